//! The words that faults are described with: GPUs, codes, times and counts, as text or as numbers.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::code::Code;
use crate::node_file::parse_duration;
use crate::view::PciAddress;

/// A GPU as somebody names it: by its number in the order of PCI addresses, by its PCI address or by its UUID.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Word", into = "String")]
pub struct GpuName(String);

/// A failure that is chosen: by its name in nvml.h, with or without `NVML_ERROR_`, or by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Word", into = "String")]
pub struct Failure(pub Code);

/// How long something lasts: a time such as `1.5s` or `250ms`, or a number of milliseconds; or `forever`, until its fault
/// is cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Word", into = "String")]
pub enum Span {
    /// So long.
    Time(Duration),
    /// As long as the fault is armed.
    Forever,
}

/// How often a fault is met: a number, or `always`, until it is cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Word", into = "String")]
pub enum Times {
    /// So often.
    Number(u32),
    /// As long as it is armed.
    Always,
}

/// YAML has numbers, where the command line has only text.
#[derive(Deserialize)]
#[serde(untagged)]
enum Word {
    Number(u64),
    Text(String),
}

/// A function's name without the number of its version.
fn without_version(function: &str) -> &str {
    match function.rsplit_once("_v") {
        Some((base, version)) if !version.is_empty() && version.bytes().all(|c| c.is_ascii_digit()) => base,
        _ => function,
    }
}

/// Whether the name in a fault means this exported function: a name with a version means that one, a name without means all.
pub(super) fn names(named: &str, function: &str) -> bool {
    named == function || (named == without_version(named) && named == without_version(function))
}

impl GpuName {
    /// The place of the GPU that is meant, among all of the node's by UUID and PCI address.
    pub fn place(&self, gpus: &[(&str, PciAddress)]) -> Option<usize> {
        let number = self.0.parse::<usize>().ok().filter(|number| *number < gpus.len());
        let address = PciAddress::parse(&self.0);
        number.or_else(|| gpus.iter().position(|(uuid, pci)| *uuid == self.0 || Some(*pci) == address))
    }
}

impl FromStr for GpuName {
    type Err = String;

    fn from_str(text: &str) -> Result<GpuName, String> {
        if text.is_empty() { Err("a GPU has a number, a PCI address or a UUID".to_owned()) } else { Ok(text.into()) }
    }
}

impl From<usize> for GpuName {
    fn from(number: usize) -> GpuName {
        GpuName(number.to_string())
    }
}

impl From<&str> for GpuName {
    fn from(text: &str) -> GpuName {
        GpuName(text.to_owned())
    }
}

impl fmt::Display for GpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Failure {
    type Err = String;

    fn from_str(text: &str) -> Result<Failure, String> {
        let number = text.parse().ok().filter(|number| *number != 0).map(Code);
        let code = number.or_else(|| Code::by_name(text));
        code.map(Failure)
            .ok_or_else(|| format!("{text:?} is no failure of nvml.h such as IN_USE, nor the number of one"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "{}", self.0.0),
        }
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Span, String> {
        if text == "forever" {
            return Ok(Span::Forever);
        }
        let time = parse_duration(text).map(Span::Time);
        time.ok_or_else(|| format!("{text:?} is neither a time such as 1s, 250ms or 250, nor forever"))
    }
}

impl From<Duration> for Span {
    fn from(time: Duration) -> Span {
        Span::Time(time)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Span::Time(time) => write!(f, "{}ms", time.as_millis()),
            Span::Forever => f.write_str("forever"),
        }
    }
}

impl Times {
    pub(super) fn is_over(self, met: u32) -> bool {
        matches!(self, Times::Number(number) if met >= number)
    }
}

impl FromStr for Times {
    type Err = String;

    fn from_str(text: &str) -> Result<Times, String> {
        match text {
            "always" => Ok(Times::Always),
            number => number.parse().map(Times::Number).map_err(|_| format!("{text:?} is neither a number nor always")),
        }
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Times::Number(number) => write!(f, "{number}"),
            Times::Always => f.write_str("always"),
        }
    }
}

/// Reads a word as its text, and writes it as what it displays.
macro_rules! worded {
    ($($word:ty)*) => {$(
        impl TryFrom<Word> for $word {
            type Error = <$word as FromStr>::Err;

            fn try_from(word: Word) -> Result<$word, Self::Error> {
                match word {
                    Word::Number(number) => number.to_string().parse(),
                    Word::Text(text) => text.parse(),
                }
            }
        }

        impl From<$word> for String {
            fn from(word: $word) -> String {
                word.to_string()
            }
        }
    )*};
}

worded! { GpuName Failure Span Times }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_one_version_or_all() {
        for (named, function, expected) in [
            ("nvmlDeviceGetCount", "nvmlDeviceGetCount_v2", true),
            ("nvmlDeviceGetCount", "nvmlDeviceGetCount", true),
            ("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount_v2", true),
            ("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount", false),
            ("nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3", false),
            ("nvmlInit", "nvmlInitWithFlags", false),
            ("nvmlDeviceCreateGpuInstance", "nvmlDeviceCreateGpuInstanceWithPlacement", false),
        ] {
            assert_eq!(names(named, function), expected, "{named} for {function}");
        }
    }

    #[test]
    fn codes_have_names_and_numbers() {
        for text in ["IN_USE", "NVML_ERROR_IN_USE", "19"] {
            assert_eq!(text.parse(), Ok(Failure(Code::IN_USE)), "{text}");
        }
        assert_eq!("999".parse::<Failure>().unwrap().to_string(), "UNKNOWN");
        assert_eq!("31".parse::<Failure>().unwrap().to_string(), "31", "of a newer header");
        for text in ["0", "SUCCESS", "NVML_SUCCESS", "in_use", "-1", ""] {
            assert!(text.parse::<Failure>().is_err(), "{text}");
        }
    }

    #[test]
    fn gpus_are_named_in_three_ways() {
        let gpus =
            [(0x3b, "GPU-a"), (0x47, "GPU-b")].map(|(bus, uuid)| (uuid, PciAddress { domain: 0, bus, device: 0 }));
        for (name, place) in [
            ("1", Some(1)),
            ("2", None),
            ("0000:47:00.0", Some(1)),
            ("00000000:3B:00.0", Some(0)),
            ("GPU-b", Some(1)),
            ("GPU-c", None),
        ] {
            assert_eq!(GpuName::from(name).place(&gpus), place, "{name}");
        }
    }

    #[test]
    fn times_and_counts_are_read_as_they_are_written() {
        for text in ["1500ms", "forever"] {
            assert_eq!(text.parse::<Span>().unwrap().to_string(), text);
        }
        assert_eq!("1.5s".parse(), Ok(Span::Time(Duration::from_millis(1500))));
        assert!("soon".parse::<Span>().is_err());
        for text in ["3", "always"] {
            assert_eq!(text.parse::<Times>().unwrap().to_string(), text);
        }
        assert!("often".parse::<Times>().is_err());
    }
}
