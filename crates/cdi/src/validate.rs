//! The rules that a spec must keep to be loaded by runtimes and to do what it says.
//!
//! The rules are those of the CDI specification and its Go library. A few are stricter, where that library is silent
//! and the mistake would show only when a container starts: paths are absolute, device numbers are complete,
//! permissions and mount types are not empty, and a file mode holds permission bits only.

use std::collections::{BTreeMap, HashSet};

use crate::{ContainerEdits, DeviceNode, Hook, Mount, Spec, Version, kind};

/// A spec that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {problem}")]
pub struct Invalid {
    /// The offending field, as a path in the JSON document (`devices[0].containerEdits.env[2]`).
    pub at: String,
    /// The broken rule.
    pub problem: Problem,
}

/// The rules, by how they are broken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what it means")]
pub enum Problem {
    #[error("`{0}` has no class; a kind is written vendor/class")]
    NoClass(String),
    #[error("the name is empty")]
    EmptyName,
    #[error(
        "`{name}` contains `{character}`; names consist of ASCII letters, digits, `_`, `-`, `.`, and for devices `:`"
    )]
    NameCharacter { name: String, character: char },
    #[error("`{0}` must begin and end with a letter or digit")]
    NameEnds(String),
    #[error("`{0}` must begin with a letter")]
    NameStartsWithDigit(String),
    #[error("there is no device; a spec needs at least one")]
    NoDevices,
    #[error("there is another device `{0}`; names must be unique")]
    DuplicateDevice(String),
    #[error("the device changes nothing in a container; runtimes refuse it")]
    NoEdits,
    #[error("`{0}` is not of the form NAME=value")]
    Env(String),
    #[error("`{0}` is not an absolute path")]
    NotAbsolute(String),
    #[error("major and minor number must be given together; runtimes would take a missing one as 0")]
    HalfDeviceNumber,
    #[error("{0:#o} has more than permission bits (0o777)")]
    FileMode(u32),
    #[error("`{0}` is neither some of the letters `rwm` nor `none`")]
    Permissions(String),
    #[error("the mount type is empty; leave it out for a bind mount")]
    EmptyMountType,
    #[error("`{0}` is not a Kubernetes label key: [DNS subdomain/]name, the name of at most 63 characters")]
    AnnotationKey(String),
    #[error("the annotations have {0} bytes; at most {MAX_ANNOTATION_BYTES} are allowed")]
    AnnotationsTooLarge(usize),
    #[error("version {declared} is declared, but the fields in use need at least {required}")]
    VersionTooLow { declared: Version, required: Version },
}

/// Limit of Kubernetes for all annotations of an object together, keys and values; the CDI library took it over.
const MAX_ANNOTATION_BYTES: usize = 256 * 1024;

impl Spec {
    /// Checks all rules.
    ///
    /// # Errors
    ///
    /// The first rule that is broken, in the order of the document.
    pub fn validate(&self) -> Result<(), Invalid> {
        annotations("annotations", &self.annotations)?;
        ensure(!self.devices.is_empty(), "devices", || Problem::NoDevices)?;
        let mut names = HashSet::new();
        for (i, device) in self.devices.iter().enumerate() {
            let at = format!("devices[{i}]");
            kind::check_device(&device.name).or_else(|problem| fail(format!("{at}.name"), problem))?;
            ensure(names.insert(&device.name), format!("{at}.name"), || Problem::DuplicateDevice(device.name.clone()))?;
            annotations(&format!("{at}.annotations"), &device.annotations)?;
            let at = format!("{at}.containerEdits");
            ensure(!device.container_edits.is_empty(), &*at, || Problem::NoEdits)?;
            edits(&at, &device.container_edits)?;
        }
        edits("containerEdits", &self.container_edits)
    }
}

