//! The life of MIG on simulated GPUs.

use std::collections::BTreeSet;

use kerf_mig::product::{ModeSwitch, Product};
use kerf_mig::{Placement, Profile};
use kerf_nvml::{Code, CudaVersion, Gpu, MigMode, MigModes, Nvml, PciAddress};

use crate::simulator::Simulator;

const OFF: MigModes = MigModes { current: MigMode::Disabled, pending: MigMode::Disabled };
const ON: MigModes = MigModes { current: MigMode::Enabled, pending: MigMode::Enabled };

fn at(start: u32, size: u32) -> Placement {
    Placement { start, size }
}

/// Products with MIG, and a node with one GPU of each, in the same order.
fn every_mig_product(mode: &str) -> (Vec<&'static Product>, Simulator) {
    let products: Vec<_> = Product::all().iter().filter(|product| product.mig.is_some()).collect();
    let entries: Vec<_> =
        products.iter().map(|product| format!("{{product: {}, mig: {{current: {mode}}}}}", product.key)).collect();
    (products, Simulator::start(&format!("[{}]", entries.join(", "))))
}

fn by_id(mut profiles: Vec<Profile>) -> Vec<Profile> {
    profiles.sort_by_key(|profile| profile.id);
    profiles
}

fn product_profiles(product: &Product) -> Vec<Profile> {
    by_id(product.mig.iter().flat_map(|mig| &mig.profiles).map(|known| known.profile.clone()).collect())
}

/// Hardware id of a profile by name.
fn id(nvml: &dyn Nvml, gpu: Gpu, name: &str) -> u32 {
    let profiles = nvml.gpu_instance_profiles(gpu).expect("profiles");
    profiles.iter().find(|profile| profile.name == name).expect("a profile of this name").id
}

#[test]
fn a_node_is_discovered_and_one_broken_gpu_does_not_hide_the_others() {
    let sim = Simulator::start(
        "[{product: h100-80gb, pciBusId: '0000:3b:00.0'}, {product: a100-40gb, pciBusId: '0000:5e:00.0', broken: true}, \
         {product: l40s, pciBusId: '0001:af:00.0'}]",
    );
    let nvml = sim.open();
    assert_eq!(nvml.driver_version().unwrap(), "535.261.03");
    assert_eq!(nvml.cuda_driver_version().unwrap(), CudaVersion { major: 12, minor: 2 });
    assert_eq!(nvml.gpu_count().unwrap(), 3);
    nvml.gpu(1).unwrap_err();
    assert_eq!(nvml.gpu(3).unwrap_err().code, Code::InvalidArgument);

    let mut uuids = BTreeSet::new();
    for (index, address, key) in [(0, "0000:3b:00.0", "h100-80gb"), (2, "0001:af:00.0", "l40s")] {
        let gpu = nvml.gpu(index).unwrap();
        let address: PciAddress = address.parse().unwrap();
        assert_eq!(nvml.pci_address(gpu).unwrap(), address);
        assert_eq!(nvml.gpu_at(address).unwrap(), gpu);

        let (facts, product) = (nvml.facts(gpu).unwrap(), Product::by_key(key).unwrap());
        assert!(facts.uuid.starts_with("GPU-") && uuids.insert(facts.uuid), "{key}");
        assert_eq!(facts.minor, index);
        assert_eq!((facts.name, facts.brand), (product.name.clone(), product.brand.clone()));
        assert_eq!(facts.architecture, format!("{:?}", product.architecture));
        assert_eq!(facts.compute_capability, product.compute_capability);
        assert_eq!(facts.memory_bytes, Some(product.memory_mib << 20));
        assert_eq!(facts.mig_mode_switchable, product.mig.is_some(), "{key}");
        assert_eq!(nvml.mig_modes(gpu).unwrap(), product.mig.as_ref().map(|_| OFF));
        assert_eq!(nvml.gpu_instances(gpu).unwrap(), []);
        assert_eq!(nvml.processes(gpu).unwrap(), []);
    }
    assert_eq!(nvml.gpu_instance_profiles(nvml.gpu(2).unwrap()).unwrap(), []);
    let nowhere = "0000:01:00.0".parse().unwrap();
    assert_eq!(nvml.gpu_at(nowhere).unwrap_err().code, Code::NotFound);
}

