//! The state machine against the behaviour of NVIDIA's driver.

use kerf_mig::Placement;
use kerf_mig::product::Product;

use super::*;
use crate::code::Code;
use crate::handle::Handle;
use crate::view::{GiProfileKey, PciAddress};

const GENERATION: u16 = 7;

fn spec(product: &str) -> GpuSpec {
    GpuSpec {
        place: 0,
        minor: 0,
        pci: PciAddress { domain: 0, bus: 0x3b, device: 0 },
        pcie_root: "pci0000:3a".to_owned(),
        uuid: "GPU-4c1f4b39-6b1b-4d5c-8a3a-000000000001".to_owned(),
        serial: "1".to_owned(),
        product: Product::by_key(product).unwrap(),
        numa_node: None,
        virtualization: Virtualization::None,
        uuids: Uuids::Deterministic,
        mig: (true, true),
        broken: false,
    }
}

/// A GPU with MIG on.
fn gpu(product: &str) -> Gpu {
    Gpu::new(spec(product), GENERATION)
}

fn at(start: u32, size: u32) -> Option<Placement> {
    Some(Placement { start, size })
}

/// Creates GPU instance and whole compute instance; the handles of both and the UUID.
fn carve(gpu: &mut Gpu, profile: u32, placement: Option<Placement>) -> (Handle, Handle, String) {
    let device = gpu.handle();
    let gi = gpu.create_gi(device, profile, placement).unwrap().handle;
    let whole = (0..8).rev().find_map(|index| gpu.ci_profile(gi, index, 0).ok()).unwrap().id;
    let ci = gpu.create_ci(gi, whole, None).unwrap();
    (gi, ci.handle, gpu.device(ci.device).unwrap().uuid)
}

#[test]
fn ids_and_uuids_of_a_full_gpu() {
    let mut gpu = gpu("h100-80gb");
    for _ in 0..7 {
        carve(&mut gpu, 19, None);
    }
    assert_eq!(gpu.all_gis().iter().map(|gi| gi.id).collect::<Vec<_>>(), [7, 8, 9, 10, 11, 12, 13]);
    assert_eq!(gpu.all_gis().iter().map(|gi| gi.placement.start).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6]);
    let uuids: std::collections::BTreeSet<_> = gpu.all_cis().into_iter().map(|(_, uuid)| uuid).collect();
    assert_eq!(uuids.len(), 7);
    assert!(uuids.iter().all(|uuid| uuid.starts_with("MIG-") && uuid.as_bytes()[18] == b'5'), "version 5: {uuids:?}");
    assert_eq!(gpu.create_gi(gpu.handle(), 19, None), Err(Code::INSUFFICIENT_RESOURCES));
}

#[test]
fn the_very_instance_that_exists_is_insufficient_resources_too() {
    let mut gpu = gpu("h100-80gb");
    gpu.create_gi(gpu.handle(), 9, at(4, 4)).unwrap();
    assert_eq!(gpu.create_gi(gpu.handle(), 9, at(4, 4)), Err(Code::INSUFFICIENT_RESOURCES));
    assert_eq!(gpu.create_gi(gpu.handle(), 9, at(2, 4)), Err(Code::INVALID_ARGUMENT), "no such placement");
    assert_eq!(gpu.create_gi(gpu.handle(), 77, None), Err(Code::INVALID_ARGUMENT), "no such profile");
}

#[test]
fn limited_engines_are_limited() {
    let mut gpu = gpu("h100-80gb");
    gpu.create_gi(gpu.handle(), 20, at(0, 1)).unwrap();
    assert_eq!(gpu.create_gi(gpu.handle(), 20, at(1, 1)), Err(Code::INSUFFICIENT_RESOURCES), "one +me only");
    assert_eq!(gpu.gi_capacity(gpu.handle(), 20), Ok(0));
    assert_eq!(gpu.gi_capacity(gpu.handle(), 19), Ok(6));
    assert_eq!(gpu.gi_capacity(gpu.handle(), 9), Ok(1));
}

