//! hostPath volumes whose path leads to another file or directory when a container starts: this container gets what the path
//! leads to now, as with a kubelet, and containers that run keep what they have.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;

use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::outcome::{Outcome, finish};
use crate::common::passthrough::disk_directory;
use crate::common::runtime::{Runtime, RuntimeContainer, SharedDirectory};
use crate::common::*;

const UID: &str = "5d0b7c1e-8e52-4f3a-9a51-6a529b442c6c";

/// The volumes, by name and path below the directory of the node.
const VOLUMES: [(&str, &str); 5] =
    [("tree", "tree"), ("file", "file"), ("link", "link"), ("claimed", "claimed"), ("free", "free")];

/// A pod with two containers, whose hostPaths are below a directory of the node. Fields are dropped in this order.
struct Pod {
    running: Running,
    fixture: Fixture,
    _shared: SharedDirectory,
    host: TempDir,
}

impl Pod {
    fn new() -> Pod {
        Pod::annotated("")
    }

    fn annotated(annotations: &str) -> Pod {
        let (shared, host) = (SharedDirectory::new(), disk_directory());
        let at = |name: &str| host.path().join(name);
        for (name, content) in
            [("tree", "old"), ("first", "old"), ("second", "new"), ("claimed", "old"), ("free", "old")]
        {
            fs::create_dir(at(name)).expect("a directory");
            fs::write(at(name).join("f"), content).expect("a file");
        }
        fs::write(at("file"), "old").expect("a file");
        symlink("first", at("link")).expect("a link");
        let volume = |(name, path): &(&str, &str)| match *name {
            "claimed" => "  - {name: claimed, persistentVolumeClaim: {claimName: data}}\n".to_owned(),
            _ => format!("  - {{name: {name}, hostPath: {{path: {}}}}}\n", at(path).display()),
        };
        let volumes: String = VOLUMES.iter().map(volume).collect();
        let mount = |(name, _): &(&str, &str)| format!("    - {{name: {name}, mountPath: /{name}}}\n");
        let mounts: String = VOLUMES.iter().map(mount).collect();
        let manifest = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}, annotations: {{{annotations}}}}}\nspec:\n  containers:\n\
             \x20 - name: first\n    volumeMounts:\n{mounts}  - name: second\n    volumeMounts:\n{mounts}  volumes:\n{volumes}"
        );
        let fixture = Fixture::new_in(&shared.path(), &manifest);
        fixture.write(
            "objects/claim.yaml",
            "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data, uid: c-1}, spec: {volumeName: pv-1}, \
             status: {phase: Bound}}",
        );
        let path = at("claimed").display().to_string();
        fixture.write(
            "objects/volume.yaml",
            &format!(
                "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, spec: {{claimRef: {{namespace: default, \
                 name: data, uid: c-1}}, hostPath: {{path: {path}}}}}}}"
            ),
        );
        let running = fixture.run();
        Pod { running, fixture, _shared: shared, host }
    }

    fn at(&self, name: &str) -> std::path::PathBuf {
        self.host.path().join(name)
    }

    fn prepare(&self, container: &str) -> Outcome {
        finish(self.fixture.operator("mounts").args(["prepare", "--pod", UID, "--container", container]))
    }

    #[track_caller]
    fn start(&self, container: &str) -> RuntimeContainer {
        let outcome = self.prepare(container);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        let mounts: Vec<Value> = serde_json::from_str(&outcome.stdout).expect("JSON");
        RuntimeContainer::start(Runtime::Runc, &mounts)
    }

    #[track_caller]
    fn release(&self, container: Option<&str>) {
        let mut release = self.fixture.operator("mounts");
        release.args(["release", "--pod", UID]);
        let outcome = finish(release.args(container.map(|name| ["--container", name]).iter().flatten()));
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    }

    /// Replaces each source, as tools of the node do.
    fn replace_all(&self) {
        for name in ["tree", "claimed"] {
            fs::rename(self.at(name), self.at(&format!("moved-{name}"))).expect("renamed");
            fs::create_dir(self.at(name)).expect("a directory");
            fs::write(self.at(name).join("f"), "new").expect("a file");
        }
        fs::write(self.at("beside"), "new").expect("a file");
        fs::rename(self.at("beside"), self.at("file")).expect("renamed");
        switch_link(&self.at("link"), "second");
        // A directory becomes a file.
        fs::rename(self.at("free"), self.at("moved-free")).expect("renamed");
        fs::write(self.at("free"), "new").expect("a file");
    }

    /// The number of descriptors of FUSE connections that the pod's server has.
    fn connections(&self) -> usize {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.running.server())).expect("the server lives");
        let is_connection = |path: std::path::PathBuf| fs::read_link(path).is_ok_and(|at| at == Path::new("/dev/fuse"));
        descriptors.filter(|entry| is_connection(entry.as_ref().expect("an entry").path())).count()
    }
}

