//! What the API server supports, as far as it decides what may be published.

/// What the API server supports. Found by trying, see [`probe`](crate::probe): fields whose feature gate is off are
/// dropped silently, and neither a version nor the OpenAPI document tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerFeatures {
    /// Shared counters, which say what excludes what.
    pub counters: Counters,
    /// Whether devices keep their taints (gate `DRADeviceTaints`). Where they are dropped, a device that cannot be given
    /// out now must not be published.
    pub taints: bool,
    /// Whether DeviceClasses keep their extended resource (gate `DRAExtendedResource`). Where it is dropped, pods that ask for
    /// `nvidia.com/mig-1g.10gb` have no class that serves them.
    pub extended_resources: bool,
}

/// How shared counters (gate `DRAPartitionableDevices`) can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counters {
    /// Not at all: they are dropped. Devices that overlap must not be published.
    None,
    /// Counter sets in the slice of the devices that consume them (Kubernetes 1.34).
    Combined,
    /// Counter sets in slices of their own (Kubernetes 1.35 and later).
    Separate,
}
