//! The dashboard and the alerts that come with podfs.

use std::fs;
use std::path::{Path, PathBuf};

use podfs::metrics::{Family, FamilyType};
use serde_json::Value;

use crate::common::outcome::finish;
use crate::metrics::scrape::promtool;

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/examples").join(name)
}

/// The expressions of the dashboard, as Grafana sends them to Prometheus.
fn of_dashboard() -> Vec<String> {
    let text = fs::read_to_string(example("grafana.json")).expect("a dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let expression = |target: &Value| target["expr"].as_str().expect("a text").replace("$__rate_interval", "5m");
    let all: Vec<_> = targets.map(expression).collect();
    assert!(all.len() > 10, "{all:?}");
    all
}

/// The names of podfs' metrics in a text.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("podfs_") || word.starts_with("storage_operation_"))
}

#[track_caller]
fn assert_names_metrics(text: &str) {
    for name in names(text) {
        let of_histogram = ["_bucket", "_sum", "_count"].iter().find_map(|end| Family::find(name.strip_suffix(end)?));
        let exists = match of_histogram {
            Some(family) => family.kind == FamilyType::Histogram,
            None => Family::find(name).is_some_and(|family| family.kind != FamilyType::Histogram),
        };
        assert!(exists, "there is no metric {name}");
    }
}

#[test]
fn dashboard_and_alerts_use_existing_metrics() {
    let alerts = fs::read_to_string(example("alerts.yaml")).expect("alerts");
    assert!(names(&alerts).count() > 10);
    assert_names_metrics(&alerts);
    assert_names_metrics(&fs::read_to_string(example("alerts_test.yaml")).expect("tests"));
    assert_names_metrics(&fs::read_to_string(example("grafana.json")).expect("a dashboard"));
}

#[test]
fn prometheus_parses_the_queries_of_the_dashboard() {
    let rule = |(number, expression): (u32, String)| serde_json::json!({"record": format!("rule_{number}"), "expr": expression});
    let rules: Vec<_> = (0..).zip(of_dashboard()).map(rule).collect();
    let groups = serde_json::json!({"groups": [{"name": "dashboard", "rules": rules}]});
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("rules.yaml");
    fs::write(&file, groups.to_string()).expect("written");
    let outcome = finish(promtool().args(["check", "rules"]).arg(&file));
    assert_eq!(outcome.code, Some(0), "{}{}", outcome.stdout, outcome.stderr);
}

#[test]
fn each_alert_is_raised_for_its_reason_and_for_no_other() {
    let outcome = finish(promtool().args(["check", "rules", "--lint-fatal"]).arg(example("alerts.yaml")));
    assert_eq!(outcome.code, Some(0), "{}{}", outcome.stdout, outcome.stderr);
    let outcome = finish(promtool().args(["test", "rules"]).arg(example("alerts_test.yaml")));
    assert_eq!(outcome.code, Some(0), "{}{}", outcome.stdout, outcome.stderr);
    // The tests name every alert.
    let alerts = fs::read_to_string(example("alerts.yaml")).expect("alerts");
    let tests = fs::read_to_string(example("alerts_test.yaml")).expect("tests");
    let named: Vec<_> = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(named.len() > 5);
    assert!(named.iter().all(|name| tests.contains(&format!("alertname=\"{name}\""))), "{named:?}");
}
