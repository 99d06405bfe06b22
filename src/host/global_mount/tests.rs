use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use super::*;
use crate::types::golden::{golden, values};

/// A root directory, a mount that is a file, and the claims of two pods.
struct TestNode {
    root: tempfile::TempDir,
}

impl TestNode {
    fn new() -> TestNode {
        let root = tempfile::tempdir().expect("a directory");
        for uid in ["a", "b"] {
            fs::write(root.path().join(uid), "").expect("a claim");
        }
        TestNode { root }
    }

    fn mount(&self) -> GlobalMount {
        GlobalMount::new(self.root.path(), "kubernetes.io~local-volume", "pv-1", self.root.path().join("place"))
    }

    fn enter(&self, uid: &str) -> Result<(), HostError> {
        let claim = self.root.path().join(uid);
        self.mount().enter(GlobalMountUser { uid, claim: &claim }, |held| {
            fs::write(held.mount_point(), "").expect("made");
            Ok(())
        })
    }

    fn leave(&self, uid: &str) {
        self.mount().leave(uid, unmount).expect("left");
    }

    fn is_mounted(&self) -> bool {
        self.root.path().join("place").exists()
    }

    #[track_caller]
    fn assert_nothing_recorded(&self) {
        assert!(!self.root.path().join("plugins/podfs").exists());
    }
}

/// Removes the file that represents a mount, if it exists.
fn unmount(held: &LockedGlobalMount<'_>) -> Result<(), HostError> {
    let _ = fs::remove_file(held.mount_point());
    Ok(())
}

#[test]
fn the_last_user_takes_the_mount_away() {
    let node = TestNode::new();
    node.enter("a").expect("mounted");
    node.enter("b").expect("mounted");
    node.enter("b").expect("a user may enter again");
    assert_eq!(GlobalMount::names(node.root.path(), "kubernetes.io~local-volume", Some("b")), ["pv-1"]);
    node.leave("a");
    assert!(node.is_mounted());
    assert!(!node.mount().has_user("a"));
    node.leave("b");
    assert!(!node.is_mounted());
    node.assert_nothing_recorded();
    node.leave("b");
    node.assert_nothing_recorded();
}

#[test]
fn a_process_that_is_killed_while_it_writes_the_file_of_its_pod_keeps_no_mount() {
    let node = TestNode::new();
    node.enter("a").expect("mounted");
    let records = node.mount().records;
    // A kill before the rename leaves the file complete, and under its first name.
    fs::rename(&user_files(&records, "a")[0], &user_files(&records, "a")[1]).expect("renamed");
    node.enter("b").expect("mounted");
    node.leave("b");
    assert!(!node.is_mounted());
    node.assert_nothing_recorded();

    node.enter("a").expect("mounted");
    fs::rename(&user_files(&records, "a")[0], &user_files(&records, "a")[1]).expect("renamed");
    assert_eq!(GlobalMount::names(node.root.path(), "kubernetes.io~local-volume", Some("a")), ["pv-1"]);
    assert!(node.mount().has_user("a"), "its pod can leave");
    node.leave("a");
    assert!(!node.is_mounted());
    node.assert_nothing_recorded();
}

#[test]
fn a_user_that_is_gone_keeps_no_mount() {
    let node = TestNode::new();
    node.enter("a").expect("mounted");
    node.enter("b").expect("mounted");
    fs::remove_file(node.root.path().join("a")).expect("the pod has gone without leaving");
    node.leave("b");
    assert!(!node.is_mounted());
    node.enter("b").expect("mounted");
    let user = node.mount().records.join(USERS).join("b");
    let record = fs::read_to_string(&user).expect("written");
    let boot = boot_id().expect("an id");
    fs::write(&user, record.replace(&boot, "before")).expect("written");
    assert!(node.mount().sweep(unmount).expect("swept"));
    assert!(!node.is_mounted());
    node.assert_nothing_recorded();
}

#[test]
fn a_failed_mount_leaves_no_user() {
    let node = TestNode::new();
    let claim = node.root.path().join("a");
    let refused = node.mount().enter(GlobalMountUser { uid: "a", claim: &claim }, |_| -> Result<(), _> {
        Err(HostError::Refused("no such device".to_owned()))
    });
    assert_eq!(refused.expect_err("refused").to_string(), "no such device");
    node.assert_nothing_recorded();
}

#[test]
fn a_failed_unmount_leaves_the_user() {
    let node = TestNode::new();
    node.enter("a").expect("mounted");
    let busy = node.mount().leave("a", |_| Err(HostError::Refused("busy".to_owned())));
    assert_eq!(busy.expect_err("refused").to_string(), "busy");
    assert!(node.mount().has_user("a"));
}

