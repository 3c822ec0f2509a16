//! Changes JSON documents as documents: most changes of bytes only break the syntax.

use libfuzzer_sys::fuzzer_mutate;
use serde_json::{Map, Number, Value};

/// Numbers at which arithmetic breaks.
const NUMBERS: [u64; 12] =
    [0, 1, 2, 7, 31, 32, 33, 64, u32::MAX as u64 - 1, u32::MAX as u64, i64::MAX as u64, u64::MAX];

/// A custom mutator of libFuzzer for JSON; every fourth change, and every change of what is no JSON, is one of bytes.
pub fn json(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> usize {
    let mut random = Random(seed.into());
    let document = serde_json::from_slice::<Value>(&data[..size]);
    let Some(mut document) = document.ok().filter(|_| random.below(4) > 0) else {
        return fuzzer_mutate(data, size, max_size);
    };
    for _ in 0..=random.below(3) {
        edit(&mut document, &mut random);
    }
    let text = document.to_string();
    match data.get_mut(..text.len()) {
        Some(place) if text.len() <= max_size => {
            place.copy_from_slice(text.as_bytes());
            text.len()
        }
        _ => fuzzer_mutate(data, size, max_size),
    }
}

/// Changes one value of the document.
fn edit(document: &mut Value, random: &mut Random) {
    let donor = nth(document, random.below(count(document))).clone();
    let place = nth(document, random.below(count(document)));
    match (random.below(6), place) {
        (0, place) => *place = donor,
        (1, place) => *place = scalar(random),
        (2, Value::Array(items)) if !items.is_empty() => {
            let item = items[random.below(items.len())].clone();
            items.insert(random.below(items.len() + 1), item);
        }
        (3, Value::Array(items)) if !items.is_empty() => drop(items.remove(random.below(items.len()))),
        (2, Value::Object(fields)) => drop(fields.insert(key(fields, random), donor)),
        (3, Value::Object(fields)) => drop(fields.remove(&key(fields, random))),
        (_, Value::Array(items)) => items.push(donor),
        (_, Value::Object(fields)) => {
            if let Some(value) = fields.get_mut(&key(fields, random)) {
                *value = scalar(random);
            }
        }
        (_, Value::String(text)) => *text = bytes(text),
        (_, Value::Number(number)) => {
            let step = random.below(5) as u64;
            let near = number.as_u64().map(|number| number.wrapping_add(step).wrapping_sub(2));
            *number = near.unwrap_or(step).into();
        }
        (_, place) => *place = scalar(random),
    }
}

/// The text as libFuzzer changes it, which knows what the program compares texts with.
fn bytes(text: &str) -> String {
    let max_size = text.len() + 16;
    let mut data = text.as_bytes().to_vec();
    data.resize(max_size, 0);
    let size = fuzzer_mutate(&mut data, text.len(), max_size);
    String::from_utf8_lossy(&data[..size]).into_owned()
}

fn scalar(random: &mut Random) -> Value {
    match random.below(8) {
        0 => Value::Null,
        1 => Value::Bool(random.below(2) == 0),
        2 => Value::String(String::new()),
        3 => Value::Array(Vec::new()),
        4 => Value::Object(Map::new()),
        5 => Number::from_f64(-0.5).into(),
        _ => NUMBERS[random.below(NUMBERS.len())].into(),
    }
}

/// A key of the object, or a new one.
fn key(fields: &Map<String, Value>, random: &mut Random) -> String {
    let existing = fields.keys().nth(random.below(fields.len() + 1)).cloned();
    existing.unwrap_or_else(|| bytes("x"))
}

/// How many values there are, the document itself included.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// The value at a place in the order of the document.
fn nth(value: &mut Value, mut at: usize) -> &mut Value {
    if at == 0 {
        return value;
    }
    at -= 1;
    let children: Vec<&mut Value> = match value {
        Value::Array(items) => items.iter_mut().collect(),
        Value::Object(fields) => fields.values_mut().collect(),
        _ => unreachable!("`at` is below the number of values"),
    };
    for child in children {
        let size = count(child);
        if at < size {
            return nth(child, at);
        }
        at -= size;
    }
    unreachable!("`at` is below the number of values")
}

/// SplitMix64: libFuzzer gives a seed and wants the same change for it.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % end.max(1) as u64) as usize
    }
}
