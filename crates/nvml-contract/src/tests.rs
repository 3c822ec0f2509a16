//! The suite against an honest machine, and against one that lies in every way.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kerf_nvml::PciAddress;

use crate::assertion::{Assertion, Outcome};
use crate::carve::checks::CARVE;
use crate::carve::{Halt, Patience, Refusal};
use crate::geometry_checks::GEOMETRY;
use crate::gpu_checks::GPU;
use crate::instance_checks::INSTANCES;
use crate::machine::{BUSY, IDLE, Lie, Machine, WITHOUT_MIG};
use crate::node_checks::NODE;
use crate::report;
use crate::suite::{Results, Setup, run};

const SHORT: Duration = Duration::from_millis(2);

fn check_until(machine: &Machine, carve: &[&str], stop: &dyn Fn() -> bool) -> Results {
    let carve: Vec<PciAddress> = carve.iter().map(|address| address.parse().unwrap()).collect();
    run(&Setup {
        nvml: machine,
        kernel: machine,
        carve: &carve,
        patience: Patience { files: SHORT, nodes: SHORT, in_use: SHORT },
        stop,
        judged: &|_| {},
        doing: &|_, _| {},
    })
}

fn check(machine: &Machine, carve: &[&str]) -> Results {
    check_until(machine, carve, &|| false)
}

/// Names of the assertions that failed, with the first mismatch of each.
fn failed(results: &Results) -> Vec<(&'static str, String)> {
    let failed = |outcome: &Outcome| match outcome {
        Outcome::Failed(mismatches) => Some(format!("{:?}", mismatches.first())),
        _ => None,
    };
    results.verdicts.iter().filter_map(|verdict| Some((verdict.name, failed(&verdict.outcome)?))).collect()
}

fn names<R>(assertions: &[Assertion<R>]) -> impl Iterator<Item = &'static str> {
    assertions.iter().map(|assertion| assertion.name)
}

fn every_name() -> Vec<&'static str> {
    let of_gpus = [GPU, GEOMETRY, INSTANCES].into_iter().flat_map(names);
    names(NODE).chain(of_gpus).chain(names(CARVE)).collect()
}

#[test]
fn everything_holds_on_an_honest_machine_and_nothing_goes_unchecked() {
    let machine = Machine::new(None);
    let results = check(&machine, &[IDLE]);
    assert_eq!(failed(&results), []);
    assert_eq!(machine.idle(), (false, vec![]));

    let held: BTreeSet<_> = results
        .verdicts
        .iter()
        .filter(|verdict| verdict.outcome == Outcome::Held)
        .map(|verdict| verdict.name)
        .collect();
    assert_eq!(held, every_name().into_iter().collect(), "each assertion had something to check");
}

#[test]
fn every_name_is_given_once() {
    let names = every_name();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
}

#[test]
fn every_lie_is_caught_by_its_assertion_and_every_assertion_can_fail() {
    let mut caught = BTreeSet::new();
    for &lie in Lie::ALL {
        let failed = failed(&check(&Machine::new(Some(lie)), &[IDLE]));
        assert!(failed.iter().any(|(name, _)| *name == lie.caught_by()), "{lie:?}: {failed:?}");
        caught.extend(failed.into_iter().map(|(name, _)| name));
    }
    assert_eq!(caught, every_name().into_iter().collect());
}

#[test]
fn what_was_made_is_removed_whatever_nvml_says() {
    for &lie in Lie::ALL {
        let machine = Machine::new(Some(lie));
        check(&machine, &[IDLE]);
        let (on, left) = machine.idle();
        if lie != Lie::DestroyDoesNothing {
            assert_eq!(left, [], "{lie:?}");
            let cannot_be_off = matches!(lie, Lie::MigStaysOn | Lie::ModeNotRestored);
            assert_eq!(on, cannot_be_off, "{lie:?}");
        }
    }
}

#[test]
fn reading_changes_nothing() {
    let machine = Machine::new(None);
    machine.idle_is(true, true, true, false);
    let before = machine.idle();
    let results = check(&machine, &[]);
    assert_eq!(failed(&results), []);
    assert_eq!(machine.idle(), before);
    assert!(results.carvings.is_empty());
}

