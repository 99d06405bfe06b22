//! OR: directories of pods that the node does not have any more.

use std::fs;
use std::path::{Path, PathBuf};

use super::{CONFIG, node_with};
use crate::common::namespace::mount_tmpfs;
use crate::common::node::Node;
use crate::common::{eventually, wait_content};

/// Makes the directory of a pod with these directories and files, as an earlier node agent may have left them. The
/// paths of directories end with a slash.
fn leave(node: &Node, uid: &str, paths: &[&str]) -> PathBuf {
    let pod = node.fixture.path("root/pods").join(uid);
    fs::create_dir_all(&pod).expect("a directory");
    for path in paths {
        let at = pod.join(path);
        if path.ends_with('/') {
            fs::create_dir_all(at).expect("a directory");
        } else {
            fs::create_dir_all(at.parent().expect("a parent")).expect("a directory");
            fs::write(at, "data").expect("a file");
        }
    }
    pod
}

fn reports(node: &Node) -> Vec<String> {
    node.log().lines().filter(|line| line.contains("orphaned pod director")).map(str::to_owned).collect()
}

fn is_gone(path: &Path) -> bool {
    path.symlink_metadata().is_err()
}

#[test]
fn or_01_or_03_empty_directories_of_unknown_pods_go_and_one_report_counts_those_that_stay() {
    let node = node_with(&[CONFIG], &["config"]);
    let empty = [
        leave(&node, "no-volumes", &[]),
        leave(&node, "empty-volume", &["volumes/kubernetes.io~empty-dir/v/"]),
        leave(&node, "empty-directory-in-a-volume", &["volumes/kubernetes.io~empty-dir/v/below/"]),
        leave(&node, "empty-subpath", &["volume-subpaths/v/c/0/"]),
        leave(&node, "empty-subpath-top", &["volume-subpaths/"]),
    ];
    let full = leave(&node, "full-volume", &["volumes/kubernetes.io~empty-dir/v/file"]);
    let full_sub_path = leave(&node, "full-subpath", &["volume-subpaths/v/c/0/file"]);
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    eventually("what is empty is removed", || empty.iter().all(|path| is_gone(path)));
    eventually("what stays is reported", || !reports(&node).is_empty());
    wait_content(&node.path("web", "config").join("key"), "one");
    let file = full.join("volumes/kubernetes.io~empty-dir/v/file");
    assert_eq!(fs::read_to_string(&file).expect("OR-02: no file is deleted"), "data");
    assert!(full_sub_path.join("volume-subpaths/v/c/0/file").exists());
    let first = reports(&node);
    assert!(
        first[0].contains("2 orphaned pod directories stay: ")
            && first[0].contains("orphaned pod \"full-volume\" found, but failed to rmdir() volume at path ")
            && first[0].contains("orphaned pod \"full-subpath\" found, but failed to remove subpath at path "),
        "{first:?}"
    );
    // When this directory is removed, another pass is over.
    let later = leave(&node, "later", &[]);
    eventually("another pass is over", || is_gone(&later));
    assert_eq!(reports(&node), first, "the same is not reported again");
    fs::remove_file(&file).expect("removed by an operator");
    eventually("it is removed, and the other one is reported alone", || {
        is_gone(&full) && reports(&node).last().is_some_and(|last| last.contains("1 orphaned pod directory stays: "))
    });
}

#[test]
fn or_02_a_mount_in_a_directory_of_an_unknown_pod_is_not_crossed() {
    let node = node_with(&[CONFIG], &["config"]);
    let pod = leave(&node, "mounted", &["volumes/kubernetes.io~empty-dir/v/"]);
    let at = pod.join("volumes/kubernetes.io~empty-dir/v");
    mount_tmpfs(&at);
    fs::create_dir(at.join("empty")).expect("a directory");
    let _daemon = node.start();
    eventually("it is reported", || {
        reports(&node)
            .iter()
            .any(|line| line.contains("orphaned pod \"mounted\" found, but ") && line.contains("mount point"))
    });
    assert!(at.join("empty").is_dir(), "nothing below the mount is touched");
    crate::common::unmount_below(&pod);
    eventually("without the mount it is removed", || is_gone(&pod));
}
