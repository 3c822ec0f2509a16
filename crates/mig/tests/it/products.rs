//! The product files: complete, consistent, and as NVIDIA's documents and dumps of real machines have them.

use std::collections::BTreeSet;
use std::path::Path;

use kerf_mig::product::{Architecture, Field, ModeSwitch, Product, ProductError};
use kerf_mig::{Engine, base_name};

use crate::support::{geometry, mig_products};

#[test]
fn every_file_is_a_product_and_every_product_has_a_file() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("products");
    let files = std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let files: BTreeSet<String> = files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    let keys: BTreeSet<String> = Product::all().iter().map(|product| product.key.clone()).collect();
    assert_eq!(keys, files);
    assert_eq!(Product::all().len(), keys.len(), "a key is listed twice");
}

#[test]
fn products_are_found_by_key() {
    assert_eq!(Product::by_key("h100-80gb").unwrap().name, "NVIDIA H100 80GB HBM3");
    assert_eq!(Product::by_key("H100"), None);
}

#[test]
fn only_products_without_mig_have_an_empty_geometry() {
    let without: Vec<&str> =
        Product::all().iter().filter(|p| p.geometry().is_empty()).map(|product| product.key.as_str()).collect();
    assert_eq!(without, ["t4", "l4", "l40s", "rtx-4090"]);
}

#[test]
fn ampere_alone_needs_a_reset_to_switch_mig() {
    for product in mig_products() {
        let needs_reset = product.mig.as_ref().unwrap().mode == ModeSwitch::NeedsReset;
        assert_eq!(needs_reset, product.architecture == Architecture::Ampere, "{}", product.key);
    }
}

/// The list of placements as `nvidia-smi mig -lgipp` prints it, by profile id.
fn placements(key: &str) -> Vec<String> {
    let mut profiles = geometry(key).profiles().to_vec();
    profiles.sort_by_key(|profile| profile.id);
    let line = |profile: &kerf_mig::Profile| {
        let starts: Vec<String> = profile.placements.iter().map(|placement| placement.start.to_string()).collect();
        format!("{} {{{}}}:{}", profile.id, starts.join(","), profile.placements[0].size)
    };
    profiles.iter().map(line).collect()
}

#[test]
fn placements_are_those_that_nvidia_smi_lists() {
    for product in mig_products().filter(|product| product.mig.as_ref().unwrap().compute_slices == 7) {
        assert_eq!(
            placements(&product.key),
            [
                "0 {0}:8",
                "5 {0}:4",
                "9 {0,4}:4",
                "14 {0,2,4}:2",
                "15 {0,2,4,6}:2",
                "19 {0,1,2,3,4,5,6}:1",
                "20 {0,1,2,3,4,5,6}:1",
            ],
            "{}",
            product.key
        );
        assert_eq!(product.geometry().offers().len(), 25, "{}", product.key);
    }
    assert_eq!(placements("a30"), ["0 {0}:4", "5 {0,2}:2", "6 {0,2}:2", "14 {0,1,2,3}:1", "21 {0,1,2,3}:1"]);
    assert_eq!(
        placements("rtx-pro-6000"),
        [
            "0 {0}:12",
            "5 {0,6}:6",
            "14 {0,3,6,9}:3",
            "21 {0,3,6,9}:3",
            "32 {0}:12",
            "35 {0,6}:6",
            "47 {0,3,6,9}:3",
            "64 {0,6}:6",
            "65 {0,3,6,9}:3",
            "66 {0,6}:6",
            "67 {0,3,6,9}:3",
        ]
    );
}

#[test]
fn slices_are_counted_from_the_profiles() {
    let slices = |key| (geometry(key).compute_slices(), geometry(key).memory_slices());
    assert_eq!(slices("a30"), (4, 4));
    assert_eq!(slices("h100-80gb"), (7, 8));
    assert_eq!(slices("rtx-pro-6000"), (4, 12));
    assert_eq!(slices("l40s"), (0, 0));
}

#[test]
fn totals_are_what_the_largest_profile_holds() {
    for product in mig_products() {
        let geometry = product.geometry();
        for engine in Engine::ALL {
            let largest = geometry.profiles().iter().map(|profile| profile.engines.get(engine)).max();
            assert_eq!(Some(geometry.totals().get(engine)), largest, "{} {engine:?}", product.key);
        }
    }
    let totals = geometry("h100-80gb").totals();
    assert_eq!([132, 8, 7, 0, 7, 1], Engine::ALL.map(|engine| totals.get(engine)));
    assert_eq!(geometry("h100-80gb").largest_memory_mib(), 81152);
}

/// NVIDIA's formula for names holds on every product; the attributes are no part of it.
#[test]
fn names_follow_from_memory() {
    for product in mig_products() {
        for profile in product.geometry().profiles() {
            let base = profile.name.split(['+', '-']).next().unwrap();
            let computed = base_name(profile.compute_slices, profile.memory_mib, product.memory_mib);
            assert_eq!(base, computed, "{} of {}", profile.name, product.key);
        }
    }
}

#[test]
fn a_name_can_be_computed_for_a_gpu_that_reports_no_memory() {
    assert_eq!(base_name(1, 0, 0), "1g.0gb"); // Thor
}