/// In whatever mode it is: a GPU without MIG is handed out whole, and no one looks at its mode again.
#[test]
fn a_gpu_that_tells_profiles_has_mig_whatever_its_mode_says() {
    let sim = Simulator::start("[{product: h100-80gb}, {product: h100-80gb, mig: {current: true}}, {product: l40s}]");
    let nvml = sim.open();
    for (index, mode) in [(0, MigMode::Disabled), (1, MigMode::Enabled)] {
        let gpu = nvml.gpu(index).unwrap();
        sim.ctl(&["fault", "call", "nvmlDeviceGetMigMode", "--code", "NOT_SUPPORTED"]);
        let error = nvml.mig_modes(gpu).unwrap_err();
        assert_eq!((error.call, error.code), ("nvmlDeviceGetMigMode", Code::NotSupported));
        assert_eq!(nvml.mig_modes(gpu), Ok(Some(MigModes { current: mode, pending: mode })));
    }
    assert_eq!(nvml.mig_modes(nvml.gpu(2).unwrap()), Ok(None));
}

#[test]
fn profiles_are_the_products_with_mig_on() {
    let (products, sim) = every_mig_product("true");
    let nvml = sim.open();
    for (product, index) in products.into_iter().zip(0..) {
        let gpu = nvml.gpu(index).unwrap();
        assert_eq!(nvml.mig_modes(gpu).unwrap(), Some(ON), "{}", product.key);
        assert_eq!(by_id(nvml.gpu_instance_profiles(gpu).unwrap()), product_profiles(product), "{}", product.key);
    }
}

#[test]
fn profiles_are_the_products_with_mig_off_where_the_driver_tells_them_then() {
    let (products, sim) = every_mig_product("false");
    let nvml = sim.open();
    for (product, index) in products.into_iter().zip(0..) {
        let gpu = nvml.gpu(index).unwrap();
        let switchable = product.mig.as_ref().is_some_and(|mig| mig.mode == ModeSwitch::Switchable);
        assert_eq!(nvml.facts(gpu).unwrap().mig_mode_switchable, switchable, "{}", product.key);
        let expected = if switchable { product_profiles(product) } else { Vec::new() };
        assert_eq!(by_id(nvml.gpu_instance_profiles(gpu).unwrap()), expected, "{}", product.key);
    }
}

#[test]
fn every_profile_of_every_product_can_be_carved_and_removed_at_each_placement() {
    let (products, sim) = every_mig_product("true");
    let nvml = sim.open();
    for (product, index) in products.into_iter().zip(0..) {
        let gpu = nvml.gpu(index).unwrap();
        for profile in nvml.gpu_instance_profiles(gpu).unwrap() {
            for &placement in &profile.placements {
                let what = format!("{} {} at {placement:?}", product.key, profile.name);
                let carved = nvml.create_gpu_instance(gpu, profile.id, placement).expect(&what);
                assert_eq!((carved.profile_id, carved.placement), (profile.id, placement), "{what}");
                let mig_device = nvml.create_compute_instance(gpu, carved.id, profile.compute_slices).expect(&what);
                assert!(mig_device.uuid.starts_with("MIG-"), "{what}: {mig_device:?}");
                assert_eq!(nvml.gpu_instances(gpu).unwrap(), [carved], "{what}");
                let listed = nvml.compute_instances(gpu, carved.id).unwrap();
                assert_eq!(listed, std::slice::from_ref(&mig_device), "{what}");

                nvml.destroy_compute_instance(gpu, carved.id, mig_device.id).expect(&what);
                nvml.destroy_gpu_instance(gpu, carved.id).expect(&what);
                assert_eq!(nvml.gpu_instances(gpu).unwrap(), [], "{what}");
            }
        }
    }
}

