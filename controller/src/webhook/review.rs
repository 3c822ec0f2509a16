//! From an AdmissionReview that asks to one that answers.

use kerf_api::problem::joined;
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::{debug, info};

use super::check::{Checked, check};
use crate::metrics::{Metrics, Verdict};

const API_VERSION: &str = "admission.k8s.io/v1";

/// A question of the API server, as far as it is looked at.
#[derive(Debug, Deserialize)]
struct Review {
    #[serde(rename = "apiVersion")]
    api_version: String,
    request: Request,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    uid: String,
    kind: Kind,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    user_info: User,
    #[serde(default)]
    object: Value,
}

#[derive(Debug, Deserialize)]
struct Kind {
    group: String,
    kind: String,
}

#[derive(Debug, Default, Deserialize)]
struct User {
    #[serde(default)]
    username: String,
}

/// What was asked is no review.
#[derive(Debug, thiserror::Error)]
#[error("this is no AdmissionReview of {API_VERSION}: {0}")]
pub struct NoReview(String);

/// Answers reviews, and counts the answers.
#[derive(Clone, Debug)]
pub struct Judge {
    /// The driver whose configurations are checked.
    pub driver: String,
    /// Where it is counted.
    pub metrics: Metrics,
}

impl Judge {
    /// The answer to a review, in JSON.
    ///
    /// # Errors
    ///
    /// When it is none: nobody but the API server is expected to ask.
    pub fn answer(&self, body: &[u8]) -> Result<Value, NoReview> {
        let review: Review = serde_json::from_slice(body).map_err(|error| NoReview(error.to_string()))?;
        if review.api_version != API_VERSION {
            return Err(NoReview(format!("its apiVersion is {:?}", review.api_version)));
        }
        let Request { uid, kind, namespace, name, user_info, object } = review.request;
        let Some(checked) = Checked::of(&kind.group, &kind.kind) else {
            debug!(group = %kind.group, kind = %kind.kind, "asked about a kind that is not checked");
            return Ok(answer(&json!({"uid": uid, "allowed": true})));
        };
        let problems = check(checked, &object, &self.driver);
        if problems.is_empty() {
            self.metrics.judged(checked, Verdict::Allowed);
            return Ok(answer(&json!({"uid": uid, "allowed": true})));
        }
        self.metrics.judged(checked, Verdict::Denied);
        let reason = joined(&problems, "; also ");
        info!(kind = checked.name(), %namespace, %name, user = %user_info.username, %reason, "refused when it was written");
        // The API server puts `admission webhook "..." denied the request: ` before it.
        let status = json!({"code": 422, "reason": "Invalid", "message": joined(&problems, "\n")});
        Ok(answer(&json!({"uid": uid, "allowed": false, "status": status})))
    }
}

fn answer(response: &Value) -> Value {
    json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(review: &Value) -> Value {
        let judge = Judge { driver: "gpu.nvidia.com".into(), metrics: Metrics::default() };
        judge.answer(review.to_string().as_bytes()).unwrap()
    }

    fn review(kind: &Value, object: &Value) -> Value {
        json!({
            "apiVersion": API_VERSION, "kind": "AdmissionReview",
            "request": {
                "uid": "u-1", "kind": kind, "operation": "CREATE", "namespace": "ns", "name": "c", "object": object,
                "userInfo": {"username": "alice"}, "dryRun": false, "oldObject": null,
            },
        })
    }

    fn claim(parameters: &Value) -> Value {
        let config = json!([{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]);
        let kind = json!({"group": "resource.k8s.io", "version": "v1", "kind": "ResourceClaim"});
        review(&kind, &json!({"spec": {"devices": {"config": config}}}))
    }

    #[test]
    fn what_is_right_is_allowed() {
        let right = json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "MigDeviceConfig"});
        let pod = review(&json!({"group": "", "version": "v1", "kind": "Pod"}), &json!({"spec": {}}));
        for review in [claim(&right), pod] {
            assert_eq!(
                ask(&review),
                json!({
                    "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
                    "response": {"uid": "u-1", "allowed": true},
                })
            );
        }
    }

    #[test]
    fn what_is_wrong_is_refused_with_a_line_a_problem() {
        let answer = ask(&claim(&json!({"kind": "GpuConfig", "x": 1})));
        assert_eq!(
            answer["response"],
            json!({
                "uid": "u-1", "allowed": false,
                "status": {
                    "code": 422, "reason": "Invalid",
                    "message": "spec.devices.config[0].opaque.parameters.apiVersion: missing; use \
                                resource.nvidia.com/v1beta1\n\
                                spec.devices.config[0].opaque.parameters.x: unknown field; known here: apiVersion, kind \
                                and sharing",
                },
            })
        );
    }

    #[test]
    fn what_is_no_review_gets_no_answer() {
        let judge = Judge { driver: "gpu.nvidia.com".into(), metrics: Metrics::default() };
        let mut old = claim(&json!({}));
        old["apiVersion"] = json!("admission.k8s.io/v1beta1");
        for body in ["", "{}", "[]", "{\"apiVersion\":\"admission.k8s.io/v1\"}", &old.to_string()] {
            let error = judge.answer(body.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("this is no AdmissionReview of admission.k8s.io/v1: "), "{body}: {error}");
        }
    }
}
