//! Anything may happen, in any order: random operations on a node with four GPUs, against a small model of what must be true
//! after each of them.
//!
//! `KERF_MODEL_OPS` says how many operations (600), `KERF_SEED` where the random numbers start. A sequence that fails is
//! played again with less and less in it, and what is left of it is printed with its seed.

mod op;
mod state;
mod world;

use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use kerf_kubelet_plugin::engine::ForeignPolicy;
use op::{Op, Random};
use world::World;

use crate::settings;

/// Operations that are played on one node, before everything is released and looked for.
const SEQUENCE: usize = 60;

/// How long a failed sequence is made shorter.
const SHRINKING: Duration = Duration::from_secs(120);

#[test]
fn whatever_happens_the_node_is_as_the_model_says() {
    let seed = u64::try_from(settings::seed()).unwrap();
    let wanted = settings::number("KERF_MODEL_OPS").unwrap_or(600);
    let started = Instant::now();
    let (mut played, mut seeds) = (0, 0);
    let mut outcomes = world::Counts::default();
    while played < wanted {
        let seed = seed + seeds;
        let mut random = Random::new(seed);
        let operations: Vec<Op> = (0..SEQUENCE.min(wanted - played)).map(|_| Op::random(&mut random)).collect();
        match play(policy(seed), &operations) {
            Ok(counts) => outcomes.add(&counts),
            Err(failure) => panic!("{}", minimise(seed, operations, failure)),
        }
        played += operations.len();
        seeds += 1;
    }
    println!("{played} operations with seeds {seed} to {} in {:?}: {outcomes:?}", seed + seeds - 1, started.elapsed());
    outcomes.assert_that_all_happened(played);
}

/// Half of all nodes have the default.
fn policy(seed: u64) -> ForeignPolicy {
    [ForeignPolicy::Keep, ForeignPolicy::Adopt, ForeignPolicy::Keep, ForeignPolicy::Delete][(seed % 4) as usize]
}

/// Plays operations on a new node, and releases everything in the end.
fn play(policy: ForeignPolicy, operations: &[Op]) -> Result<world::Counts, String> {
    let mut world = World::new(policy);
    for (number, operation) in operations.iter().enumerate() {
        let context = || format!("after operation {number}, {operation:?}");
        unless_it_panics(context, || world.act(operation).and_then(|()| world.check()))?;
    }
    unless_it_panics(|| "in the end".to_owned(), || world.end())?;
    Ok(world.counts)
}

fn unless_it_panics(context: impl Fn() -> String, act: impl FnOnce() -> anyhow::Result<()>) -> Result<(), String> {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(format!("{}: {error:#}", context())),
        Err(why) => Err(format!("{}: it panics: {}", context(), text(&*why))),
    }
}

fn text(panic: &(dyn std::any::Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text")
}

/// Leaves out what the failure does not need.
fn minimise(seed: u64, mut operations: Vec<Op>, mut failure: String) -> String {
    let started = Instant::now();
    let mut size = operations.len().div_ceil(2);
    loop {
        let mut start = 0;
        let before = operations.len();
        while start < operations.len() && started.elapsed() < SHRINKING {
            let mut fewer = operations.clone();
            fewer.drain(start..(start + size).min(fewer.len()));
            match play(policy(seed), &fewer) {
                Err(why) => (operations, failure) = (fewer, why),
                Ok(_) => start += size,
            }
        }
        if started.elapsed() >= SHRINKING || (size == 1 && operations.len() == before) {
            break;
        }
        size = size.div_ceil(2);
    }
    let mut report = format!("KERF_SEED={seed}: {failure}\nwith {} operations:\n", operations.len());
    operations.iter().for_each(|operation| writeln!(report, "  {operation:?}").unwrap());
    report
}
