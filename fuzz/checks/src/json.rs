//! JSON documents with something in them that nobody knows.

use serde_json::Value;

/// The document with an unknown field in one of its objects, for each object except those below `free` keys, where any
/// field is data.
pub(crate) fn with_an_unknown_field(document: &Value, free: &[&str]) -> Vec<Value> {
    let mut pointers = Vec::new();
    objects(document, String::new(), free, &mut pointers);
    pointers
        .iter()
        .map(|pointer| {
            let mut document = document.clone();
            document.pointer_mut(pointer).expect("a pointer into it")["kerf-fuzz"] = Value::Null;
            document
        })
        .collect()
}

/// JSON pointers of the objects of a document, at most some of them.
fn objects(value: &Value, at: String, free: &[&str], found: &mut Vec<String>) {
    const ENOUGH: usize = 16;
    let escaped = |key: &str| key.replace('~', "~0").replace('/', "~1");
    match value {
        Value::Object(_) if found.len() >= ENOUGH => {}
        Value::Object(fields) => {
            for (key, value) in fields.iter().filter(|(key, _)| !free.contains(&key.as_str())) {
                objects(value, format!("{at}/{}", escaped(key)), free, found);
            }
            found.push(at);
        }
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, value)| objects(value, format!("{at}/{i}"), free, found));
        }
        _ => {}
    }
}