/// nvml.h: the enum index says how many compute slices and which attribute a profile has.
#[test]
fn enum_indices_and_names_agree() {
    for product in mig_products() {
        for profile in &product.mig.as_ref().unwrap().profiles {
            let name = &profile.profile.name;
            let doubled = product.geometry().profiles().iter().any(|other| {
                other.compute_slices == profile.profile.compute_slices
                    && other.memory_mib < profile.profile.memory_mib
                    && !other.name.contains(['+', '-'])
            });
            let attribute = name.find(['+', '-']).map_or("", |at| &name[at..]);
            let expected = match (profile.profile.compute_slices, attribute) {
                (1, "") if doubled => 0x9,
                (1, "") => 0x0,
                (2, "") => 0x1,
                (3, "") => 0x2,
                (4, "") => 0x3,
                (7, "") => 0x4,
                (1, "+me") => 0x7,
                (2, "+me") => 0x8,
                (1, "+gfx") => 0xa,
                (2, "+gfx") => 0xb,
                (4, "+gfx") => 0xc,
                (1, "-me") => 0xd,
                (2, "-me") => 0xe,
                (1, "+me.all") => 0xf,
                (2, "+me.all") => 0x10,
                other => panic!("{} has {other:?}", product.key),
            };
            assert_eq!(profile.nvml_index, expected, "{name} of {}", product.key);
        }
    }
}

#[test]
fn estimates_are_marked() {
    let unknown = |key: &str, name: &str| {
        let profiles = &Product::by_key(key).unwrap().mig.as_ref().unwrap().profiles;
        profiles.iter().find(|profile| profile.profile.name == name).unwrap().unknown.clone()
    };
    assert_eq!(unknown("h200", "2g.35gb"), []);
    assert_eq!(unknown("h200", "1g.35gb"), [Field::MemoryMib, Field::Multiprocessors]);
    assert_eq!(unknown("h100-80gb", "3g.40gb"), []);
    assert!(unknown("b300", "3g.135gb").contains(&Field::Placements));
    for product in Product::all() {
        assert!(!product.source.is_empty() && product.mig.iter().all(|mig| !mig.source.is_empty()), "{}", product.key);
    }
}

/// NVIDIA MIG user guide, compute instances; multiprocessors as `nvidia-smi mig -lcip` lists them on an A100.
#[test]
fn compute_instances_divide_a_gpu_instance() {
    let listed = |key: &str, name: &str| {
        let product = Product::by_key(key).unwrap();
        let profiles = &product.mig.as_ref().unwrap().profiles;
        let profile = profiles.iter().find(|profile| profile.profile.name == name).unwrap();
        let compute = product.compute_instances(profile);
        compute.iter().map(|c| (c.compute_slices, c.id, c.max_instances, c.multiprocessors)).collect::<Vec<_>>()
    };
    assert_eq!(listed("a100-80gb", "1g.20gb"), [(1, 0, 1, 14)]);
    assert_eq!(listed("a100-80gb", "3g.40gb"), [(1, 0, 3, 14), (2, 1, 1, 28), (3, 2, 1, 42)]);
    assert_eq!(listed("a100-80gb", "4g.40gb"), [(1, 0, 4, 14), (2, 1, 2, 28), (4, 3, 1, 56)]);
    assert_eq!(
        listed("a100-80gb", "7g.80gb"),
        [(1, 0, 7, 14), (2, 1, 3, 28), (3, 2, 2, 42), (4, 3, 1, 56), (7, 4, 1, 98)]
    );
    assert_eq!(listed("h100-80gb", "1g.20gb"), [(1, 0, 1, 26)], "one that spans the GPU instance has all of it");
}

const TEXT: &str = include_str!("../../products/h100-80gb.yaml");

fn error(text: &str) -> String {
    Product::parse("mine", text).expect_err("contradictory").to_string()
}

#[test]
fn a_misspelt_field_is_refused_where_it_stands() {
    let text = TEXT.replace("max_instances: 3", "max_instance: 3");
    assert!(matches!(Product::parse("mine", &text), Err(ProductError::Form { .. })));
    let line = 1 + text.lines().position(|line| line.contains("max_instance:")).unwrap();
    let message = error(&text);
    assert!(
        message.contains("mine") && message.contains("max_instance") && message.contains(&line.to_string()),
        "{message}"
    );
}

#[test]
fn contradictions_are_refused() {
    let cases = [
        ("memory_slices: 8", "memory_slices: 7", "memory_slices says 7, but the profiles add up to 8"),
        ("compute_slices: 7\n  memory", "compute_slices: 8\n  memory", "compute_slices says 8"),
        ("id: 14", "id: 15", "1g.20gb and 2g.20gb share"),
        ("nvml_index: 1\n", "nvml_index: 0\n", "1g.10gb and 2g.20gb share"),
        ("name: 2g.20gb", "name: 1g.20gb", "1g.20gb and 1g.20gb share"),
        ("memory_mib: 81152", "memory_mib: 90000", "7g.80gb has 90000 MiB, more than the GPU's 81559"),
        ("multiprocessors: 132,", "multiprocessors: 133,", "7g.80gb has 133 multiprocessors"),
        ("starts: [0, 2, 4]", "starts: []", "2g.20gb has a placement size of 0 or no placement"),
        ("starts: [0, 4], size: 4", "starts: [0, 4], size: 0", "3g.40gb has a placement size of 0"),
    ];
    for (from, to, expected) in cases {
        assert!(TEXT.contains(from), "{from}");
        let message = error(&TEXT.replace(from, to));
        assert!(message.contains(expected), "{to}: {message}");
    }
}