const READ: &str = "cat /tree/f /file /link/f /claimed/f";

#[test]
fn a_container_that_starts_gets_what_the_paths_lead_to_now_and_a_running_one_keeps_what_it_has() {
    let mut pod = Pod::new();
    let before = pod.connections();
    let mut first = pod.start("first");
    assert_eq!(first.says(&format!("{READ} /free/f")), "oldoldoldoldold");
    pod.replace_all();
    assert_eq!(first.says(&format!("{READ} /free/f")), "oldoldoldoldold", "it runs");
    let mut second = pod.start("second");
    let mut check = |why: &str, pod: &Pod| {
        assert_eq!(second.says(&format!("{READ} /free")), "newnewnewnewnew", "{why}");
        assert_eq!(first.says(&format!("{READ} /free/f")), "oldoldoldoldold", "{why}");
        second.says("echo second >/tree/second; echo second >/file");
        first.says("echo first >/tree/first; echo first >/link/first; echo x >/free/first");
        assert!(pod.at("tree/second").exists() && !pod.at("tree/first").exists(), "{why}");
        assert!(pod.at("moved-tree/first").exists() && pod.at("first/first").exists(), "{why}");
        assert!(pod.at("moved-free/first").exists(), "{why}");
        assert_eq!(fs::read_to_string(pod.at("file")).expect("the file"), "second\n", "{why}");
        fs::write(pod.at("file"), "new").expect("written");
        for leftover in ["tree/second", "moved-tree/first", "first/first", "moved-free/first"] {
            fs::remove_file(pod.at(leftover)).expect("removed");
        }
    };
    check("at the start", &pod);
    assert_eq!(pod.connections(), 2 * before, "the server goes on with the earlier mount of each volume");
    kill(pod.running.server(), Signal::SIGKILL).expect("the server exists");
    check("after the death of the server", &pod);
    pod.fixture.kill_supervisor(&mut pod.running);
    check("without a supervisor", &pod);
    pod.running = pod.fixture.run();
    check("with another supervisor", &pod);
    kill(pod.running.server(), Signal::SIGKILL).expect("the server exists");
    check("with the next server", &pod);
    let status = finish(&mut pod.fixture.operator("status"));
    let of_tree = status.stdout.lines().filter(|line| line.ends_with("/tree")).count();
    assert_eq!(of_tree, 1, "the volume is there once: {}", status.stdout);

    // Nothing changes for a container that starts again while its paths stay.
    let connections = pod.connections();
    drop(second);
    let mut second = pod.start("second");
    assert_eq!(second.says(&format!("{READ} /free")), "newnewnewnewnew");
    assert_eq!(pod.connections(), connections);
    drop((first, second));
    pod.release(None);
    assert_eq!(pod.connections(), before, "no container is left that uses the earlier mounts");
    pod.running.stop();
    pod.fixture.assert_nothing_left();
}

#[test]
fn an_earlier_mount_ends_when_the_last_container_that_may_use_it_has_ended_or_starts_again() {
    let pod = Pod::new();
    let before = pod.connections();
    let (first, second) = (pod.start("first"), pod.start("second"));
    pod.replace_all();
    drop(second);
    let mut second = pod.start("second");
    assert_eq!(pod.connections(), 2 * before, "the first container uses the earlier mounts");
    drop(first);
    pod.release(Some("first"));
    assert_eq!(pod.connections(), before);
    assert_eq!(second.says(READ), "newnewnewnew");
    // A container that starts again and again with another directory each time leaves nothing behind.
    for round in 0..20 {
        drop(second);
        fs::rename(pod.at("tree"), pod.at(&format!("tree-{round}"))).expect("renamed");
        fs::create_dir(pod.at("tree")).expect("a directory");
        fs::write(pod.at("tree/f"), format!("{round}")).expect("a file");
        second = pod.start("second");
        assert_eq!(second.says("cat /tree/f"), round.to_string());
    }
    assert_eq!(pod.connections(), before);
    let at = pod.running.volume("tree");
    assert_eq!(pod.fixture.mounts().iter().filter(|path| **path == at).count(), 1, "one mount is at the path");
}

#[test]
fn a_mount_that_no_container_was_prepared_with_stays_until_all_are_released() {
    let pod = Pod::new();
    let before = pod.connections();
    // As a container of an agent that mounts the path of the volume by itself.
    let old = fs::File::open(pod.running.volume("tree")).expect("the volume");
    pod.replace_all();
    let mut second = pod.start("second");
    assert_eq!(second.says("cat /tree/f"), "new");
    drop(second);
    pod.release(Some("second"));
    let read = fs::read_to_string(format!("/proc/self/fd/{}/f", old.as_raw_fd()));
    assert_eq!(read.expect("the server goes on with the earlier mount"), "old");
    drop(old);
    pod.release(None);
    eventually("the earlier mounts have ended", || pod.connections() == before);
}