fn edits(at: &str, edits: &ContainerEdits) -> Result<(), Invalid> {
    env(&format!("{at}.env"), &edits.env)?;
    for (i, node) in edits.device_nodes.iter().enumerate() {
        device_node(&format!("{at}.deviceNodes[{i}]"), node)?;
    }
    for (i, h) in edits.hooks.iter().enumerate() {
        hook(&format!("{at}.hooks[{i}]"), h)?;
    }
    for (i, m) in edits.mounts.iter().enumerate() {
        mount(&format!("{at}.mounts[{i}]"), m)?;
    }
    Ok(())
}

fn env(at: &str, env: &[String]) -> Result<(), Invalid> {
    for (i, variable) in env.iter().enumerate() {
        let named = variable.split_once('=').is_some_and(|(name, _)| !name.is_empty());
        ensure(named, format!("{at}[{i}]"), || Problem::Env(variable.clone()))?;
    }
    Ok(())
}

fn device_node(at: &str, node: &DeviceNode) -> Result<(), Invalid> {
    absolute(format!("{at}.path"), &node.path)?;
    if let Some(path) = &node.host_path {
        absolute(format!("{at}.hostPath"), path)?;
    }
    ensure(node.major.is_some() == node.minor.is_some(), at, || Problem::HalfDeviceNumber)?;
    if let Some(mode) = node.file_mode {
        ensure(mode <= 0o777, format!("{at}.fileMode"), || Problem::FileMode(mode))?;
    }
    if let Some(permissions) = &node.permissions {
        // Runtimes take the empty string for `rwm`, the opposite of what it looks like.
        let legal =
            permissions == "none" || (!permissions.is_empty() && permissions.chars().all(|c| "rwm".contains(c)));
        ensure(legal, format!("{at}.permissions"), || Problem::Permissions(permissions.clone()))?;
    }
    Ok(())
}

fn hook(at: &str, hook: &Hook) -> Result<(), Invalid> {
    absolute(format!("{at}.path"), &hook.path)?;
    env(&format!("{at}.env"), &hook.env)
}

fn mount(at: &str, mount: &Mount) -> Result<(), Invalid> {
    absolute(format!("{at}.hostPath"), &mount.host_path)?;
    absolute(format!("{at}.containerPath"), &mount.container_path)?;
    ensure(mount.mount_type.as_deref() != Some(""), format!("{at}.type"), || Problem::EmptyMountType)
}

fn absolute(at: String, path: &str) -> Result<(), Invalid> {
    ensure(path.starts_with('/'), at, || Problem::NotAbsolute(path.to_owned()))
}

fn annotations(at: &str, annotations: &BTreeMap<String, String>) -> Result<(), Invalid> {
    for key in annotations.keys() {
        ensure(is_label_key(key), at, || Problem::AnnotationKey(key.clone()))?;
    }
    let bytes = annotations.iter().map(|(key, value)| key.len() + value.len()).sum();
    ensure(bytes <= MAX_ANNOTATION_BYTES, at, || Problem::AnnotationsTooLarge(bytes))
}

/// As Kubernetes' `IsQualifiedName`, on the key in lower case as it does for annotations.
fn is_label_key(key: &str) -> bool {
    let within = |text: &str, inner: &[char]| {
        let alphanumeric = |c: char| c.is_ascii_alphanumeric();
        text.starts_with(alphanumeric)
            && text.ends_with(alphanumeric)
            && text.chars().all(|c| alphanumeric(c) || inner.contains(&c))
    };
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    let is_subdomain = |prefix: &str| prefix.len() <= 253 && prefix.split('.').all(|label| within(label, &['-']));
    name.len() <= 63 && within(name, &['_', '-', '.']) && prefix.is_none_or(is_subdomain)
}

fn ensure(kept: bool, at: impl Into<String>, problem: impl FnOnce() -> Problem) -> Result<(), Invalid> {
    if kept { Ok(()) } else { fail(at, problem()) }
}

fn fail(at: impl Into<String>, problem: Problem) -> Result<(), Invalid> {
    Err(Invalid { at: at.into(), problem })
}
