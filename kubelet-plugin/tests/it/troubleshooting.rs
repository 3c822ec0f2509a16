//! Everything that `kubectl describe` may show has its row in `docs/troubleshooting.md`: messages, reasons of Events, taints.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use kerf_api::names;

const SOURCES: [&str; 7] = [
    "src/engine/errors.rs",
    "src/engine/former/mod.rs",
    "src/engine/journal.rs",
    "src/engine/locks.rs",
    "src/claim/mod.rs",
    "src/claim/source.rs",
    "src/driver.rs",
];

/// Where reasons of Events are, of both programs, and what stands before each.
const REASONS: [(&str, &str); 7] = [
    ("src/events.rs", "self.report("),
    ("src/driver.rs", "events.node("),
    ("src/reconcile/mod.rs", "events.node("),
    ("src/inventory/watch.rs", "events.node("),
    ("src/inventory/mod.rs", "pub const"),
    ("../controller/src/render/remark.rs", "=> "),
    ("../controller/src/classes/plan.rs", "=> "),
];

/// Reasons of what is in the way, which are taints as well.
const TAINTS: (&str, &str) = ("../crates/api/src/names.rs", "pub const");

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

#[test]
fn every_message_is_explained() {
    let page = read("../docs/troubleshooting.md");
    let mut messages = 0;
    for source in SOURCES {
        let text = read(source);
        for message in messages_of(&text) {
            messages += 1;
            let words = telling(&message);
            assert!(page.contains(&words), "{source}: {message:?}: the page has no row with {words:?}");
        }
    }
    assert!(messages > 40, "{messages} messages were found");
}

#[test]
fn every_reason_and_every_taint_is_explained() {
    let page = read("../docs/troubleshooting.md");
    let events: BTreeSet<String> = REASONS.into_iter().flat_map(words_of).collect();
    let taints = words_of(TAINTS);
    assert!(events.len() >= 19 && taints.len() >= 4, "{events:?} {taints:?}");
    for reason in events {
        assert!(page.contains(&format!("`{reason}`")), "the page has no row with {reason}");
    }
    let keys = taints.iter().map(|reason| names::taint_key(reason).unwrap());
    for key in keys.chain([names::TAINT_BLOCKED.to_owned()]) {
        assert!(page.contains(&format!("`{key}`")), "the page has no row with {key}");
    }
}

/// The CamelCase words that are the first text after `before` in a source.
fn words_of((source, before): (&str, &str)) -> BTreeSet<String> {
    let source = read(source);
    let code = source.split("mod tests {").next().unwrap_or_default();
    let texts = code.split(before).skip(1).filter_map(|rest| rest.split('"').nth(1));
    let is_word = |text: &&str| text.starts_with(char::is_uppercase) && text.chars().all(|c| c.is_ascii_alphanumeric());
    texts.filter(is_word).map(str::to_owned).collect()
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
