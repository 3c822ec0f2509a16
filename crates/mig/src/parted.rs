//! The file of NVIDIA's mig-parted, version 1: named layouts of a node's GPUs.
//!
//! Read as mig-parted reads it: strictly, every name with at least one rule, the rules one after the other, so that of
//! several that select one GPU the last decides.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

/// NVIDIA's PCI vendor id, the low half of the word by which mig-parted's filters name a GPU.
const NVIDIA: u32 = 0x10de;

/// Why a text is no file of layouts.
#[derive(Debug, thiserror::Error)]
pub enum PartedError {
    /// Not YAML, or not of this form.
    #[error("{0}")]
    Form(Box<serde_saphyr::Error>),
    /// Of another version.
    #[error("its version is {found:?}, known is \"v1\"")]
    Version {
        /// What it says.
        found: String,
    },
    /// A layout contradicts itself.
    #[error("mig-configs.{}: {problem}", layout.escape_debug())]
    Layout {
        /// Its name.
        layout: String,
        /// What is wrong, and where.
        problem: String,
    },
}

/// Named layouts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layouts {
    layouts: BTreeMap<String, Vec<Rule>>,
}

/// What some GPUs shall be.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    /// `None`: every model. Else PCI device ids with NVIDIA's vendor id in the low half.
    models: Option<BTreeSet<u32>>,
    /// `None`: every position.
    positions: Option<BTreeSet<u32>>,
    arrangement: Arrangement,
}

/// What a layout makes of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// MIG is off: the GPU is whole.
    Whole,
    /// MIG is on: these partitions, by the name of the profile and how many; perhaps none.
    Partitions(BTreeMap<String, u32>),
}

/// What a layout says of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ruling<'a> {
    /// Nothing: the GPU is left as it is.
    Silent,
    /// This.
    Is(&'a Arrangement),
    /// It depends on the GPU's model, which is not known.
    UnknownModel,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: String,
    #[serde(rename = "mig-configs")]
    layouts: BTreeMap<String, Vec<RuleInFile>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RuleInFile {
    #[serde(default)]
    device_filter: Option<OneOrMany>,
    devices: Positions,
    mig_enabled: bool,
    #[serde(default)]
    mig_devices: Option<BTreeMap<String, u32>>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a PCI device id such as \"0x20B210DE\", or a list of them")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// `all`, or positions.
struct Positions(Option<BTreeSet<u32>>);

#[derive(Deserialize)]
#[serde(untagged)]
enum AllOrSome {
    Word(String),
    Some(BTreeSet<u32>),
}

impl<'de> Deserialize<'de> for Positions {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Positions, D::Error> {
        let expected = || D::Error::custom("devices: expected \"all\" or a list of positions such as [0, 1]");
        match AllOrSome::deserialize(from).map_err(|_| expected())? {
            AllOrSome::Word(word) if word == "all" => Ok(Positions(None)),
            AllOrSome::Word(_) => Err(expected()),
            AllOrSome::Some(positions) => Ok(Positions(Some(positions))),
        }
    }
}

impl Layouts {
    /// Reads a file.
    ///
    /// # Errors
    ///
    /// When it is not of the form, with the place.
    pub fn parse(text: &str) -> Result<Layouts, PartedError> {
        // The place and the reason in one line: a cutting of the file would not fit into an object's status.
        let options = serde_saphyr::options! { with_snippet: false };
        let file = serde_saphyr::from_str_with_options::<File>(text, options);
        let file = file.map_err(|error| PartedError::Form(Box::new(error)))?;
        if file.version != "v1" {
            return Err(PartedError::Version { found: file.version });
        }
        let mut layouts = BTreeMap::new();
        for (name, rules) in file.layouts {
            let failed = |problem| PartedError::Layout { layout: name.clone(), problem };
            if rules.is_empty() {
                return Err(failed("it has no rule".to_owned()));
            }
            let rules = rules.into_iter().enumerate();
            let rules = rules.map(|(index, rule)| rule.check().map_err(|why| failed(format!("rule {index}: {why}"))));
            layouts.insert(name.clone(), rules.collect::<Result<_, _>>()?);
        }
        Ok(Layouts { layouts })
    }

    /// The names of all layouts.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.layouts.keys().map(String::as_str)
    }

    /// What layout `name` says of the GPU at `position` of its node, as `nvidia-smi -L` numbers them, whose PCI ids are the word
    /// `model`, as NVML's `nvmlPciInfo_t` has it. `None`: there is no such layout.
    pub fn ruling(&self, name: &str, position: u32, model: Option<u32>) -> Option<Ruling<'_>> {
        let rules = self.layouts.get(name)?;
        let here = |rule: &&Rule| rule.positions.as_ref().is_none_or(|positions| positions.contains(&position));
        let mut ruling = Ruling::Silent;
        for rule in rules.iter().filter(here) {
            ruling = match (&rule.models, model) {
                (None, _) => Ruling::Is(&rule.arrangement),
                (Some(models), Some(model)) if models.contains(&model) => Ruling::Is(&rule.arrangement),
                (Some(_), Some(_)) => ruling,
                (Some(_), None) => Ruling::UnknownModel,
            };
        }
        Some(ruling)
    }
}

