//! What can be checked without a cluster: kerf's installation, as Helm lints and renders it, and how the files of others are read.

mod chart;
mod flags;
mod parted;
mod rights;
mod samples;
