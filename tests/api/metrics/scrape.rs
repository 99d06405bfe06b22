//! The metrics of a scrape, read by the parsers of Prometheus.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::common::outcome::{Outcome, finish};
use crate::common::{Fixture, eventually};

/// Metrics as OpenMetrics text.
pub struct Scrape(pub String);

/// A program that parses OpenMetrics strictly, and prints all samples.
const STRICT: &str = "import json, sys\n\
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse\n\
    families = parse(sys.stdin.read())\n\
    print(json.dumps([[s.name, s.labels, s.value] for family in families for s in family.samples]))";

impl Fixture {
    /// `podfs metrics`, with these arguments.
    #[track_caller]
    pub fn metrics(&self, arguments: &[&str]) -> Outcome {
        finish(self.operator("metrics").args(arguments))
    }

    /// The metrics of all pods.
    #[track_caller]
    pub fn scrape(&self) -> Scrape {
        let outcome = self.metrics(&["--all"]);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        Scrape(outcome.stdout)
    }

    /// Scrapes until the value of a metric `holds`. Returns the scrape.
    #[track_caller]
    pub fn scrape_until(&self, name: &str, labels: &[(&str, &str)], holds: impl Fn(f64) -> bool) -> Scrape {
        let mut last = None;
        eventually(&format!("{name} {labels:?} has the expected value"), || {
            let scrape = self.scrape();
            let is_expected = scrape.find(name, labels).is_some_and(&holds);
            last = Some(scrape);
            is_expected
        });
        last.expect("the closure has set it")
    }
}

impl Scrape {
    /// The value of the metric of this name with all of these labels. Their values must need no escapes.
    #[track_caller]
    pub fn find(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels: Vec<_> = labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
        let matches = |line: &&str| {
            line.strip_prefix(name).is_some_and(|end| end.starts_with('{')) && labels.iter().all(|l| line.contains(l))
        };
        let mut lines = self.0.lines().filter(matches);
        let value = lines.next()?.rsplit(' ').next()?.parse().ok();
        assert_eq!(lines.next(), None, "{name} {labels:?} has two lines");
        value
    }

    #[track_caller]
    pub fn get(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.find(name, labels).unwrap_or_else(|| panic!("{name} {labels:?} is not in:\n{}", self.0))
    }

    /// The families of the scrape.
    pub fn families(&self) -> BTreeSet<String> {
        let types = self.0.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let name = |family: &str| match family.split_once(' ') {
            Some((name, "counter")) => format!("{name}_total"),
            Some((name, _)) => name.to_owned(),
            None => panic!("{family:?} has no type"),
        };
        types.map(name).collect()
    }

    /// Parses the metrics with the strict parser of Prometheus' client for Python. Returns name, labels and value of
    /// each sample.
    #[track_caller]
    pub fn strictly(&self) -> Vec<(String, Value, f64)> {
        let mut command = Command::new("/usr/bin/python3");
        let outcome = finish_with_input(command.arg("-c").arg(STRICT), &self.0);
        assert_eq!(outcome.code, Some(0), "{}\n{}", outcome.stderr, self.0);
        serde_json::from_str(&outcome.stdout).expect("samples")
    }
}

/// Checks metrics in the older text format with promtool.
#[track_caller]
pub fn check_text(text: &str) {
    let outcome = finish_with_input(promtool().args(["check", "metrics"]), text);
    assert_eq!((outcome.code, outcome.stderr.as_str(), outcome.stdout.as_str()), (Some(0), "", ""), "{text}");
}

/// promtool, as tests/run unpacks it.
pub fn promtool() -> Command {
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).with_file_name("promtool").join("usr/bin/promtool");
    assert!(program.exists(), "{} is missing; tests/run fetches it", program.display());
    Command::new(program)
}

/// Runs a command on this standard input.
#[track_caller]
fn finish_with_input(command: &mut Command, input: &str) -> Outcome {
    use std::io::{Seek, Write};
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(input.as_bytes()).and_then(|()| file.rewind()).expect("written");
    finish(command.stdin(Stdio::from(file)))
}