#[test]
fn only_an_idle_gpu_is_carved() {
    let refusal = |machine: &Machine, gpu: &str| {
        let results = check(machine, &[gpu]);
        assert!(results.refused());
        results.carvings.into_iter().next().unwrap().1.unwrap_err()
    };
    let honest = Machine::new(None);
    assert_eq!(refusal(&honest, WITHOUT_MIG), Refusal::NoMig);
    assert_eq!(refusal(&honest, BUSY), Refusal::Occupied(2));
    assert!(matches!(refusal(&honest, "0000:01:00.0"), Refusal::Unreadable(_)));

    let machine = Machine::new(None);
    machine.idle_is(false, true, false, true);
    assert_eq!(refusal(&machine, IDLE), Refusal::Busy(1));
    let machine = Machine::new(None);
    machine.idle_is(false, false, false, false);
    assert_eq!(refusal(&machine, IDLE), Refusal::NeedsReset);
    assert_eq!(machine.idle(), (false, vec![]));
}

#[test]
fn a_gpu_that_was_in_mig_mode_is_so_afterwards() {
    for switchable in [true, false] {
        let machine = Machine::new(None);
        machine.idle_is(true, switchable, false, false);
        let results = check(&machine, &[IDLE]);
        assert_eq!(failed(&results), []);
        assert_eq!(machine.idle(), (true, vec![]));
        let carving = results.carvings[0].1.as_ref().unwrap();
        assert_eq!(carving.cuts.len(), 25);
        assert_eq!(carving.switched_off.is_some(), switchable);
    }
}

#[test]
fn an_interrupted_run_leaves_the_gpu_as_it_was() {
    for stop_at in 0..40 {
        let machine = Machine::new(None);
        let looks = AtomicUsize::new(0);
        let results = check_until(&machine, &[IDLE], &|| looks.fetch_add(1, Ordering::Relaxed) >= stop_at);
        assert_eq!(failed(&results), [], "{stop_at}");
        assert_eq!(machine.idle(), (false, vec![]), "{stop_at}");
        let halted = &results.carvings[0].1.as_ref().unwrap().halted;
        assert_eq!(results.interrupted(), *halted == Some(Halt::Interrupted));
        assert_eq!(results.interrupted(), stop_at < 34, "mode on, 25 cuts, 7 fills, mode off: {stop_at}");
    }
}

#[test]
fn a_panic_leaves_the_gpu_as_it_was() {
    let machine = Machine::new(None);
    let looks = AtomicUsize::new(0);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        check_until(&machine, &[IDLE], &|| {
            assert!(looks.fetch_add(1, Ordering::Relaxed) < 5, "as if something went wrong here");
            false
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(machine.idle(), (false, vec![]));
}

#[test]
fn the_report_tells_all_and_no_secret() {
    let results = check(&Machine::new(Some(Lie::OddName)), &[IDLE, BUSY]);
    let text = report::json(&results).unwrap();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["version"], 1);
    assert_eq!(report["driver_version"], "535.261.03");
    assert_eq!(report["gpus"][0]["name"], "NVIDIA H100 80GB HBM3");
    assert_eq!(report["gpus"][0]["profiles"].as_array().unwrap().len(), 7);
    assert!(report["gpus"][1]["error"].as_str().unwrap().contains("lost"));
    assert_eq!(report["gpus"][2]["instances"][1]["placement"]["start"], 4);
    assert_eq!(report["carved"][0]["cuts"].as_array().unwrap().len(), 25);
    assert!(report["carved"][1]["refused"].as_str().unwrap().contains("2 GPU instances"));

    let find = |list: &str, key: &str, value: &str| {
        report[list].as_array().unwrap().iter().find(|entry| entry[key] == value).unwrap()
    };
    let odd = find("assertions", "name", "mig.profile-names");
    assert_eq!((&odd["outcome"], &odd["gpu"]), (&"failed".into(), &IDLE.into()));
    assert_eq!(odd["mismatches"][0]["found"], "\"MIG 1g.10gb\"");
    let create = find("times", "function", "nvmlDeviceCreateGpuInstanceWithPlacement");
    assert!(create["count"].as_u64().unwrap() > 25);
    assert!(create["min_ms"].as_f64() <= create["median_ms"].as_f64());
    assert!(!text.contains("GPU-") && !text.contains("MIG-0000"), "UUIDs of this machine begin so");
}
