//! The rows of the kubelet's `TestCleanupOrphanedPodDirs`, and mounts.

use std::fs;

use podfs_fuse::mount::visible::detach;

use super::*;
use crate::host::memory::mount_tmpfs;

/// Root and run directory of a node.
struct TestNode {
    base: tempfile::TempDir,
    orphans: Orphans,
}

impl TestNode {
    fn new() -> TestNode {
        let base = tempfile::tempdir().expect("a directory");
        let orphans = Orphans::new(&base.path().join("run"), &base.path().join("root"));
        TestNode { base, orphans }
    }

    /// A node with these entries below `root/pods`. An entry that ends with a slash is a directory.
    fn with(entries: &[&str]) -> TestNode {
        let node = TestNode::new();
        for entry in entries {
            let path = node.path(entry);
            match entry.strip_suffix('/') {
                Some(_) => fs::create_dir_all(path).expect("directories"),
                None => {
                    fs::create_dir_all(path.parent().expect("a directory")).expect("directories");
                    fs::write(path, "").expect("written");
                }
            }
        }
        node
    }

    fn path(&self, below_pods: &str) -> PathBuf {
        self.base.path().join("root/pods").join(below_pods)
    }

    /// A pass on a node that knows one pod.
    fn pass(&mut self) -> OrphanPass {
        self.pass_with(PodPresence::Gone)
    }

    /// A pass on a node that knows one pod, and has this presence of the others.
    fn pass_with(&mut self, others: PodPresence) -> OrphanPass {
        let presence = |uid: &PodUid| if uid.as_str() == "known" { PodPresence::Known } else { others };
        self.orphans.pass(presence).expect("the directories can be read")
    }
}

#[test]
fn or_02_the_pod_of_a_podfs_with_another_run_directory_is_left_alone() {
    let mut node = TestNode::with(&["a/plugins/kubernetes.io~empty-dir/scratch/content/file"]);
    let scratch = node.path("a/plugins/kubernetes.io~empty-dir/scratch");
    fs::write(scratch.join("agent"), "").expect("written");
    let served = File::open(node.path("a")).expect("a directory");
    let _lock = lock_until(served, Instant::now()).expect("no other lock");
    let report = node.pass().report.expect("a report").to_string();
    assert!(report.contains("a podfs with another --run-dir serves it"), "{report}");
    assert!(scratch.join("content/file").exists());
}

#[test]
fn or_01_empty_directories_of_unknown_pods_are_removed() {
    let rows: &[(&str, &[&str])] = &[
        ("a pod without volumes", &["a/"]),
        ("an empty volume", &["a/volumes/plugin/name/"]),
        ("an empty directory in a volume", &["a/volumes/plugin/name/inside/"]),
        ("a subPath", &["a/volume-subpaths/volume/container/0/"]),
        ("a subPath of a file", &["a/volume-subpaths/volume/container/0"]),
        ("the directory of all subPaths", &["a/volume-subpaths/"]),
        ("all of it", &["a/volumes/p/v/", "a/volume-subpaths/v/c/0", "a/plugins/kubernetes.io~empty-dir/"]),
    ];
    for (row, entries) in rows {
        let mut node = TestNode::with(entries);
        let pass = node.pass();
        assert!(!node.path("a").exists(), "{row}");
        assert_eq!((pass.removed, pass.report), (vec![PodUid::parse("a").expect("a uid")], None), "{row}");
    }
}

#[test]
fn or_02_content_of_empty_dirs_goes_only_where_it_was_kept_over_a_shutdown_by_this_daemon() {
    let homes = ["a", "b", "known"].map(|pod| format!("{pod}/{HOMES}/scratch"));
    let mut node = TestNode::with(&[]);
    for (home, is_kept) in homes.iter().zip([true, false, true]) {
        let files = ["content/deep/file", "ready"].into_iter().chain(is_kept.then_some("agent"));
        for file in files {
            let path = node.path(&format!("{home}/{file}"));
            fs::create_dir_all(path.parent().expect("a directory")).expect("directories");
            fs::write(path, "disk").expect("written");
        }
    }
    let uncertain = node.pass_with(PodPresence::Uncertain);
    assert!(uncertain.removed.is_empty() && uncertain.report.is_some());
    assert!(node.path(&format!("{}/content/deep/file", homes[0])).exists(), "its source may describe it later");
    // The pass looks at a directory again after a pause, or when the directory has changed.
    fs::write(node.path("a/changed"), "").and_then(|()| fs::remove_file(node.path("a/changed"))).expect("changed");
    let pass = node.pass();
    assert_eq!(pass.removed, [PodUid::parse("a").expect("a uid")]);
    assert!(pass.report.expect("a report").to_string().contains("orphaned pod \"b\" found"));
    for home in &homes[1..] {
        assert!(node.path(&format!("{home}/content/deep/file")).exists(), "{home}");
    }
}

