//! What containers are told of their devices: a file for each request of a claim.
//!
//! The format and the places are Kubernetes' (KEP 5304; `k8s.io/dynamic-resource-allocation/api/metadata`): an object
//! `DeviceMetadata`, of the one version that is released. Readers take the first object of the file that they know.
//!
//! A file is changed in place, because a mount follows the inode, and its generation rises then. Nothing is synced: Prepare
//! compares it before a container starts.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::Claim;
use crate::attributes::Attributes;

const API_VERSION: &str = "metadata.resource.k8s.io/v1alpha1";

const KIND: &str = "DeviceMetadata";

/// Where containers have the files (Kubernetes documentation, "Device metadata protocol").
const IN_CONTAINER: &str = "/var/run/kubernetes.io/dra-device-attributes";

const SUFFIX: &str = ".json";

/// The longest name of a request, which is a DNS label.
const LABEL: usize = 63;

/// Device metadata cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the device metadata {}: {error}; check that the disk is mounted, writable and not full", path.display())]
pub struct MetadataError {
    path: PathBuf,
    error: io::Error,
}

/// A file of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MetadataFile {
    /// The request that it is of, without its subrequest.
    pub(super) request: String,
    /// Where it is on the host.
    pub(super) host_path: PathBuf,
    /// Where containers have it that use the request.
    pub(super) container_path: String,
}

/// A file and what it says, but for the generation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Document {
    pub(super) file: MetadataFile,
    content: Value,
}

/// The files of all claims: a directory for each, named by its UID.
#[derive(Clone, Debug)]
pub(super) struct MetadataDir(pub(super) PathBuf);

impl MetadataDir {
    /// What is to be told of a claim. `attributes` are those of a device by its name.
    pub(super) fn documents<'a>(
        &self,
        driver_name: &str,
        claim: &Claim,
        attributes: impl Fn(&str) -> Option<&'a Attributes>,
    ) -> Vec<Document> {
        let Some(place) = place(claim) else { return Vec::new() };
        // Names of requests are DNS labels: the API server takes no others, and these become paths.
        let requests: BTreeSet<&str> =
            claim.devices.iter().map(|device| device.request.as_str()).filter(|request| is_label(request)).collect();
        requests
            .into_iter()
            .map(|request| {
                let results = || claim.devices.iter().filter(|device| device.request == request);
                let name = results().find_map(|device| device.subrequest.as_deref());
                let devices: Vec<Value> = results()
                    .map(|device| {
                        let mut told = json!({"driver": driver_name, "pool": device.pool, "name": device.device});
                        if let Some(attributes) = attributes(&device.device) {
                            told["attributes"] = json!(attributes);
                        }
                        told
                    })
                    .collect();
                let mut content = json!({
                    "kind": KIND,
                    "apiVersion": API_VERSION,
                    "metadata": { "name": claim.name, "namespace": claim.namespace, "uid": claim.uid },
                    "requests": [{
                        "name": name.map_or_else(|| request.to_owned(), |name| format!("{request}/{name}")),
                        "devices": devices,
                    }],
                });
                if let Some(pod_claim_name) = &claim.pod_claim_name {
                    content["podClaimName"] = json!(pod_claim_name);
                }
                let file = MetadataFile {
                    request: request.to_owned(),
                    host_path: self.path(&claim.uid).join(format!("{request}{SUFFIX}")),
                    container_path: format!("{IN_CONTAINER}/{place}/{request}/{driver_name}-metadata.json"),
                };
                Document { file, content }
            })
            .collect()
    }

    /// Whether a claim's files say exactly this.
    pub(super) fn says(&self, uid: &str, documents: &[Document]) -> bool {
        let wanted: BTreeSet<PathBuf> = documents.iter().map(|document| document.file.host_path.clone()).collect();
        self.files(uid) == wanted && documents.iter().all(|document| document.generation() == Generation::Same)
    }

    /// Makes a claim's files say exactly this.
    pub(super) fn write(&self, uid: &str, documents: &[Document]) -> Result<(), MetadataError> {
        if documents.is_empty() {
            return self.remove(uid);
        }
        let directory = self.path(uid);
        // Containers see files of it and nothing of the directory.
        let made = DirBuilder::new().recursive(true).mode(0o755).create(&directory);
        made.map_err(|error| MetadataError { path: directory, error })?;
        let wanted: BTreeSet<&PathBuf> = documents.iter().map(|document| &document.file.host_path).collect();
        for path in self.files(uid).iter().filter(|path| !wanted.contains(path)) {
            gone(fs::remove_file(path)).map_err(|error| MetadataError { path: path.clone(), error })?;
        }
        documents.iter().try_for_each(Document::write)
    }

    /// Removes a claim's files, if there are any.
    pub(super) fn remove(&self, uid: &str) -> Result<(), MetadataError> {
        let path = self.path(uid);
        gone(fs::remove_dir_all(&path)).map_err(|error| MetadataError { path, error })
    }

    /// Whether there is anything of a claim.
    pub(super) fn has(&self, uid: &str) -> bool {
        self.path(uid).exists()
    }

    /// The claims of which there is anything.
    pub(super) fn uids(&self) -> BTreeSet<String> {
        entries(&self.0).into_iter().filter_map(|path| path.file_name()?.to_str().map(str::to_owned)).collect()
    }

    fn files(&self, uid: &str) -> BTreeSet<PathBuf> {
        entries(&self.path(uid))
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.0.join(uid)
    }
}

