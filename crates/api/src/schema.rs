//! Schemas in the words that Kubernetes knows.

use schemars::Schema;

/// Of integers a CRD's schema knows the formats int32 and int64; of others the API server warns who installs it
/// (apiextensions-apiserver, `pkg/apiserver/validation/formats.go`).
pub(crate) fn known_formats(schema: &mut Schema) {
    let most = match schema.get("format").and_then(|format| format.as_str()) {
        Some("uint8") => Some(u64::from(u8::MAX)),
        Some("uint16") => Some(u64::from(u16::MAX)),
        Some("uint32") => Some(u64::from(u32::MAX)),
        Some("uint64") => None,
        _ => return,
    };
    schema.insert("format".to_owned(), "int64".into());
    if let Some(most) = most {
        schema.insert("maximum".to_owned(), most.into());
    }
}
