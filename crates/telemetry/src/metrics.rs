//! What the metrics of both programs have in common.
//!
//! Labels take values from short lists that are known when the program is built, or from what a GPU's hardware offers.
//! Never a claim, a pod or a namespace: each would be a new series, for ever.

use std::borrow::Cow;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

/// One label: its name and a value.
pub type Label = [(&'static str, &'static str); 1];

/// The labels of a value that is read when it is asked for.
pub type Labels = Vec<(&'static str, Cow<'static, str>)>;

/// Upper ends of the buckets of durations, in seconds: from a claim that is found prepared to what the kubelet waits for
/// at most (45 s, `k8s.io/kubernetes/pkg/kubelet/cm/dra/plugin`).
const SECONDS: [f64; 15] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 45.0];

/// A registry that tells which version of kerf this is.
pub fn registry(version: &'static str) -> Registry {
    let mut registry = Registry::default();
    registry.register("kerf_build", "The version of kerf that runs", Info::new([("version", version)]));
    registry
}

/// Durations, by one label. There is a series for each of `values` from the start: a rate over a series that appears with
/// its first event does not show that event.
pub fn durations(label: &'static str, values: impl IntoIterator<Item = &'static str>) -> Family<Label, Histogram> {
    let family = Family::<Label, Histogram>::new_with_constructor(|| Histogram::new(SECONDS));
    values.into_iter().for_each(|value| drop(family.get_or_create(&[(label, value)])));
    family
}

/// Gauges whose values are read when they are asked for: what has no value at the moment has no series.
pub struct Gauges<F> {
    name: &'static str,
    help: &'static str,
    read: F,
}

impl<F: Fn() -> Vec<(Labels, i64)> + Send + Sync + 'static> Gauges<F> {
    /// Puts them into a registry. `read` must not block.
    pub fn register(registry: &mut Registry, name: &'static str, help: &'static str, read: F) {
        registry.register_collector(Box::new(Gauges { name, help, read }));
    }
}

impl<F: Fn() -> Vec<(Labels, i64)> + Send + Sync + 'static> Collector for Gauges<F> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // The registry ends its own with a full stop.
        let help = format!("{}.", self.help);
        let mut metric = encoder.encode_descriptor(self.name, &help, None, MetricType::Gauge)?;
        for (labels, value) in (self.read)() {
            let gauge = ConstGauge::new(value);
            if labels.is_empty() {
                metric.encode_gauge(&value)?;
            } else {
                gauge.encode(metric.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

impl<F> fmt::Debug for Gauges<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gauges").field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI64, Ordering};

    use prometheus_client::encoding::text::encode;

    use super::*;

    fn encoded(registry: &Registry) -> String {
        let mut text = String::new();
        encode(&mut text, registry).unwrap();
        text
    }

    #[test]
    fn gauges_are_read_when_they_are_asked_for() {
        let mut registry = Registry::default();
        let count = Arc::new(AtomicI64::new(0));
        let counted = Arc::clone(&count);
        Gauges::register(&mut registry, "kerf_cuts", "Cuts", move || match counted.load(Ordering::SeqCst) {
            0 => vec![(Vec::new(), 0)],
            count => vec![(vec![("kind", "long".into()), ("of", format!("{count} cm").into())], count)],
        });
        let head = "# HELP kerf_cuts Cuts.\n# TYPE kerf_cuts gauge\n";
        assert_eq!(encoded(&registry), format!("{head}kerf_cuts 0\n# EOF\n"));
        count.store(7, Ordering::SeqCst);
        assert_eq!(encoded(&registry), format!("{head}kerf_cuts{{kind=\"long\",of=\"7 cm\"}} 7\n# EOF\n"));
    }

    #[test]
    fn durations_are_there_before_the_first() {
        let mut registry = Registry::default();
        registry.register("kerf_cut", "Cuts", durations("result", ["ok", "error"]));
        let text = encoded(&registry);
        for result in ["ok", "error"] {
            assert!(text.contains(&format!("kerf_cut_count{{result=\"{result}\"}} 0\n")), "{text}");
            assert!(text.contains(&format!("kerf_cut_bucket{{le=\"45.0\",result=\"{result}\"}} 0\n")), "{text}");
        }
    }
}