#[test]
fn or_02_empty_directories_in_content_of_empty_dirs_stay() {
    let home = format!("a/{HOMES}/scratch");
    let mut node = TestNode::with(&[&format!("{home}/content/pg_notify/"), "a/volumes/plugin/name/"]);
    fs::write(node.path(&home).join("ready"), "disk").expect("written");
    let report = node.pass().report.expect("a report").to_string();
    assert!(report.contains(&format!("{} has the content of an emptyDir", node.path(&home).display())), "{report}");
    assert!(node.path(&home).join("content/pg_notify").is_dir());
}

#[test]
fn or_02_a_pod_that_has_come_back_during_a_pass_is_left_alone() {
    let home = format!("a/{HOMES}/scratch");
    let mut node = TestNode::with(&[&format!("{home}/content/file"), &format!("{home}/agent")]);
    let asked = std::cell::Cell::new(0);
    let presence = |_: &PodUid| {
        asked.set(asked.get() + 1);
        if asked.get() == 1 { PodPresence::Gone } else { PodPresence::Known }
    };
    let pass = node.orphans.pass(presence).expect("the directories can be read");
    assert!(pass.removed.is_empty() && pass.report.is_none());
    assert!(node.path(&home).join("content/file").exists());
}

#[test]
fn or_01_nothing_is_done_where_there_is_nothing_to_do() {
    let mut none = TestNode::new();
    assert!(none.pass().removed.is_empty(), "no pod has been here");
    let mut node = TestNode::with(&["known/volumes/plugin/name/", "a.file"]);
    let pass = node.pass();
    assert!(pass.removed.is_empty() && pass.report.is_none());
    assert!(node.path("known/volumes/plugin/name").is_dir() && node.path("a.file").exists());
    // The supervisor of this pod is gone, and its records show what it has left.
    let mut served = TestNode::with(&["a/volumes/plugin/name/"]);
    fs::create_dir_all(served.base.path().join("run/a")).expect("directories");
    fs::write(served.base.path().join("run/a").join(LOCK), "").expect("written");
    assert!(served.pass().removed.is_empty());
    assert!(served.path("a/volumes/plugin/name").is_dir());
}

#[test]
fn or_01_or_02_directories_with_files_stay_for_ever() {
    let rows = [
        (
            "a/volumes/plugin/name/file",
            "failed to rmdir() volume at path PODS/a/volumes/plugin/name: directory not empty",
        ),
        (
            "a/volumes/plugin/name/deep/file",
            "failed to rmdir() volume at path PODS/a/volumes/plugin/name: directory not empty",
        ),
        ("a/volumes/plugin/name", "failed to rmdir() volume at path PODS/a/volumes/plugin/name: it is a file"),
        (
            "a/volume-subpaths/volume/container/0/file",
            "failed to remove subpath at path PODS/a/volume-subpaths/volume/container/0: directory not empty",
        ),
        ("a/etc-hosts", "failed to rmdir() PODS/a/etc-hosts: it is a file"),
    ];
    for (file, reason) in rows {
        let mut node = TestNode::with(&[file, "a/volumes/plugin/empty/"]);
        let report = node.pass().report.expect("it stays").to_string();
        let pods = node.path("").canonicalize().expect("it is there");
        let expected = format!("1 orphaned pod directory stays: orphaned pod \"a\" found, but {reason}");
        assert_eq!(report, expected.replace("PODS", &pods.display().to_string()), "{file}");
        assert!(node.path(file).is_file() && !node.path("a/volumes/plugin/empty").exists(), "{file}");
    }
    let mut populated = TestNode::with(&["a/volume-subpaths/v/c/"]);
    fs::write(populated.path("a/volume-subpaths/v/c/0"), "x").expect("written");
    assert!(populated.pass().report.is_some() && populated.path("a/volume-subpaths/v/c/0").is_file());
}

