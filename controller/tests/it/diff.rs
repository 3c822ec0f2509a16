//! Any history of wishes, interruptions and meddling ends in what is wanted, and no reader is ever misled on the way.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kerf_api::{Gpu, names};
use kerf_controller::diff::{Delete, Observed, Plan, Write, diff, withdraw};
use kerf_controller::features::{Counters, ServerFeatures};
use kerf_controller::meaning::Meaning;
use kerf_controller::policy::Offering;
use kerf_controller::render::render;
use proptest::prelude::*;
use proptest::sample::subsequence;

use crate::api_server::add_taint_times;
use crate::fixtures::{DRIVER, NODE_UID, blocked, gpu, node};

/// The API server's store, which insists on versions.
#[derive(Clone, Default)]
struct Store {
    slices: BTreeMap<String, ResourceSlice>,
    version: u64,
}

/// What a scheduler takes the pool to be: the slices of the highest generation, if there are as many as they say.
type View = Option<BTreeMap<String, Meaning>>;

impl Store {
    fn observe(&self) -> Vec<Observed> {
        self.slices.values().map(Observed::from).collect()
    }

    fn put(&mut self, mut slice: ResourceSlice) {
        self.version += 1;
        slice.metadata.resource_version = Some(self.version.to_string());
        add_taint_times(&mut slice, i64::try_from(self.version).unwrap());
        self.slices.insert(slice.metadata.name.clone().unwrap(), slice);
    }

    fn delete(&mut self, delete: &Delete) {
        let slice = self.slices.remove(&delete.name).expect("it is there");
        assert_eq!(slice.metadata.uid.as_ref(), Some(&delete.uid));
        assert_eq!(slice.metadata.resource_version.as_ref(), Some(&delete.resource_version));
    }

    fn write(&mut self, write: Write) {
        match write {
            Write::Create(mut slice) => {
                assert!(!self.slices.contains_key(slice.metadata.name.as_ref().unwrap()));
                slice.metadata.uid = Some(format!("uid-{}", self.version));
                self.put(slice);
            }
            Write::Update(mut slice) => {
                let known = &self.slices[slice.metadata.name.as_ref().unwrap()];
                assert_eq!(known.metadata.resource_version, slice.metadata.resource_version);
                assert_eq!(known.spec.pool.name, slice.spec.pool.name, "immutable");
                assert_eq!(known.spec.node_name, slice.spec.node_name, "immutable");
                slice.metadata.uid = known.metadata.uid.clone();
                self.put(slice);
            }
        }
    }

    fn view(&self) -> View {
        let pool = || self.slices.values().filter(|slice| slice.spec.pool.name == "n");
        let generation = pool().map(|slice| slice.spec.pool.generation).max()?;
        let current: Vec<_> = pool().filter(|slice| slice.spec.pool.generation == generation).collect();
        let complete = current.iter().all(|slice| slice.spec.pool.resource_slice_count == current.len() as i64);
        complete.then(|| meanings(current))
    }

    /// Carries out at most `limit` steps of `plan`. Readers see what was there before the writes or what shall be, or an
    /// incomplete pool.
    fn apply(&mut self, plan: Plan, mut limit: usize, wanted: &[ResourceSlice]) {
        for delete in plan.delete.iter().take(limit) {
            self.delete(delete);
        }
        limit = limit.saturating_sub(plan.delete.len());
        let (before, after) = (self.view(), Some(meanings(wanted)));
        for write in plan.write.into_iter().take(limit) {
            self.write(write);
            let view = self.view();
            assert!(view.is_none() || view == before || view == after, "a reader takes a mixture for the pool");
        }
    }
}

fn meanings<'a>(slices: impl IntoIterator<Item = &'a ResourceSlice>) -> BTreeMap<String, Meaning> {
    slices.into_iter().map(|slice| (slice.metadata.name.clone().unwrap(), Meaning::of(&slice.spec))).collect()
}

