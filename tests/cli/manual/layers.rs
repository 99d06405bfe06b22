//! ARCHITECTURE's "arrows point down": a module imports only modules of the layers below its own.

use std::fs;
use std::path::Path;

use crate::common::packages::top;
use crate::manual::source::sources;

/// The modules of a crate, layer by layer, the lowest first. Modules of one layer do not import each other.
type Layers = &'static [&'static [&'static str]];

const PODFS: Layers = &[
    &["csi", "types"],
    &["volume"],
    &["manifest"],
    &["binding", "kube", "metrics", "mounts", "payload"],
    &["host", "render", "source"],
    &["driver"],
    &["supervisor", "view"],
    &["admin"],
    &["node"],
    &["cli"],
    &["bin", "lib", "main"],
];

const PODFS_FUSE: Layers = &[
    &["caller", "child", "memory_lock", "mount", "printable", "region", "utc"],
    &["log", "session"],
    &["audit", "trace"],
    &["nfs", "projection"],
    &["live", "passthrough"],
    &["confinement", "protocol"],
    &["server"],
    &["client", "program"],
    &["lib"],
];

const PODFS_NFS: Layers = &[
    &["address", "backoff", "xdr"],
    &["rpc"],
    &["v3"],
    &["error", "mountd", "portmap", "server"],
    &["export"],
    &["mount"],
    &["lib"],
];

fn layer(layers: Layers, module: &str) -> usize {
    let layer = layers.iter().position(|modules| modules.contains(&module));
    layer.unwrap_or_else(|| panic!("{module} has no layer: give it one here and in ARCHITECTURE.md"))
}

/// The folder or file in `sources` that a source file belongs to.
fn module_of(sources: &Path, file: &Path) -> String {
    let inside = file.strip_prefix(sources).expect("a file in it");
    let first = inside.iter().next().expect("a name").to_str().expect("text");
    first.trim_end_matches(".rs").to_owned()
}

/// The modules of podfs that a text names after `crate::`. A list of them in braces would be missed, and fails.
fn imports(text: &str) -> Vec<&str> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let after = lines.flat_map(|line| line.split("crate::").skip(1));
    after
        .map(|rest| {
            assert!(!rest.starts_with('{'), "name one module after `crate::`, not a list: {rest}");
            rest.split(|letter: char| !letter.is_ascii_lowercase() && !letter.is_ascii_digit() && letter != '_')
                .next()
                .unwrap_or_default()
        })
        .filter(|module| !module.is_empty())
        .collect()
}

/// Fails if a module of the crate imports one that does not lie below it.
fn assert_imports_point_down(directory: &str, layers: Layers, at_least: usize) {
    let mut upwards = Vec::new();
    let mut seen = 0;
    let directory = top().join(directory);
    for file in sources(&directory) {
        let module = module_of(&directory, &file);
        for import in imports(&fs::read_to_string(&file).expect("a source")) {
            seen += 1;
            if import != module && layer(layers, import) >= layer(layers, &module) {
                upwards.push(format!("{} imports {import}", file.strip_prefix(top()).expect("below").display()));
            }
        }
    }
    assert!(seen > at_least, "these are not all: {seen}");
    assert!(upwards.is_empty(), "these imports do not point down: {upwards:#?}");
}

#[test]
fn modules_of_podfs_import_only_what_lies_below_them() {
    assert_imports_point_down("src", PODFS, 200);
}

#[test]
fn modules_of_podfs_fuse_import_only_what_lies_below_them() {
    assert_imports_point_down("fuse/src", PODFS_FUSE, 200);
}

#[test]
fn modules_of_podfs_nfs_import_only_what_lies_below_them_and_nothing_of_fuse() {
    assert_imports_point_down("fuse/nfs/src", PODFS_NFS, 30);
    let manifest = fs::read_to_string(top().join("fuse/nfs/Cargo.toml")).expect("a manifest");
    let dependencies = manifest.split("[dependencies]").nth(1).and_then(|rest| rest.split("\n[").next());
    assert!(!dependencies.expect("dependencies").contains("podfs"), "the NFS client is no part of the others");
}