impl RuleInFile {
    fn check(self) -> Result<Rule, String> {
        let filters = self.device_filter.map(|filter| match filter {
            OneOrMany::One(one) if one.is_empty() => Vec::new(),
            OneOrMany::One(one) => vec![one],
            OneOrMany::Many(many) => many,
        });
        // To mig-parted a filter of nothing is no filter.
        let filters = filters.filter(|filters| !filters.is_empty());
        let models = filters.map(|filters| filters.iter().map(|text| model(text)).collect()).transpose()?;
        let arrangement = match (self.mig_enabled, self.mig_devices) {
            (true, None) => return Err("mig-enabled is true, so it needs mig-devices, perhaps {}".to_owned()),
            (true, Some(devices)) => {
                if !devices.is_empty() && devices.values().all(|count| *count == 0) {
                    return Err("mig-devices: every count is 0; write {} for none".to_owned());
                }
                Arrangement::Partitions(devices.into_iter().filter(|(_, count)| *count > 0).collect())
            }
            (false, Some(devices)) if !devices.is_empty() => {
                return Err("mig-enabled is false, so it can have no mig-devices".to_owned());
            }
            (false, _) => Arrangement::Whole,
        };
        Ok(Rule { models, positions: self.devices.0, arrangement })
    }
}

/// `0x20B210DE`, in either case.
fn model(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or_default();
    let word = u32::from_str_radix(digits, 16).ok().filter(|word| digits.len() == 8 && word & 0xffff == NVIDIA);
    word.ok_or_else(|| {
        format!("device-filter: {text:?} is no PCI device id of NVIDIA, device before vendor, such as \"0x20B210DE\"")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file of the article that this project is measured by, from its key `config.yaml`.
    const ARTICLE: &str = r#"
version: v1
mig-configs:
  all-1g.10gb:
    - devices: all
      mig-enabled: true
      mig-devices:
        "1g.10gb": 7
  mixed:
    - devices: [0]
      mig-enabled: true
      mig-devices:
        "3g.40gb": 2
    - devices: [1]
      mig-enabled: true
      mig-devices:
        "1g.10gb": 7
    - devices: [2, 3]
      mig-enabled: false
"#;

    fn partitions(devices: &[(&str, u32)]) -> Arrangement {
        Arrangement::Partitions(devices.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect())
    }

    #[test]
    fn rules_by_position() {
        let layouts = Layouts::parse(ARTICLE).unwrap();
        assert_eq!(layouts.names().collect::<Vec<_>>(), ["all-1g.10gb", "mixed"]);
        let (threes, sevens) = (partitions(&[("3g.40gb", 2)]), partitions(&[("1g.10gb", 7)]));
        let rulings = [
            (0, Ruling::Is(&threes)),
            (1, Ruling::Is(&sevens)),
            (2, Ruling::Is(&Arrangement::Whole)),
            (3, Ruling::Is(&Arrangement::Whole)),
            (4, Ruling::Silent),
        ];
        for (position, ruling) in rulings {
            assert_eq!(layouts.ruling("mixed", position, None), Some(ruling), "{position}");
        }
        assert_eq!(layouts.ruling("all-1g.10gb", 9, Some(0)), Some(Ruling::Is(&sevens)));
        assert_eq!(layouts.ruling("mixt", 0, None), None);
    }

    #[test]
    fn rules_by_model() {
        let text = "
version: v1
mig-configs:
  balanced:
    - device-filter: [\"0x20B010DE\", '0x20b110de']
      devices: all
      mig-enabled: true
      mig-devices: {\"1g.5gb\": 7}
    - device-filter: \"0x20B210DE\"
      devices: all
      mig-enabled: true
      mig-devices: {\"1g.10gb\": 7, \"2g.20gb\": 0}
    - devices: [7]
      mig-enabled: true
      mig-devices: {}
";
        let layouts = Layouts::parse(text).unwrap();
        let is = |position, model| layouts.ruling("balanced", position, model).unwrap();
        assert_eq!(is(0, Some(0x20b1_10de)), Ruling::Is(&partitions(&[("1g.5gb", 7)])));
        assert_eq!(is(0, Some(0x20b2_10de)), Ruling::Is(&partitions(&[("1g.10gb", 7)])));
        assert_eq!(is(0, Some(0x2330_10de)), Ruling::Silent);
        assert_eq!(is(0, None), Ruling::UnknownModel);
        assert_eq!(is(7, None), Ruling::Is(&partitions(&[])), "the last rule that selects it decides");
    }

    #[test]
    fn a_filter_of_nothing_is_none() {
        for filter in ["[]", "\"\"", "null"] {
            let text = format!(
                "version: v1\nmig-configs: {{one: [{{device-filter: {filter}, devices: all, mig-enabled: false}}]}}"
            );
            let layouts = Layouts::parse(&text).unwrap();
            assert_eq!(layouts.ruling("one", 0, Some(0x2330_10de)), Some(Ruling::Is(&Arrangement::Whole)), "{filter}");
        }
    }

    #[test]
    fn mistakes_are_named_with_their_place() {
        let rule =
            |rule: &str| format!("version: v1\nmig-configs:\n  one:\n    - {}\n", rule.replace('\n', "\n      "));
        let cases = [
            ("version: v2\nmig-configs: {}".to_owned(), "its version is \"v2\""),
            ("version: v1\nmig-config: {}".to_owned(), "mig-config"),
            ("version: v1".to_owned(), "mig-configs"),
            ("version: v1\nmig-configs:\n  one: []".to_owned(), "mig-configs.one: it has no rule"),
            (rule("devices: some\nmig-enabled: false"), "expected \"all\" or a list of positions"),
            (rule("devices: [-1]\nmig-enabled: false"), "expected \"all\" or a list of positions"),
            (rule("devices: all"), "mig-enabled"),
            (rule("devices: all\nmig-enabled: true"), "mig-configs.one: rule 0: mig-enabled is true, so it needs mig-devices"),
            (rule("devices: all\nmig-enabled: false\nmig-devices: {1g.5gb: 1}"), "rule 0: mig-enabled is false"),
            (rule("devices: all\nmig-enabled: true\nmig-devices: {1g.5gb: 0}"), "every count is 0"),
            (rule("devices: all\nmig-enabled: true\nmig-devices: {1g.5gb: -1}"), "line 6"),
            (rule("devices: all\nmig-enabled: true\nmig-device: {1g.5gb: 1}"), "mig-device"),
            (rule("devices: all\nmig-enabled: false\ndevice-filter: 0x2330"), "or a list of them at line 6, column 22"),
            (rule("devices: all\nmig-enabled: false\ndevice-filter: [\"0x10DE2330\"]"), "device before vendor"),
            ("version: v1\nmig-configs:\n  one:\n    - devices: all\n      mig-enabled: false\n  one:\n    - devices: all\n      mig-enabled: false".to_owned(), "duplicate"),
            ("[".to_owned(), "line 1"),
        ];
        for (text, words) in cases {
            let error = Layouts::parse(&text).expect_err(&text).to_string();
            assert!(error.contains(words), "{text}\nsays: {error}\nlacks: {words}");
        }
    }
}
