//! Who uses a GPU: processes, and users that no list shows.
//!
//! The open kernel module refuses to destroy a GPU instance while a client is subscribed to it, and a compute instance
//! while it is shared; it does not ask whether the client is a process that NVML lists.

use std::collections::BTreeMap;

use crate::code::Code;

/// What is used, or what is to be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The GPU as a whole, and all that is on it.
    Gpu,
    /// A GPU instance, and all in it.
    Gi(u32),
    /// A compute instance, by the id of its GPU instance and its own.
    Ci(u32, u32),
}

/// A user of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// What it uses.
    pub place: Place,
    /// What the lists show; `None` for a user that they do not.
    pub process: Option<Process>,
    /// It ends when it was in the way so often.
    pub tries: Option<u32>,
}

/// A process as the lists show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// Its program.
    pub name: String,
    /// GPU memory that it uses, in bytes.
    pub memory: u64,
}

/// The users of one GPU, by an id that is the caller's. Those that have ended are remembered until they are removed.
#[derive(Debug, Default)]
pub(super) struct Clients(BTreeMap<u64, Entry>);

#[derive(Debug)]
struct Entry {
    client: Client,
    refused: u32,
    ended: bool,
}

impl Place {
    /// Whether the one is part of the other, or the same.
    fn touches(self, other: Place) -> bool {
        match (self, other) {
            (Place::Gpu, _) | (_, Place::Gpu) => true,
            (Place::Gi(a), Place::Gi(b) | Place::Ci(b, _)) | (Place::Ci(a, _), Place::Gi(b)) => a == b,
            (Place::Ci(..), Place::Ci(..)) => self == other,
        }
    }

    /// Whether the other is part of this one, or the same.
    fn contains(self, other: Place) -> bool {
        match (self, other) {
            (Place::Gpu, _) => true,
            (Place::Gi(a), Place::Gi(b) | Place::Ci(b, _)) => a == b,
            (Place::Ci(..), Place::Ci(..)) => self == other,
            (Place::Gi(_) | Place::Ci(..), _) => false,
        }
    }
}

impl Clients {
    pub(super) fn add(&mut self, id: u64, client: Client) {
        self.0.insert(id, Entry { client, refused: 0, ended: false });
    }

    pub(super) fn remove(&mut self, id: u64) {
        self.0.remove(&id);
    }

    /// It uses nothing any more.
    pub(super) fn end(&mut self, id: u64) {
        self.0.get_mut(&id).into_iter().for_each(|entry| entry.ended = true);
    }

    pub(super) fn end_all(&mut self) {
        self.0.values_mut().for_each(|entry| entry.ended = true);
    }

    /// How often it was in the way, and whether it still is.
    pub(super) fn standing(&self, id: u64) -> Option<(u32, bool)> {
        self.0.get(&id).map(|entry| (entry.refused, !entry.ended))
    }

    /// A call wants to change something: whether it is free. Who is in the way counts the call.
    pub(super) fn free(&mut self, wanted: Place) -> Result<(), Code> {
        let mut free = Ok(());
        for entry in self.0.values_mut().filter(|entry| !entry.ended && entry.client.place.touches(wanted)) {
            free = Err(Code::IN_USE);
            entry.refused = entry.refused.saturating_add(1);
            entry.ended = entry.client.tries.is_some_and(|tries| entry.refused >= tries);
        }
        free
    }

    /// The processes within a place, with what each uses.
    pub(super) fn processes(&self, within: Place) -> impl Iterator<Item = (Place, &Process)> {
        let live = self.0.values().filter(move |entry| !entry.ended && within.contains(entry.client.place));
        live.filter_map(|entry| entry.client.process.as_ref().map(|process| (entry.client.place, process)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clients(place: Place, tries: Option<u32>) -> Clients {
        let mut clients = Clients::default();
        let process = Some(Process { pid: 1, name: String::new(), memory: 0 });
        clients.add(1, Client { place, process: process.filter(|_| tries.is_none()), tries });
        clients
    }

    #[test]
    fn a_client_is_in_the_way_of_what_it_uses_and_of_what_that_is_part_of() {
        use Place::{Ci, Gi, Gpu};
        for (used, wanted, busy) in [
            (Gpu, Gpu, true),
            (Gpu, Gi(1), true),
            (Gpu, Ci(1, 0), true),
            (Gi(1), Gpu, true),
            (Gi(1), Gi(1), true),
            (Gi(1), Ci(1, 3), true),
            (Gi(1), Gi(2), false),
            (Gi(1), Ci(2, 0), false),
            (Ci(1, 0), Gpu, true),
            (Ci(1, 0), Gi(1), true),
            (Ci(1, 0), Ci(1, 0), true),
            (Ci(1, 0), Ci(1, 1), false),
            (Ci(1, 0), Ci(2, 0), false),
            (Ci(1, 0), Gi(2), false),
        ] {
            assert_eq!(clients(used, None).free(wanted).is_err(), busy, "{used:?} used, {wanted:?} wanted");
        }
    }

    #[test]
    fn tries_run_out() {
        let mut clients = clients(Place::Gi(1), Some(2));
        assert_eq!(clients.processes(Place::Gpu).count(), 0, "it is not listed");
        let tries: Vec<bool> = (0..4).map(|_| clients.free(Place::Gi(1)).is_ok()).collect();
        assert_eq!(tries, [false, false, true, true]);
        assert_eq!(clients.standing(1), Some((2, false)));
        clients.remove(1);
        assert_eq!(clients.standing(1), None);
    }

    #[test]
    fn processes_are_listed_within_a_place() {
        let clients = clients(Place::Ci(1, 0), None);
        let listed = [Place::Gpu, Place::Gi(1), Place::Ci(1, 0), Place::Ci(1, 1), Place::Gi(2)]
            .map(|within| clients.processes(within).count());
        assert_eq!(listed, [1, 1, 1, 0, 0]);
    }
}
