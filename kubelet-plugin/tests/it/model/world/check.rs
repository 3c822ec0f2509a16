//! Whether the node is as the model says, after each operation and at the end.

use std::fs;

use anyhow::ensure;
use kerf_kubelet_plugin::engine::ForeignPolicy;

use super::{Request, World, same};
use crate::engine_node::claim;
use crate::model::state::{File, Known, OnGpu, Truth};

impl World {
    /// Whether everything is as the model says.
    pub(in crate::model) fn check(&self) -> anyhow::Result<()> {
        let truth = self.truth();
        self.model.check(&truth).map_err(anyhow::Error::msg)?;
        for name in self.node.journal_files() {
            let uid = name.split('.').next().unwrap();
            ensure!(self.model.claims.contains_key(uid), "the journal has {name}");
        }
        for name in self.node.cdi_files() {
            let uid = name.trim_start_matches("k8s.gpu.nvidia.com-claim_").trim_end_matches(".json");
            ensure!(self.model.claims.contains_key(uid), "the CDI directory has {name}");
        }
        for uid in self.node.metadata_files() {
            ensure!(self.model.claims.contains_key(&uid), "there is device metadata of {uid}");
        }
        let told = self.plugins[0].engine.prepared_claims()?;
        let told_uids: Vec<_> = told.iter().map(|claim| claim.uid.clone()).collect();
        let explained = self.model.claims.iter().filter(|(_, known)| known.is_explained());
        let explained: Vec<_> = explained.map(|(uid, _)| uid.clone()).collect();
        ensure!(same(&told_uids, &explained), "told are {told_uids:?} instead of {explained:?}");
        for (uid, known) in &self.model.claims {
            if known.on_gpu == OnGpu::Whole && known.cdi == File::Whole {
                self.check_cdi(uid, known, &truth)?;
            }
        }
        Ok(())
    }

    /// The CDI file gives to each device the nodes of its own instance.
    fn check_cdi(&self, uid: &str, known: &Known, truth: &Truth) -> anyhow::Result<()> {
        let minors = fs::read_to_string(self.node.root().join("proc/driver/nvidia-caps/mig-minors"))?;
        let minor = |name: &str| {
            let line = minors.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            format!("/dev/nvidia-caps/nvidia-cap{}", line.unwrap())
        };
        let claim = claim(uid, &[]);
        for device in &known.devices {
            let gpu = device.gpu;
            let mut expected = vec![format!("/dev/nvidia{gpu}")];
            if device.part.is_none() {
                expected.extend([format!("/dev/dri/card{gpu}"), format!("/dev/dri/renderD{}", 128 + gpu)]);
            }
            if device.part.is_some() {
                let instance = truth.instances.iter().find(|instance| device.is(instance)).unwrap();
                let (gi, ci) = (instance.id, instance.compute[0]);
                expected.push(minor(&format!("gpu{gpu}/gi{gi}/access")));
                expected.push(minor(&format!("gpu{gpu}/gi{gi}/ci{ci}/access")));
            }
            let nodes = self.node.nodes(&claim, &device.name);
            ensure!(nodes == expected, "{uid} has for {} {nodes:?} instead of {expected:?}", device.name);
        }
        Ok(())
    }

    /// Everything is released, without faults: nothing of ours is left.
    pub(in crate::model) fn end(&mut self) -> anyhow::Result<()> {
        self.client.clear_all().unwrap();
        self.model.busy.clear();
        self.restart(0, true);
        for (uid, _) in self.seen.clone() {
            self.call(0, &Request { uid, prepare: None })?;
            self.check()?;
        }
        self.sweep(0)?;
        self.check()?;
        ensure!(self.model.claims.is_empty(), "{:?}", self.model.claims);
        if self.model.policy == ForeignPolicy::Delete {
            ensure!(self.model.foreign.is_empty(), "{:?} are not swept", self.model.foreign);
        }
        let (journal, cdi, told) = (self.node.journal_files(), self.node.cdi_files(), self.node.metadata_files());
        let is_clean = journal.is_empty() && cdi.is_empty() && told.is_empty();
        ensure!(is_clean, "files are left: {journal:?} {cdi:?} {told:?}");
        let locks = fs::read_dir(self.node.settings().locks)?.map(|entry| entry.unwrap().file_name());
        let locks: Vec<_> = locks.filter(|name| name.to_string_lossy().starts_with("claim-")).collect();
        ensure!(locks.is_empty(), "{locks:?} are left");
        // A crash can leave MIG on, and somebody else can: the next claim switches it off.
        for gpu in 0..self.devices.len() {
            let part = self.devices[gpu].iter().find(|device| device.part.is_some()).unwrap().clone();
            if self.model.foreign.iter().any(|foreign| foreign.gpu == gpu) {
                continue;
            }
            let uid = format!("last-{gpu}");
            self.call(0, &Request { uid: uid.clone(), prepare: Some(vec![part]) })?;
            self.call(0, &Request { uid, prepare: None })?;
            ensure!(!self.truth().mig[gpu], "MIG is still on, on GPU {gpu}");
        }
        self.check()
    }
}
