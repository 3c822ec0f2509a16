//! The bytes of whole documents, and which documents are refused.

use kerf_cdi::{DecodeError, Problem, Spec};

use crate::samples;

#[test]
fn documents_of_a_gpu_and_a_mig_device() {
    for (name, spec) in [("gpu", samples::gpu()), ("mig", samples::mig())] {
        insta::assert_snapshot!(name, String::from_utf8(spec.to_json().unwrap()).unwrap());
    }
}

#[test]
fn nothing_optional_is_written_when_it_is_absent() {
    let json = br#"{
  "cdiVersion": "0.3.0",
  "kind": "v/c",
  "devices": [
    {
      "name": "d",
      "containerEdits": {
        "deviceNodes": [
          {
            "path": "/dev/null"
          }
        ]
      }
    }
  ]
}
"#;
    assert_eq!(Spec::from_json(json).unwrap().to_json().unwrap(), json);
}

/// Decodes a document with `fields` beside a valid device.
fn decode(fields: &str) -> Result<Spec, DecodeError> {
    let document = format!(r#"{{{fields}, "devices": [{{"name": "d", "containerEdits": {{"env": ["A=b"]}}}}]}}"#);
    Spec::from_json(document.as_bytes())
}

#[test]
fn unknown_fields_and_values_are_refused() {
    assert!(decode(r#""cdiVersion": "0.3.0", "kind": "v/c""#).is_ok());
    for (fields, cause) in [
        (r#""cdiVersion": "0.3.0""#, "missing field `kind`"),
        (r#""kind": "v/c""#, "missing field `cdiVersion`"),
        (r#""cdiVersion": "0.3.1", "kind": "v/c""#, "unknown variant `0.3.1`"),
        (r#""cdiVersion": "0.3.0", "kind": "vc""#, "kind: `vc` has no class"),
        (r#""cdiVersion": "0.3.0", "kind": "v/c", "more": 1"#, "unknown field `more`"),
    ] {
        assert_json_error(fields, cause);
    }
    for (edits, cause) in [
        (r#""netDevices": []"#, "unknown field `netDevices`"),
        (r#""deviceNodes": [{"path": "/d", "type": "x"}]"#, "unknown variant `x`"),
        (r#""deviceNodes": [{"path": "/d", "size": 1}]"#, "unknown field `size`"),
        (r#""deviceNodes": [{"path": "/d", "major": -1}]"#, "invalid value: integer `-1`"),
        (r#""mounts": [{"hostPath": "/d"}]"#, "missing field `containerPath`"),
        (r#""hooks": [{"hookName": "never", "path": "/h"}]"#, "unknown variant `never`"),
        (r#""hooks": [{"hookName": "poststop", "path": "/h", "timeout": 0}]"#, "invalid value: integer `0`"),
    ] {
        assert_json_error(&format!(r#""cdiVersion": "1.1.0", "kind": "v/c", "containerEdits": {{{edits}}}"#), cause);
    }
}

#[track_caller]
fn assert_json_error(fields: &str, cause: &str) {
    let error = decode(fields).unwrap_err();
    assert!(matches!(error, DecodeError::Json(_)));
    assert!(error.to_string().contains(cause), "{fields}: {error}");
}

#[test]
fn the_declared_version_may_be_too_high_but_not_too_low() {
    let at =
        |version: &str| decode(&format!(r#""cdiVersion": "{version}", "kind": "v/c", "annotations": {{"k": "v"}}"#));
    for version in ["0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0"] {
        assert!(at(version).is_ok(), "{version}");
    }
    for version in ["0.3.0", "0.4.0", "0.5.0"] {
        let error = at(version).unwrap_err();
        assert!(matches!(&error, DecodeError::Invalid(i) if matches!(i.problem, Problem::VersionTooLow { .. })));
        assert_eq!(
            error.to_string(),
            format!("cdiVersion: version {version} is declared, but the fields in use need at least 0.6.0")
        );
    }
}

#[test]
fn a_document_that_breaks_a_rule_is_refused() {
    let error = decode(r#""cdiVersion": "0.3.0", "kind": "v/c", "containerEdits": {"env": ["A"]}"#).unwrap_err();
    assert_eq!(error.to_string(), "containerEdits.env[0]: `A` is not of the form NAME=value");
}
