//! The certificates that the API server trusts for the webhook, one of each replica and of those before. Pure.
//!
//! Replicas do not know of each other: each adds its own at the end and drops the oldest of too many. Whose was dropped adds
//! it again, so more replicas than fit would push each other out for ever. One that renews has two: the chart allows half as many.

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use serde_json::{Value, json};

/// How many certificates a bundle keeps. What is left of replicas that are gone does no harm: nobody has their keys.
pub const KEPT: usize = 8;

const END: &str = "-----END CERTIFICATE-----";

/// A JSON patch after which the API server trusts each certificate of `own` for every webhook of the configuration, and after
/// which nothing else is changed. `None` where it does already.
///
/// It fails with a conflict where the configuration has changed meanwhile.
pub fn patch(configuration: &ValidatingWebhookConfiguration, own: &[&str]) -> Option<Value> {
    let mut steps = Vec::new();
    for (place, webhook) in configuration.webhooks.iter().flatten().enumerate() {
        let stored = webhook.client_config.ca_bundle.as_ref().map(|bundle| bundle.0.as_slice()).unwrap_or_default();
        if let Some(bundle) = with(&String::from_utf8_lossy(stored), own) {
            let path = format!("/webhooks/{place}/clientConfig/caBundle");
            steps.push(json!({"op": "add", "path": path, "value": ByteString(bundle.into_bytes())}));
        }
    }
    if steps.is_empty() {
        return None;
    }
    let version = configuration.metadata.resource_version.as_deref();
    steps.push(json!({"op": "replace", "path": "/metadata/resourceVersion", "value": version}));
    Some(Value::Array(steps))
}

/// A bundle with certificates in it, the oldest of too many left out. `None` where they are in it.
fn with(bundle: &str, own: &[&str]) -> Option<String> {
    let mut certificates: Vec<&str> =
        bundle.split_inclusive(END).map(str::trim).filter(|one| one.ends_with(END)).collect();
    let before = certificates.len();
    for one in own.iter().map(|one| one.trim()) {
        if !certificates.contains(&one) {
            certificates.push(one);
        }
    }
    if certificates.len() == before {
        return None;
    }
    let newest = &certificates[certificates.len().saturating_sub(KEPT)..];
    Some(newest.iter().flat_map(|one| [*one, "\n"]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(name: usize) -> String {
        format!("-----BEGIN CERTIFICATE-----\n{name}\n{END}\n")
    }

    fn names(bundle: &str) -> Vec<usize> {
        bundle.lines().filter_map(|line| line.parse().ok()).collect()
    }

    #[test]
    fn each_adds_its_own_and_keeps_the_others() {
        let first = with("", &[&certificate(1)]).unwrap();
        assert_eq!(first, certificate(1));
        assert_eq!(with(&first, &[&certificate(1)]), None, "it is there");
        let second = with(&first, &[&certificate(2)]).unwrap();
        assert_eq!(second, certificate(1) + &certificate(2));
        assert_eq!(with(&second, &[&certificate(2), &certificate(1)]), None);
        assert_eq!(names(&with(&second, &[&certificate(1), &certificate(3)]).unwrap()), [1, 2, 3]);
    }

    #[test]
    fn the_newest_are_kept() {
        let full: String = (1..=KEPT).map(certificate).collect();
        assert_eq!(names(&with(&full, &[&certificate(9)]).unwrap()), [2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(with(&full, &[&certificate(1)]), None);
    }

    /// Whether replicas that all renew at once, as those do that were started at once, come to rest.
    fn come_to_rest(replicas: usize) -> bool {
        let own = |replica: usize| [certificate(replica), certificate(100 + replica)];
        let mut bundle = (0..replicas).map(certificate).collect::<String>();
        (0..100).any(|_| {
            let change = (0..replicas).map(own).find_map(|[old, new]| with(&bundle, &[&old, &new]));
            change.map(|changed| bundle = changed).is_none()
        })
    }

    #[test]
    fn replicas_that_renew_together_leave_each_other_room() {
        assert!((1..=KEPT / 2).all(come_to_rest));
        assert!(!come_to_rest(KEPT / 2 + 1), "the chart allows no more than fit");
    }

    #[test]
    fn what_is_no_certificate_is_dropped_with_the_next_one() {
        assert_eq!(with("what is this?\n", &[&certificate(1)]).unwrap(), certificate(1));
    }

    #[test]
    fn every_webhook_is_seen_to() {
        let one = certificate(1);
        let webhook = |bundle: Option<&str>| {
            json!({
                "name": "x.kerf.dev", "admissionReviewVersions": ["v1"], "sideEffects": "None",
                "clientConfig": {"caBundle": bundle.map(|text| ByteString(text.as_bytes().to_vec()))},
            })
        };
        let mut configuration: ValidatingWebhookConfiguration = serde_json::from_value(json!({
            "metadata": {"name": "kerf-webhook", "resourceVersion": "7"},
            "webhooks": [webhook(None), webhook(Some(&one)), webhook(Some(""))],
        }))
        .unwrap();
        let step = |place: usize| {
            let path = format!("/webhooks/{place}/clientConfig/caBundle");
            json!({"op": "add", "path": path, "value": ByteString(one.clone().into_bytes())})
        };
        let pinned = json!({"op": "replace", "path": "/metadata/resourceVersion", "value": "7"});
        assert_eq!(patch(&configuration, &[&one]), Some(json!([step(0), step(2), pinned])));
        configuration.webhooks = None;
        assert_eq!(patch(&configuration, &[&one]), None);
    }
}