#[test]
fn a_socket_that_its_daemon_makes_anew_works_in_a_container_that_starts_again() {
    let (shared, host) = (SharedDirectory::new(), TempDir::new_in("/run").expect("a directory"));
    let listen = |answer: &'static str| {
        let _ = fs::remove_file(host.path().join("daemon.sock"));
        let listener = UnixListener::bind(host.path().join("daemon.sock")).expect("a socket");
        thread::spawn(move || {
            let (mut client, _) = listener.accept().expect("a client");
            client.write_all(answer.as_bytes()).expect("sent");
        })
    };
    let at = host.path().display();
    let manifest = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}}}\nspec:\n  containers:\n  - name: first\n    volumeMounts: \
         [{{name: socket, mountPath: /socket}}, {{name: directory, mountPath: /directory}}]\n  volumes:\n  - {{name: socket, \
         hostPath: {{path: {at}/daemon.sock}}}}\n  - {{name: directory, hostPath: {{path: {at}/directory}}}}\n"
    );
    fs::create_dir(host.path().join("directory")).expect("a directory");
    let fixture = Fixture::new_in(&shared.path(), &manifest);
    let old = listen("old");
    let mut running = fixture.run();
    let prepare = |expected: &str| {
        let prepared = finish(fixture.operator("mounts").args(["prepare", "--pod", UID, "--container", "first"]));
        assert_eq!(prepared.code, Some(0), "{}", prepared.stderr);
        let mut answer = String::new();
        // The path of a socket has at most 107 bytes.
        let above = fs::File::open(running.volume("socket").parent().expect("a directory")).expect("open");
        let short = format!("/proc/self/fd/{}/socket", above.as_raw_fd());
        let mut socket = UnixStream::connect(short).expect("the daemon listens");
        socket.read_to_string(&mut answer).expect("an answer");
        assert_eq!(answer, expected);
        running.volume("directory").join("new").exists()
    };
    assert!(!prepare("old"));
    old.join().expect("answered");
    let new = listen("new");
    // As systemd does with a RuntimeDirectory.
    fs::remove_dir(host.path().join("directory")).expect("removed");
    fs::create_dir_all(host.path().join("directory/new")).expect("a directory");
    assert!(prepare("new"));
    new.join().expect("answered");
    running.stop();
    fixture.assert_nothing_left();
}

#[test]
fn a_path_that_leads_nowhere_or_out_of_its_bounds_refuses_the_container_and_changes_nothing() {
    let host = disk_directory();
    for name in ["shared/inside", "outside"] {
        fs::create_dir_all(host.path().join(name)).expect("a directory");
        fs::write(host.path().join(name).join("f"), name).expect("a file");
    }
    let (shared, at) = (SharedDirectory::new(), host.path().display());
    let manifest = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}, annotations: {{podfs.io/within.tree: {at}/shared}}}}\nspec:\n  \
         containers:\n  - name: first\n    volumeMounts: [{{name: tree, mountPath: /tree}}]\n  volumes:\n  - {{name: tree, hostPath: \
         {{path: {at}/shared/inside, type: Directory}}}}\n"
    );
    let fixture = Fixture::new_in(&shared.path(), &manifest);
    let running = fixture.run();
    let prepare = || finish(fixture.operator("mounts").args(["prepare", "--pod", UID, "--container", "first"]));
    assert_eq!(prepare().code, Some(0));
    let shown = || fs::read_to_string(running.volume("tree").join("f")).expect("the mount stays");
    let inside = host.path().join("shared/inside");
    fs::rename(&inside, host.path().join("shared/moved")).expect("renamed");
    symlink("../outside", &inside).expect("a link");
    for (change, sentence) in [
        ("a link", "a symbolic link is on the path, and podfs follows none below"),
        ("nothing", "is not a directory: it does not exist"),
        ("a file", "is not a directory"),
    ] {
        let refused = prepare();
        assert_ne!(refused.code, Some(0), "{change}");
        assert!(refused.stderr.contains(sentence), "{change}: {}", refused.stderr);
        assert_eq!(shown(), "shared/inside", "{change}");
        fs::remove_file(&inside).unwrap_or_default();
        if change == "nothing" {
            fs::write(&inside, "").expect("a file");
        }
    }
    fs::rename(host.path().join("shared/moved"), &inside).expect("renamed");
    assert_eq!(prepare().code, Some(0), "it is as it was");
}
