//! Manifests are read as Kubernetes' own decoder for Go reads them (Debian's golang-k8s-sigs-yaml-dev): generated texts, and the manifests that
//! podfs and the packages on this machine ship.
//!
//! `PODFS_MANIFESTS` sets the number of generated texts, `PODFS_MANIFESTS_SEED` the first of them.

mod generator;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use podfs::manifest::objects::{Objects, Values, parse_object};
use podfs::manifest::{Document, read_documents};
use serde::Deserialize;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::load::number;
use crate::common::packages::top;

/// What Go makes of a document.
#[derive(Debug, Deserialize)]
struct GoDocument {
    value: Option<Value>,
    error: Option<String>,
    /// The values of a Secret or ConfigMap, in base64.
    content: Option<Value>,
    /// The reason why it is no Secret or ConfigMap.
    invalid: Option<String>,
}

/// What Go makes of texts.
fn go(texts: &[String]) -> Vec<Vec<GoDocument>> {
    let build = TempDir::with_prefix("podfs-test-").expect("a directory");
    let program = build.path().join("manifests");
    let built = Command::new("go")
        .args(["build", "-o"])
        .args([&program, &top().join("tests/peers/manifests.go")])
        .envs([("GO111MODULE", "off"), ("GOPATH", "/usr/share/gocode")])
        .env("GOCACHE", build.path().join("cache"))
        .status();
    assert!(built.expect("go is installed").success());
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let (mut input, output) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
    let answers: Vec<_> = thread::scope(|scope| {
        scope.spawn(move || texts.iter().for_each(|text| write!(input, "{}\n{text}", text.len()).expect("it reads")));
        BufReader::new(output).lines().map(|line| line.expect("text")).collect()
    });
    assert!(child.wait().expect("a child").success());
    assert_eq!(answers.len(), texts.len());
    answers.iter().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Reasons of podfs to refuse what Go accepts.
const STRICTER: [&str; 8] = [
    "appears twice in one mapping",
    "aliases repeat too much",
    "every object needs apiVersion and kind",
    "expected a mapping of fields",
    "must be a string",
    "a valid config key",
    "invalid indentation in multiline quoted scalar",
    // Go refuses such a number, too, unless a later key of the same name replaces it.
    "the number is not finite",
];

/// How podfs and Go differ on a text.
fn difference(text: &str, go: &[GoDocument]) -> Option<String> {
    let read = read_documents(Path::new("generated.yaml"), text.as_bytes());
    if go.iter().any(|document| document.error.is_some()) {
        let is_refused = read.iter().any(Result::is_err);
        return (!is_refused).then(|| format!("podfs accepts what Go refuses: {go:?}"));
    }
    let (mut documents, mut errors) = (Vec::new(), Vec::new());
    for document in read {
        match document {
            Ok(document) => documents.push(document),
            Err(error) => errors.push(error.to_string()),
        }
    }
    if let Some(error) = errors.iter().find(|error| !STRICTER.iter().any(|reason| error.contains(reason))) {
        return Some(format!("podfs refuses what Go accepts: {error}"));
    }
    if !errors.is_empty() {
        return None;
    }
    let mut expected = Vec::new();
    go.iter().filter_map(|document| document.value.as_ref()).for_each(|value| flatten(value, &mut expected));
    let values: Vec<Value> = documents.iter().cloned().map(Document::into_value).collect();
    if values.len() != expected.len() || values.iter().zip(&expected).any(|(value, expected)| !is_same(value, expected))
    {
        return Some(format!("Go reads {expected:?}, podfs {values:?}"));
    }
    if documents.len() != go.len() {
        return None;
    }
    documents.into_iter().zip(go).find_map(|(document, go)| difference_of_content(document, go))
}

/// The items of a list, or the object.
fn flatten<'a>(value: &'a Value, objects: &mut Vec<&'a Value>) {
    match value["items"].as_array().filter(|_| value["kind"] == "List") {
        Some(items) => items.iter().for_each(|item| flatten(item, objects)),
        None => objects.push(value),
    }
}

