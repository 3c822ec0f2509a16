//! What the tests of both programs share: asking a program over HTTP, reading its JSON log, and comparing
//! `docs/metrics.md` with what it has registered. Included by their test binaries, part of no library.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::Value;

/// The status and the body that a program answers with.
pub(crate) fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// The lines of a log so far. Each is a JSON object with all that every line has.
pub(crate) fn lines(log: &str) -> Vec<Value> {
    let whole = &log[..log.rfind('\n').map_or(0, |end| end + 1)];
    let parse = |line: &str| {
        let parsed: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        for name in ["timestamp", "level", "message", "target"] {
            assert!(parsed[name].is_string(), "no {name}: {line}");
        }
        parsed
    };
    whole.lines().map(parse).collect()
}

/// Where a program serves, once its log tells.
pub(crate) fn http_address(log: &str) -> Option<SocketAddr> {
    let lines = lines(log);
    let serving = lines.iter().find(|line| line["message"] == "serving /healthz, /readyz and /metrics")?;
    Some(serving["address"].as_str().unwrap().parse().unwrap())
}

/// Fails unless the page names everything that a program waits for, given what `/readyz` answers.
pub(crate) fn is_named_on_page(waiting: &str) {
    let page = page();
    for what in waiting.trim().strip_prefix("waiting for: ").unwrap().split(", ") {
        assert!(page.contains(&format!("`{what}`")), "docs/metrics.md should say that {what} is waited for");
    }
}

/// Fails unless the page lists for a program exactly what it registers: name, type, labels, unit and meaning.
pub(crate) fn compare_with_page(program: &str, registry: &Registry) {
    let page = page();
    let (begin, end) = (format!("<!-- {program}:begin -->\n"), format!("<!-- {program}:end -->"));
    let listed = page.split_once(&begin).and_then(|(_, rest)| Some(rest.split_once(&end)?.0)).unwrap_or_default();
    let mut registered = String::new();
    encode(&mut registered, registry).unwrap();
    let registered = table(&registered);
    assert!(listed.trim() == registered.trim(), "docs/metrics.md should say of {program}:\n\n{registered}");
}

fn page() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md")).unwrap()
}

/// Metrics in OpenMetrics text as a table of the page. Each must have a series: the labels are taken from there.
fn table(metrics: &str) -> String {
    let mut table = "| Metric | Type | Labels | Unit | Meaning |\n|---|---|---|---|---|\n".to_owned();
    for family in metrics.split("# HELP ").skip(1) {
        let mut family = family.lines();
        let (name, help) = family.next().unwrap().split_once(' ').unwrap();
        let (mut kind, mut unit, mut series) = ("", "", None);
        let mut labels = BTreeSet::new();
        for line in family {
            match line.strip_prefix("# ").and_then(|line| line.split_once(' ')) {
                Some(("TYPE", rest)) => kind = rest.split(' ').nth(1).unwrap(),
                Some(("UNIT", rest)) => unit = rest.split(' ').nth(1).unwrap(),
                Some(_) => panic!("{line}"),
                None if line == "# EOF" => {}
                None => {
                    let end = line.find(['{', ' ']).unwrap();
                    series = Some(&line[..end]);
                    let inside = line[end..].strip_prefix('{').and_then(|rest| rest.rsplit_once('}'));
                    let pairs = inside.map_or("", |(pairs, _)| pairs).split("\",");
                    labels.extend(pairs.filter_map(|pair| pair.split_once('=')).map(|(name, _)| name.to_owned()));
                }
            }
        }
        labels.remove("le");
        let series = series.unwrap_or_else(|| panic!("{name} has no series"));
        let shown = if kind == "histogram" { name } else { series };
        let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
        table.push_str(&format!("| `{shown}` | {kind} | {} | {unit} | {help} |\n", labels.join(", ")));
    }
    table
}