#[test]
fn ids_and_placements_of_published_dumps() {
    // `nvidia-smi mig -lgi` after `-cgi 9,14,19,19` and after `-cgi 5,14,19` on an A100: id, start, size.
    for (profiles, expected) in [
        (&[9, 14, 19, 19][..], &[(1, 4, 4), (6, 2, 2), (11, 0, 1), (12, 1, 1)][..]),
        (&[5, 14, 19], &[(2, 0, 4), (3, 4, 2), (9, 6, 1)]),
    ] {
        let mut gpu = gpu("a100-40gb");
        for profile in profiles {
            gpu.create_gi(gpu.handle(), *profile, None).unwrap();
        }
        let seen: Vec<_> = gpu.all_gis().iter().map(|gi| (gi.id, gi.placement.start, gi.placement.size)).collect();
        assert_eq!(seen, expected);
    }
}

#[test]
fn small_ones_first_leave_no_room_for_a_large_one() {
    // Seen on A100s, as is that it works the other way round.
    let mut gpu = gpu("a100-40gb");
    for profile in [19, 19, 14] {
        gpu.create_gi(gpu.handle(), profile, None).unwrap();
    }
    assert_eq!(gpu.create_gi(gpu.handle(), 9, None), Err(Code::INSUFFICIENT_RESOURCES));
}

#[test]
fn destroying_goes_from_the_inside_out() {
    let mut gpu = gpu("h100-80gb");
    let (gi, ci, _) = carve(&mut gpu, 9, at(4, 4));
    assert_eq!(gpu.destroy_gi(gi).unwrap_err(), Code::IN_USE);
    gpu.destroy_ci(ci).unwrap();
    gpu.destroy_gi(gi).unwrap();
    assert_eq!(gpu.all_gis(), []);
}

#[test]
fn handles_of_what_is_gone_are_invalid() {
    let mut gpu = gpu("h100-80gb");
    let (gi, ci, _) = carve(&mut gpu, 9, at(4, 4));
    let mig = gpu.mig_devices(gpu.handle()).unwrap()[0].handle;
    gpu.destroy_ci(ci).unwrap();
    assert_eq!(gpu.ci(ci).unwrap_err(), Code::INVALID_ARGUMENT);
    assert_eq!(gpu.device(mig).unwrap_err(), Code::INVALID_ARGUMENT);
    gpu.destroy_gi(gi).unwrap();
    let (again, ..) = carve(&mut gpu, 9, at(4, 4));
    assert_eq!(gpu.gi(gi).unwrap_err(), Code::INVALID_ARGUMENT, "same id, another instance");
    assert_eq!(gpu.gi(again).unwrap().id, 2);
    assert_eq!(gpu.device(again).unwrap_err(), Code::INVALID_ARGUMENT, "a GPU instance is no device");
    assert_eq!(gpu.gi_by_id(gpu.handle(), 1).unwrap_err(), Code::NOT_FOUND);
}

#[test]
fn uuids_come_again_or_never() {
    let uuids = |mode: Uuids| {
        let mut gpu = Gpu::new(GpuSpec { uuids: mode, ..spec("h100-80gb") }, GENERATION);
        let mut once = || {
            let (gi, ci, uuid) = carve(&mut gpu, 19, at(6, 1));
            gpu.destroy_ci(ci).unwrap();
            gpu.destroy_gi(gi).unwrap();
            uuid
        };
        (once(), once())
    };
    let (first, second) = uuids(Uuids::Deterministic);
    assert_eq!(first, second);
    let (first, second) = uuids(Uuids::Fresh);
    assert_ne!(first, second);
}

#[test]
fn compute_instances_share_a_gpu_instance() {
    let mut gpu = gpu("h100-80gb");
    let gi = gpu.create_gi(gpu.handle(), 9, at(0, 4)).unwrap().handle;
    let small = gpu.ci_profile(gi, 0, 0).unwrap();
    assert_eq!((small.name.as_str(), small.max_instances), ("1c.3g.40gb", 3));
    let ids: Vec<_> = (0..3).map(|_| gpu.create_ci(gi, small.id, None).unwrap().id).collect();
    assert_eq!(ids, [0, 1, 2]);
    assert_eq!(gpu.ci_capacity(gi, small.id), Ok(0));
    assert_eq!(gpu.create_ci(gi, small.id, None), Err(Code::INSUFFICIENT_RESOURCES));
    let migs = gpu.mig_devices(gpu.handle()).unwrap();
    let device = gpu.device(migs[1].handle).unwrap();
    assert_eq!(device.name, "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb");
    assert_eq!(device.memory_mib, 40448);
    let uuids: std::collections::BTreeSet<_> = gpu.all_cis().into_iter().map(|(_, uuid)| uuid).collect();
    assert_eq!(uuids.len(), 3);
    // The id in the middle is given again.
    let middle = gpu.ci_by_id(gi, 1).unwrap().handle;
    gpu.destroy_ci(middle).unwrap();
    assert_eq!(gpu.create_ci(gi, small.id, None).unwrap().id, 1);
    assert_eq!(gpu.ci_profile(gi, 3, 0).unwrap_err(), Code::NOT_SUPPORTED, "no 4c in a 3g");
    assert_eq!(gpu.ci_profile(gi, 8, 0).unwrap_err(), Code::INVALID_ARGUMENT);
    assert_eq!(gpu.ci_profile(gi, 0, 1).unwrap_err(), Code::INVALID_ARGUMENT);
}

