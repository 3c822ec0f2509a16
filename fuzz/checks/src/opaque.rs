//! Opaque configurations, as anyone who may write a claim writes them.

use kerf_api::opaque::{API_VERSION, DeviceConfig};
use serde_json::{Value, json};

use crate::json;

/// Whatever is accepted means what it says: written again it is the same document, and nothing that nobody knows is in
/// it.
pub fn opaque_config(data: &[u8]) {
    let Ok(parameters) = serde_json::from_slice::<Value>(data) else { return };
    let config = match DeviceConfig::decode(&parameters) {
        Ok(config) => config,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let encoded = encode(&config);
    assert_eq!(DeviceConfig::decode(&encoded).as_ref().ok(), Some(&config), "what is written is read");
    assert_eq!(normal(encoded), normal(parameters.clone()), "nothing is lost or taken for something else");
    for unknown in json::with_an_unknown_field(&parameters, &["defaultPerDevicePinnedMemoryLimit"]) {
        assert!(DeviceConfig::decode(&unknown).is_err(), "{unknown}");
    }
}

/// As a manifest says it.
fn encode(config: &DeviceConfig) -> Value {
    let body = match config {
        DeviceConfig::Gpu(config) => serde_json::to_value(config),
        DeviceConfig::Mig(config) => serde_json::to_value(config),
    };
    let mut document = body.expect("strings and numbers always encode");
    document["apiVersion"] = API_VERSION.into();
    document["kind"] = config.kind().into();
    document
}

/// Without what says nothing: null, and an empty map of limits. Quantities as text: a number is a quantity as well.
fn normal(document: Value) -> Value {
    let quantity = |value: Value| if value.is_number() { Value::String(quantity(&value)) } else { value };
    match document {
        Value::Object(fields) => fields
            .into_iter()
            .map(|(name, value)| match name.as_str() {
                "defaultPinnedDeviceMemoryLimit" => (name, quantity(value)),
                "defaultPerDevicePinnedMemoryLimit" => {
                    let Value::Object(limits) = value else { return (name, value) };
                    let limits = limits.into_iter().map(|(device, limit)| (device, quantity(limit)));
                    (name, Value::Object(limits.collect()))
                }
                _ => (name, normal(value)),
            })
            .filter(|(name, value)| {
                let no_limits = name == "defaultPerDevicePinnedMemoryLimit" && *value == json!({});
                !value.is_null() && !no_limits
            })
            .collect(),
        other => other,
    }
}

/// A number as the text of a quantity.
fn quantity(number: &Value) -> String {
    number.as_f64().filter(|_| number.is_f64()).map_or_else(|| number.to_string(), |number| number.to_string())
}
