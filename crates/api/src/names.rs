//! Names that other software sees. Changing one breaks users: manifests, dashboards, running clusters.

/// The DRA driver name unless `--driver-name` says otherwise. It is the name of the driver that kerf replaces, so that
/// its DeviceClasses, selectors and opaque configurations work unchanged.
pub const DRIVER_NAME: &str = "gpu.nvidia.com";

/// API group of kerf's own resources.
pub const GROUP: &str = "kerf.dev";

/// The namespace kerf's programs, leases and Events about nodes live in, unless told otherwise.
pub const NAMESPACE: &str = "kerf-system";

/// Value of the label [`LABEL_MANAGED_BY`] on everything the controller writes.
pub const CONTROLLER: &str = "kerf-controller";

/// Reporting name of the node's part in Events and as field manager.
pub const KUBELET_PLUGIN: &str = "kerf-kubelet-plugin";

/// Well-known label that says which program owns an object.
pub const LABEL_MANAGED_BY: &str = "app.kubernetes.io/managed-by";

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