#[test]
fn profiles_by_enum_index_end_with_invalid_argument() {
    let gpu = gpu("h100-80gb");
    let answers: Vec<_> =
        (0..).map(|index| gpu.gi_profile(gpu.handle(), GiProfileKey::Index(index))).take(0x13).collect();
    let ids: Vec<_> = answers.iter().filter_map(|answer| answer.as_ref().ok()).map(|info| info.profile.id).collect();
    assert_eq!(ids, [19, 14, 9, 5, 0, 20, 15]);
    assert_eq!(answers[0x12].as_ref().unwrap_err(), &Code::INVALID_ARGUMENT);
    assert_eq!(answers[5].as_ref().unwrap_err(), &Code::NOT_SUPPORTED);
}

#[test]
fn twelve_memory_slices() {
    let mut gpu = gpu("rtx-pro-6000");
    for _ in 0..4 {
        carve(&mut gpu, 14, None);
    }
    let seen: Vec<_> = gpu.all_gis().iter().map(|gi| (gi.id, gi.placement.start, gi.placement.size)).collect();
    assert_eq!(seen, [(3, 0, 3), (4, 3, 3), (5, 6, 3), (6, 9, 3)]);
    let graphics = gpu.gi_profile(gpu.handle(), GiProfileKey::IdMigOn(47)).unwrap();
    assert_eq!((graphics.profile.name.as_str(), graphics.capabilities), ("1g.24gb+gfx", 2));
}

#[test]
fn hopper_switches_at_once_unless_instances_exist() {
    let mut gpu = Gpu::new(GpuSpec { mig: (false, false), ..spec("h100-80gb") }, GENERATION);
    let device = gpu.handle();
    assert_eq!(gpu.create_gi(device, 19, None), Err(Code::NOT_SUPPORTED), "MIG is off");
    assert!(gpu.gi_profile(device, GiProfileKey::Index(0)).is_ok(), "profiles are told all the same");
    assert_eq!(gpu.gi_profile(device, GiProfileKey::IndexMigOn(0)), Err(Code::NOT_SUPPORTED));
    assert_eq!(gpu.gi_placements(device, 19).unwrap().len(), 7);
    assert_eq!(gpu.device(device).unwrap().max_mig_devices, 0);
    assert_eq!(gpu.set_mig_mode(device, true), Ok(Ok(())));
    assert_eq!(gpu.settings().mig, Some((true, true)));
    assert_eq!(gpu.device(device).unwrap().max_mig_devices, 7);
    carve(&mut gpu, 19, None);
    assert_eq!(gpu.set_mig_mode(device, false), Ok(Err(Code::IN_USE)));
    assert_eq!(gpu.settings().mig, Some((true, true)), "nothing is left pending");
}

#[test]
fn hopper_loses_its_mode_with_the_driver() {
    let mut gpu = gpu("h100-80gb");
    let device = gpu.handle();
    carve(&mut gpu, 19, None);
    gpu.reload(GENERATION + 1);
    assert_eq!(gpu.settings().mig, Some((false, false)));
    assert_eq!(gpu.all_gis(), []);
    assert_eq!(gpu.device(device).unwrap_err(), Code::INVALID_ARGUMENT, "a handle of before");
    assert!(gpu.device(gpu.handle()).is_ok());
}

#[test]
fn ampere_waits_for_a_reset_and_keeps_its_mode() {
    let mut gpu = Gpu::new(GpuSpec { mig: (false, false), ..spec("a100-80gb") }, GENERATION);
    let device = gpu.handle();
    assert_eq!(gpu.gi_profile(device, GiProfileKey::Index(0)), Err(Code::NOT_SUPPORTED), "not with MIG off");
    assert_eq!(gpu.set_mig_mode(device, true), Ok(Err(Code::IN_USE)));
    assert_eq!(gpu.settings().mig, Some((false, true)));
    assert_eq!(gpu.create_gi(device, 19, None), Err(Code::NOT_SUPPORTED), "still pending");
    gpu.reset().unwrap();
    assert_eq!(gpu.settings().mig, Some((true, true)));
    carve(&mut gpu, 19, None);
    gpu.reload(GENERATION + 1);
    assert_eq!(gpu.settings().mig, Some((true, true)), "kept in the InfoROM");
    assert_eq!(gpu.all_gis(), []);
}