#[test]
fn or_02_a_mount_is_not_crossed() {
    for at in ["a", "a/volumes/plugin/name", "a/volume-subpaths/v/c/0", "a/other"] {
        let mut node = TestNode::with(&[&format!("{at}/"), "b/"]);
        let point = node.path(at);
        mount_tmpfs(&point, 1 << 20).expect("mounted");
        fs::create_dir(point.join("inside")).expect("a directory");
        let pass = node.pass();
        let is_untouched = point.join("inside").is_dir();
        detach(&point).expect("unmounted");
        let report = pass.report.expect("it stays").to_string();
        assert!(is_untouched && report.ends_with(" is a mount point"), "{at}: {report}");
        assert!(!node.path("b").exists(), "no other pod waits for it");
        // The same without the mount table: the kernel stops the walk.
        mount_tmpfs(&point, 1 << 20).expect("mounted");
        fs::create_dir(point.join("inside")).expect("a directory");
        let pods = File::open(node.path("")).expect("a directory");
        let uid = PodUid::parse("a").expect("a uid");
        let stays = remove(&node.path(""), pods.as_fd(), &uid, &[], || PodPresence::Gone).expect("walked");
        let is_untouched = point.join("inside").is_dir();
        detach(&point).expect("unmounted");
        let is_mount_point = matches!(stays, Removal::Stays(reason) if reason.ends_with("is a mount point"));
        assert!(is_untouched && is_mount_point, "{at}");
    }
}

#[test]
fn or_02_links_are_not_followed() {
    let mut node = TestNode::with(&["a/volumes/plugin/"]);
    let elsewhere = tempfile::tempdir().expect("a directory");
    fs::create_dir(elsewhere.path().join("inside")).expect("a directory");
    std::os::unix::fs::symlink(elsewhere.path(), node.path("a/volumes/plugin/name")).expect("a link");
    std::os::unix::fs::symlink(elsewhere.path(), node.path("b")).expect("a link");
    let report = node.pass().report.expect("both stay").to_string();
    assert!(report.starts_with("2 orphaned pod directories stay: "), "{report}");
    assert!(elsewhere.path().join("inside").is_dir());
}

#[test]
fn or_03_a_directory_that_stays_is_reported_once_until_it_changes() {
    let mut node = TestNode::with(&["a/volumes/p/v/file", "b/volumes/p/v/file", "b/volumes/p/v/more"]);
    let report = node.pass().report.expect("both stay").to_string();
    assert!(report.starts_with("2 orphaned pod directories stay: ") && report.contains("(2 entries stay)"), "{report}");
    assert_eq!((node.pass().report, node.orphans.kept_directories()), (None, 2));
    fs::create_dir_all(node.path("c/volumes/p/v/deep")).expect("directories");
    fs::write(node.path("c/file"), "").expect("written");
    assert!(node.pass().report.expect("there is another").to_string().starts_with("3 orphaned"));
    fs::remove_dir_all(node.path("a")).expect("another process removes it");
    assert!(node.pass().report.expect("there is one less").to_string().starts_with("2 orphaned"));
    fs::remove_file(node.path("c/file")).expect("removed");
    let pass = node.pass();
    assert!(pass.removed.len() == 1 && pass.report.is_some_and(|report| report.to_string().starts_with("1 orphaned")));
    assert_eq!(node.pass().report, None);
}

#[test]
fn a_directory_that_cannot_be_read_stays_and_delays_no_other() {
    let mut node = TestNode::new();
    // The kernel opens some directories of a process that has ended, but cannot read them.
    let mut ended = std::process::Command::new("true").spawn().expect("it starts");
    let pid = rustix::process::Pid::from_child(&ended);
    let is_over = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
    rustix::process::waitid(rustix::process::WaitId::Pid(pid), is_over).expect("it ends");
    fs::create_dir(node.base.path().join("root")).expect("a directory");
    let process = format!("/proc/{}", pid.as_raw_nonzero());
    std::os::unix::fs::symlink(&process, node.base.path().join("root/pods")).expect("a link");
    let is_other = |uid: &PodUid| !matches!(uid.as_str(), "net" | "task");
    let pass = node.orphans.pass(|uid| if is_other(uid) { PodPresence::Known } else { PodPresence::Gone });
    ended.wait().expect("it has ended");
    let report = pass.expect("the directory of all pods can be read").report.expect("they stay").to_string();
    let unreadable = format!("orphaned pod \"net\" found, but cannot read {process}/net: Invalid argument");
    assert!(report.contains(&unreadable) && report.contains("orphaned pod \"task\" found"), "{report}");
}
