//! `make bench`: what a prepare costs, on a real API server, and how large kerf is.
//!
//! The harness plays the kubelet's part of the DRA call (the same socket, the same messages), so that the figures are
//! kerf's own and not those of starting a pod.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use k8s_openapi::api::core::v1::Pod;
use kerf_e2e::{Claim, NodeFile, Part, Request, World, built, claim_ref, eventually};
use serde_json::json;

/// Measures kerf and writes a report.
#[derive(Parser)]
struct Arguments {
    /// Where the report goes; logs are kept beside it.
    #[arg(long, default_value = "target/bench/report.json")]
    report: PathBuf,
    /// How often each single prepare and unprepare is done with a carve latency of 0.
    #[arg(long, default_value_t = 200)]
    rounds: usize,
    /// The same with the latencies of real hardware, where a carve takes seconds.
    #[arg(long, default_value_t = 5)]
    real_rounds: usize,
}

/// GPUs of the simulated node, and claims of a round.
const GPUS: u32 = 8;

/// How often the pods of each part are replaced.
const RENEWALS: usize = 5;

type Figures = BTreeMap<String, f64>;

#[tokio::main]
async fn main() -> Result<()> {
    let Arguments { report, rounds, real_rounds } = Arguments::parse();
    let directory = report.parent().context("the report has a folder")?.to_owned();
    std::fs::create_dir_all(&directory)?;
    let mut figures = Figures::new();
    measure("", json!("none"), rounds, &directory, &mut figures).await?;
    measure("real_", json!("real"), real_rounds, &directory, &mut figures).await?;
    figures.insert("disk_sync_p50_ms".to_owned(), milliseconds(disk_sync(&directory)?));
    for program in ["kerf-kubelet-plugin", "kerf-controller"] {
        let bytes = std::fs::metadata(built(program)?)?.len();
        let name = program.trim_start_matches("kerf-").replace("kubelet-", "");
        figures.insert(format!("{name}_binary_mib"), bytes as f64 / f64::from(1 << 20));
    }
    for figure in figures.values_mut() {
        *figure = (*figure * 100.0).round() / 100.0;
    }
    let text = serde_json::to_string_pretty(&figures)?;
    std::fs::write(&report, format!("{text}\n"))?;
    println!("{text}");
    Ok(())
}

/// How long the machine takes to put one small file on disk: each prepare waits for it once, and machines differ.
fn disk_sync(directory: &Path) -> Result<Duration> {
    let path = directory.join("sync");
    let mut times = Vec::new();
    for _ in 0..200 {
        let mut file = File::create(&path)?;
        file.write_all(&[b'x'; 2048])?;
        let begin = Instant::now();
        file.sync_all()?;
        times.push(begin.elapsed());
    }
    std::fs::remove_file(&path)?;
    times.sort();
    Ok(times[times.len() / 2])
}

/// One kind of device on each of the eight GPUs.
struct Kind {
    name: &'static str,
    /// What follows the GPU's name in the device's.
    suffix: &'static str,
}

const KINDS: [Kind; 2] = [Kind { name: "whole", suffix: "" }, Kind { name: "1g10gb", suffix: "-mig-1g10gb-0" }];

