//! What is wrong with an object that somebody wrote: where, what, and what to do.

use std::fmt;

/// One mistake in an object.
///
/// Shown as `spec.layout.name: no layout "mixt"; did you mean "mixed"?`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The field, as Kubernetes writes paths: `spec.devices.config[0].opaque`. Empty: the object itself.
    pub path: String,
    /// What is wrong with it. A lower-case fragment.
    pub message: String,
    /// What the writer can do. A lower-case fragment.
    pub hint: Option<String>,
}

impl Problem {
    /// A problem without a hint.
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Problem {
        Problem { path: path.into(), message: message.into(), hint: None }
    }

    /// The same problem, with what to do about it.
    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> Problem {
        Problem { hint: Some(hint.into()), ..self }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Problem { path, message, hint } = self;
        if !path.is_empty() {
            write!(f, "{path}: ")?;
        }
        f.write_str(message)?;
        hint.iter().try_for_each(|hint| write!(f, "; {hint}"))
    }
}

/// The path of a field: `spec.layout`. A name with other characters than a field's is quoted: `limits["a.b"]`.
pub fn field(path: &str, name: &str) -> String {
    let plain = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    match (plain, path.is_empty()) {
        (true, true) => name.to_owned(),
        (true, false) => format!("{path}.{name}"),
        (false, _) => format!("{path}[{name:?}]"),
    }
}

/// The path of an element of a list: `spec.gpus.indices[2]`.
pub fn element(path: &str, index: usize) -> String {
    format!("{path}[{index}]")
}

/// The known word that the writer of `word` most likely meant: at most a third of it has to be changed, and case is free.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// Nobody means a known word by more than this many characters; a bound on the work for what users write.
    const LONGEST: usize = 64;
    let written: Vec<char> = word.chars().map(|c| c.to_ascii_lowercase()).take(LONGEST + 1).collect();
    if written.len() > LONGEST {
        return None;
    }
    let by_distance = known.into_iter().map(|known| (distance(&written, known), known));
    let (distance, known) = by_distance.min_by_key(|(distance, _)| *distance)?;
    (distance * 3 <= written.len().max(known.len())).then_some(known)
}

/// How many characters have to be inserted, removed or replaced (Levenshtein), case aside.
fn distance(written: &[char], known: &str) -> usize {
    let mut row: Vec<usize> = (0..=written.len()).collect();
    for (line, letter) in known.chars().enumerate() {
        let letter = letter.to_ascii_lowercase();
        let mut diagonal = row[0];
        row[0] = line + 1;
        for (column, other) in written.iter().enumerate() {
            let replaced = diagonal + usize::from(*other != letter);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[written.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_in_one_line() {
        let problem = Problem::new(field("spec.layout", "name"), "no layout \"mixt\"");
        assert_eq!(problem.to_string(), "spec.layout.name: no layout \"mixt\"");
        assert_eq!(
            problem.hint("did you mean \"mixed\"?").to_string(),
            "spec.layout.name: no layout \"mixt\"; did you mean \"mixed\"?"
        );
        assert_eq!(Problem::new("", "not an object").to_string(), "not an object");
    }

    #[test]
    fn paths_are_those_of_kubernetes() {
        assert_eq!(field("", "spec"), "spec");
        assert_eq!(field(&element("spec.config", 2), "opaque"), "spec.config[2].opaque");
        assert_eq!(field("limits", "GPU-1\n"), "limits[\"GPU-1\\n\"]");
        assert_eq!(field("limits", ""), "limits[\"\"]");
    }

    #[test]
    fn a_slip_finds_the_word_that_was_meant() {
        let known = ["sharing", "strategy", "timeSlicingConfig", "mpsConfig"];
        for (word, meant) in [
            ("sharin", Some("sharing")),
            ("Strategy", Some("strategy")),
            ("timeslicing", None),
            ("timeSliceConfig", Some("timeSlicingConfig")),
            ("mpsconfg", Some("mpsConfig")),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, known), meant, "{word}");
        }
        assert_eq!(nearest("mps", []), None);
        assert_eq!(nearest(&"s".repeat(100_000), known), None);
    }
}