/// What has to happen to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Generation {
    /// Nothing.
    Same,
    /// It is written, and this is its number.
    Next(u64),
}

impl Document {
    fn generation(&self) -> Generation {
        let present = fs::read(&self.file.host_path).ok();
        let Some(mut present) = present.and_then(|text| serde_json::from_slice::<Value>(&text).ok()) else {
            return Generation::Next(1);
        };
        let metadata = present.get_mut("metadata").and_then(Value::as_object_mut);
        let number = metadata.and_then(|metadata| metadata.remove("generation")?.as_u64());
        match number {
            Some(_) if present == self.content => Generation::Same,
            number => Generation::Next(number.unwrap_or(0).saturating_add(1)),
        }
    }

    fn write(&self) -> Result<(), MetadataError> {
        let Generation::Next(generation) = self.generation() else { return Ok(()) };
        let mut content = self.content.clone();
        content["metadata"]["generation"] = json!(generation);
        let path = &self.file.host_path;
        let write = || {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(path)?;
            file.write_all(format!("{content:#}\n").as_bytes())
        };
        write().map_err(|error| MetadataError { path: path.clone(), error })
    }
}

/// Where containers have a claim's files. A claim that was made from a pod's template goes by its name in the pod, which
/// an annotation tells: whoever can make a claim can write into it what he likes.
fn place(claim: &Claim) -> Option<String> {
    match &claim.pod_claim_name {
        Some(name) => is_label(name).then(|| format!("resourceclaimtemplates/{name}")),
        None => is_subdomain(&claim.name).then(|| format!("resourceclaims/{}", claim.name)),
    }
}

/// A DNS label, as Kubernetes takes it for names of requests and of a pod's claims.
fn is_label(text: &str) -> bool {
    text.len() <= LABEL && is_subdomain(text) && !text.contains('.')
}

fn is_subdomain(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    text.split('.').all(|label| !label.is_empty() && label.bytes().all(inner) && !label.starts_with('-'))
}