async fn measure(
    prefix: &str,
    latency: serde_json::Value,
    rounds: usize,
    directory: &Path,
    figures: &mut Figures,
) -> Result<()> {
    let node = NodeFile::new().gpus("h100-80gb", GPUS).latency(latency);
    let mut world = World::start("bench", &node, directory).await?;
    world.published().await?;
    let devices = world.devices().await?;
    let gpus: Vec<&String> = devices.iter().filter(|name| !name.contains("-mig-")).collect();
    ensure!(gpus.len() == GPUS as usize, "{gpus:?}");
    let mut kubelet = world.kubelet().await?;

    for Kind { name, suffix } in KINDS {
        let mut claims = Vec::new();
        for (index, gpu) in gpus.iter().enumerate() {
            let claim = format!("{name}-{index}");
            world.create(&Claim::of(&[Request::gpu("gpu")]).object(&claim)).await?;
            let uid = world.allocate(&claim, &[("gpu", &format!("{gpu}{suffix}"))], &[]).await?;
            claims.push(claim_ref(world.namespace(), &claim, &uid));
        }
        let (mut prepare, mut unprepare) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let claim = vec![claims[round % claims.len()].clone()];
            let begin = Instant::now();
            let answers = kubelet.prepare(claim.clone()).await?;
            prepare.push(begin.elapsed());
            ensure!(answers.values().all(|answer| answer.error.is_empty()), "{answers:?}");
            let begin = Instant::now();
            let answers = kubelet.unprepare(claim).await?;
            unprepare.push(begin.elapsed());
            ensure!(answers.values().all(|answer| answer.error.is_empty()), "{answers:?}");
        }
        for (act, times) in [("prepare", &mut prepare), ("unprepare", &mut unprepare)] {
            times.sort();
            figures.insert(format!("{prefix}{name}_{act}_p50_ms"), milliseconds(times[times.len() / 2]));
            figures.insert(format!("{prefix}{name}_{act}_p99_ms"), milliseconds(times[times.len() * 99 / 100]));
        }
        let (mut prepare, mut unprepare) = (Vec::new(), Vec::new());
        for _ in 0..(rounds / 10).max(1) {
            prepare.push(round(&world, &claims, Act::Prepare).await?);
            unprepare.push(round(&world, &claims, Act::Unprepare).await?);
        }
        for (act, times) in [("prepare", &mut prepare), ("unprepare", &mut unprepare)] {
            times.sort();
            figures.insert(format!("{prefix}round8_{name}_{act}_ms"), milliseconds(times[times.len() / 2]));
        }
    }
    figures.insert(format!("{prefix}install_to_published_s"), world.installed_in.as_secs_f64());
    for (name, part) in [("plugin", Part::KubeletPlugin), ("controller", Part::Controller)] {
        // Of several controllers the one that leads is the largest.
        let kib = world.kerf.resident_kib(part).await?.into_iter().max().unwrap_or_default();
        figures.insert(format!("{prefix}{name}_rss_mib"), kib as f64 / 1024.0);
        let renewed = renewal(&mut world, part).await?;
        figures.insert(format!("{prefix}{name}_renewed_to_ready_s"), renewed.as_secs_f64());
    }
    world.end().await
}

/// From the deletion of a part's pods until those that Kubernetes made in their place are ready, their image being there.
async fn renewal(world: &mut World, part: Part) -> Result<Duration> {
    let mut times = Vec::new();
    for _ in 0..RENEWALS {
        let former: BTreeSet<_> = world.kerf.pods(part).await?.into_iter().map(|pod| pod.metadata.uid).collect();
        let begin = Instant::now();
        world.kerf.renew(part).await?;
        eventually("the new pods are ready", Duration::from_secs(60), async || {
            let pods = world.kerf.pods(part).await?;
            let new = pods.iter().all(|pod| !former.contains(&pod.metadata.uid) && is_ready(pod));
            Ok((new && pods.len() == former.len()).then_some(()))
        })
        .await?;
        times.push(begin.elapsed());
    }
    times.sort();
    Ok(times[times.len() / 2])
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().filter_map(|status| status.conditions.as_ref()).flatten();
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

#[derive(Clone, Copy)]
enum Act {
    Prepare,
    Unprepare,
}

/// All claims at once, each in a call of its own as the kubelet would for eight pods; how long until the last is done.
async fn round(world: &World, claims: &[kerf_proto::dra::v1::Claim], act: Act) -> Result<Duration> {
    let mut kubelets = Vec::new();
    for _ in claims {
        kubelets.push(world.kubelet().await?);
    }
    let begin = Instant::now();
    let calls = claims.iter().zip(&mut kubelets).map(|(claim, kubelet)| async move {
        let claim = vec![claim.clone()];
        let errors: Vec<String> = match act {
            Act::Prepare => kubelet.prepare(claim).await?.into_values().map(|answer| answer.error).collect(),
            Act::Unprepare => kubelet.unprepare(claim).await?.into_values().map(|answer| answer.error).collect(),
        };
        ensure!(errors.iter().all(String::is_empty), "{errors:?}");
        anyhow::Ok(())
    });
    futures::future::try_join_all(calls).await?;
    Ok(begin.elapsed())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
