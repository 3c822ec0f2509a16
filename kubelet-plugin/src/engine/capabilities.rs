//! MIG capability devices: which device node opens which instance. Pure; the texts are the kernel module's.
//!
//! Each GPU instance and each compute instance has a character device of major `nvidia-caps`; a container that may open
//! both, and the GPU's own node, may use the instance (NVIDIA MIG user guide, "Device Nodes and Capabilities").

/// How capability nodes are named below `/dev`, before the minor number.
pub(super) const NODE_PREFIX: &str = "nvidia-caps/nvidia-cap";

/// The minor number in an `access` file below `/proc/driver/nvidia/capabilities`, line `DeviceFileMinor: 12`.
pub(super) fn minor_of_access(text: &str) -> Option<u32> {
    text.lines().find_map(|line| line.strip_prefix("DeviceFileMinor:")?.trim().parse().ok())
}

/// The name under which `/proc/driver/nvidia-caps/mig-minors` lists an instance.
pub(super) fn name(gpu_minor: u32, gpu_instance: u32, compute_instance: Option<u32>) -> String {
    match compute_instance {
        None => format!("gpu{gpu_minor}/gi{gpu_instance}/access"),
        Some(compute_instance) => format!("gpu{gpu_minor}/gi{gpu_instance}/ci{compute_instance}/access"),
    }
}

/// The directory of a GPU's instances below `/proc/driver/nvidia/capabilities`.
pub(super) fn directory(gpu_minor: u32) -> String {
    format!("gpu{gpu_minor}/mig")
}

/// The GPU instance that a directory in it is about.
pub(super) fn gpu_instance_of_directory(name: &str) -> Option<u32> {
    name.strip_prefix("gi")?.parse().ok()
}

/// The path of an instance's `access` file below `/proc/driver/nvidia/capabilities`.
pub(super) fn access_path(gpu_minor: u32, gpu_instance: u32, compute_instance: Option<u32>) -> String {
    let directory = directory(gpu_minor);
    match compute_instance {
        None => format!("{directory}/gi{gpu_instance}/access"),
        Some(compute_instance) => format!("{directory}/gi{gpu_instance}/ci{compute_instance}/access"),
    }
}

/// The minor number that `mig-minors` lists under a name.
pub(super) fn minor_of_name(mig_minors: &str, name: &str) -> Option<u32> {
    mig_minors.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The other way round: the GPU instance id behind a minor number; `None` for anything but a GPU instance.
pub(super) fn gpu_instance_of_minor(mig_minors: &str, minor: u32) -> Option<u32> {
    mig_minors.lines().find_map(|line| {
        let (name, number) = line.split_once(' ')?;
        if number.trim().parse() != Ok(minor) {
            return None;
        }
        let mut parts = name.split('/');
        let (gpu, instance, access) = (parts.next()?, parts.next()?, parts.next()?);
        let is_instance = gpu.starts_with("gpu") && access == "access" && parts.next().is_none();
        instance.strip_prefix("gi").filter(|_| is_instance)?.parse().ok()
    })
}

/// The major number of the capability devices, from `/proc/devices`.
pub(super) fn major(devices: &str) -> Option<u32> {
    devices.lines().find_map(|line| {
        let (number, name) = line.trim().split_once(' ')?;
        (name == "nvidia-caps").then(|| number.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIG_MINORS: &str = "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\ngpu0/gi1/access 12\n\
                              gpu0/gi1/ci0/access 13\ngpu0/gi10/access 93\ngpu1/gi1/access 147\n";

    #[test]
    fn minors_are_found_both_ways() {
        assert_eq!(minor_of_name(MIG_MINORS, &name(0, 1, None)), Some(12));
        assert_eq!(minor_of_name(MIG_MINORS, &name(0, 1, Some(0))), Some(13));
        assert_eq!(minor_of_name(MIG_MINORS, &name(0, 2, None)), None);
        assert_eq!(gpu_instance_of_minor(MIG_MINORS, 12), Some(1));
        assert_eq!(gpu_instance_of_minor(MIG_MINORS, 93), Some(10));
        for no_instance in [1, 2, 13, 999] {
            assert_eq!(gpu_instance_of_minor(MIG_MINORS, no_instance), None, "{no_instance}");
        }
    }

    #[test]
    fn directories_are_named_by_instance() {
        assert_eq!(gpu_instance_of_directory("gi10"), Some(10));
        for other in ["", "gi", "config", "monitor", "ci0", "gi1x"] {
            assert_eq!(gpu_instance_of_directory(other), None, "{other}");
        }
    }

    #[test]
    fn access_files_are_read() {
        let text = "DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 1\n";
        assert_eq!(minor_of_access(text), Some(12));
        assert_eq!(minor_of_access("DeviceFileMode: 292\n"), None);
        assert_eq!(minor_of_access("DeviceFileMinor: many\n"), None);
    }

    #[test]
    fn the_major_is_that_of_nvidia_caps() {
        let devices = "Character devices:\n  1 mem\n195 nvidia\n234 nvidia-caps-imex-channels\n235 nvidia-caps\n\nBlock \
                       devices:\n  8 sd\n";
        assert_eq!(major(devices), Some(235));
        assert_eq!(major("Character devices:\n195 nvidia\n"), None);
    }
}
