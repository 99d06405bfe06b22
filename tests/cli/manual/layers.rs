//! ARCHITECTURE's "arrows point down": a module imports only modules of the layers below its own.

use std::fs;

use crate::common::packages::top;
use crate::manual::imports::Folder;

/// The modules of a folder, layer by layer, the lowest first. Modules of one layer do not import each other.
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
    &["caller", "child", "label", "memory_lock", "mount", "printable", "region", "utc"],
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

/// `src/node`. Those of one layer do not import each other.
const NODE: Layers = &[
    &["spans"],
    &["backing", "on_host", "orphans", "pod", "publication"],
    &["checkpoint", "sample", "state"],
    &["feed", "handle", "plugin", "reconstruct"],
    &["service", "supervisors", "world"],
    &["in_use", "local_volumes", "operation", "reconciler", "registrations"],
    &["metrics"],
    &["csi", "manager"],
    &["nri"],
    &["error"],
    &["run_directory"],
    &["daemon"],
];

/// `src/supervisor`.
const SUPERVISOR: Layers = &[
    &["exec_state", "installed", "log_format", "run_dir"],
    &["server"],
    &["volume"],
    &["status"],
    &["control"],
    &["run"],
    &["program"],
];

/// Folders whose modules still import each other in a circle.
const WITH_CYCLES: &[&str] = &["fuse/src/passthrough"];

fn layer(layers: Layers, module: &str) -> usize {
    let layer = layers.iter().position(|modules| modules.contains(&module));
    layer.unwrap_or_else(|| panic!("{module} has no layer: give it one here and in ARCHITECTURE.md"))
}

/// Fails if a module of the folder imports one that does not lie below it.
fn assert_imports_point_down(folder: &Folder, layers: Layers, at_least: usize) {
    let imports = folder.imports();
    assert!(imports.len() > at_least, "these are not all: {}", imports.len());
    let is_upwards = |from: &str, to: &str| from != to && layer(layers, to) >= layer(layers, from);
    let upwards: Vec<_> = imports.iter().filter(|import| is_upwards(&import.from, &import.to)).collect();
    assert!(upwards.is_empty(), "these imports do not point down: {upwards:#?}");
}

#[test]
fn modules_of_podfs_import_only_what_lies_below_them() {
    assert_imports_point_down(&Folder::of_crate("src"), PODFS, 200);
}

#[test]
fn modules_of_podfs_fuse_import_only_what_lies_below_them() {
    assert_imports_point_down(&Folder::of_crate("fuse/src"), PODFS_FUSE, 200);
}

#[test]
fn modules_of_podfs_nfs_import_only_what_lies_below_them_and_nothing_of_fuse() {
    assert_imports_point_down(&Folder::of_crate("fuse/nfs/src"), PODFS_NFS, 30);
    let manifest = fs::read_to_string(top().join("fuse/nfs/Cargo.toml")).expect("a manifest");
    let dependencies = manifest.split("[dependencies]").nth(1).and_then(|rest| rest.split("\n[").next());
    assert!(!dependencies.expect("dependencies").contains("podfs"), "the NFS client is no part of the others");
}

#[test]
fn modules_of_podfs_node_import_only_what_lies_below_them() {
    assert_imports_point_down(&Folder::in_crate("src", &["node"]), NODE, 100);
}

#[test]
fn modules_of_the_supervisor_import_only_what_lies_below_them() {
    assert_imports_point_down(&Folder::in_crate("src", &["supervisor"]), SUPERVISOR, 60);
}

#[test]
fn modules_of_a_folder_do_not_import_each_other_in_a_circle() {
    let folders = ["src", "fuse/src", "fuse/nfs/src"].map(Folder::of_crate).into_iter().flat_map(Folder::folders);
    let mut seen = 0;
    let with_cycles: Vec<_> = folders
        .filter(|folder| {
            seen += 1;
            let cycle = folder.cycle();
            if let Some(cycle) = &cycle {
                println!("{}: {}", folder.name(), cycle.join(" -> "));
            }
            cycle.is_some()
        })
        .map(|folder| folder.name())
        .collect();
    assert!(seen > 30, "these are not all: {seen}");
    assert_eq!(with_cycles, WITH_CYCLES, "a folder without a cycle any more leaves the list");
}
