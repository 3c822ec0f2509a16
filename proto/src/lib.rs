//! The gRPC services between the kubelet and a DRA plugin, clients and servers.
//!
//! All of them are served by the plugin on Unix sockets and called by the kubelet: [`registration`] on a socket in
//! `plugins_registry`, [`dra`] and [`health`] on the socket that the registration names. The message names and field
//! numbers are those of `k8s.io/kubelet` (`pkg/apis/pluginregistration/v1`, `pkg/apis/dra`, `pkg/apis/dra-health`).
//!
//! An old and a new version of a service share their messages: `v1beta1` and `v1alpha1` re-export those of `v1`, so an
//! implementation is written once. On the wire nothing differs, see the `.proto` files.

#![forbid(unsafe_code)]
#![expect(
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    unused_qualifications,
    reason = "style of the generated code"
)]

pub mod registration {
    //! `pluginregistration.Registration`: how a plugin makes itself known to the kubelet.

    /// [`PluginInfo::type`](PluginInfo) of a DRA plugin (`DRAPlugin` in `k8s.io/kubelet`
    /// `pkg/apis/pluginregistration/v1`).
    pub const DRA_PLUGIN: &str = "DRAPlugin";

    tonic::include_proto!("pluginregistration");
}

pub mod dra {
    //! `DRAPlugin`: preparing and releasing the devices of claims.

    pub mod v1 {
        //! `k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin`, known to kubelets from 1.34 on.

        /// Name of this service in `PluginInfo.supported_versions`.
        pub const SUPPORTED_VERSION: &str = "v1.DRAPlugin";

        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
    }

    pub mod v1beta1 {
        //! `k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin`, for kubelets that do not know v1.

        pub use super::v1::{
            Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
            NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
        };

        /// Name of this service in `PluginInfo.supported_versions`.
        pub const SUPPORTED_VERSION: &str = "v1beta1.DRAPlugin";

        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
    }
}

pub mod health {
    //! `DRAResourceHealth`: the health of devices, for the status of the pods that use them.

    pub mod v1 {
        //! `v1.DRAResourceHealth`, known to kubelets from 1.37 on.

        /// Name of this service in `PluginInfo.supported_versions`.
        pub const SUPPORTED_VERSION: &str = "v1.DRAResourceHealth";

        tonic::include_proto!("v1");
    }

    pub mod v1alpha1 {
        //! `v1alpha1.DRAResourceHealth`, for kubelets from 1.34 on.

        pub use super::v1::{
            DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
        };

        /// Name of this service in `PluginInfo.supported_versions`.
        pub const SUPPORTED_VERSION: &str = "v1alpha1.DRAResourceHealth";

        tonic::include_proto!("v1alpha1");
    }
}

#[cfg(test)]
mod tests;