#[derive(Clone, Debug)]
enum Act {
    /// The wish is carried out, up to so many steps.
    Reconcile { wish: Wish, steps: usize },
    /// Somebody deletes the slices at these places.
    Wipe(Vec<usize>),
    /// Somebody creates a slice of our driver on the node.
    Foreign { pool: &'static str, generation: i64, label: bool },
    /// Somebody changes the slice at this place.
    Meddle(usize),
}

#[derive(Clone, Debug)]
struct Wish {
    gpus: Vec<Gpu>,
    counters: Counters,
    uid: &'static str,
}

impl Wish {
    fn slices(&self) -> Vec<ResourceSlice> {
        let features = ServerFeatures { counters: self.counters, taints: true, extended_resources: true };
        render(DRIVER, &node("n", self.gpus.clone()), self.uid, &Offering::default(), features).slices
    }
}

/// GPUs with three profiles: enough to tell slices apart, and quick.
fn small(product: &str, bus: u8) -> Gpu {
    let mut gpu = gpu(product, bus);
    gpu.mig.iter_mut().for_each(|mig| mig.profiles.truncate(3));
    gpu
}

fn wish() -> impl Strategy<Value = Wish> {
    let gpus: Vec<Gpu> =
        [("h100-80gb", 1), ("l40s", 2), ("l40s", 3), ("a100-40gb", 4), ("h200", 5)].map(|(p, b)| small(p, b)).into();
    let counters = prop_oneof![3 => Just(Counters::Separate), 1 => Just(Counters::None), 1 => Just(Counters::Combined)];
    let uid = prop_oneof![9 => Just(NODE_UID), 1 => Just("another-node")];
    let one = || proptest::option::weighted(0.3, 0..5_usize);
    (subsequence(gpus, 0..=5), counters, uid, one(), one()).prop_map(|(mut gpus, counters, uid, renamed, held_back)| {
        if let Some(gpu) = held_back.and_then(|index| gpus.get_mut(index)) {
            gpu.blocked.push(blocked(names::CONDEMNED, Some((0, 2))));
        }
        if let Some(gpu) = renamed.and_then(|index| gpus.get_mut(index)) {
            gpu.product = "Another name".into();
        }
        Wish { gpus, counters, uid }
    })
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (wish(), prop_oneof![2 => Just(usize::MAX), 1 => 0..6_usize]).prop_map(|(wish, steps)| Act::Reconcile { wish, steps }),
        1 => proptest::collection::vec(0..7_usize, 1..4).prop_map(Act::Wipe),
        1 => (prop_oneof![Just("n"), Just("other")], 0..5_i64, any::<bool>())
            .prop_map(|(pool, generation, label)| Act::Foreign { pool, generation, label }),
        1 => (0..7_usize).prop_map(Act::Meddle),
    ]
}

fn foreign(pool: &str, generation: i64, label: bool) -> ResourceSlice {
    let mut slice = Wish { gpus: vec![gpu("l40s", 9)], counters: Counters::None, uid: NODE_UID }.slices().remove(0);
    slice.metadata.name = Some(format!("00000-{pool}-xyz"));
    slice.metadata.labels = slice.metadata.labels.filter(|_| label);
    slice.metadata.uid = Some("foreign".into());
    slice.spec.pool.name = pool.to_owned();
    slice.spec.pool.generation = generation;
    slice.spec.pool.resource_slice_count = 1;
    slice
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn ends_in_what_is_wanted(acts in proptest::collection::vec(act(), 0..8), last in wish()) {
        let mut store = Store::default();
        for act in acts {
            let name = |index: usize| store.slices.keys().nth(index).cloned();
            match act {
                Act::Reconcile { wish, steps } => {
                    let wanted = wish.slices();
                    let plan = diff(wanted.clone(), &store.observe());
                    store.apply(plan, steps, &wanted);
                }
                Act::Wipe(indices) => {
                    let names: BTreeSet<String> = indices.into_iter().filter_map(name).collect();
                    store.slices.retain(|name, _| !names.contains(name));
                }
                Act::Foreign { pool, generation, label } => store.put(foreign(pool, generation, label)),
                Act::Meddle(index) => {
                    if let Some(mut slice) = name(index).map(|name| store.slices[&name].clone()) {
                        slice.spec.devices.get_or_insert_default().push(Device { name: "odd".into(), ..Device::default() });
                        store.put(slice);
                    }
                }
            }
        }

        let wanted = last.slices();
        let before = store.clone();
        let plan = diff(wanted.clone(), &store.observe());
        check_economy(&before, &plan, &wanted);
        store.apply(plan, usize::MAX, &wanted);

        prop_assert_eq!(store.view(), Some(meanings(&wanted)));
        prop_assert_eq!(store.slices.len(), wanted.len(), "nothing else is left");
        for slice in store.slices.values() {
            prop_assert_eq!(&slice.metadata.owner_references.as_ref().unwrap()[0].uid, last.uid);
            prop_assert_eq!(&slice.metadata.labels.as_ref().unwrap()[names::LABEL_MANAGED_BY], names::CONTROLLER);
        }
        prop_assert!(diff(wanted, &store.observe()).is_empty(), "a second look finds nothing to do");
    }
}

/// No more is written than has to be.
fn check_economy(store: &Store, plan: &Plan, wanted: &[ResourceSlice]) {
    let before = store.view();
    if before == Some(meanings(wanted)) && store.slices.len() == wanted.len() && plan.delete.is_empty() {
        let all_ours = store.slices.values().all(|slice| slice.metadata.labels.is_some());
        assert!(!all_ours || plan.write.is_empty(), "{plan:?}");
    }
    let generation = store.slices.values().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
    match plan.write.as_slice() {
        [] => {}
        [Write::Update(one)] if wanted.len() > 1 => {
            assert!(one.spec.pool.generation <= generation, "one slice changes");
        }
        writes => assert_eq!(writes.len(), wanted.len(), "either one slice or all of them"),
    }
    let counters_first: Vec<bool> = plan.write.iter().map(|write| write.slice().spec.devices.is_some()).collect();
    assert!(counters_first.is_sorted(), "counters are written before devices");
}

