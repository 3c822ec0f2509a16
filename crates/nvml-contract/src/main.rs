//! `nvml-contract`: checks what kerf relies on NVML for, on this machine's driver.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use kerf_nvml::{DriverRoot, Library, PciAddress};
use kerf_nvml_contract::carve::Patience;
use kerf_nvml_contract::{Measured, Outcome, Setup, Summary, Times, Verdict, report, run};
use tokio::signal::unix::{SignalKind, signal};

/// Checks what kerf relies on NVML for. Changes nothing, unless a GPU is named to be carved.
///
/// Ends with 0 when everything held, 1 when something failed, 2 when a GPU to be carved was refused or NVML cannot be
/// used, 130 when interrupted.
#[derive(Parser)]
#[command(name = "nvml-contract", version)]
struct Args {
    /// Where the NVIDIA driver is.
    #[arg(long, default_value = "/")]
    driver_root: PathBuf,

    /// Also carve this idle GPU in every way, and leave it as it was found. It takes minutes and needs root; whatever else
    /// carves GPUs on this machine must be stopped. May be given several times.
    #[arg(long, value_name = "PCI ADDRESS")]
    carve: Vec<PciAddress>,

    /// Write a report (JSON) for kerf's developers. It has no UUIDs, serial numbers and host names.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

fn main() -> ExitCode {
    match check(&Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("nvml-contract: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn check(args: &Args) -> Result<ExitCode> {
    // Before anything is carved: what cannot be written must not be found out afterwards.
    let report = match &args.report {
        Some(path) => Some((path, File::create(path).with_context(|| format!("cannot write {}", path.display()))?)),
        None => None,
    };
    let root = DriverRoot::at(&args.driver_root);
    let start = Instant::now();
    let library = Library::open(&root)?;
    let opening = Times::once(start.elapsed());
    let stop = interrupted()?;

    let mut results = run(&Setup {
        nvml: &library,
        kernel: &root,
        carve: &args.carve,
        patience: Patience::default(),
        stop: &|| stop.load(Ordering::Relaxed),
        judged: &tell,
        doing: &|gpu, what| eprintln!("{gpu}: {what}"),
    });
    let measured = Measured { function: "nvmlInit_v2", with: "loading the library", succeeded: true };
    results.times.push((measured, opening));
    let Summary { held, failed, skipped } = results.summary();
    println!("\n{held} held, {failed} failed, {skipped} skipped");
    if let Some((path, mut file)) = report {
        file.write_all(report::json(&results)?.as_bytes())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(match failed {
        0 if results.interrupted() => ExitCode::from(130),
        0 if results.refused() => ExitCode::from(2),
        0 => ExitCode::SUCCESS,
        _ => ExitCode::from(1),
    })
}

fn tell(verdict: &Verdict) {
    let Verdict { name, relied_on_for, gpu, outcome } = verdict;
    let gpu = gpu.as_ref().map_or_else(String::new, |gpu| format!("{gpu} "));
    match outcome {
        Outcome::Held => println!("{gpu}{name}: ok"),
        Outcome::Skipped(why) => println!("{gpu}{name}: skipped: {why}"),
        Outcome::Failed(mismatches) => {
            let first = mismatches.first().map_or_else(String::new, |mismatch| {
                format!("expected {}, found {}", mismatch.expected, mismatch.found)
            });
            let more = match mismatches.len() {
                0 | 1 => String::new(),
                count => format!(" (and {} more)", count - 1),
            };
            println!("{gpu}{name}: FAILED: {first}{more}; kerf relies on it: {relied_on_for}");
        }
    }
}

/// Becomes true at the first SIGINT or SIGTERM: carving ends after the cut in progress and cleans up. At the second the
/// program ends as it stands.
fn interrupted() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no signals to be had")?;
    let (mut interrupts, mut terminations) = {
        let _context = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    thread::spawn(move || {
        runtime.block_on(async {
            loop {
                tokio::select! {
                    _ = interrupts.recv() => {}
                    _ = terminations.recv() => {}
                }
                if flag.swap(true, Ordering::Relaxed) {
                    eprintln!("ended at once; GPU instances may be left: look with nvidia-smi mig -lgi");
                    std::process::exit(130);
                }
                eprintln!("ending after the cut in progress, then cleaning up; once more ends at once");
            }
        });
    });
    Ok(stop)
}
