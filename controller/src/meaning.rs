//! When two ResourceSlices mean the same, whatever their spelling.
//!
//! The API server rewrites what it stores: quantities get another spelling, empty lists vanish, taints get a time. A
//! plain `==` would find a difference for ever and write for ever.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Counter, DeviceCapacity, ResourcePool, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kerf_api::quantity::Amount;
use sha1::{Digest as _, Sha1};

/// What a slice says, except for its pool's generation and slice count. Equal digests: the same meaning.
///
/// A digest in place of the content keeps the memory for a large cluster's slices small: 27 KB of JSON become 20 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Meaning([u8; 20]);

impl Meaning {
    /// The meaning of `spec`: quantities by value, absent equals empty, `false` equals absent, the times of taints do
    /// not count, the order of devices does.
    pub fn of(spec: &ResourceSliceSpec) -> Meaning {
        let mut spec = spec.clone();
        normalize(&mut spec);
        // Maps of these types are ordered, so equal values have equal JSON; and they can always be written as JSON.
        let json = serde_json::to_vec(&spec).expect("a ResourceSlice is JSON");
        Meaning(Sha1::digest(json).into())
    }
}

fn normalize(spec: &mut ResourceSliceSpec) {
    spec.pool = ResourcePool { name: std::mem::take(&mut spec.pool.name), ..ResourcePool::default() };
    drop_false(&mut spec.all_nodes);
    drop_false(&mut spec.per_device_node_selection);
    drop_empty(&mut spec.node_name, String::is_empty);
    drop_empty(&mut spec.partition_type_attribute, String::is_empty);
    drop_empty(&mut spec.skip_node_operations, Vec::is_empty);
    drop_empty(&mut spec.shared_counters, Vec::is_empty);
    drop_empty(&mut spec.devices, Vec::is_empty);
    for set in spec.shared_counters.iter_mut().flatten() {
        set.counters.values_mut().for_each(normalize_counter);
    }
    for device in spec.devices.iter_mut().flatten() {
        drop_false(&mut device.all_nodes);
        drop_false(&mut device.allow_multiple_allocations);
        drop_false(&mut device.binds_to_node);
        drop_empty(&mut device.node_name, String::is_empty);
        drop_empty(&mut device.attributes, BTreeMap::is_empty);
        drop_empty(&mut device.capacity, BTreeMap::is_empty);
        drop_empty(&mut device.node_allocatable_resources, BTreeMap::is_empty);
        drop_empty(&mut device.binding_conditions, Vec::is_empty);
        drop_empty(&mut device.binding_failure_conditions, Vec::is_empty);
        drop_empty(&mut device.consumes_counters, Vec::is_empty);
        drop_empty(&mut device.taints, Vec::is_empty);
        for consumption in device.consumes_counters.iter_mut().flatten() {
            drop_empty(&mut consumption.compatibility_groups, Vec::is_empty);
            consumption.counters.values_mut().for_each(normalize_counter);
        }
        for taint in device.taints.iter_mut().flatten() {
            taint.time_added = None;
            drop_empty(&mut taint.value, String::is_empty);
        }
        device.capacity.iter_mut().flatten().for_each(|(_, capacity)| normalize_capacity(capacity));
    }
}

fn normalize_counter(counter: &mut Counter) {
    normalize_quantity(&mut counter.value);
}

fn normalize_capacity(capacity: &mut DeviceCapacity) {
    normalize_quantity(&mut capacity.value);
    let Some(policy) = &mut capacity.request_policy else { return };
    policy.default.iter_mut().for_each(normalize_quantity);
    drop_empty(&mut policy.valid_values, Vec::is_empty);
    policy.valid_values.iter_mut().flatten().for_each(normalize_quantity);
    if let Some(range) = &mut policy.valid_range {
        normalize_quantity(&mut range.min);
        range.max.iter_mut().for_each(normalize_quantity);
        range.step.iter_mut().for_each(normalize_quantity);
    }
}

fn normalize_quantity(quantity: &mut Quantity) {
    if let Some(amount) = Amount::parse(&quantity.0) {
        *quantity = amount.to_normal_form();
    }
}

fn drop_false(flag: &mut Option<bool>) {
    if *flag == Some(false) {
        *flag = None;
    }
}

fn drop_empty<T>(value: &mut Option<T>, is_empty: impl Fn(&T) -> bool) {
    if value.as_ref().is_some_and(is_empty) {
        *value = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn meaning(spec: Value) -> Meaning {
        Meaning::of(&serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn spelling_does_not_count() {
        let plain = json!({
            "driver": "d", "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1}, "nodeName": "n",
            "devices": [{
                "name": "a",
                "capacity": {"memory": {"value": "10240Mi"}},
                "consumesCounters": [{"counterSet": "s", "counters": {"c": {"value": "1"}}}],
                "taints": [{"key": "k", "effect": "NoSchedule"}],
            }],
        });
        let other = json!({
            "driver": "d", "pool": {"name": "n", "generation": 7, "resourceSliceCount": 3}, "nodeName": "n",
            "allNodes": false, "sharedCounters": [], "skipNodeOperations": [], "perDeviceNodeSelection": false,
            "devices": [{
                "name": "a", "attributes": {}, "bindingConditions": [], "allowMultipleAllocations": false,
                "capacity": {"memory": {"value": "10Gi"}},
                "consumesCounters": [{"counterSet": "s", "counters": {"c": {"value": "1000m"}}, "compatibilityGroups": []}],
                "taints": [{"key": "k", "value": "", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"}],
            }],
        });
        assert_eq!(meaning(plain), meaning(other));
    }

    #[test]
    fn content_counts() {
        let device = |name: &str, memory: &str| json!({"name": name, "capacity": {"memory": {"value": memory}}});
        let slice = |devices: Vec<Value>| {
            meaning(json!({"driver": "d", "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
                "nodeName": "n", "devices": devices}))
        };
        let (a, b) = (|| device("a", "1Gi"), || device("b", "1Gi"));
        let base = slice(vec![a(), b()]);
        assert_ne!(base, slice(vec![b(), a()]), "order is placement policy");
        assert_ne!(base, slice(vec![a()]));
        assert_ne!(base, slice(vec![a(), device("b", "1G")]));
        assert_eq!(base, slice(vec![a(), b()]));
    }
}