fn stored(wish: &Wish) -> Store {
    let mut store = Store::default();
    let wanted = wish.slices();
    store.apply(diff(wanted.clone(), &store.observe()), usize::MAX, &wanted);
    store
}

fn h100s(buses: impl IntoIterator<Item = u8>) -> Wish {
    let gpus = buses.into_iter().map(|bus| gpu("h100-80gb", bus)).collect();
    Wish { gpus, counters: Counters::Separate, uid: NODE_UID }
}

#[test]
fn one_changed_gpu_is_one_update_of_the_same_generation() {
    let mut wish = h100s(0..8);
    let store = stored(&wish);
    let changes: [fn(&mut Gpu); 2] = [
        |gpu| drop(gpu.attributes.insert("brand".into(), kerf_api::Attribute::string("Another"))),
        |gpu| gpu.blocked.push(blocked(names::FOREIGN_INSTANCE, Some((0, 1)))),
    ];
    for change in changes {
        change(&mut wish.gpus[3]);
        let plan = diff(wish.slices(), &store.observe());
        assert!(plan.delete.is_empty());
        let [Write::Update(slice)] = plan.write.as_slice() else { panic!("{plan:?}") };
        assert!(slice.metadata.name.as_ref().unwrap().ends_with("gpu-03-00-0"));
        assert_eq!(slice.spec.pool.generation, 1);
    }
}

/// Whatever else is written, a taint keeps the time at which it came; one that comes again is new.
#[test]
fn taints_keep_their_time() {
    let mut wish = h100s(0..2);
    let mut store = stored(&wish);
    let mut wish_for = |change: fn(&mut Vec<Gpu>)| {
        change(&mut wish.gpus);
        let wanted = wish.slices();
        store.apply(diff(wanted.clone(), &store.observe()), usize::MAX, &wanted);
        assert!(diff(wanted, &store.observe()).is_empty(), "the server's times are no difference");
        let devices = store.slices.values().flat_map(|slice| slice.spec.devices.iter().flatten());
        let taints = devices.flat_map(|device| {
            device.taints.iter().flatten().map(|taint| {
                ((device.name.clone(), taint.key.clone()), taint.time_added.clone().expect("the server sets it"))
            })
        });
        taints.collect::<BTreeMap<_, _>>()
    };
    let first = wish_for(|gpus| gpus[0].blocked.push(blocked(names::FOREIGN_INSTANCE, Some((0, 1)))));
    assert!(first.len() > 1);
    let kept = |later: &BTreeMap<_, _>| first.iter().all(|(device, time)| later.get(device) == Some(time));
    assert!(kept(&wish_for(|gpus| gpus[0].product = "Another".into())), "one update");
    assert!(kept(&wish_for(|gpus| drop(gpus.pop()))), "a new generation of all");
    let both = wish_for(|gpus| gpus[0].blocked.push(blocked(names::CONDEMNED, Some((0, 2)))));
    assert!(kept(&both) && both.len() > first.len(), "a second taint");
    assert!(wish_for(|gpus| gpus[0].blocked.clear()).is_empty());
    let again = wish_for(|gpus| gpus[0].blocked.push(blocked(names::FOREIGN_INSTANCE, Some((0, 1)))));
    assert!(first.iter().all(|(device, time)| again[device] > *time));
}

#[test]
fn a_gpu_more_is_a_new_generation_of_all() {
    let store = stored(&h100s(0..2));
    let plan = diff(h100s(0..3).slices(), &store.observe());
    assert!(plan.delete.is_empty());
    let kinds: Vec<bool> = plan.write.iter().map(|write| matches!(write, Write::Create(_))).collect();
    assert_eq!(kinds, [false, false, false, true], "counters, the old ones, the new one");
    assert!(plan.write.iter().all(|write| write.slice().spec.pool.generation == 2));
    assert!(plan.write.iter().all(|write| write.slice().spec.pool.resource_slice_count == 4));
}

#[test]
fn a_slice_of_an_earlier_node_is_replaced() {
    let store = stored(&h100s(0..1));
    let plan = diff(Wish { uid: "another", ..h100s(0..1) }.slices(), &store.observe());
    assert_eq!(plan.delete.len(), 2);
    assert!(plan.write.iter().all(|write| matches!(write, Write::Create(_))));
}

#[test]
fn withdrawing_takes_what_is_ours() {
    let mut store = stored(&h100s(0..2));
    store.put(foreign("n", 9, false));
    let plan = withdraw(&store.observe());
    assert_eq!((plan.delete.len(), plan.write.len()), (3, 0));
    plan.delete.iter().for_each(|delete| store.delete(delete));
    assert_eq!(store.slices.keys().collect::<Vec<_>>(), ["00000-n-xyz"]);
}
