//! AdmissionReviews, as whoever reaches the webhook's port sends them.

use kerf_controller::metrics::Metrics;
use kerf_controller::webhook::Judge;
use serde_json::Value;

/// Whatever is sent is answered or refused. An answer is about the question, and whoever is denied is told why.
pub fn admission_review(data: &[u8]) {
    let judge = Judge { driver: "gpu.nvidia.com".to_owned(), metrics: Metrics::default() };
    let Ok(answer) = judge.answer(data) else { return };
    // What nobody asks about is skipped, and need not even be Unicode.
    let Ok(question) = serde_json::from_slice::<Value>(data) else { return };
    let response = &answer["response"];
    assert_eq!(response["uid"], question["request"]["uid"]);
    let allowed = response["allowed"].as_bool().expect("yes or no");
    let message = response["status"]["message"].as_str().unwrap_or_default();
    assert_eq!(allowed, message.is_empty(), "{answer}");
    // What the API server takes of a webhook's answer is far more (apimachinery, 3 MiB); a person reads this.
    assert!(message.len() < 100_000, "{} bytes", message.len());
}