fn entries(directory: &Path) -> BTreeSet<PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use kerf_api::Attribute;

    use super::super::AllocatedDevice;
    use super::*;

    fn claim() -> Claim {
        let device = |request: &str, subrequest: Option<&str>, device: &str| AllocatedDevice {
            request: request.to_owned(),
            subrequest: subrequest.map(str::to_owned),
            pool: "node-1".to_owned(),
            device: device.to_owned(),
            share_id: None,
            admin_access: false,
        };
        Claim {
            uid: "u1".to_owned(),
            namespace: "team".to_owned(),
            name: "training".to_owned(),
            pod_claim_name: None,
            devices: vec![
                device("big", Some("h100"), "gpu-3b-00-0"),
                device("big", Some("h100"), "gpu-47-00-0"),
                device("slice", None, "gpu-5e-00-0-mig-1g10gb-4"),
            ],
        }
    }

    fn documents(directory: &MetadataDir, claim: &Claim) -> Vec<Document> {
        let attributes = Attributes::from([("uuid".to_owned(), Attribute::string("GPU-1"))]);
        directory.documents("gpu.nvidia.com", claim, |device| (device == "gpu-3b-00-0").then_some(&attributes))
    }

    fn read(document: &Document) -> Value {
        serde_json::from_slice(&fs::read(&document.file.host_path).unwrap()).unwrap()
    }

    #[test]
    fn each_request_has_a_file_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let directory = MetadataDir(dir.path().join("metadata"));
        let documents = documents(&directory, &claim());
        let [big, slice] = &documents[..] else { panic!("{documents:?}") };
        assert!(!directory.says("u1", &documents));
        directory.write("u1", &documents).unwrap();
        assert!(directory.says("u1", &documents) && directory.has("u1"));
        assert_eq!(
            big.file.container_path,
            "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/training/big/gpu.nvidia.com-metadata.json"
        );
        assert_eq!(
            read(big),
            json!({
                "kind": "DeviceMetadata", "apiVersion": "metadata.resource.k8s.io/v1alpha1",
                "metadata": {"name": "training", "namespace": "team", "uid": "u1", "generation": 1},
                "requests": [{"name": "big/h100", "devices": [
                    {"driver": "gpu.nvidia.com", "pool": "node-1", "name": "gpu-3b-00-0",
                        "attributes": {"uuid": {"string": "GPU-1"}}},
                    {"driver": "gpu.nvidia.com", "pool": "node-1", "name": "gpu-47-00-0"},
                ]}],
            })
        );
        assert_eq!(read(slice)["requests"][0]["name"], "slice");
        assert_eq!(fs::metadata(&slice.file.host_path).unwrap().mode() & 0o777, 0o644);
        assert_eq!(directory.uids(), BTreeSet::from(["u1".to_owned()]));
        directory.remove("u1").unwrap();
        directory.remove("u1").unwrap();
        assert!(!directory.has("u1") && directory.uids().is_empty());
    }

    #[test]
    fn a_change_keeps_the_inode_and_counts() {
        let dir = tempfile::tempdir().unwrap();
        let directory = MetadataDir(dir.path().to_owned());
        let mut claim = claim();
        directory.write("u1", &documents(&directory, &claim)).unwrap();
        let before = documents(&directory, &claim).remove(1);
        let about = fs::metadata(&before.file.host_path).unwrap();

        directory.write("u1", &documents(&directory, &claim)).unwrap();
        let same = fs::metadata(&before.file.host_path).unwrap();
        assert_eq!(
            (same.mtime_nsec(), read(&before)["metadata"]["generation"].clone()),
            (about.mtime_nsec(), json!(1))
        );

        claim.devices[2].device = "gpu-5e-00-0-mig-1g10gb-5".to_owned();
        claim.devices.truncate(3);
        claim.devices.drain(..2);
        let after = documents(&directory, &claim);
        assert!(!directory.says("u1", &after));
        directory.write("u1", &after).unwrap();
        let [changed] = &after[..] else { panic!("{after:?}") };
        assert_eq!(read(changed)["metadata"]["generation"], 2);
        assert_eq!(fs::metadata(&changed.file.host_path).unwrap().ino(), about.ino(), "a mount follows the inode");
        assert_eq!(directory.files("u1").len(), 1, "the other request is none any more");

        fs::write(&changed.file.host_path, "{").unwrap();
        directory.write("u1", &after).unwrap();
        assert_eq!(read(changed)["metadata"]["generation"], 1, "cut off");
    }

    /// The annotation is the user's.
    #[test]
    fn no_name_leads_out_of_the_place() {
        let directory = MetadataDir(PathBuf::from("/metadata"));
        let mut claim = claim();
        claim.pod_claim_name = Some("gpu".to_owned());
        let place = documents(&directory, &claim)[1].file.container_path.clone();
        assert!(place.ends_with("/resourceclaimtemplates/gpu/slice/gpu.nvidia.com-metadata.json"), "{place}");
        for hostile in ["../../../../etc", "..", "a/b", "", "A", "a.b", &"a".repeat(64)] {
            claim.pod_claim_name = Some(hostile.to_owned());
            assert_eq!(documents(&directory, &claim), [], "{hostile:?}");
        }
        claim.pod_claim_name = None;
        for device in &mut claim.devices {
            device.request = "../../escape".to_owned();
        }
        assert_eq!(documents(&directory, &claim), []);
        for hostile in ["..", "a/b", "", ".a"] {
            let claim = Claim { name: hostile.to_owned(), ..self::claim() };
            assert_eq!(documents(&directory, &claim), [], "{hostile:?}");
        }
    }
}