/// How the values of a Secret or ConfigMap differ.
fn difference_of_content(document: Document, go: &GoDocument) -> Option<String> {
    let is_secret = document.kind == "Secret";
    let object = match (parse_object(document), &go.invalid) {
        (Ok(None), _) | (Err(_), Some(_)) => return None,
        (Ok(Some(_)), Some(reason)) => return Some(format!("podfs accepts what Go refuses: {reason}")),
        (Err(error), None) if STRICTER.iter().any(|reason| error.to_string().contains(reason)) => return None,
        (Err(error), None) => return Some(format!("podfs refuses what Go accepts: {error}")),
        (Ok(Some(object)), None) => object,
    };
    let name = object.key.name.clone();
    let objects = Objects::collect([object.into()]).expect("one object");
    let collect = |values: &mut dyn Iterator<Item = (&str, &[u8])>| -> Value {
        values
            .map(|(key, bytes)| (key.to_owned(), serde_json::json!(k8s_openapi::ByteString(bytes.to_vec()))))
            .collect()
    };
    let content = if is_secret {
        collect(&mut objects.secret("default", &name)?.values())
    } else {
        collect(&mut objects.config_map("default", &name)?.values())
    };
    let expected = go.content.clone().unwrap_or_else(|| Value::Object(serde_json::Map::new()));
    (content != expected).then(|| format!("Go decodes {expected}, podfs {content}"))
}

/// Whether two values are equal; numbers are compared by their value.
fn is_same(value: &Value, other: &Value) -> bool {
    match (value, other) {
        (Value::Object(fields), Value::Object(others)) => {
            fields.len() == others.len()
                && fields.iter().all(|(key, value)| others.get(key).is_some_and(|other| is_same(value, other)))
        }
        (Value::Array(items), Value::Array(others)) => {
            items.len() == others.len() && items.iter().zip(others).all(|(item, other)| is_same(item, other))
        }
        (Value::Number(number), Value::Number(other)) => number == other || number.as_f64() == other.as_f64(),
        _ => value == other,
    }
}

#[track_caller]
fn assert_read_as_go_reads(texts: &[String]) {
    let answers = go(texts);
    let differences: Vec<_> = texts
        .iter()
        .zip(&answers)
        .filter_map(|(text, go)| difference(text, go).map(|difference| format!("{difference}\n{text}\n======")))
        .collect();
    let shown = differences.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
    assert!(differences.is_empty(), "{} of {} texts differ:\n{shown}", differences.len(), texts.len());
}

#[test]
fn generated_manifests_are_read_as_go_reads_them() {
    let seed = number("PODFS_MANIFESTS_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("PODFS_MANIFESTS_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let texts: Vec<_> =
        (0..number("PODFS_MANIFESTS").unwrap_or(3000)).map(|_| generator::manifest(&mut random)).collect();
    assert_read_as_go_reads(&texts);
}

/// The manifests below a directory that need no templates.
fn manifests_below(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut found = Vec::new();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if path.is_dir() && !path.is_symlink() {
            found.extend(manifests_below(&path));
        } else if path.extension().is_some_and(|ending| ["yaml", "yml"].iter().any(|known| ending == *known)) {
            found.push(path);
        }
    }
    found
}

#[test]
fn manifests_of_packages_are_read_as_go_reads_them() {
    let places = [top().join("packaging"), top().join("docs"), "/usr/share".into(), "/etc".into()];
    let files = places.iter().flat_map(|place| manifests_below(place));
    let texts: Vec<_> = files
        .filter_map(|path| fs::read_to_string(path).ok())
        .filter(|text| text.contains("apiVersion:") && !text.contains("{{"))
        .collect();
    assert!(texts.len() >= 5, "only {} manifests", texts.len());
    assert_read_as_go_reads(&texts);
}

#[test]
fn what_was_read_otherwise_is_read_as_go_reads_it() {
    let map = |fields: &str| format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: o}}\n{fields}\n");
    let deep = |levels: usize| map(&format!("x: {}{}", "[".repeat(levels), "]".repeat(levels)));
    let list = "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Secret\n  metadata: {name: o}\n";
    let texts = [
        map("data: {on: a, 1.50: b, 0123: c, 0x1F: e, 1_000: f, 1e3: g}"),
        map("binaryData: {a: Yh==, b: YmL=, c: YmJi}"),
        map("").replace("ConfigMap", "Secret") + "data: {a: Yh==, b: YmL=, c: YmJi}\n",
        map("base: &base {a: 1, b: 2}\nx: {a: 3, <<: *base}\ny: {<<: *base, a: 3}\nz: {<<: [*base, {a: 4, c: 5}]}"),
        deep(65),
        deep(120),
        format!("{}---\n\u{feff}{}", map(""), map("data: {a: b}")),
        format!("{list}- apiVersion: v1\n  kind: List\n  items: [{{apiVersion: v1, kind: Pod}}]\n"),
    ];
    assert_read_as_go_reads(&texts);
}
