//! Arbitrary valid specs.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use kerf_cdi::{ContainerEdits, Device, DeviceNode, DeviceType, Hook, HookName, Kind, Mount, Spec};
use proptest::collection::{btree_map, vec};
use proptest::option::of;
use proptest::prelude::*;

/// Printable text. Runtimes read specs as YAML, which forbids control characters where JSON allows them.
const TEXT: &str = r"\PC{0,12}";

fn path() -> impl Strategy<Value = String> {
    TEXT.prop_map(|tail| format!("/{tail}"))
}

fn env() -> impl Strategy<Value = Vec<String>> {
    vec(("[A-Z_]{1,8}", TEXT).prop_map(|(name, value)| format!("{name}={value}")), 0..3)
}

fn annotations() -> impl Strategy<Value = BTreeMap<String, String>> {
    btree_map("([a-z0-9]{1,5}\\.)?[a-z]{1,5}/[A-Za-z0-9]{1,8}", TEXT, 0..3)
}

fn node() -> impl Strategy<Value = DeviceNode> {
    let device_type =
        prop::sample::select(&[DeviceType::Block, DeviceType::Character, DeviceType::Unbuffered, DeviceType::Fifo]);
    let permissions = prop_oneof![Just("none".to_owned()), "[rwm]{1,3}"];
    let place = (path(), of(path()), of(device_type), of(any::<(u32, u32)>()));
    let rights = (of(0..=0o777_u32), of(permissions), any::<Option<u32>>(), any::<Option<u32>>());
    (place, rights).prop_map(|((path, host_path, device_type, number), (file_mode, permissions, uid, gid))| {
        DeviceNode {
            path,
            host_path,
            device_type,
            major: number.map(|(major, _)| major),
            minor: number.map(|(_, minor)| minor),
            file_mode,
            permissions,
            uid,
            gid,
        }
    })
}

fn hook() -> impl Strategy<Value = Hook> {
    let hook_name = prop::sample::select(&[
        HookName::Prestart,
        HookName::CreateRuntime,
        HookName::CreateContainer,
        HookName::StartContainer,
        HookName::Poststart,
        HookName::Poststop,
    ]);
    (hook_name, path(), vec(TEXT, 0..3), env(), any::<u32>()).prop_map(|(hook_name, path, args, env, timeout)| Hook {
        hook_name,
        path,
        args,
        env,
        timeout: NonZeroU32::new(timeout),
    })
}

fn mount() -> impl Strategy<Value = Mount> {
    (path(), path(), vec("[a-z]{1,8}", 0..4), of("[a-z]{1,8}")).prop_map(
        |(host_path, container_path, options, mount_type)| Mount { host_path, container_path, options, mount_type },
    )
}

fn edits() -> impl Strategy<Value = ContainerEdits> {
    (env(), vec(node(), 0..3), vec(hook(), 0..2), vec(mount(), 0..3), vec(any::<u32>(), 0..2)).prop_map(
        |(env, device_nodes, hooks, mounts, additional_gids)| ContainerEdits {
            env,
            device_nodes,
            hooks,
            mounts,
            additional_gids,
        },
    )
}

/// A spec of any kind, with all its parts.
pub(crate) fn spec() -> impl Strategy<Value = Spec> {
    let own = edits().prop_filter("a device needs edits", |edits| !edits.is_empty());
    let devices = btree_map("[A-Za-z0-9]([A-Za-z0-9:._-]{0,6}[A-Za-z0-9])?", (own, annotations()), 1..4);
    let name = || "[A-Za-z]([A-Za-z0-9._-]{0,6}[A-Za-z0-9])?";
    (name(), name(), annotations(), devices, edits()).prop_map(
        |(vendor, class, annotations, devices, container_edits)| {
            let device = |(name, (container_edits, annotations))| Device { name, annotations, container_edits };
            let devices = devices.into_iter().map(device).collect();
            Spec { kind: Kind::new(vendor, class).unwrap(), annotations, devices, container_edits }
        },
    )
}
