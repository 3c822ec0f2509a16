//! The checkpoint of NVIDIA's DRA driver for GPUs, as far as it says which claims have which devices. Pure.
//!
//! Formats v1 and v2 (`cmd/gpu-kubelet-plugin/checkpointv.go` and `prepared.go` of v0.5.0). The checksums in it are made
//! over Go's own reading of the file and cannot be made again here; the file is replaced atomically
//! (`k8s.io/kubernetes/pkg/kubelet/checkpointmanager`), so one that can be read is whole. What it may say that is not
//! understood is an error, as it may be a device that somebody uses.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

/// A claim of which that driver has, or may have, something in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) uid: String,
    /// Empty where it is not told, as with most claims that are prepared whole.
    pub(super) namespace: String,
    pub(super) name: String,
    /// Whether it was prepared whole.
    pub(super) complete: bool,
    pub(super) devices: Vec<HeldDevice>,
}

/// A device of such a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeldDevice {
    /// The request that it is for; empty where it is not told.
    pub(super) request: String,
    pub(super) what: What,
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// A whole GPU.
    Gpu(Which),
    /// A GPU instance.
    Instance {
        /// Its GPU.
        gpu: Which,
        /// Its id; `None` where it may be there or not.
        id: Option<u32>,
        /// What its name says of it.
        cut: Option<Cut>,
    },
}

/// Which GPU is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Which {
    /// The one with this UUID.
    Uuid(String),
    /// The one with this minor number, as in `/dev/nvidia0`.
    Minor(u32),
}

/// A GPU instance by what it is and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) profile_id: u32,
    pub(super) start: u32,
}

