//! The chart packaging/helm/podfs, and the objects that it renders with given values.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use serde_json::{Value, json};

use super::packages::{stdout_of, top};

/// The chart's values, with the values of `other` in place of the chart's.
pub fn values(other: &Value) -> Value {
    let mut values = yaml(&fs::read_to_string(chart("values.yaml")).expect("values")).remove(0);
    for (key, other) in other.as_object().expect("values") {
        match (&mut values[key], other) {
            (Value::Object(known), Value::Object(new)) => known.extend(new.clone()),
            (known, new) => *known = new.clone(),
        }
    }
    values
}

/// The objects that the chart renders with these values. Debian has no `helm`; tests/peers/helm.go takes its place.
pub fn rendered(other: &Value) -> Vec<Value> {
    static RENDERER: LazyLock<PathBuf> = LazyLock::new(|| {
        let (source, program) =
            (top().join("tests/peers/helm.go"), Path::new(env!("CARGO_TARGET_TMPDIR")).join("helm-templates"));
        let mut go = Command::new("go");
        go.args(["build", "-o"]).arg(&program).arg(source).env("GO111MODULE", "off");
        stdout_of(go.env("GOCACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("go")));
        program
    });
    let about = yaml(&fs::read_to_string(chart("Chart.yaml")).expect("the chart")).remove(0);
    let data = json!({
        "Values": values(other),
        "Release": {"Name": "podfs", "Namespace": "podfs"},
        "Chart": {"Name": about["name"], "Version": about["version"], "AppVersion": about["appVersion"]},
    });
    let templates = fs::read_dir(chart("templates")).expect("templates").map(|entry| entry.expect("an entry").path());
    let templates = templates.filter(|path| path.extension().is_some_and(|kind| kind == "yaml"));
    let mut renderer = Command::new(&*RENDERER);
    renderer.args(templates).stdin(Stdio::piped()).stdout(Stdio::piped());
    yaml(&stdout_with_input(&mut renderer, &data))
}

/// The standard output of a program that gets `input` on its standard input. Fails the test if the program fails.
#[track_caller]
pub fn stdout_with_input(command: &mut Command, input: &Value) -> String {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    child.stdin.take().expect("a pipe").write_all(input.to_string().as_bytes()).expect("written");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{command:?} fails");
    String::from_utf8(output.stdout).expect("text")
}

/// The path of a file of the chart.
pub fn chart(name: &str) -> PathBuf {
    top().join("packaging/helm/podfs").join(name)
}

/// The objects of a YAML text.
pub fn yaml(text: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).expect("YAML");
    documents.into_iter().filter(|document| !document.is_null()).collect()
}
