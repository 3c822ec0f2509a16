//! Names that other software sees. Changing one breaks users: manifests, dashboards, running clusters.

/// The DRA driver name unless `--driver-name` says otherwise. It is the name of the driver that kerf replaces, so that
/// its DeviceClasses, selectors and opaque configurations work unchanged.
pub const DRIVER_NAME: &str = "gpu.nvidia.com";

/// API group of kerf's own resources.
pub const GROUP: &str = "kerf.dev";

/// The namespace kerf's programs and leases live in, unless told otherwise.
pub const NAMESPACE: &str = "kerf-system";

/// Value of the label [`LABEL_MANAGED_BY`] on everything the controller writes.
pub const CONTROLLER: &str = "kerf-controller";

/// Who holds the lease of the controllers after kerf was removed. None of those that run then leads for a while; one that
/// starts later does not wait.
pub const REMOVED: &str = "kerf-removed";

/// Reporting name of the node's part in Events and as field manager.
pub const KUBELET_PLUGIN: &str = "kerf-kubelet-plugin";

/// Well-known label that says which program owns an object.
pub const LABEL_MANAGED_BY: &str = "app.kubernetes.io/managed-by";

/// Label of DeviceClasses that the controller makes of what the GPUs can be cut into; its value is `true`. An object without
/// it, or with another [`LABEL_DRIVER`], is somebody else's.
pub const LABEL_GENERATED: &str = "kerf.dev/generated";

/// Label that says for which driver name the controller makes an object.
pub const LABEL_DRIVER: &str = "kerf.dev/driver";

/// Field manager of the labels that the controller writes on Nodes: what it owns there is what this manager has applied.
pub const NODE_LABELS: &str = "kerf-controller-labels";

/// Prefix of all labels that the controller writes on Nodes: they are those of NVIDIA's GPU feature discovery and MIG manager.
pub const NODE_LABEL_PREFIX: &str = "nvidia.com/";

/// The domain of a driver's DeviceClasses and extended resources: its name without the first label, `nvidia.com` for
/// [`DRIVER_NAME`].
pub fn domain(driver: &str) -> &str {
    driver.split_once('.').map_or(driver, |(_, domain)| domain)
}

/// `type` attribute of a whole GPU.
pub const TYPE_GPU: &str = "gpu";

/// `type` attribute of a MIG device.
pub const TYPE_MIG: &str = "mig";

/// CDI vendor and class of the devices that kerf hands to containers: `<kind>=<claim uid>-<device name>`. The shape is
/// that of the driver kerf replaces, because monitoring agents parse it.
pub const CDI_VENDOR: &str = "k8s.gpu.nvidia.com";

/// See [`CDI_VENDOR`].
pub const CDI_CLASS: &str = "claim";

/// The name of the liveness lease of a node's plugin: the node's name, in kerf's namespace.
///
/// The controller publishes a node's devices only while this lease is renewed.
pub fn plugin_lease(node: &str) -> String {
    format!("kubelet-plugin-{node}")
}

/// How long a plugin's lease is good for, in seconds. The plugin renews it three times in that span.
///
/// 30 s is also how long the kubelet waits before it wipes the ResourceSlices of a driver whose plugin went away.
pub const PLUGIN_LEASE_SECONDS: u32 = 30;

/// Reason of [`Blocked`](crate::Blocked): a GPU instance that no claim explains.
pub const FOREIGN_INSTANCE: &str = "ForeignInstance";

/// Reason of [`Blocked`](crate::Blocked): a GPU instance whose claim has ended and that could not be destroyed yet, mostly
/// because a process still works in it.
pub const CONDEMNED: &str = "Condemned";

/// Reason of [`Blocked`](crate::Blocked): a claim that the DRA driver that was on the node before kerf has prepared, and
/// that the API server knows by another device's name; or what that driver's claims hold cannot be told.
pub const FORMER_DRIVER: &str = "FormerDriver";

/// Reason of the taint on a device that a claim holds and that is offered no more: kept until the claim ends.
pub const NOT_OFFERED: &str = "NotOffered";

/// Node label by which NVIDIA's mig-manager is told which layout the node shall have; kerf reads it, too.
pub const LABEL_MIG_CONFIG: &str = "nvidia.com/mig.config";

/// Node label in which mig-manager, and kerf, answers [`LABEL_MIG_CONFIG`]: `pending`, `success` or `failed`.
pub const LABEL_MIG_CONFIG_STATE: &str = "nvidia.com/mig.config.state";

/// Name of the ConfigMap with the cluster's layouts, in kerf's namespace, unless told otherwise.
pub const LAYOUTS: &str = "kerf-layouts";

/// Key of that ConfigMap, as of mig-manager's.
pub const LAYOUTS_KEY: &str = "config.yaml";

/// The key of the taint for a reason that gives no [key](taint_key) of its own.
pub const TAINT_BLOCKED: &str = "kerf.dev/blocked";

/// The key of the taint that devices carry for a [reason](crate::Blocked::reason): the word in kebab-case in kerf's
/// domain, `kerf.dev/foreign-instance`. `None` where `reason` is no CamelCase word of ASCII letters and digits, or too long.
///
/// Tolerations of users name it.
pub fn taint_key(reason: &str) -> Option<String> {
    /// The longest name part of a label key.
    const LONGEST: usize = 63;
    let word =
        reason.starts_with(|c: char| c.is_ascii_uppercase()) && reason.bytes().all(|b| b.is_ascii_alphanumeric());
    if !word || reason.len() > LONGEST {
        return None;
    }
    let mut name = String::new();
    let mut before = None;
    for letter in reason.chars() {
        if letter.is_ascii_uppercase() && before.is_some_and(|before: char| !before.is_ascii_uppercase()) {
            name.push('-');
        }
        name.push(letter.to_ascii_lowercase());
        before = Some(letter);
    }
    (name.len() <= LONGEST).then(|| format!("{GROUP}/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_become_taint_keys() {
        let keys = [
            (FOREIGN_INSTANCE, Some("kerf.dev/foreign-instance")),
            (CONDEMNED, Some("kerf.dev/condemned")),
            (FORMER_DRIVER, Some("kerf.dev/former-driver")),
            ("ECCError2", Some("kerf.dev/eccerror2")),
            ("", None),
            ("condemned", None),
            ("Two Words", None),
            ("Über", None),
            ("Foreign-Instance", None),
            ("2Much", None),
        ];
        for (reason, key) in keys {
            assert_eq!(taint_key(reason).as_deref(), key, "{reason}");
        }
        assert_eq!(taint_key(&format!("A{}", "a".repeat(62))).unwrap().len(), "kerf.dev/".len() + 63);
        assert_eq!(taint_key(&format!("A{}", "a".repeat(63))), None);
        assert_eq!(taint_key(&"aA".repeat(31)), None, "starts small");
        assert_eq!(taint_key(&"Aa".repeat(31)), None, "too long with its dashes");
    }
}
