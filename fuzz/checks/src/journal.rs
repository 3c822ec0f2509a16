//! The journal: a disk may hold anything, and so may a file that a newer version wrote.

use kerf_kubelet_plugin::engine::JournalFile;
use serde_json::Value;

/// A file that can be used is written back as it was, unknown fields included; what it holds, it holds after a reboot.
pub fn journal(data: &[u8]) {
    let document: Value = serde_json::from_slice(data).unwrap_or_default();
    // The file's name says whose it is.
    let uid = document["claim"]["uid"].as_str().unwrap_or("0b6f6c5e-8a3f-4a44-9d0c-0d9f4d1c2a11");
    let file = match JournalFile::read(uid, data) {
        Ok(file) => file,
        Err(reason) => return assert!(!reason.is_empty()),
    };
    assert!(JournalFile::read(&format!("{uid}-"), data).is_err(), "a file under another claim's name");

    let written = file.to_bytes();
    let again = JournalFile::read(uid, &written).expect("what is written is read");
    assert_eq!(again, file);
    assert_eq!(again.to_bytes(), written);
    let rewritten: Value = serde_json::from_slice(&written).expect("JSON");
    assert_eq!(normal(rewritten), normal(document.clone()), "nothing is lost");

    // A reboot forgets instances and nothing else.
    let boot_id = document["bootId"].as_str().unwrap_or_default();
    assert_eq!(file.clone().at_boot(boot_id), file);
    let rebooted = file.clone().at_boot(&format!("{boot_id}+1"));
    assert_eq!(rebooted.clone().at_boot(&format!("{boot_id}+1")), rebooted);
    assert_eq!(rebooted.gpus(), file.gpus());
    let claim = file.claim();
    assert!(rebooted.claim().partitions.is_empty() && !rebooted.claim().complete);
    assert_eq!(rebooted.claim().devices, claim.devices);

    for partition in &claim.partitions {
        assert_eq!(partition.gpu, partition.device.gpu());
        assert!(file.gpus().contains(&partition.gpu));
    }
    for gpu in file.gpus().into_iter().filter(|_| !claim.condemned) {
        assert_eq!(file.holds(gpu, None), rebooted.holds(gpu, None), "what the claim holds, nobody else gets");
    }
}

/// Without what says nothing: optional fields that are null, and no admin access. A word may be written as serde writes
/// variants that hold something.
fn normal(mut record: Value) -> Value {
    let word = |value: &mut Value| {
        if let Some(word) = value.as_object().and_then(|variant| variant.keys().next()) {
            *value = Value::String(word.clone());
        }
    };
    let drop = |items: &mut Value, fields: &[&str], nothing: Value| {
        for item in items.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
            item.retain(|name, value| !(fields.contains(&name.as_str()) && *value == nothing));
        }
    };
    drop(&mut record["results"], &["shareId"], Value::Null);
    drop(&mut record["results"], &["adminAccess"], Value::Bool(false));
    drop(&mut record["partitions"], &["gpuInstance", "computeInstance", "uuid"], Value::Null);
    drop(&mut record["partitions"], &["kept", "keptCompute"], Value::Bool(false));
    if let Some(record) = record.as_object_mut() {
        record.retain(|name, value| match name.as_str() {
            "driverLoad" | "stuckSince" => !value.is_null(),
            "condemned" => *value != Value::Bool(false),
            _ => true,
        });
    }
    word(&mut record["phase"]);
    for partition in record["partitions"].as_array_mut().into_iter().flatten() {
        word(&mut partition["state"]);
    }
    record
}
