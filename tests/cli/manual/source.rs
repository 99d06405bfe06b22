//! Words that the source has in one place, compared with the documentation.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::manual::guide::guide;
use crate::manual::pages::hand_written;

/// The source files of podfs, without the tests among them.
pub fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
    entries
        .flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] })
        .filter(|path| !path.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "tests.rs"))
        .collect()
}

/// Each text between `begin` and the next of `ends`.
fn between<'a>(text: &'a str, begin: &'a str, ends: &'static [char]) -> impl Iterator<Item = &'a str> {
    text.split(begin).skip(1).map(move |text| text.split(ends).next().unwrap_or_default())
}

/// The annotations that a text names: `podfs.io/…`, without the volume at their end.
fn annotations(text: &str) -> BTreeSet<String> {
    // These have the name of podfs, but are no annotations of pods: a directory of the kubelet's plugins, annotations
    // of local PersistentVolumes, and the API version of pushed certificates.
    let text = ["plugins/podfs.io/", "local.podfs.io/", "podfs.io/v1"]
        .iter()
        .fold(text.to_owned(), |text, exempt| text.replace(exempt, ""));
    let names = between(&text, "podfs.io/", &['.', ' ', '`', '"', ':', '<', '\n']).map(str::to_owned);
    names.filter(|name| !name.is_empty()).collect()
}

#[test]
fn annotations_are_those_of_the_source() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/volume/preferences.rs");
    let source = fs::read_to_string(source).expect("the source");
    let constants = source
        .lines()
        .filter(|line| line.trim_start_matches("pub ").starts_with("const "))
        .collect::<Vec<_>>()
        .join("\n");
    let known = annotations(&constants);
    assert!(known.len() >= 2, "{known:?}");
    assert_eq!(annotations(&hand_written()["podfs-pod.5"]), known);
    assert_eq!(annotations(&guide()), known);
    let all = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).into_iter();
    let elsewhere = all.map(|path| annotations(&fs::read_to_string(path).expect("a source")));
    assert_eq!(elsewhere.flatten().collect::<BTreeSet<_>>(), known, "each is named in preferences.rs");
}

#[test]
fn kinds_of_volumes_and_their_directories_are_those_of_the_source() {
    let files = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/volume"));
    let source: String = files.into_iter().map(|path| fs::read_to_string(path).expect("a source")).collect();
    let page = &hand_written()["podfs-pod.5"];
    let fields: Vec<_> = between(&source, "    field: \"", &['"']).collect();
    assert!(fields.len() >= 8, "{fields:?}");
    let kinds = page.split(".Sh KINDS").nth(1).expect("a section");
    for field in fields {
        let is_term =
            |line: &str| line.strip_prefix(".It ").is_some_and(|terms| terms.split([' ', ',']).any(|t| t == field));
        assert!(kinds.lines().any(is_term), "podfs-pod(5) does not describe {field}");
    }
    for directory in between(&source, "\"kubernetes.io~", &['"']) {
        assert!(page.contains(&format!("kubernetes.io~{directory}\n")), "podfs-pod(5) does not have {directory}");
    }
}

/// `generation_age_seconds` becomes `generationAgeSeconds`.
fn camel_case(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |all, word| all + &word[..1].to_uppercase() + &word[1..])
}

#[test]
fn fields_of_a_status_are_those_of_the_source() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/supervisor/status/pod_status.rs");
    let source = fs::read_to_string(source).expect("the source");
    let fields = source.lines().filter_map(|line| line.strip_prefix("    pub ")?.split_once(": "));
    let fields = fields.filter(|(name, _)| !name.contains(' ')).map(|(name, _)| camel_case(name));
    let fields: BTreeSet<_> = fields.collect();
    assert!(fields.contains("generationAgeSeconds") && fields.len() > 15, "{fields:?}");
    let (page, guide) = (&hand_written()["podfs-agent.7"], guide());
    let state = page.split(".Sh STATE").nth(1).and_then(|text| text.split(".Sh ").next()).expect("a section");
    // `process` is no field of the JSON: its fields are fields of the object that has it (`#[serde(flatten)]`).
    for field in fields.iter().filter(|field| *field != "process") {
        let has = |text: &str| text.split(|c: char| !c.is_alphanumeric()).any(|word| word == field);
        assert!(has(state), "podfs-agent(7) does not describe {field}");
        assert!(has(&guide), "docs/ does not describe {field}");
    }
}
