//! What happens to a node from outside: other people, processes and lost files.

use std::fs;

use kerf_kubelet_plugin::engine::DeviceName;
use kerf_nvml::MigMode;
use kerf_nvml_sim::fault::{ForeignInstance, Process};

use super::{World, pick};
use crate::model::op::Which;
use crate::model::state::{Busy, File, Instance, Known, OnGpu};

impl World {
    /// Not where a claim has the whole GPU, and not where it would be taken for what a claim has just lost: the journal cannot
    /// tell those apart.
    pub(super) fn foreign_comes(&mut self, gpu: usize, number: usize, compute: bool) {
        let devices = &self.devices[gpu];
        let device = devices[1 + number % (devices.len() - 1)].clone();
        let explained: Vec<_> = self.model.claims.values().filter(|known| known.is_explained()).collect();
        let whole = explained.iter().any(|known| known.devices.iter().any(|it| it.gpu == gpu && it.part.is_none()));
        let alike = explained
            .iter()
            .filter(|known| known.on_gpu != OnGpu::Nothing || known.journal != File::Whole)
            .any(|known| known.devices.contains(&device));
        let busy = self.model.busy.iter().any(|busy| busy.gpu == gpu && busy.instance.is_none());
        let (Some((profile, placement)), false) = (device.part, whole || alike || busy) else { return };
        let address = devices[0].name.parse::<DeviceName>().unwrap().gpu();
        let handle = self.node.nvml.gpu_at(address).unwrap();
        if !self.truth().mig[gpu] {
            self.node.nvml.set_mig_mode(handle, MigMode::Enabled).unwrap();
        }
        let wanted = ForeignInstance { gpu: gpu.into(), profile: profile.to_string(), start: placement.start, compute };
        if let Ok(created) = self.client.create(wanted) {
            self.counts.add_one("foreign");
            let compute = created.ci.into_iter().collect();
            self.model.foreign.push(Instance { gpu, id: created.gi, part: (profile, placement), compute });
        }
    }

    pub(super) fn rob(&mut self, number: usize) {
        let truth = self.truth();
        let is_owned = |instance: &&Instance| self.model.claims.values().any(|it| self.model.owns(it, instance));
        let owned: Vec<_> = truth.instances.iter().filter(is_owned).collect();
        let Some(instance) = pick(&owned, number) else { return };
        if self.client.destroy(instance.gpu, instance.id).is_ok() {
            let owner = |known: &&mut Known| known.devices.iter().any(|device| device.is(instance));
            for known in self.model.claims.values_mut().filter(owner).filter(|known| known.on_gpu != OnGpu::Nothing) {
                known.on_gpu = OnGpu::Part;
                known.kept.retain(|kept| (kept.gpu, kept.id) != (instance.gpu, instance.id));
            }
        }
    }

    pub(super) fn busy_comes(&mut self, number: usize) {
        let truth = self.truth();
        let live = || self.model.claims.values().filter(|known| known.on_gpu == OnGpu::Whole);
        let is_used =
            |it: &&Instance| self.model.foreign.contains(it) || live().any(|known| self.model.owns(known, it));
        let instances = truth.instances.iter().filter(is_used).map(|it| (it.gpu, Some(it.id)));
        let whole = live().flat_map(|known| known.devices.iter().filter(|it| it.part.is_none()));
        let users: Vec<_> = instances.chain(whole.map(|device| (device.gpu, None))).collect();
        let Some((gpu, instance)) = pick(&users, number).copied() else { return };
        let process = Process { gi: instance, ..Process::new(gpu, std::process::id()) };
        let id = self.client.arm(process).unwrap();
        self.counts.add_one("busy");
        self.model.busy.push(Busy { id, gpu, instance });
    }

    pub(super) fn spoil(&mut self, number: usize, file: Which, content: Option<&str>) {
        let has = |known: &Known| match file {
            Which::Journal => known.journal == File::Whole,
            Which::Cdi => known.cdi == File::Whole,
        };
        let uids: Vec<_> = self.model.claims.iter().filter(|(_, it)| has(it)).map(|(uid, _)| uid.clone()).collect();
        let Some(uid) = pick(&uids, number) else { return };
        let path = match file {
            Which::Journal => self.journal_dir().join(format!("{uid}.json")),
            Which::Cdi => self.cdi_path(uid),
        };
        match content {
            Some(content) => fs::write(path, content).unwrap(),
            None => fs::remove_file(path).unwrap(),
        }
        self.counts.add_one("spoilt");
        let (devices, on_gpu, kept) = {
            let known = &self.model.claims[uid];
            (known.devices.clone(), known.on_gpu, known.kept.clone())
        };
        // Where nothing is left on the disk either, its instances are orphans all the same.
        let lost = Known { devices, journal: File::Absent, cdi: File::Absent, on_gpu, condemned: None, kept };
        self.observe(uid);
        if !self.model.claims.contains_key(uid) {
            self.model.foreign.retain(|it| !lost.kept.contains(it));
            self.model.claims.insert(uid.clone(), lost);
            self.model.disown(&self.truth());
            self.model.claims.remove(uid);
        }
    }
}
