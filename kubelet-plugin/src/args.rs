//! The program's arguments.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use kerf_api::names;

use crate::engine::ForeignPolicy;
use crate::lease::AtExit;
use crate::paths;

/// Offers this node's NVIDIA GPUs to Kubernetes, and carves MIG instances out of them when pods need them.
#[derive(Clone, Debug, Parser)]
#[command(name = "kerf-kubelet-plugin", version)]
pub struct Args {
    /// Name of this node in Kubernetes.
    #[arg(long, env = "KERF_NODE_NAME", value_parser = dns_name)]
    pub node_name: String,

    /// Name of the DRA driver to serve.
    #[arg(long, env = "KERF_DRIVER_NAME", default_value = names::DRIVER_NAME, value_parser = dns_name)]
    pub driver_name: String,

    /// UID of this pod. With it, two pods can serve the node at the same time, one taking over from the other.
    #[arg(long, env = "KERF_POD_UID", value_parser = pod_uid)]
    pub pod_uid: Option<String>,

    /// Where the host's root directory is, as this program sees it.
    #[arg(long, env = "KERF_HOST_ROOT", default_value = "/", value_parser = absolute)]
    pub host_root: PathBuf,

    /// Where the NVIDIA driver is, as the host sees it [default: the first that holds one of /run/nvidia/driver,
    /// /home/kubernetes/bin/nvidia, /].
    #[arg(long, env = "KERF_DRIVER_ROOT", value_parser = absolute)]
    pub driver_root: Option<PathBuf>,

    /// The kubelet's root directory.
    #[arg(long, env = "KERF_KUBELET_ROOT", default_value = "/var/lib/kubelet", value_parser = absolute)]
    pub kubelet_root: PathBuf,

    /// Where the container runtime reads CDI specifications.
    #[arg(long, env = "KERF_CDI_ROOT", default_value = "/var/run/cdi", value_parser = absolute)]
    pub cdi_root: PathBuf,

    /// The program that container runtimes run for this one, which is copied to the host [default: kerf-cdi-hook beside this
    /// program; without it containers get less].
    #[arg(long, env = "KERF_CDI_HOOK", value_parser = absolute)]
    pub cdi_hook: Option<PathBuf>,

    /// Where the host gets that program, below a directory of the driver's name. Every user must be able to go there, and to run
    /// programs from there; where that cannot be, it is `bin` in the plugin's own directory.
    #[arg(long, env = "KERF_HOOK_ROOT", default_value = "/var/lib/kerf", value_parser = absolute)]
    pub hook_root: PathBuf,

    /// What containers do without.
    #[arg(long, env = "KERF_CDI_WITHOUT", value_enum, value_delimiter = ',')]
    pub cdi_without: Vec<CdiPart>,

    /// Namespace of this program's lease.
    #[arg(long, env = "KERF_NAMESPACE", default_value = names::NAMESPACE)]
    pub namespace: String,

    /// How to reach the API server [default: the pod's service account].
    #[arg(long, env = "KERF_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// What to do about GPU instances that no claim explains. One with processes is never destroyed.
    #[arg(long, env = "KERF_FOREIGN_INSTANCES", value_enum, default_value_t)]
    pub foreign_instances: ForeignPolicy,

    /// What becomes of the node's devices when this program is told to end and no other serves the node.
    #[arg(long, env = "KERF_AT_EXIT", value_enum, default_value_t)]
    pub at_exit: AtExit,

    /// How this program can be observed.
    #[command(flatten)]
    pub telemetry: kerf_telemetry::TelemetryArgs,
}

/// A part of what containers get that can be left out, on a node where it is in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CdiPart {
    /// The hook that updates the linker's cache and makes links.
    Hooks,
    /// Files that tell a container which devices it has.
    Metadata,
    /// Groups that may open a device whose node is not for everyone; container runtimes need CDI 0.7 for it.
    AdditionalGids,
}

/// A name that Kubernetes takes for nodes and drivers, and that is safe as part of a path.
fn dns_name(text: &str) -> Result<String, &'static str> {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let inner = |byte: u8| alphanumeric(byte) || byte == b'-';
    let label = |label: &str| {
        let bytes = label.as_bytes();
        bytes.iter().all(|byte| inner(*byte))
            && [bytes.first(), bytes.last()].iter().all(|end| end.is_some_and(|end| alphanumeric(*end)))
    };
    if text.len() <= 253 && text.split('.').all(label) {
        Ok(text.to_owned())
    } else {
        Err("not a DNS name of lower-case letters, digits, '-' and '.'")
    }
}

/// What Kubernetes gives pods for a UID: a UUID, or the hash of a static pod's file. It becomes part of sockets' names.
fn pod_uid(text: &str) -> Result<String, &'static str> {
    if paths::is_pod_uid(text) {
        Ok(text.to_owned())
    } else {
        Err("not a pod's UID, which has hexadecimal digits and '-'")
    }
}

/// A path that means the same to the kubelet and the container runtime.
fn absolute(text: &str) -> Result<PathBuf, &'static str> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err("not an absolute path") }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn arguments_are_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn every_flag_can_come_from_the_environment() {
        for argument in Args::command().get_arguments().filter(|argument| argument.get_id() != "help") {
            let flag = argument.get_long().unwrap();
            let env = argument.get_env().map(|env| env.to_string_lossy().into_owned());
            assert_eq!(env, Some(format!("KERF_{}", flag.replace('-', "_").to_uppercase())), "--{flag}");
        }
    }

    #[test]
    fn bad_arguments_are_refused_at_once() {
        let parse = |arguments: &[&str]| {
            let all = ["kerf-kubelet-plugin", "--node-name", "node-1.example.com"].iter().chain(arguments);
            Args::try_parse_from(all).map_err(|error| error.to_string())
        };
        assert_eq!(parse(&[]).unwrap().foreign_instances, ForeignPolicy::Keep);
        for bad in [
            ["--driver-name", "../../etc"],
            ["--driver-name", "Gpu.nvidia.com"],
            ["--driver-name", "gpu..com"],
            ["--driver-name", "gpu-.com"],
            ["--driver-name", ""],
            ["--kubelet-root", "kubelet"],
            ["--cdi-root", ""],
            ["--host-root", "host"],
            ["--pod-uid", "../1"],
            ["--pod-uid", ""],
            ["--foreign-instances", "destroy"],
            ["--at-exit", "stay"],
            ["--cdi-hook", "hook"],
            ["--hook-root", "hooks"],
            ["--cdi-without", "hooks,everything"],
        ] {
            let error = parse(&bad).unwrap_err();
            assert!(
                error.contains(bad[0]) && (error.contains("not a") || error.contains("possible values")),
                "{error}"
            );
        }
    }
}
