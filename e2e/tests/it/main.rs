//! What of kerf's installation can be checked without a cluster: the chart, as Helm lints and renders it.

mod chart;
mod flags;
mod rights;
mod samples;
