//! ARCHITECTURE.md tells what kerf leaves in the file system; a run is the judge.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use kerf_e2e::{Claim, NodeFile, Request, scenario};

/// A row of the table.
struct Row {
    /// The forms that the path may have.
    patterns: Vec<String>,
    seen: bool,
}

#[tokio::test]
async fn the_file_table_in_architecture_is_what_a_run_leaves() {
    scenario("file_table", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        world.run_ready("one", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        let node = world.cluster.node()?;
        let mut rows = table()?;
        let mut found = BTreeSet::new();
        let registry = node.kubelet_root.join("plugins_registry");
        for (root, name) in [(&node.kubelet_root, "<kubelet>"), (&node.cdi_root, "<cdi>"), (&node.hook_root, "<hooks>")]
        {
            let roots = [node.cdi_root.clone(), node.hook_root.clone()];
            for directory in [registry.clone(), node.kubelet_root.join("plugins")].into_iter().chain(roots) {
                if let Ok(inside) = directory.strip_prefix(root) {
                    collect(&directory, &Path::new(name).join(inside), &mut found)?;
                }
            }
        }
        for path in &found {
            let row = rows.iter_mut().find(|row| row.patterns.iter().any(|pattern| fits(pattern, path)));
            row.with_context(|| format!("{path} is not in ARCHITECTURE.md"))?.seen = true;
        }
        let unseen: Vec<_> = rows.iter().filter(|row| !row.seen).map(|row| &row.patterns).collect();
        ensure!(unseen.is_empty(), "in ARCHITECTURE.md, but not left by a run: {unseen:?}; found {found:?}");
        Ok(())
    })
    .await;
}

/// The first column of the table between the marks.
fn table() -> Result<Vec<Row>> {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../ARCHITECTURE.md"))?;
    let table = page.split("<!-- files:begin -->").nth(1).context("the table's begin mark")?;
    let table = table.split("<!-- files:end -->").next().context("the table's end mark")?;
    let rows: Vec<Row> = table
        .lines()
        .filter(|line| line.starts_with("| `"))
        .filter_map(|line| line.split(" | ").next())
        .map(|paths| paths.split('`').filter(|path| path.contains('/')).map(str::to_owned).collect())
        .map(|patterns| Row { patterns, seen: false })
        .collect();
    ensure!(rows.len() > 3, "the table has rows");
    Ok(rows)
}

/// Everything under `directory`, but the directory itself, under the name `shown`; directories end in `/`.
fn collect(directory: &Path, shown: &Path, found: &mut BTreeSet<String>) -> Result<()> {
    for entry in std::fs::read_dir(directory).with_context(|| format!("{}", directory.display()))? {
        let entry = entry?;
        let path: PathBuf = shown.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            found.insert(format!("{}/", path.display()));
            collect(&entry.path(), &path, found)?;
        } else {
            found.insert(path.display().to_string());
        }
    }
    Ok(())
}

/// Whether a path has the shape of a pattern: placeholders but the three roots stand for anything without a slash.
fn fits(pattern: &str, path: &str) -> bool {
    let pattern = pattern.replace("<driver>", "gpu.nvidia.com");
    let mut rest = path;
    let mut parts = pattern.split_inclusive('/');
    parts.all(|part| {
        let Some(piece) = rest.split_inclusive('/').next() else { return false };
        rest = &rest[piece.len()..];
        match (part.find('<'), part.find('>')) {
            (Some(open), Some(close)) if !["<kubelet>/", "<cdi>/", "<hooks>/"].contains(&part) => {
                let (head, tail) = (&part[..open], &part[close + 1..]);
                piece.len() > head.len() + tail.len() && piece.starts_with(head) && piece.ends_with(tail)
            }
            _ => piece == part,
        }
    }) && rest.is_empty()
}

#[test]
fn patterns_fit_what_they_mean() {
    for (pattern, path, wanted) in [
        ("<cdi>/a_<claim uid>.json", "<cdi>/a_1-2.json", true),
        ("<cdi>/a_<claim uid>.json", "<cdi>/b_1-2.json", false),
        ("<cdi>/a_<claim uid>.json", "<cdi>/a_1/2.json", false),
        ("<kubelet>/a/<driver>-<pod uid>@reg.sock", "<kubelet>/a/gpu.nvidia.com-1-2@reg.sock", true),
        ("<kubelet>/a/<driver>-<pod uid>@reg.sock", "<kubelet>/a/gpu.nvidia.com@reg.sock", false),
        ("<kubelet>/plugins/<driver>/", "<kubelet>/plugins/gpu.nvidia.com/", true),
        ("<kubelet>/plugins/<driver>/", "<kubelet>/plugins/other/", false),
        ("<kubelet>/plugins/<driver>/", "<kubelet>/plugins/gpu.nvidia.com/x", false),
    ] {
        assert_eq!(fits(pattern, path), wanted, "{pattern} and {path}");
    }
}
