//! ARCHITECTURE's "arrows point down": a module imports only modules of the layers below its own.

use std::fs;

use crate::common::packages::top;
use crate::manual::imports::{Folder, Import};

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
    &["caller", "child", "label", "memory_lock", "mount", "printable", "region", "shortage", "utc"],
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
    &["squash"],
    &["mount"],
    &["lib"],
];

/// `src/node`.
const NODE: Layers = &[
    &["files", "spans"],
    &["backing", "on_host", "orphans", "pod", "publication", "root_lock"],
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
    &["long_step", "ready_fd", "signal_record"],
    &["exec_state", "installed", "log_format", "run_dir"],
    &["server"],
    &["volume"],
    &["status"],
    &["control"],
    &["run"],
    &["program"],
];

/// Folders, each with modules of it that import each other in a circle.
const CIRCLES: &[(&str, &[&str])] = &[
    // The types refer to each other: `Nodes` makes each `Node` from its cell, and the drop of the last reference to a `Node`
    // informs `Nodes`. A `Node` has the `OpenNode` that its open files share, an `OpenNode` has each `OpenFile`, and an
    // `OpenFile` has its `Node`.
    ("fuse/src/passthrough", &["node", "nodes", "open_files", "open_node"]),
];

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
    let dependencies = manifest.split("[dependencies]").nth(1).and_then(|text| text.split("\n[").next());
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
    let mut count = 0;
    let mut circles = Vec::new();
    for folder in folders {
        count += 1;
        for circle in folder.circles() {
            let imports = folder.imports().into_iter();
            let is_in_circle =
                |Import { from, to, .. }: &Import| from != to && circle.contains(from) && circle.contains(to);
            println!("{}: {:#?}", folder.name(), imports.filter(is_in_circle).collect::<Vec<_>>());
            circles.push((folder.name(), circle));
        }
    }
    assert!(count > 50, "these are not all: {count}");
    let known = CIRCLES.iter().map(|(folder, modules)| {
        ((*folder).to_owned(), modules.iter().map(|module| (*module).to_owned()).collect::<Vec<_>>())
    });
    assert_eq!(circles, known.collect::<Vec<_>>(), "break a new circle; remove a circle that is gone from CIRCLES");
}
