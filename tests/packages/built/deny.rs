//! The rules of `deny.toml`, applied to the crates of every target for which podfs is built.
//!
//! `cargo deny` applies the same file. To build that program takes minutes, so these tests read the output of `cargo
//! metadata` instead.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::common::packages::{stdout_of, top};

fn rules() -> toml::Table {
    let text = fs::read_to_string(top().join("deny.toml")).expect("deny.toml");
    text.parse().expect("TOML")
}

/// The strings of a list in `deny.toml`.
fn strings(rules: &toml::Table, section: &str, list: &str) -> Vec<String> {
    let list = rules[section][list].as_array().expect("a list");
    list.iter().map(|text| text.as_str().expect("a text").to_owned()).collect()
}

/// The manifests whose crates are checked: each has a lock file of its own.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "fuse/fuzz/Cargo.toml"];

/// Every crate of the graphs of these manifests for the targets of `deny.toml`, with those of tests and build scripts.
fn crates() -> Vec<Value> {
    let targets = strings(&rules(), "graph", "targets");
    let platforms: Vec<_> = targets.iter().map(|target| format!("--filter-platform={target}")).collect();
    let crates_of = |manifest: &str| {
        let mut command = Command::new(env!("CARGO"));
        command.args(["metadata", "--locked", "--format-version=1", "--manifest-path", manifest]);
        let output = stdout_of(command.args(&platforms).current_dir(top()));
        let mut metadata: Value = serde_json::from_str(&output).expect("JSON");
        let Value::Array(crates) = metadata["packages"].take() else { panic!("no packages") };
        assert!(crates.len() > 20, "these are not all crates of {manifest}: {}", crates.len());
        crates
    };
    let crates: Vec<_> = MANIFESTS.iter().flat_map(|manifest| crates_of(manifest)).collect();
    assert!(crates.len() > 200, "these are not all crates: {}", crates.len());
    crates
}

/// The name and version of a crate: `serde 1.0.0`.
fn title(package: &Value) -> String {
    format!("{} {}", package["name"].as_str().expect("a name"), package["version"].as_str().expect("a version"))
}

#[test]
fn every_crate_has_a_licence_that_is_allowed() {
    let rules = rules();
    let allowed = strings(&rules, "licenses", "allow");
    let exceptions = rules["licenses"]["exceptions"].as_array().expect("a list");
    let excepted = |package: &Value, licence: &str| {
        let concerns = |rule: &&toml::Value| rule["crate"].as_str() == package["name"].as_str();
        let allowed = exceptions.iter().find(concerns).and_then(|rule| rule["allow"].as_array());
        allowed.is_some_and(|licences| licences.iter().any(|allowed| allowed.as_str() == Some(licence)))
    };
    let refused = |package: &Value| {
        let licence = package["license"].as_str().unwrap_or_default();
        let expression = spdx::Expression::parse_mode(licence, spdx::ParseMode::LAX);
        let is_allowed = |requirement: &spdx::LicenseReq| {
            let licence = requirement.to_string();
            allowed.contains(&licence) || excepted(package, &licence)
        };
        !expression.is_ok_and(|expression| expression.evaluate(is_allowed))
    };
    let refused: Vec<_> = crates().iter().filter(|package| refused(package)).map(title).collect();
    assert_eq!(refused, [] as [&str; 0], "deny.toml does not allow the licences of these crates");
}

#[test]
fn no_crate_is_banned_and_none_is_required_in_any_version() {
    let rules = rules();
    let banned = rules["bans"]["deny"].as_array().expect("a list");
    let banned: Vec<_> = banned.iter().map(|rule| rule["name"].as_str().expect("a name")).collect();
    let crates = crates();
    let found: Vec<_> = crates.iter().filter(|package| banned.iter().any(|name| package["name"] == *name)).collect();
    assert!(found.is_empty(), "banned: {found:?}");
    for package in crates.iter().filter(|package| package["source"].is_null()) {
        let dependencies = package["dependencies"].as_array().expect("dependencies");
        let any_version = |dependency: &&Value| dependency["req"] == "*" && dependency["path"].is_null();
        let wildcards: Vec<_> = dependencies.iter().filter(any_version).map(|dependency| &dependency["name"]).collect();
        assert!(wildcards.is_empty(), "{} requires any version of {wildcards:?}", title(package));
    }
}

#[test]
fn every_crate_comes_from_the_registry_or_from_this_tree() {
    let rules = rules();
    for source in ["unknown-registry", "unknown-git"] {
        assert_eq!(rules["sources"][source].as_str(), Some("deny"), "{source}");
    }
    let foreign = |package: &Value| match package["source"].as_str() {
        Some(source) => !(source.starts_with("registry+") && source.ends_with("/crates.io-index")),
        None => !package["manifest_path"].as_str().is_some_and(|path| path.starts_with(&*top().to_string_lossy())),
    };
    let foreign: Vec<_> = crates().iter().filter(|package| foreign(package)).map(title).collect();
    assert_eq!(foreign, [] as [&str; 0]);
}
