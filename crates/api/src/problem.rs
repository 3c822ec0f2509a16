//! What is wrong with an object that somebody wrote: where, what, and what to do.

use std::fmt;

/// Words have no more characters. Whoever writes more is not answered in full.
const LONGEST_WORD: usize = 64;

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
    /// A problem without a hint. The message is shown in one line, whatever of the object a library repeats in it.
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Problem {
        let shown = |c: char| if c.is_control() { c.escape_default().collect() } else { String::from(c) };
        Problem { path: path.into(), message: message.into().chars().map(shown).collect(), hint: None }
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

/// Problems as one text with `separator` between them: of many the first, and how many more there are.
pub fn joined(problems: &[Problem], separator: &str) -> String {
    /// What a person reads at once, and far below what an Event or an answer of the API server may hold.
    const SHOWN: usize = 10;
    let shown = problems.iter().take(SHOWN).map(ToString::to_string);
    let more = problems.len().checked_sub(SHOWN).filter(|more| *more > 0);
    let lines: Vec<String> = shown.chain(more.map(|more| format!("and {more} more"))).collect();
    lines.join(separator)
}

/// The path of a field: `spec.layout`. A name with other characters than a field's is quoted: `limits["a.b"]`.
pub fn field(path: &str, name: &str) -> String {
    let plain = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        && name.len() <= LONGEST_WORD;
    match (plain, path.is_empty()) {
        (true, true) => name.to_owned(),
        (true, false) => format!("{path}.{name}"),
        (false, _) => format!("{path}[{}]", quoted(name)),
    }
}

/// What somebody wrote, in quotes and in one line; of a long text its beginning.
pub fn quoted(text: &str) -> String {
    match text.char_indices().nth(LONGEST_WORD) {
        None => format!("{text:?}"),
        Some((end, _)) => format!("{:?}...", &text[..end]),
    }
}

/// The path of an element of a list: `spec.gpus.indices[2]`.
pub fn element(path: &str, index: usize) -> String {
    format!("{path}[{index}]")
}

/// The known word that the writer of `word` most likely meant: at most a third of it has to be changed, and case is free.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let written: Vec<char> = word.chars().map(|c| c.to_ascii_lowercase()).take(LONGEST_WORD + 1).collect();
    if written.len() > LONGEST_WORD {
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
        assert_eq!(Problem::new("", "no variant `a\nb\u{1b}é`").to_string(), "no variant `a\\nb\\u{1b}é`");
    }

    #[test]
    fn of_many_the_first_are_shown() {
        let problems: Vec<Problem> = (1..=12).map(|n| Problem::new("", n.to_string())).collect();
        assert_eq!(joined(&problems[..2], "; also "), "1; also 2");
        assert_eq!(joined(&problems[..10], "\n").lines().count(), 10);
        assert_eq!(joined(&problems, " "), "1 2 3 4 5 6 7 8 9 10 and 2 more");
        assert_eq!(joined(&[], "\n"), "");
    }

    #[test]
    fn paths_are_those_of_kubernetes() {
        assert_eq!(field("", "spec"), "spec");
        assert_eq!(field(&element("spec.config", 2), "opaque"), "spec.config[2].opaque");
        assert_eq!(field("limits", "GPU-1\n"), "limits[\"GPU-1\\n\"]");
        assert_eq!(field("limits", ""), "limits[\"\"]");
        assert_eq!(field("", &"é".repeat(100)), format!("[\"{}\"...]", "é".repeat(64)));
        assert_eq!(field("", &"a".repeat(65)), format!("[\"{}\"...]", "a".repeat(64)));
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
