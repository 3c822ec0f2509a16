//! Opaque configurations, as anyone who may write a claim writes them.

use kerf_api::opaque::{API_VERSION, DeviceConfig, problems};
use serde_json::{Value, json};

use crate::json;

/// Whatever is accepted means what it says: written again it is the same document, and nothing that nobody knows is in
/// it. Whatever is refused has a problem, at a path within the document.
pub fn opaque_config(data: &[u8]) {
    const PATH: &str = "spec.config[0].opaque.parameters";
    let Ok(parameters) = serde_json::from_slice::<Value>(data) else { return };
    let problems = problems(&parameters, PATH);
    for problem in &problems {
        let rest = problem.path.strip_prefix(PATH).expect("a path is within the document");
        assert!(rest.is_empty() || rest.starts_with(['.', '[']), "{problem}");
        assert!(!problem.message.is_empty() && problem.hint.as_ref().is_none_or(|hint| !hint.is_empty()), "{problem}");
        assert!(!problem.to_string().contains('\n'), "one line: {problem}");
    }
    let decode = |parameters: &Value| DeviceConfig::decode(parameters, PATH);
    let config = match decode(&parameters) {
        Ok(config) => config,
        Err(mistakes) => {
            assert!(!mistakes.is_empty(), "{parameters} is refused without a reason");
            return assert!(mistakes.iter().all(|mistake| problems.contains(mistake)), "{parameters}: {problems:?}");
        }
    };
    assert_eq!(problems, config.unsupported(PATH), "what is read is right: {parameters}");
    let encoded = encode(&config);
    assert_eq!(decode(&encoded).as_ref().ok(), Some(&config), "what is written is read");
    assert_eq!(normal(encoded), normal(parameters.clone()), "nothing is lost or taken for something else");
    for unknown in json::with_an_unknown_field(&parameters, &["defaultPerDevicePinnedMemoryLimit"]) {
        assert!(decode(&unknown).is_err(), "{unknown}");
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