#[test]
fn a_pending_switch_can_be_taken_back() {
    let mut gpu = Gpu::new(GpuSpec { mig: (false, true), ..spec("a100-80gb") }, GENERATION);
    assert_eq!(gpu.set_mig_mode(gpu.handle(), false), Ok(Ok(())));
    assert_eq!(gpu.settings().mig, Some((false, false)));
}

#[test]
fn a_passed_through_ampere_cannot_be_reset() {
    let spec = GpuSpec { mig: (false, false), virtualization: Virtualization::Passthrough, ..spec("a100-80gb") };
    let mut gpu = Gpu::new(spec, GENERATION);
    assert_eq!(gpu.set_mig_mode(gpu.handle(), true), Ok(Err(Code::RESET_REQUIRED)));
}

#[test]
fn what_has_no_mig_says_so() {
    let vgpu = GpuSpec { mig: (false, false), virtualization: Virtualization::Vgpu, ..spec("h100-80gb") };
    for spec in [GpuSpec { mig: (false, false), ..spec("l40s") }, vgpu] {
        let mut gpu = Gpu::new(spec, GENERATION);
        let device = gpu.handle();
        assert_eq!(gpu.device(device).unwrap().mig, None);
        assert_eq!(gpu.set_mig_mode(device, true), Err(Code::NOT_SUPPORTED));
        assert_eq!(gpu.gi_profile(device, GiProfileKey::Index(0)), Err(Code::NOT_SUPPORTED));
        assert_eq!(gpu.gi_profile(device, GiProfileKey::Index(0x12)), Err(Code::INVALID_ARGUMENT), "counting ends");
        assert_eq!(gpu.gi_placements(device, 19), Err(Code::NOT_SUPPORTED));
    }
}

#[test]
fn a_broken_gpu_is_lost_until_mended() {
    let mut gpu = gpu("h100-80gb");
    gpu.set_broken(true);
    assert!(gpu.listed().broken);
    assert_eq!(gpu.device(gpu.handle()).unwrap_err(), Code::GPU_IS_LOST);
    gpu.set_broken(false);
    assert!(gpu.device(gpu.handle()).is_ok());
}

#[test]
fn compute_mode_is_not_set_on_a_gpu_in_mig_mode() {
    let mut gpu = gpu("h100-80gb");
    assert_eq!(gpu.set_compute_mode(gpu.handle(), 3), Err(Code::NOT_SUPPORTED));
    gpu.set_mig_mode(gpu.handle(), false).unwrap().unwrap();
    assert_eq!(gpu.set_compute_mode(gpu.handle(), 3), Ok(()));
    assert_eq!(gpu.set_compute_mode(gpu.handle(), 4), Err(Code::INVALID_ARGUMENT));
    assert_eq!(gpu.settings().compute_mode, 3);
}

#[test]
fn a_mig_device_has_a_compute_mode_of_its_own() {
    let mut gpu = gpu("h100-80gb");
    carve(&mut gpu, 19, None);
    carve(&mut gpu, 19, None);
    let migs = gpu.mig_devices(gpu.handle()).unwrap();
    assert_eq!(gpu.set_compute_mode(migs[0].handle, 3), Ok(()));
    let modes: Vec<_> = migs.iter().map(|mig| gpu.device(mig.handle).unwrap().compute_mode).collect();
    assert_eq!(modes, [3, 0]);
}

#[test]
fn mig_devices_are_found_by_both_forms_of_their_name() {
    let mut gpu = gpu("h100-80gb");
    let (.., uuid) = carve(&mut gpu, 9, at(0, 4));
    let found = gpu.mig_by_uuid(&uuid);
    assert!(found.is_some());
    assert_eq!(gpu.mig_by_uuid(&format!("MIG-{}/1/0", gpu.spec().uuid)), found);
    assert_eq!(gpu.mig_by_uuid(&format!("MIG-{}/2/0", gpu.spec().uuid)), None);
}