#[test]
fn instances_live_side_by_side_and_what_is_taken_is_refused() {
    let sim = Simulator::start("[{product: h100-80gb}]");
    let nvml = sim.open();
    let gpu = nvml.gpu(0).unwrap();
    nvml.set_mig_mode(gpu, MigMode::Enabled).unwrap();
    let (small, large) = (id(&*nvml, gpu, "1g.10gb"), id(&*nvml, gpu, "3g.40gb"));

    let one = nvml.create_gpu_instance(gpu, large, at(4, 4)).unwrap();
    let other = nvml.create_gpu_instance(gpu, small, at(2, 1)).unwrap();
    let refused = |profile, placement| nvml.create_gpu_instance(gpu, profile, placement).unwrap_err().code;
    assert_eq!(refused(small, at(5, 1)), Code::InsufficientResources, "taken by the larger one");
    assert_eq!(refused(small, at(2, 1)), Code::InsufficientResources, "this very instance exists");
    assert_eq!(refused(large, at(1, 4)), Code::InvalidArgument, "not a placement");
    assert_eq!(refused(1000, at(0, 1)), Code::InvalidArgument, "not a profile");

    let devices = [one, other].map(|gi| {
        let slices = if gi == one { 3 } else { 1 };
        nvml.create_compute_instance(gpu, gi.id, slices).unwrap()
    });
    assert_ne!(devices[0].uuid, devices[1].uuid);
    assert_eq!(nvml.compute_instances(gpu, one.id).unwrap(), [devices[0].clone()]);
    assert_eq!(nvml.compute_instances(gpu, other.id).unwrap(), [devices[1].clone()]);

    assert_eq!(nvml.destroy_gpu_instance(gpu, one.id).unwrap_err().code, Code::InUse, "holds a compute instance");
    assert_eq!(nvml.set_mig_mode(gpu, MigMode::Disabled).unwrap_err().code, Code::InUse, "holds GPU instances");
    nvml.destroy_compute_instance(gpu, one.id, devices[0].id).unwrap();
    nvml.destroy_gpu_instance(gpu, one.id).unwrap();
    assert_eq!(nvml.gpu_instances(gpu).unwrap(), [other]);
}

#[test]
fn a_gpu_instance_without_a_compute_instance_is_listed_by_every_client() {
    let sim = Simulator::start("[{product: h100-80gb, mig: {current: true}}]");
    let orphan = {
        let nvml = sim.open();
        let gpu = nvml.gpu(0).unwrap();
        nvml.create_gpu_instance(gpu, id(&*nvml, gpu, "2g.20gb"), at(2, 2)).unwrap()
    };
    let nvml = sim.open();
    let gpu = nvml.gpu(0).unwrap();
    assert_eq!(nvml.gpu_instances(gpu).unwrap(), [orphan]);
    assert_eq!(nvml.compute_instances(gpu, orphan.id).unwrap(), []);
    nvml.destroy_gpu_instance(gpu, orphan.id).unwrap();
    assert_eq!(nvml.gpu_instances(gpu).unwrap(), []);
}

#[test]
fn ids_that_are_gone_are_not_found() {
    let sim = Simulator::start("[{product: h100-80gb}]");
    let nvml = sim.open();
    let gpu = nvml.gpu(0).unwrap();
    assert!(nvml.destroy_gpu_instance(gpu, 9).unwrap_err().is_gone(), "MIG is off");
    assert_eq!(nvml.gpu_instances(gpu).unwrap(), []);

    nvml.set_mig_mode(gpu, MigMode::Enabled).unwrap();
    let gi = nvml.create_gpu_instance(gpu, id(&*nvml, gpu, "1g.10gb"), at(0, 1)).unwrap().id;
    let ci = nvml.create_compute_instance(gpu, gi, 1).unwrap().id;
    assert_eq!(nvml.destroy_compute_instance(gpu, gi, ci + 1).unwrap_err().code, Code::NotFound);
    nvml.destroy_compute_instance(gpu, gi, ci).unwrap();
    assert_eq!(nvml.destroy_compute_instance(gpu, gi, ci).unwrap_err().code, Code::NotFound);
    nvml.destroy_gpu_instance(gpu, gi).unwrap();
    assert_eq!(nvml.destroy_gpu_instance(gpu, gi).unwrap_err().code, Code::NotFound);
    assert_eq!(nvml.compute_instances(gpu, gi).unwrap_err().code, Code::NotFound);
    assert_eq!(nvml.create_compute_instance(gpu, gi, 1).unwrap_err().code, Code::NotFound);
}

