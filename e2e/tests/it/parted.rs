//! kerf reads the file of mig-parted as mig-parted does. The genuine program is the judge.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use kerf_e2e::{Neighbours, NodeFile, Simulation, neighbour};
use kerf_mig::parted::{Arrangement, Layouts, Ruling};
use kerf_mig::product::Product;
use serde_json::{Value, json};

const PARTED: &str = "mig-parted/nvidia-mig-parted";

/// Who takes a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takers {
    Both,
    Nobody,
    /// mig-parted passes over what kerf calls a mistake.
    PartedAlone,
    /// What is quoted is the number it reads as; and of a profile that no GPU has, kerf says so where the layout is chosen, so that
    /// the others of the file go on serving.
    KerfAlone,
}

/// Whether mig-parted takes the file, and finds this layout in it.
fn judge(text: &str, layout: &str) -> Result<bool> {
    let mut command = Command::new(neighbour(PARTED)?);
    command.args(["assert", "--valid-config", "-f", "-", "-c", layout]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    child.stdin.take().context("there is an input")?.write_all(text.as_bytes())?;
    Ok(child.wait()?.success())
}

fn kerf_takes(text: &str, layout: &str) -> bool {
    Layouts::parse(text).is_ok_and(|layouts| layouts.names().any(|name| name == layout))
}

#[test]
fn both_take_and_refuse_the_same_files() -> Result<()> {
    let rule = |rule: &str| format!("version: v1\nmig-configs:\n  one:\n    - {{{rule}}}\n");
    let good = "devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}";
    let cases = [
        (rule(good), Takers::Both),
        (rule("devices: [0, 1, 1], mig-enabled: true, mig-devices: {1g.10gb: 7, 1g.10gb+me: 0}"), Takers::Both),
        (rule("devices: [], mig-enabled: true, mig-devices: {}"), Takers::Both),
        (rule("devices: all, mig-enabled: false, mig-devices: {}"), Takers::Both),
        (rule("devices: all, mig-enabled: yes, mig-devices: {1g.10gb: 7}"), Takers::Both),
        (rule("devices: all, mig-enabled: false, device-filter: 0x2330"), Takers::Nobody),
        (rule(&format!("{good}, device-filter: '0x233010de'")), Takers::Both),
        (rule(&format!("{good}, device-filter: ['0x233010DE', '0x20B210DE']")), Takers::Both),
        (rule(&format!("{good}, device-filter: []")), Takers::Both),
        (rule(&format!("{good}, device-filter: ''")), Takers::Both),
        (rule(&format!("{good}, device-filter: null")), Takers::Both),
        // Mistakes.
        (String::new(), Takers::Nobody),
        ("[".to_owned(), Takers::Nobody),
        ("version: v1".to_owned(), Takers::Nobody),
        ("version: v1\nmig-configs: {}".to_owned(), Takers::Nobody),
        ("version: v1\nmig-configs: {one: []}".to_owned(), Takers::Nobody),
        (rule(good).replace("v1", "v2"), Takers::Nobody),
        (rule(good).replace("version: v1\n", ""), Takers::Nobody),
        (rule(good).replace("mig-configs", "mig-config"), Takers::Nobody),
        (format!("{}more: 1\n", rule(good)), Takers::Nobody),
        (rule(&format!("{good}, more: 1")), Takers::Nobody),
        (rule(&good.replace("all", "some")), Takers::Nobody),
        (rule(&good.replace("all", "0")), Takers::Nobody),
        (rule(&good.replace("all", "['0']")), Takers::Nobody),
        (rule(&good.replace('7', "-1")), Takers::Nobody),
        (rule(&good.replace('7', "0")), Takers::Nobody),
        (rule(&good.replace('7', "some")), Takers::Nobody),
        (rule("mig-enabled: true, mig-devices: {1g.10gb: 7}"), Takers::Nobody),
        (rule("devices: all, mig-devices: {1g.10gb: 7}"), Takers::Nobody),
        (rule("devices: all, mig-enabled: true"), Takers::Nobody),
        (rule("devices: all, mig-enabled: true, mig-devices: null"), Takers::Nobody),
        (rule("devices: all, mig-enabled: false, mig-devices: {1g.10gb: 7}"), Takers::Nobody),
        (rule("devices: all, mig-enabled: false, mig-devices: {1g.10gb: 0}"), Takers::Nobody),
        // Where they part.
        (rule(&format!("{good}, mig-enabled: true")), Takers::PartedAlone),
        (rule(&format!("{good}, device-filter: ['0x10DE2330']")), Takers::PartedAlone),
        (rule(&format!("{good}, device-filter: ['H100']")), Takers::PartedAlone),
        (rule(&good.replace("1g.10gb", "half")), Takers::KerfAlone),
        (rule(&good.replace("true", "'true'")), Takers::KerfAlone),
        (rule(&good.replace('7', "'7'")), Takers::KerfAlone),
    ];
    for (text, expected) in cases {
        let takers = match (judge(&text, "one")?, kerf_takes(&text, "one")) {
            (true, true) => Takers::Both,
            (false, false) => Takers::Nobody,
            (true, false) => Takers::PartedAlone,
            (false, true) => Takers::KerfAlone,
        };
        ensure!(takers == expected, "{takers:?}, and not {expected:?}: {text}\n{:?}", Layouts::parse(&text).err());
    }
    Ok(())
}

/// The file of the article that kerf is measured by, from its ConfigMap.
fn article() -> Result<String> {
    let object: Value = serde_saphyr::from_str(include_str!("../files/mig-config.yaml"))?;
    Ok(object["data"]["config.yaml"].as_str().context("it has the key")?.to_owned())
}

/// A file of NVIDIA's mig-parted, in the version that is built.
fn shipped(path: &str) -> Result<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("neighbours/mig-parted");
    let output = Command::new("go")
        .args(["mod", "download", "-json", "github.com/NVIDIA/mig-parted"])
        .current_dir(folder)
        .env("GOWORK", "off")
        .output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let module: Value = serde_json::from_slice(&output.stdout)?;
    let path = PathBuf::from(module["Dir"].as_str().context("a downloaded module has a folder")?).join(path);
    std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// What there is of NVIDIA's own, every layout of it.
#[test]
fn both_read_nvidias_files() -> Result<()> {
    for file in
        ["deployments/systemd/config-default.yaml", "examples/config.yaml", "examples/dgx-station-80gb-config.yaml"]
    {
        let text = shipped(file)?;
        let layouts = Layouts::parse(&text).with_context(|| file.to_owned())?;
        let object: Value = serde_saphyr::from_str(&text)?;
        let names = object["mig-configs"].as_object().context("it has layouts")?;
        ensure!(layouts.names().eq(names.keys().map(String::as_str)) && !names.is_empty(), "{file}: {names:?}");
        for name in names.keys() {
            ensure!(judge(&text, name)?, "{file}: {name}");
        }
    }
    Ok(())
}

/// mig-parted makes of the GPUs what kerf reads that a layout says, and refuses what kerf finds no place for.
#[tokio::test]
async fn what_mig_parted_makes_is_what_kerf_reads() -> Result<()> {
    let products = ["h100-80gb", "a30"];
    let mut node = NodeFile::new();
    for product in products {
        node = node.gpu(json!({ "product": product, "mig": { "current": true, "pending": true } }));
    }
    let directory = std::env::temp_dir().join(format!("kerf-parted-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let simulation = Simulation::start(&node, &directory, &directory).await?;
    let outcome = compare(&simulation, &products);
    simulation.stop().await?;
    std::fs::remove_dir_all(&directory)?;
    outcome
}

fn compare(simulation: &Simulation, products: &[&str]) -> Result<()> {
    let beside = Neighbours::alone(simulation)?;
    let products: Vec<&Product> =
        products.iter().map(|key| Product::by_key(key).context("it is known")).collect::<Result<_>>()?;
    let default = shipped("deployments/systemd/config-default.yaml")?;
    let cases = [
        (&default, "all-balanced"),
        (&default, "all-enabled"),
        (&default, "all-1g.10gb"),
        (&default, "all-1g.6gb.me"),
        (&article()?, "all-2g.20gb"),
        (&article()?, "mixed"),
    ];
    let mut now: Vec<Arrangement> = vec![Arrangement::Partitions(BTreeMap::new()); products.len()];
    for (text, name) in cases {
        let layouts = Layouts::parse(text)?;
        let mut wanted = now.clone();
        let (mut fits, mut all) = (true, true);
        for (position, product) in (0..).zip(&products) {
            match layouts.ruling(name, position, model(product)).context("the layout is there")? {
                Ruling::Silent => all = false,
                Ruling::Is(arrangement) => {
                    if let Arrangement::Partitions(partitions) = arrangement {
                        fits &= product.geometry().place(partitions).is_ok();
                    }
                    wanted[position as usize] = arrangement.clone();
                }
                Ruling::UnknownModel => anyhow::bail!("the model is known"),
            }
        }
        let file = beside.directory().join("config.yaml");
        std::fs::write(&file, text)?;
        let file = file.to_str().context("the path is text")?;
        let applied = beside.run(PARTED, &["apply", "-f", file, "-c", name]);
        ensure!(applied.is_ok() == fits, "{name}: kerf finds a place: {fits}, mig-parted: {applied:?}");
        let found = Layouts::parse(&beside.run(PARTED, &["export"])?)?;
        now = (0..)
            .zip(&products)
            .map(|(position, product)| match found.ruling("current", position, model(product)) {
                Some(Ruling::Is(arrangement)) => Ok(arrangement.clone()),
                other => anyhow::bail!("an export has every GPU: {other:?}"),
            })
            .collect::<Result<_>>()?;
        if fits {
            ensure!(now == wanted, "{name}: mig-parted made {now:?}, kerf reads {wanted:?}");
            // To mig-parted a layout that is silent about a GPU is never the one that is applied.
            let asserted = beside.run(PARTED, &["assert", "-f", file, "-c", name]);
            ensure!(asserted.is_ok() == all, "{name}: {asserted:?}");
        }
    }
    Ok(())
}

/// The word by which mig-parted's filters name a product.
fn model(product: &Product) -> Option<u32> {
    product.pci_device_ids.first().map(|id| u32::from(*id) << 16 | 0x10de)
}
