//! Every message that `kubectl describe` may show has its row in `docs/troubleshooting.md`.

use std::fs;
use std::path::Path;

const SOURCES: [&str; 7] = [
    "src/engine/errors.rs",
    "src/engine/former/mod.rs",
    "src/engine/journal.rs",
    "src/engine/locks.rs",
    "src/claim/mod.rs",
    "src/claim/source.rs",
    "src/driver.rs",
];

#[test]
fn every_message_is_explained() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("../docs/troubleshooting.md")).unwrap();
    let mut messages = 0;
    for source in SOURCES {
        let text = fs::read_to_string(root.join(source)).unwrap();
        for message in messages_of(&text) {
            messages += 1;
            let words = telling(&message);
            assert!(page.contains(&words), "{source}: {message:?}: the page has no row with {words:?}");
        }
    }
    assert!(messages > 40, "{messages} messages were found");
}

/// The texts of `#[error("...")]`, as they are before values are put in.
fn messages_of(source: &str) -> Vec<String> {
    let starts = source.match_indices("#[error(").map(|(at, found)| &source[at + found.len()..]);
    starts
        .filter_map(|rest| {
            let text = rest.trim_start().strip_prefix('"')?;
            let text = &text[..text.find('"')?];
            // A line that is continued: the break and the blanks after it are not in the text.
            let lines = text.split("\\\n").map(str::trim_start);
            Some(lines.collect())
        })
        .collect()
}

/// The first part of a message between values that has three words, or the longest.
fn telling(message: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    let mut rest = message;
    while let Some((part, after)) = rest.split_once('{') {
        parts.push(part);
        rest = after.split_once('}').map_or("", |(_, after)| after);
    }
    parts.push(rest);
    let trimmed = parts.iter().map(|part| part.trim_matches(|c: char| !c.is_alphanumeric()));
    let words = |part: &&str| part.split_whitespace().count();
    let first = trimmed.clone().find(|part| words(part) >= 3);
    let part = first.or_else(|| trimmed.max_by_key(|part| part.len())).unwrap_or_default();
    // What to do is worded differently on the page.
    part.split([';', ':', '(']).next().unwrap_or_default().trim_end().to_owned()
}