#[test]
fn the_lock_lasts_as_long_as_a_program_that_has_it() {
    let node = TestNode::new();
    let claim = node.root.path().join("a");
    // The program ends when it is killed, or when this test ends and closes the program's output.
    let mut program = node
        .mount()
        .enter(GlobalMountUser { uid: "a", claim: &claim }, |held| {
            let mut command = Command::new("sh");
            command.args(["-c", "while echo; do :; done"]).stdin(held.program_input()?).stdout(Stdio::piped());
            Ok(command.spawn().expect("a shell"))
        })
        .expect("entered");
    let mount = node.mount();
    let (sender, receiver) = channel();
    let waiting = thread::spawn(move || {
        mount.leave("a", |_| Ok(())).expect("left");
        sender.send(()).expect("the test listens");
    });
    // The program has the lock still.
    let lock = File::open(node.mount().records.join(LOCK)).expect("a lock");
    assert!(flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err());
    assert!(receiver.try_recv().is_err());
    program.kill().expect("killed");
    program.wait().expect("ended");
    receiver.recv().expect("the lock is free");
    waiting.join().expect("ended");
}

#[test]
fn a_cleanup_does_not_wait_for_a_process_that_works_on_the_mount() {
    let node = TestNode::new();
    node.enter("a").expect("mounted");
    let mount = node.mount();
    let held = mount.hold().expect("locked");
    assert!(!node.mount().sweep(unmount).expect("not swept"));
    let error = node.mount().leave_at_once("a", unmount).expect_err("locked").to_string();
    assert!(error.starts_with("it is in use by pod a: "), "{error}");
    assert!(node.is_mounted() && node.mount().has_user("a"));
    drop(held);
    node.mount().leave_at_once("a", unmount).expect("left");
    node.assert_nothing_recorded();
}

#[test]
fn a_link_to_a_disk_that_is_not_mounted_is_reported() {
    let node = TestNode::new();
    let plugins = node.root.path().join("plugins");
    std::os::unix::fs::symlink("/nonexistent/disk", &plugins).expect("a link");
    let error = node.enter("a").expect_err("there is no directory").to_string();
    assert!(error.ends_with(&format!("{} leads to no directory", plugins.display())), "{error}");
}

#[test]
fn users_that_come_and_go_at_once_lose_nothing() {
    let node = TestNode::new();
    let mounted = AtomicUsize::new(0);
    let root = node.root.path();
    for uid in 0..8 {
        fs::write(root.join(format!("u{uid}")), "").expect("a claim");
    }
    thread::scope(|scope| {
        for uid in 0..8 {
            let (node, mounted) = (&node, &mounted);
            scope.spawn(move || {
                let (uid, mount) = (format!("u{uid}"), node.mount());
                let claim = root.join(&uid);
                for _ in 0..20 {
                    let make = |_: &LockedGlobalMount<'_>| {
                        mounted.store(1, Ordering::SeqCst);
                        Ok(())
                    };
                    let take_away = |_: &LockedGlobalMount<'_>| {
                        mounted.store(0, Ordering::SeqCst);
                        Ok(())
                    };
                    mount.enter(GlobalMountUser { uid: &uid, claim: &claim }, make).expect("entered");
                    assert_eq!(mounted.load(Ordering::SeqCst), 1, "the mount stays while it has a user");
                    mount.leave(&uid, take_away).expect("left");
                }
            });
        }
    });
    assert_eq!(mounted.load(Ordering::SeqCst), 0);
    node.assert_nothing_recorded();
}

#[test]
fn the_record_of_a_user_has_the_bytes_that_other_versions_read() {
    let [user] = &values::<UserRecord>(golden!("global-mount-user.json"))[..] else { panic!("one line") };
    assert_eq!((user.boot.as_str(), user.claim.as_path()), ("b1", Path::new("/run/podfs/u1/lock")));
}

#[test]
fn a_user_that_only_another_version_can_read_keeps_the_mount() {
    let node = TestNode::new();
    node.enter("a").expect("mounted");
    let record = node.mount().records.join(USERS).join("b");
    for unknown in [r#"{"version":2,"boot":"b1"}"#, r#"{"pod":"b"}"#, "{"] {
        fs::write(&record, unknown).expect("written");
        let refused = node.mount().leave("a", unmount).expect_err("b may use it").to_string();
        assert!(
            refused.contains(&format!("the record {} of a pod that may use the mount", record.display())),
            "{refused}"
        );
        node.mount().sweep(unmount).expect_err("b may use it");
        assert_eq!(fs::read_to_string(&record).expect("it stays"), unknown);
        assert!(node.is_mounted() && node.mount().has_user("a"));
    }
    // It was not written to the disk when the machine stopped.
    fs::write(&record, "\0\0").expect("written");
    node.leave("a");
    assert!(!node.is_mounted());
}
