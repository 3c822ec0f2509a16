//! Names: the kind of a spec (`vendor/class`) and the characters that CDI allows in names.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::validate::{Invalid, Problem};

/// Vendor and class of devices, written `vendor/class`.
///
/// Both parts begin with an ASCII letter, end with a letter or digit, and hold letters, digits, `_`, `-` and `.`
/// between.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Kind {
    vendor: String,
    class: String,
}

impl Kind {
    /// The kind `vendor/class`.
    ///
    /// # Errors
    ///
    /// When one of the two is not a legal name.
    pub fn new(vendor: impl Into<String>, class: impl Into<String>) -> Result<Self, Invalid> {
        let (vendor, class) = (vendor.into(), class.into());
        for name in [&vendor, &class] {
            check_vendor_or_class(name).map_err(|problem| Invalid { at: "kind".to_owned(), problem })?;
        }
        Ok(Self { vendor, class })
    }

    /// The part before the slash; by convention a domain.
    pub fn vendor(&self) -> &str {
        &self.vendor
    }

    /// The part after the slash.
    pub fn class(&self) -> &str {
        &self.class
    }

    /// The fully qualified name `vendor/class=device` by which a runtime is asked for a device.
    pub fn qualified(&self, device: &str) -> String {
        format!("{self}={device}")
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.vendor, self.class)
    }
}

impl TryFrom<String> for Kind {
    type Error = Invalid;

    fn try_from(text: String) -> Result<Self, Invalid> {
        match text.split_once('/') {
            Some((vendor, class)) => Self::new(vendor, class),
            None => Err(Invalid { at: "kind".to_owned(), problem: Problem::NoClass(text) }),
        }
    }
}

impl From<Kind> for String {
    fn from(kind: Kind) -> Self {
        kind.to_string()
    }
}

fn check_vendor_or_class(name: &str) -> Result<(), Problem> {
    check_name(name, &['_', '-', '.'])?;
    // The check above leaves only letters and digits at the head.
    if name.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(Problem::NameStartsWithDigit(name.to_owned()));
    }
    Ok(())
}

/// A device name may also begin with a digit and have colons inside.
pub(crate) fn check_device(name: &str) -> Result<(), Problem> {
    check_name(name, &['_', '-', '.', ':'])
}

/// ASCII letters and digits at both ends, also `inner` between.
fn check_name(name: &str, inner: &[char]) -> Result<(), Problem> {
    if name.is_empty() {
        return Err(Problem::EmptyName);
    }
    if let Some(character) = name.chars().find(|c| !c.is_ascii_alphanumeric() && !inner.contains(c)) {
        return Err(Problem::NameCharacter { name: name.to_owned(), character });
    }
    if name.starts_with(inner) || name.ends_with(inner) {
        return Err(Problem::NameEnds(name.to_owned()));
    }
    Ok(())
}