/// A device by the name that that driver publishes it under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    /// `gpu-0`: by its minor number.
    Gpu(u32),
    /// `gpu-0-mig-1g10gb-19-3`.
    Instance(u32, Cut),
    /// `gpu-vfio-0`: it is bound to another kernel driver, and NVML knows nothing of it.
    Vfio,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    v1: Option<Version>,
    v2: Option<Version>,
    #[serde(default, rename = "checksum")]
    _checksum: Value,
    #[serde(flatten)]
    other: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Version {
    #[serde(default)]
    prepared_claims: Option<BTreeMap<String, Claim>>,
    #[serde(default, rename = "nodeBootID")]
    node_boot_id: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Claim {
    /// Absent in v1, which has claims that are prepared whole and no others.
    checkpoint_state: Option<String>,
    #[serde(default)]
    status: Status,
    #[serde(default)]
    prepared_devices: Option<Vec<Group>>,
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
}

#[derive(Default, Deserialize)]
struct Status {
    #[serde(default)]
    allocation: Option<Allocation>,
}

#[derive(Deserialize)]
struct Allocation {
    #[serde(default)]
    devices: Option<Devices>,
}

#[derive(Deserialize)]
struct Devices {
    #[serde(default)]
    results: Option<Vec<AllocationResult>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AllocationResult {
    #[serde(default)]
    request: String,
    driver: String,
    device: String,
    #[serde(default)]
    admin_access: Option<bool>,
}

#[derive(Deserialize)]
struct Group {
    #[serde(default)]
    devices: Option<Vec<Device>>,
}

#[derive(Deserialize)]
struct Device {
    gpu: Option<Gpu>,
    mig: Option<Mig>,
    vfio: Option<Value>,
}

#[derive(Deserialize)]
struct Gpu {
    info: GpuInfo,
    device: Published,
}

#[derive(Deserialize)]
struct GpuInfo {
    uuid: String,
}

#[derive(Deserialize)]
struct Mig {
    concrete: Concrete,
    device: Published,
}

#[derive(Deserialize)]
struct Concrete {
    #[serde(rename = "giId")]
    gi_id: u32,
    #[serde(rename = "parentUUID")]
    parent_uuid: String,
}

#[derive(Deserialize)]
struct Published {
    #[serde(rename = "DeviceName")]
    name: String,
    #[serde(default, rename = "Requests")]
    requests: Option<Vec<String>>,
}

/// What the claims of `driver` have. None of them where the file is of another boot than `boot_id`: that driver throws such
/// a file away itself. One that names no boot is of an old version, and is trusted as that driver does.
///
/// # Errors
/// Why the file cannot be relied upon.
pub(super) fn parse(bytes: &[u8], driver: &str, boot_id: &str) -> Result<Vec<Held>, String> {
    let file: File = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if let Some(unknown) = file.other.keys().next() {
        return Err(format!("it has {unknown:?}, which this version of kerf does not know"));
    }
    let Some(version) = file.v2.or(file.v1) else { return Ok(Vec::new()) };
    if !version.node_boot_id.is_empty() && version.node_boot_id != boot_id {
        return Ok(Vec::new());
    }
    let claims = version.prepared_claims.unwrap_or_default();
    claims
        .into_iter()
        .map(|(uid, claim)| held(&uid, claim, driver).map_err(|why| format!("claim {uid}: {why}")))
        .collect()
}

fn held(uid: &str, claim: Claim, driver: &str) -> Result<Held, String> {
    let complete = match claim.checkpoint_state.as_deref() {
        None | Some("PrepareCompleted") => true,
        Some("" | "PrepareStarted") => false,
        Some(other) => return Err(format!("the state {other:?} is not known")),
    };
    let devices = claim.status.allocation.and_then(|allocation| allocation.devices);
    let mut results = devices.and_then(|devices| devices.results).unwrap_or_default();
    results.retain(|result| result.driver == driver);
    let devices: Result<Vec<_>, _> = if complete {
        // Who only looks on holds nothing.
        let looks_on = |name: &str| {
            let mut of_it = results.iter().filter(|result| result.device == name).peekable();
            of_it.peek().is_some() && of_it.all(|result| result.admin_access == Some(true))
        };
        let groups = claim.prepared_devices.unwrap_or_default().into_iter();
        let devices = groups.flat_map(|group| group.devices.unwrap_or_default());
        devices.filter_map(|device| prepared(device, &looks_on).transpose()).collect()
    } else {
        let own = results.into_iter().filter(|result| result.admin_access != Some(true));
        own.filter_map(|AllocationResult { request, device, .. }| allocated(request, &device).transpose()).collect()
    };
    let Claim { name, namespace, .. } = claim;
    Ok(Held { uid: uid.to_owned(), namespace, name, complete, devices: devices? })
}

fn prepared(device: Device, looks_on: &impl Fn(&str) -> bool) -> Result<Option<HeldDevice>, String> {
    let (published, what) = match device {
        Device { gpu: Some(Gpu { info, device }), .. } => (device, What::Gpu(Which::Uuid(info.uuid))),
        Device { mig: Some(Mig { concrete: Concrete { gi_id, parent_uuid }, device }), .. } => {
            let cut = match parse_name(&device.name) {
                Some(Name::Instance(_, cut)) => Some(cut),
                _ => None,
            };
            (device, What::Instance { gpu: Which::Uuid(parent_uuid), id: Some(gi_id), cut })
        }
        Device { vfio: Some(_), .. } => return Ok(None),
        _ => return Err("it has a device of a kind that is not known".to_owned()),
    };
    let request = published.requests.into_iter().flatten().next().unwrap_or_default();
    Ok((!looks_on(&published.name)).then_some(HeldDevice { request, what }))
}

fn allocated(request: String, name: &str) -> Result<Option<HeldDevice>, String> {
    let what = match parse_name(name) {
        Some(Name::Gpu(minor)) => What::Gpu(Which::Minor(minor)),
        Some(Name::Instance(minor, cut)) => What::Instance { gpu: Which::Minor(minor), id: None, cut: Some(cut) },
        Some(Name::Vfio) => return Ok(None),
        None => return Err(format!("the device {name:?} is not known")),
    };
    Ok(Some(HeldDevice { request, what }))
}

/// Whether a device's name is one that NVIDIA's DRA driver publishes.
pub fn is_name(name: &str) -> bool {
    parse_name(name).is_some()
}

fn parse_name(name: &str) -> Option<Name> {
    let number = |text: &str| text.parse::<u32>().ok().filter(|number| number.to_string() == text);
    let rest = name.strip_prefix("gpu-")?;
    if let Some(index) = rest.strip_prefix("vfio-") {
        return number(index).map(|_| Name::Vfio);
    }
    let Some((minor, instance)) = rest.split_once("-mig-") else { return number(rest).map(Name::Gpu) };
    let (rest, start) = instance.rsplit_once('-')?;
    let (profile, profile_id) = rest.rsplit_once('-')?;
    let cut = Cut { profile_id: number(profile_id)?, start: number(start)? };
    (!profile.is_empty()).then_some(Name::Instance(number(minor)?, cut))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const DRIVER: &str = "gpu.nvidia.com";

    fn read(value: &Value) -> Result<Vec<Held>, String> {
        parse(value.to_string().as_bytes(), DRIVER, "this boot")
    }

    /// As v0.5.0 has written it, with a whole GPU and an instance.
    const GENUINE: &str = include_str!("../../../tests/former/checkpoint-0.5.0.json");
    const BOOT: &str = "c4a5781e-c747-42a7-87c7-a5b1523ce894";

    /// Both parts of the file say the same of claims that are prepared whole; an old version wrote the first alone.
    #[test]
    fn a_genuine_file_is_read() {
        let device = |what| vec![HeldDevice { request: "gpu".into(), what }];
        let uuid = |uuid: &str| Which::Uuid(uuid.into());
        let devices = [
            device(What::Gpu(uuid("GPU-03f5746e-d728-51ca-b05f-ee0127ce0ed8"))),
            device(What::Instance {
                gpu: uuid("GPU-7c4a47cb-ea7f-52ae-a268-64e99f28cda6"),
                id: Some(7),
                cut: Some(Cut { profile_id: 19, start: 0 }),
            }),
        ];
        let of = |held: Vec<Held>| held.into_iter().map(|held| held.devices).collect::<Vec<_>>();
        assert_eq!(of(parse(GENUINE.as_bytes(), DRIVER, BOOT).unwrap()), devices);
        assert_eq!(parse(GENUINE.as_bytes(), DRIVER, "another boot"), Ok(vec![]));

        let mut old: Value = serde_json::from_str(GENUINE).unwrap();
        old.as_object_mut().unwrap().remove("v2");
        assert_eq!(of(parse(old.to_string().as_bytes(), DRIVER, "another boot").unwrap()), devices);
        for length in 0..GENUINE.len() {
            assert!(parse(&GENUINE.as_bytes()[..length], DRIVER, BOOT).is_err(), "cut off after {length} bytes");
        }
    }

    fn instance() -> Value {
        json!({"gpu": null, "mig": {
            "concrete": {"parentMinor": 1, "giId": 9, "ciId": 0, "migUUID": "MIG-1", "parentUUID": "GPU-2"},
            "device": {"Requests": ["r"], "PoolName": "node", "DeviceName": "gpu-1-mig-1g10gb-19-3", "CDIDeviceIDs": []},
        }})
    }

    fn completed(device: &Value) -> Value {
        json!({"v2": {"nodeBootID": "this boot", "preparedClaims": {
            "u": {"checkpointState": "PrepareCompleted", "status": {}, "preparedDevices": [{"devices": [device]}]},
        }}})
    }

    fn started(results: &Value) -> Value {
        json!({"checksum": 1, "v1": {}, "v2": {"checksum": 2, "nodeBootID": "this boot", "preparedClaims": {
            "u": {"checkpointState": "PrepareStarted", "name": "mine", "namespace": "team",
                  "status": {"allocation": {"devices": {"results": results}}}},
        }}})
    }

    #[test]
    fn instances_are_known_by_gpu_and_id() {
        let held = read(&completed(&instance())).unwrap();
        let what = What::Instance {
            gpu: Which::Uuid("GPU-2".into()),
            id: Some(9),
            cut: Some(Cut { profile_id: 19, start: 3 }),
        };
        assert_eq!(held[0].devices, [HeldDevice { request: "r".into(), what }]);
        assert!(held[0].complete);
    }

    /// While a claim is prepared there is nothing but what it was allocated, by name.
    #[test]
    fn a_claim_that_was_cut_off_is_known_by_its_allocation() {
        let result =
            |driver: &str, device: &str| json!({"request": "r", "driver": driver, "pool": "node", "device": device});
        let mut watched = result(DRIVER, "gpu-5");
        watched["adminAccess"] = json!(true);
        let results = json!([
            result(DRIVER, "gpu-0"),
            result(DRIVER, "gpu-1-mig-1g10gb-me-20-3"),
            result("network.example.com", "something-else"),
            result(DRIVER, "gpu-vfio-3"),
            watched,
        ]);
        let held = read(&started(&results)).unwrap();
        let device = |what| HeldDevice { request: "r".into(), what };
        assert_eq!(
            held,
            [Held {
                uid: "u".into(),
                namespace: "team".into(),
                name: "mine".into(),
                complete: false,
                devices: vec![
                    device(What::Gpu(Which::Minor(0))),
                    device(What::Instance {
                        gpu: Which::Minor(1),
                        id: None,
                        cut: Some(Cut { profile_id: 20, start: 3 })
                    }),
                ],
            }]
        );
    }

    #[test]
    fn who_looks_on_holds_nothing() {
        let mut file = completed(&instance());
        let claim = &mut file["v2"]["preparedClaims"]["u"];
        let result = |admin| json!({"request": "r", "driver": DRIVER, "pool": "node", "device": "gpu-1-mig-1g10gb-19-3", "adminAccess": admin});
        claim["status"] = json!({"allocation": {"devices": {"results": [result(true)]}}});
        assert_eq!(read(&file).unwrap()[0].devices, []);
        let claim = &mut file["v2"]["preparedClaims"]["u"];
        claim["status"] = json!({"allocation": {"devices": {"results": [result(true), result(false)]}}});
        assert_eq!(read(&file).unwrap()[0].devices.len(), 1);
    }

    #[test]
    fn files_of_old_versions_have_no_states_and_no_boot() {
        let mut file = completed(&instance());
        let mut version = file["v2"].take();
        version.as_object_mut().unwrap().remove("nodeBootID");
        version["preparedClaims"]["u"].as_object_mut().unwrap().remove("checkpointState");
        let held = read(&json!({"checksum": 1, "v1": version})).unwrap();
        assert!(held[0].complete && held[0].devices.len() == 1);
    }

    #[test]
    fn nothing_survives_a_boot() {
        let mut file = completed(&instance());
        file["v2"]["nodeBootID"] = json!("an older boot");
        assert_eq!(read(&file), Ok(vec![]));
        for empty in [
            json!({}),
            json!({"checksum": 0, "v1": {}, "v2": {"checksum": 0}}),
            json!({"v2": {"preparedClaims": null}}),
        ] {
            assert_eq!(read(&empty), Ok(vec![]), "{empty}");
        }
    }

    #[test]
    fn what_is_not_understood_is_not_passed_over() {
        let mut unknown_state = completed(&instance());
        unknown_state["v2"]["preparedClaims"]["u"]["checkpointState"] = json!("PrepareSuspended");
        let mut older_device = instance();
        older_device["mig"] = json!({"info": {"uuid": "MIG-1"}, "device": {"DeviceName": "gpu-1-mig-9-4-4"}});
        for (file, why) in [
            (json!({"v3": {}, "v2": {}}), "it has \"v3\""),
            (unknown_state, "the state \"PrepareSuspended\" is not known"),
            (completed(&older_device), "missing field `concrete`"),
            (completed(&json!({"gpu": null, "mig": null, "vgpu": {}})), "a kind that is not known"),
            (started(&json!([{"driver": DRIVER, "device": "gpu-next-1"}])), "the device \"gpu-next-1\" is not known"),
        ] {
            let error = read(&file).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        for damaged in [&b""[..], b"{\"v2\":{\"prepared", b"[]", b"\xff"] {
            assert!(parse(damaged, DRIVER, "this boot").is_err(), "{damaged:?}");
        }
    }

    #[test]
    fn its_names_are_none_of_ours() {
        for name in ["gpu-0", "gpu-12", "gpu-vfio-0", "gpu-0-mig-1g24gb-19-3", "gpu-0-mig-1g10gb-me-20-0"] {
            assert!(is_name(name) && name.parse::<crate::engine::DeviceName>().is_err(), "{name}");
        }
        for name in [
            "gpu-3b-00-0",
            "gpu-3b-00-0-mig-1g10gb-4",
            "gpu-",
            "gpu-01",
            "gpu-0-mig-3",
            "gpu-0-mig-19-3",
            "other-0",
            "",
        ] {
            assert!(!is_name(name), "{name}");
        }
    }
}
