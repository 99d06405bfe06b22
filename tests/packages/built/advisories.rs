//! Advisories of RustSec about the crates of the lock files.
//!
//! `cargo deny check advisories` looks for the same. To build that program takes minutes, and it fetches its database from a
//! server that not every machine reaches. So these tests read a copy of the database (<https://github.com/rustsec/advisory-db>) where
//! there is one: at `PODFS_ADVISORIES`, or where cargo-audit and cargo-deny keep theirs.

use std::env;
use std::fs;
use std::io::{Write, stderr};
use std::path::{Path, PathBuf};

use semver::{Version, VersionReq};

use crate::common::packages::top;

/// A crate of a lock file.
struct LockedCrate {
    name: String,
    version: Version,
}

/// The crates of podfs and of its fuzz targets.
fn crates() -> Vec<LockedCrate> {
    let lock_files = ["Cargo.lock", "fuse/fuzz/Cargo.lock"];
    let crates = lock_files.iter().flat_map(|file| {
        let lock: toml::Table = fs::read_to_string(top().join(file)).expect("a lock file").parse().expect("TOML");
        lock["package"].as_array().expect("crates").clone()
    });
    let text = |package: &toml::Value, field: &str| package[field].as_str().expect("text").to_owned();
    let crates = crates.map(|package| LockedCrate {
        name: text(&package, "name"),
        version: text(&package, "version").parse().expect("a version"),
    });
    crates.collect()
}

/// The copy of the database on this machine.
fn database() -> Option<PathBuf> {
    if let Some(path) = env::var_os("PODFS_ADVISORIES") {
        return Some(path.into());
    }
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(Path::new(&env::var_os("HOME")?).join(".cargo")))?;
    let of_deny = fs::read_dir(home.join("advisory-dbs")).into_iter().flatten().flatten().map(|entry| entry.path());
    of_deny.chain([home.join("advisory-db")]).find(|path| path.join("crates").is_dir())
}

/// The ids of the advisories about the crate: those that are not withdrawn, and name its version neither as patched nor as unaffected.
fn advisories(database: &Path, package: &LockedCrate) -> Vec<String> {
    let files = fs::read_dir(database.join("crates").join(&package.name)).into_iter().flatten().flatten();
    let concerns = |text: String| {
        let (_, after) = text.split_once("```toml\n")?;
        let advisory: toml::Table = after.split_once("```")?.0.parse().expect("TOML");
        let is_safe = |list: &str| {
            let versions = advisory.get("versions").and_then(|versions| versions.get(list)?.as_array());
            let mut ranges = versions.into_iter().flatten().filter_map(toml::Value::as_str);
            ranges.any(|range| VersionReq::parse(range).expect("a range").matches(&package.version))
        };
        let is_withdrawn = advisory["advisory"].get("withdrawn").is_some();
        let id = advisory["advisory"]["id"].as_str().expect("an id").to_owned();
        (!is_withdrawn && !is_safe("patched") && !is_safe("unaffected")).then_some(id)
    };
    files.filter_map(|file| concerns(fs::read_to_string(file.path()).ok()?)).collect()
}

#[test]
fn no_advisory_is_about_a_crate_of_podfs() {
    let Some(database) = database() else {
        let sentence =
            "skipped: there is no database of advisories; set PODFS_ADVISORIES to a copy of rustsec/advisory-db";
        let _ = writeln!(stderr(), "{sentence}");
        return;
    };
    assert!(database.join("crates/lru").is_dir(), "{} is no database of advisories", database.display());
    let found: Vec<String> = crates()
        .iter()
        .flat_map(|package| {
            let ids = advisories(&database, package).into_iter();
            ids.map(|id| format!("{} {}: {id}", package.name, package.version)).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(found, [] as [&str; 0], "update these crates");
}

#[test]
fn an_advisory_is_about_versions_that_it_calls_neither_patched_nor_unaffected() {
    let database = tempfile::tempdir().expect("a directory");
    let directory = database.path().join("crates/one");
    fs::create_dir_all(&directory).expect("a directory");
    let advisory = "```toml\n[advisory]\nid = \"RUSTSEC-1\"\n\n[versions]\npatched = [\">= 0.18.2\", \"^0.16.9\"]\n\
                    unaffected = [\"< 0.9.0\"]\n```\n\n# A title\n";
    fs::write(directory.join("RUSTSEC-1.md"), advisory).expect("written");
    let of = |name: &str, version: &str| {
        let package = LockedCrate { name: name.to_owned(), version: version.parse().expect("a version") };
        advisories(database.path(), &package)
    };
    for (version, expected) in [("0.16.4", 1), ("0.16.9", 0), ("0.17.0", 1), ("0.18.2", 0), ("0.8.0", 0)] {
        assert_eq!(of("one", version).len(), expected, "{version}");
    }
    assert_eq!(of("other", "0.16.4"), [] as [&str; 0]);
    let withdrawn = advisory.replace("\n\n[versions]", "\nwithdrawn = \"2026-01-01\"\n\n[versions]");
    fs::write(directory.join("RUSTSEC-1.md"), withdrawn).expect("written");
    assert_eq!(of("one", "0.16.4"), [] as [&str; 0]);
}