#[test]
fn ampere_switches_its_mode_at_the_next_reset_and_hopper_at_once() {
    let sim = Simulator::start(
        "[{product: a100-40gb, pciBusId: '0000:3b:00.0'}, {product: h100-80gb, pciBusId: '0000:5e:00.0'}]",
    );
    let nvml = sim.open();
    let (ampere, hopper) = (nvml.gpu(0).unwrap(), nvml.gpu(1).unwrap());

    // The call itself succeeds; that the mode is not in force is said by the activation status alone.
    let error = nvml.set_mig_mode(ampere, MigMode::Enabled).unwrap_err();
    assert_eq!(error.code, Code::InUse);
    assert!(error.call.contains("activation"), "{error}");
    let pending = MigModes { current: MigMode::Disabled, pending: MigMode::Enabled };
    assert_eq!(nvml.mig_modes(ampere).unwrap(), Some(pending));
    sim.ctl(&["reset", "0000:3b:00.0"]);
    let ampere = nvml.gpu_at("0000:3b:00.0".parse().unwrap()).unwrap();
    assert_eq!(nvml.mig_modes(ampere).unwrap(), Some(ON));
    assert!(!nvml.gpu_instance_profiles(ampere).unwrap().is_empty());

    for (mode, modes) in [(MigMode::Enabled, ON), (MigMode::Enabled, ON), (MigMode::Disabled, OFF)] {
        nvml.set_mig_mode(hopper, mode).unwrap();
        assert_eq!(nvml.mig_modes(hopper).unwrap(), Some(modes));
    }
}

#[test]
fn a_gpu_is_found_again_after_the_driver_was_reloaded() {
    let sim = Simulator::start("[{product: h100-80gb, mig: {current: true}}]");
    let nvml = sim.open();
    let before = nvml.gpu(0).unwrap();
    let address = nvml.pci_address(before).unwrap();
    nvml.create_gpu_instance(before, id(&*nvml, before, "1g.10gb"), at(0, 1)).unwrap();

    sim.ctl(&["reload"]);
    nvml.gpu_instances(before).unwrap_err();
    let nvml = sim.open();
    let after = nvml.gpu_at(address).unwrap();
    assert_eq!(nvml.mig_modes(after).unwrap(), Some(OFF), "Hopper's mode lives in the driver");
    assert_eq!(nvml.gpu_instances(after).unwrap(), []);
}

#[test]
fn many_threads_share_one_session() {
    let sim = Simulator::start("[{product: h100-80gb, count: 8, mig: {current: true}}]");
    let nvml = sim.open();
    std::thread::scope(|scope| {
        for index in 0..8 {
            let nvml = &*nvml;
            scope.spawn(move || {
                let gpu = nvml.gpu(index).unwrap();
                let profile = id(nvml, gpu, "1g.10gb");
                for start in 0..7 {
                    let gi = nvml.create_gpu_instance(gpu, profile, at(start, 1)).unwrap().id;
                    nvml.create_compute_instance(gpu, gi, 1).unwrap();
                }
                assert_eq!(nvml.gpu_instances(gpu).unwrap().len(), 7);
            });
        }
    });
    for index in 0..8 {
        assert_eq!(nvml.gpu_instances(nvml.gpu(index).unwrap()).unwrap().len(), 7);
    }
}
