//! NVIDIA's own nvidia-smi 535 as a judge, and our front of it.

use kerf_mig::product::Product;

use crate::sim::{Sim, node, one};

/// The lines of an output, without the spaces that only make columns.
fn lines(output: &str) -> Vec<String> {
    output.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

#[track_caller]
fn has(output: &str, line: &str) {
    assert!(lines(output).iter().any(|seen| seen == line), "no line {line:?} in\n{output}");
}

/// Profiles that nvidia-smi 535 asks for: its header ends before the graphics and media variants of Blackwell.
fn known_profiles(product: &Product) -> Vec<&kerf_mig::Profile> {
    let profiles = &product.mig.as_ref().unwrap().profiles;
    profiles.iter().filter(|profile| profile.nvml_index <= 9).map(|profile| &profile.profile).collect()
}

/// The whole life of a GPU in MIG mode, each step as nvidia-smi shows it.
fn life_cycle(key: &str) {
    let product = Product::by_key(key).unwrap();
    let switchable = product.mig.as_ref().unwrap().mode == kerf_mig::product::ModeSwitch::Switchable;
    let sim = Sim::with_programs(&one(key));
    let name = &product.name;

    let list = sim.smi("-L");
    assert!(list.starts_with(&format!("GPU 0: {name} (UUID: GPU-")), "{list}");
    assert_eq!(
        sim.smi("--query-gpu=index,name,pci.bus_id,memory.total,mig.mode.current,driver_version --format=csv,noheader"),
        format!("0, {name}, 00000000:3B:00.0, {} MiB, Disabled, 535.261.03\n", product.memory_mib)
    );
    let table = sim.smi("");
    assert!(table.contains("Driver Version: 535.261.03") && table.contains("CUDA Version: 12.2"), "{table}");
    assert!(table.contains(&format!("0MiB / {}MiB", product.memory_mib)), "{table}");

    let switched = sim.smi("-mig 1");
    assert!(switched.contains("Enabled MIG Mode") || switched.contains("In use by another client"), "{switched}");
    if !switchable {
        let query = "--query-gpu=mig.mode.current,mig.mode.pending --format=csv,noheader";
        assert_eq!(sim.smi(query), "Disabled, Enabled\n");
        sim.ctl("reset 0");
        assert_eq!(sim.smi(query), "Enabled, Enabled\n");
    }

    let profiles = sim.smi("mig -lgip");
    let placements = sim.smi("mig -lgipp");
    for profile in known_profiles(product) {
        let (free, engines) = (profile.max_instances, profile.engines);
        let gib = profile.memory_mib as f64 / 1024.0;
        has(
            &profiles,
            &format!(
                "| 0 MIG {} {} {free}/{free} {gib:.2} No {} {} {} |",
                profile.name, profile.id, engines.multiprocessors, engines.decoders, engines.encoders
            ),
        );
        let starts: Vec<String> = profile.placements.iter().map(|place| place.start.to_string()).collect();
        let word = if starts.len() == 1 { "Placement :" } else { "Placements:" };
        let line =
            format!("GPU 0 Profile ID {} {word} {{{}}}:{}", profile.id, starts.join(","), profile.placements[0].size);
        has(&placements, &line);
    }

    // The smallest profile fills the GPU.
    let smallest = known_profiles(product)[0];
    let wanted = vec![smallest.id.to_string(); smallest.max_instances as usize].join(",");
    let created = sim.smi(&format!("mig -cgi {wanted} -C"));
    assert_eq!(created.matches("Successfully created GPU instance").count(), smallest.max_instances as usize);
    assert_eq!(created.matches("Successfully created compute instance").count(), smallest.max_instances as usize);
    let full = sim.smi_output(&format!("mig -cgi {} -C", smallest.id));
    assert!(!full.status.success());
    assert!(String::from_utf8_lossy(&full.stdout).contains("Insufficient Resources"), "{full:?}");

    let state = sim.state();
    let mig = state.gpus[0].mig.clone().unwrap();
    let list = sim.smi("-L");
    let gis = sim.smi("mig -lgi");
    let cis = sim.smi("mig -lci");
    let table = sim.smi("");
    for (number, gi) in mig.instances.iter().enumerate() {
        let uuid = &gi.compute_instances[0].uuid;
        has(&list, &format!("MIG {} Device {number}: (UUID: {uuid})", smallest.name));
        let placement = format!("{}:{}", gi.placement.start, gi.placement.size);
        has(&gis, &format!("| 0 MIG {} {} {} {placement} |", smallest.name, smallest.id, gi.id));
        has(&cis, &format!("| 0 {} MIG {} 0 0 0:1 |", gi.id, smallest.name));
        let engines = smallest.engines;
        has(
            &table,
            &format!(
                "| 0 {} 0 {number} | 0MiB / {}MiB | {} N/A | {} {} {} {} {} |",
                gi.id,
                smallest.memory_mib,
                engines.multiprocessors,
                engines.copy_engines,
                engines.encoders,
                engines.decoders,
                engines.ofa_engines,
                engines.jpeg_engines
            ),
        );
    }
    assert_eq!(mig.instances.len(), smallest.max_instances as usize);

    let busy = sim.smi_output("mig -dgi");
    assert!(!busy.status.success());
    assert!(String::from_utf8_lossy(&busy.stdout).contains("In use by another client"), "{busy:?}");
    sim.smi("mig -dci");
    sim.smi("mig -dgi");
    assert_eq!(sim.state().gpus[0].mig.as_ref().unwrap().instances, []);
    assert!(sim.smi_output("mig -lgi").stdout.starts_with(b"No GPU instances found"));

    // Half a GPU in pieces: one compute instance of two slices, or of one, and another beside it.
    let half = known_profiles(product).into_iter().find(|profile| profile.compute_slices == 2).unwrap();
    sim.smi(&format!("mig -cgi {}", half.id));
    sim.smi("mig -cci 0,0");
    let list = sim.smi("-L");
    assert_eq!(list.matches(&format!("MIG 1c.{}", half.name)).count(), 2, "{list}");
    assert_eq!(lines(&sim.smi("mig -lci")).iter().filter(|line| line.starts_with("| 0 ")).count(), 2);
    sim.smi("mig -dci");
    sim.smi("mig -dgi");
}

#[test]
fn life_cycle_of_an_h100() {
    life_cycle("h100-80gb");
}

#[test]
fn life_cycle_of_an_a100() {
    life_cycle("a100-40gb");
}

#[test]
fn life_cycle_of_an_rtx_pro_6000() {
    life_cycle("rtx-pro-6000");
}

#[test]
fn a_placement_can_be_asked_for() {
    let sim = Sim::with_programs(&node("gpus: [{product: h100-80gb, mig: {current: true}}]"));
    sim.smi("mig -cgi 19:6,9:0 -C");
    let gis = sim.smi("mig -lgi");
    has(&gis, "| 0 MIG 1g.10gb 19 13 6:1 |");
    has(&gis, "| 0 MIG 3g.40gb 9 1 0:4 |");
}

#[test]
fn time_slices_are_set_where_nvidia_smi_cannot() {
    let sim = Sim::with_programs(&node("gpus: [{product: h100-80gb, count: 2}]"));
    let uuid = sim.state().gpus[1].uuid.clone();
    sim.smi(&format!("compute-policy -i {uuid} --set-timeslice=3"));
    assert_eq!(sim.state().gpus.iter().map(|gpu| gpu.timeslice).collect::<Vec<_>>(), [0, 3]);
    assert!(sim.smi("compute-policy --list").contains("Timeslice: Long"));
    assert!(!sim.smi_output("compute-policy -i 0 --set-timeslice=4").status.success());
    assert!(!sim.smi_output("compute-policy -i 7 --set-timeslice=1").status.success());
}

#[test]
fn compute_mode_and_persistence_mode_are_kept() {
    let sim = Sim::with_programs(&one("l40s"));
    sim.smi("-c EXCLUSIVE_PROCESS");
    sim.smi("-pm 1");
    let query = "--query-gpu=compute_mode,persistence_mode,mig.mode.current --format=csv,noheader";
    assert_eq!(sim.smi(query), "Exclusive_Process, Enabled, [N/A]\n");
}

#[test]
fn a_broken_gpu_does_not_hide_its_neighbour() {
    let sim = Sim::with_programs(&node("gpus: [{product: l40s, broken: true}, {product: h100-80gb}]"));
    // What nvidia-smi prints of the broken one is garbage in part, for it has the address from NVML's private interface.
    let list = String::from_utf8_lossy(&sim.smi_output("-L").stdout).into_owned();
    assert!(list.contains("GPU is lost"), "{list}");
    assert!(list.contains("GPU 1: NVIDIA H100 80GB HBM3"), "{list}");
    assert!(!list.contains("L40S"), "{list}");
    sim.ctl("mend 0");
    assert!(sim.smi("-L").contains("NVIDIA L40S"));
}

#[test]
fn without_nvidias_program_ours_prints_the_same_lists() {
    let file = node("gpus: [{product: h100-80gb, mig: {current: true}}, {product: l40s}]");
    let (genuine, ours) = (Sim::with_programs(&file), Sim::start(&file));
    genuine.smi("mig -cgi 19,9,14 -C");
    carve(&ours, &[(19, 6), (9, 0), (14, 4)]);
    let placed = |sim: &Sim| {
        let mig = sim.state().gpus[0].mig.clone().unwrap();
        mig.instances.iter().map(|gi| (gi.profile_id, gi.placement.start)).collect::<Vec<_>>()
    };
    assert_eq!(placed(&genuine), placed(&ours), "the same instances on both");
    assert_eq!(genuine.smi("-L"), ours.smi("-L"));
    assert_eq!(genuine.smi("mig -lgi"), ours.smi("mig -lgi"));
    assert!(!ours.smi_output("mig -lgip").status.success());
}

/// Carves without nvidia-smi: profile and start.
fn carve(sim: &Sim, wanted: &[(u32, u32)]) {
    use kerf_nvml_sim::{client::Client, view, wire::Op};
    let client = Client::new(sim.root());
    let gpu = client.ask::<view::Node>("", Op::Node).unwrap().gpus[0].handle;
    for &(profile, start) in wanted {
        let places: Vec<kerf_mig::Placement> = client.ask("", Op::GiPlacements(gpu, profile)).unwrap();
        let place = places.into_iter().find(|place| place.start == start);
        let gi: view::Gi = client.ask("", Op::CreateGi(gpu, profile, place)).unwrap();
        let whole = (0..8).rev().find_map(|index| client.ask(" ", Op::CiProfile(gi.handle, index, 0)).ok());
        let whole: view::CiProfile = whole.unwrap();
        client.ask::<view::Ci>("", Op::CreateCi(gi.handle, whole.id, None)).unwrap();
    }
}
