//! The [Container Device Interface]: how a driver tells a container runtime what a device needs inside a container.
//!
//! * [`Spec`] is one CDI document: the edits of a container that make up each device. It is checked and encoded by
//!   [`Spec::to_json`], with the lowest `cdiVersion` that its fields allow, so that runtimes as old as possible take it.
//! * [`SpecDir`] keeps one such document for each claim in a directory that runtimes watch, and never shows them half
//!   a file.
//!
//! Architecture invariant: this crate knows CDI and nothing else. What belongs into a container with a GPU is decided
//! by the caller; of NVIDIA, MIG and Kubernetes nothing is known here.
//!
//! [Container Device Interface]: https://github.com/cncf-tags/container-device-interface

#![forbid(unsafe_code)]

mod dir;
mod document;
mod kind;
mod spec;
mod validate;
mod version;

pub use dir::{Error, SpecDir};
pub use document::DecodeError;
pub use kind::Kind;
pub use spec::{ContainerEdits, Device, DeviceNode, DeviceType, Hook, HookName, Mount, Spec};
pub use validate::{Invalid, Problem};
pub use version::Version;
