//! Kills of the daemon, of supervisors and of servers, without an effect on the pods' containers.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};

use super::lifecycle::pod;
use crate::common::node::Node;
use crate::common::watch::Watcher;
use crate::common::{PODFS_SUPERVISOR, config_map, eventually, wait_content};

const CONFIG: &str = "{name: config, configMap: {name: app}}";
const SCRATCH: &str = "{name: scratch, emptyDir: {}}";

fn node_with_a_pod() -> Node {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put("web.yaml", &pod("web", &[CONFIG, SCRATCH], &["config", "scratch"]));
    node
}

#[test]
fn rc_01_a_daemon_that_is_killed_and_started_again_touches_no_volume() {
    let node = node_with_a_pod();
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (config, supervisor) = (node.path("web", "config"), node.supervisor("web"));
    let inode = |path: &std::path::Path| fs::metadata(path).map(|file| (file.dev(), file.ino())).expect("a file");
    let before = inode(&config.join("key"));
    daemon.signal(Signal::SIGKILL);
    drop(daemon);
    assert_eq!(fs::read_to_string(config.join("key")).expect("it is served on"), "one");
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    eventually("the supervisor is known again", || node.pod("web").is_some_and(|pod| pod["supervisor"].is_number()));
    assert_eq!(node.supervisor("web"), supervisor, "it was adopted");
    assert_eq!(inode(&config.join("key")), before);
    node.put("app.yaml", &config_map("app", &[("key", "two")]));
    wait_content(&config.join("key"), "two");
}

#[test]
fn rc_02_a_pod_that_was_deleted_while_the_daemon_was_down_is_cleaned_up_when_it_is_released() {
    let node = node_with_a_pod();
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    drop(daemon);
    node.remove("web.yaml");
    let _daemon = node.start();
    eventually("the sources are ready", || {
        node.pod("web").is_some_and(|pod| pod["stage"].is_null() && pod["origin"].is_null())
    });
    assert!(node.fixture.path("root/pods/uid-web/volumes/kubernetes.io~configmap/config/key").exists());
    node.expect(&["release", "uid-web"]);
    eventually("nothing of the pod is left", || node.is_clean("uid-web"));
}

#[test]
fn rc_02_a_pod_whose_daemon_and_supervisor_were_killed_and_whose_manifest_is_gone_is_retired() {
    let node = node_with_a_pod();
    let mut command = node.command();
    command.arg("--release-when-gone");
    let daemon = node.start_command(command);
    node.expect(&["wait", "default/web"]);
    fs::write(node.path("web", "scratch").join("file"), "data").expect("written");
    let supervisor = node.supervisor("web");
    drop(daemon);
    kill(supervisor, Signal::SIGKILL).expect("killed");
    node.remove("web.yaml");
    let mut command = node.command();
    command.arg("--release-when-gone");
    let _daemon = node.start_command(command);
    eventually("nothing of the pod is left", || node.is_clean("uid-web"));
    eventually("its processes have ended", || node.fixture.processes().len() == 1);
}

#[test]
fn rc_06_the_daemon_replaces_a_killed_supervisor() {
    let node = node_with_a_pod();
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (config, first) = (node.path("web", "config"), node.supervisor("web"));
    let open = fs::File::open(config.join("key")).expect("a file");
    kill(first, Signal::SIGKILL).expect("killed");
    assert_eq!(fs::read_to_string(config.join("key")).expect("it is served on"), "one");
    eventually("another supervisor serves the pod", || {
        node.pod("web")
            .is_some_and(|pod| pod["supervisor"].as_i64().is_some_and(|pid| pid != i64::from(first.as_raw())))
    });
    node.put("app.yaml", &config_map("app", &[("key", "two")]));
    wait_content(&config.join("key"), "two");
    drop(open);
}

#[test]
fn rc_05_after_a_reboot_the_volumes_are_mounted_again() {
    let node = node_with_a_pod();
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let config = node.path("web", "config");
    drop(daemon);
    node.fixture.kill_all();
    crate::common::unmount_below(&node.fixture.path("root"));
    fs::remove_dir_all(node.fixture.path("run")).expect("the run directory is gone with a reboot");
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    wait_content(&config.join("key"), "one");
}

/// Shuts the node down: ends all processes, and removes the run directory.
fn shut_down(node: &Node, daemon: crate::common::Running) {
    let supervisor = node.supervisor("web");
    drop(daemon);
    kill(supervisor, Signal::SIGTERM).expect("told to end");
    eventually("the supervisor and its server have ended", || node.fixture.processes().is_empty());
    assert!(node.fixture.mounts().is_empty(), "a shutdown unmounts");
    fs::remove_dir_all(node.fixture.path("run")).expect("the run directory is gone with a reboot");
}

#[test]
fn ed_06_rc_05_a_shutdown_keeps_the_files_of_empty_dirs_and_the_end_of_the_pod_deletes_them() {
    let node = node_with_a_pod();
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let file = node.path("web", "scratch").join("file");
    fs::write(&file, "data").expect("written");
    shut_down(&node, daemon);
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    assert_eq!(fs::read_to_string(&file).expect("it is there again"), "data");
    shut_down(&node, daemon);
    // The pod is deleted while the node is down.
    node.remove("web.yaml");
    let _daemon = node.start();
    eventually("nothing of the pod is left", || node.is_clean("uid-web"));
}

#[test]
fn a_supervisor_that_follows_another_one_begins_with_the_labels_that_the_pod_has_now() {
    let node = Node::new();
    let labels = "{name: info, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}";
    let with_label = |value: &str| {
        pod("web", &[labels], &["info"]).replace("uid: uid-web}", &format!("uid: uid-web, labels: {{app: {value}}}}}"))
    };
    node.put("web.yaml", &with_label("one"));
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let file = node.path("web", "info").join("labels");
    wait_content(&file, "app=\"one\"");
    node.put("web.yaml", &with_label("two"));
    wait_content(&file, "app=\"two\"");
    eventually("it is written down for the next supervisor", || {
        fs::read_to_string(node.fixture.path("run/node/pods/uid-web/pod.json")).is_ok_and(|text| text.contains("two"))
    });
}

#[test]
fn a_supervisor_that_is_started_anew_by_the_next_daemon_shows_the_pod_as_it_is_described_now() {
    let node = Node::new();
    let labels = "{name: info, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}";
    let with_label = |value: &str, volumes: &[&str], used: &[&str]| {
        pod("web", volumes, used).replace("uid: uid-web}", &format!("uid: uid-web, labels: {{app: {value}}}}}"))
    };
    node.put("web.yaml", &with_label("one", &[labels], &["info"]));
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (file, supervisor) = (node.path("web", "info").join("labels"), node.supervisor("web"));
    wait_content(&file, "app=\"one\"");
    daemon.signal(Signal::SIGKILL);
    drop(daemon);
    kill(supervisor, Signal::SIGKILL).expect("killed");
    // The checkpoint has the old label and only the old volume.
    node.put("web.yaml", &with_label("two", &[labels, SCRATCH], &["info", "scratch"]));
    let _daemon = node.start();
    wait_content(&file, "app=\"two\"");
    eventually("the new volume is known", || node.volume("web", "scratch").is_some());
    node.expect(&["wait", "default/web"]);
    fs::write(node.path("web", "scratch").join("file"), "data").expect("it is mounted");
}

#[test]
fn a_persistent_volume_that_grows_while_its_pod_runs_has_its_new_size_in_the_state() {
    let node = Node::new();
    let source = node.fixture.path("source");
    fs::create_dir(&source).expect("a directory");
    node.put(
        "claim.yaml",
        "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data, uid: c-1}, spec: {volumeName: pv-1}, \
         status: {phase: Bound}}",
    );
    let put_volume = |size: &str| {
        let source = source.display();
        node.put(
            "volume.yaml",
            &format!(
                "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, spec: {{accessModes: [ReadWriteOnce], \
                 capacity: {{storage: {size}}}, claimRef: {{namespace: default, name: data, uid: c-1}}, \
                 local: {{path: {source}}}}}}}"
            ),
        );
    };
    put_volume("1Gi");
    node.put("web.yaml", &pod("web", &["{name: data, persistentVolumeClaim: {claimName: data}}"], &["data"]));
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (path, supervisor) = (node.path("web", "data"), node.supervisor("web"));
    let size_is = |bytes: u64| node.volume("web", "data").is_some_and(|volume| volume["size"] == bytes);
    eventually("its size is known", || size_is(1 << 30));
    fs::write(path.join("file"), "data").expect("it is mounted");
    put_volume("2Gi");
    eventually("its new size is known", || size_is(2 << 30));
    assert_eq!(node.supervisor("web"), supervisor);
    assert_eq!(fs::read_to_string(path.join("file")).expect("it is mounted throughout"), "data");
}

#[test]
fn a_pod_whose_checkpoint_is_gone_and_whose_supervisor_lives_is_removed_if_no_source_describes_it() {
    let node = node_with_a_pod();
    node.put("other.yaml", &pod("other", &[CONFIG, SCRATCH], &["config", "scratch"]));
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    node.expect(&["wait", "default/other"]);
    let (scratch, other) = (node.path("other", "scratch"), node.supervisor("other"));
    fs::write(scratch.join("file"), "data").expect("written");
    drop(daemon);
    for uid in ["uid-web", "uid-other"] {
        fs::remove_dir_all(node.fixture.path("run/node/pods").join(uid)).expect("deleted");
    }
    node.remove("web.yaml");
    let _daemon = node.start();
    eventually("nothing of the pod is left", || node.is_clean("uid-web"));
    node.expect(&["wait", "default/other"]);
    assert_eq!(node.supervisor("other"), other, "the supervisor of a pod that a source describes goes on");
    assert_eq!(fs::read_to_string(scratch.join("file")).expect("a file"), "data");
}

#[test]
fn a_pod_whose_checkpoint_has_another_version_is_never_gone_and_stays_as_it_is() {
    let node = node_with_a_pod();
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (config, scratch, supervisor) =
        (node.path("web", "config"), node.path("web", "scratch"), node.supervisor("web"));
    fs::write(scratch.join("file"), "data").expect("written");
    drop(daemon);
    let checkpoint = node.fixture.path("run/node/pods/uid-web/checkpoint.json");
    let recorded = fs::read_to_string(&checkpoint).expect("a checkpoint");
    let later = recorded.replacen(r#""version":1"#, r#""version":2"#, 1);
    fs::write(&checkpoint, &later).expect("written");
    node.remove("web.yaml");
    let mut command = node.command();
    command.arg("--release-when-gone");
    let daemon = node.start_command(command);
    // Without its checkpoint, the pod has no name.
    let says = |sentence: &str| node.expect(&["state", "--output", "json"]).contains(sentence);
    eventually("the daemon says what it does not know", || says("another version of podfs node wrote its checkpoint"));
    assert!(node.log().contains("it has version 2, and this podfs reads version 1; use the podfs that wrote it"));
    node.wait_for_pass();
    assert_eq!(fs::read_to_string(config.join("key")).expect("it is served"), "one");
    assert_eq!(fs::read_to_string(scratch.join("file")).expect("it is served"), "data");
    assert!(node.fixture.processes().contains(&supervisor));
    // Its source describes it again: podfs serves no more volumes of it, and says why.
    let volumes = [CONFIG, SCRATCH, "{name: more, emptyDir: {}}"];
    node.put("web.yaml", &pod("web", &volumes, &["config", "scratch", "more"]));
    eventually("the volume waits", || says("it has version 2, and this podfs reads version 1"));
    assert_eq!(fs::read_to_string(&checkpoint).expect("it stays"), later);
    assert_eq!(fs::read_to_string(scratch.join("file")).expect("it is served"), "data");
    drop(daemon);
    // The podfs that wrote it comes back.
    fs::write(&checkpoint, &recorded).expect("written");
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    assert_eq!(node.supervisor("web"), supervisor, "it served throughout");
    assert_eq!(fs::read_to_string(scratch.join("file")).expect("a file"), "data");
}

#[test]
fn a_pod_whose_checkpoint_has_another_version_is_removed_when_it_is_released() {
    let node = node_with_a_pod();
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    drop(daemon);
    let checkpoint = node.fixture.path("run/node/pods/uid-web/checkpoint.json");
    let recorded = fs::read_to_string(&checkpoint).expect("a checkpoint");
    fs::write(&checkpoint, recorded.replacen(r#""version":1"#, r#""version":2"#, 1)).expect("written");
    node.remove("web.yaml");
    let _daemon = node.start();
    eventually("the daemon knows the pod", || node.expect(&["state", "--output", "json"]).contains("uid-web"));
    node.expect(&["release", "uid-web"]);
    eventually("nothing of the pod is left", || node.is_clean("uid-web"));
}

#[test]
fn a_supervisor_that_gets_the_claim_after_the_daemon_has_removed_its_pod_ends() {
    let node = node_with_a_pod();
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let supervisor = node.supervisor("web");
    drop(daemon);
    kill(supervisor, Signal::SIGKILL).expect("killed");
    eventually("it is gone", || !node.fixture.processes().contains(&supervisor));
    // As the daemon does while it removes what is left of the pod. The kernel closes the files of a killed process last.
    let lock = node.fixture.path("run/uid-web/lock");
    let file = fs::OpenOptions::new().read(true).write(true).open(&lock).expect("a file");
    let claim = Flock::lock(file, FlockArg::LockExclusive).expect("the supervisor is dead");
    let records = fs::read(&lock).expect("a record");
    let first = records.split(|byte| *byte == b'\n').next().expect("a copy");
    let mut record: serde_json::Value = serde_json::from_slice(first).expect("JSON");
    // The process may be a zombie: then its id is taken.
    record["pid"] = 0.into();
    fs::write(&lock, record.to_string()).expect("written");
    let opened = Watcher::on("lock", &lock);
    let manifest = node.fixture.path("run/node/pods/uid-web/pod.json");
    // As systemd starts the unit of the supervisor again.
    let mut command = Command::new(PODFS_SUPERVISOR);
    command.args(["--uid", "uid-web", "--pod"]).arg(&manifest);
    command.arg("--root-dir").arg(node.fixture.path("root")).arg("--run-dir").arg(node.fixture.path("run"));
    let mut next = node.fixture.spawn(command.stdin(Stdio::null()));
    eventually("it waits for the claim", || opened.events().iter().any(|event| event.contains("OPEN")));
    fs::remove_file(&manifest).expect("removed");
    drop(claim);
    assert_eq!(next.wait().code(), Some(2), "{}", next.log());
    assert!(next.log().contains("podfs node has removed pod default/web"), "{}", next.log());
}

/// A file that no process can delete until this is dropped.
struct ImmutableFile(PathBuf);

impl ImmutableFile {
    fn new(path: PathBuf) -> ImmutableFile {
        assert!(ImmutableFile::chattr("+i", &path), "chattr +i {}", path.display());
        ImmutableFile(path)
    }

    fn chattr(flag: &str, path: &std::path::Path) -> bool {
        Command::new("chattr").arg(flag).arg(path).status().is_ok_and(|status| status.success())
    }
}

impl Drop for ImmutableFile {
    fn drop(&mut self) {
        ImmutableFile::chattr("-i", &self.0);
    }
}

#[test]
fn rc_02_the_next_daemon_keeps_a_released_pod_until_it_has_removed_it() {
    let node = node_with_a_pod();
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    fs::write(node.path("web", "scratch").join("file"), "data").expect("written");
    let content = node.fixture.path("root/pods/uid-web/plugins/kubernetes.io~empty-dir/scratch/content");
    let immutable = ImmutableFile::new(content.join("file"));
    node.remove("web.yaml");
    eventually("its source does not have it", || node.pod("web").is_some_and(|pod| pod["stage"].is_null()));
    node.expect(&["release", "uid-web"]);
    eventually("its removal fails", || node.log().contains("UnmountVolume.TearDown failed"));
    drop(daemon);
    let _daemon = node.start();
    eventually("the next daemon says what stays", || {
        node.pod("web").is_some_and(|pod| pod["released"] == true && pod.to_string().contains("scratch"))
    });
    drop(immutable);
    eventually("nothing of the pod is left", || node.is_clean("uid-web") && node.pod("web").is_none());
}

#[test]
fn a_daemon_that_starts_while_a_file_is_invalid_keeps_the_content_of_optional_volumes() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put("web.yaml", &pod("web", &["{name: config, configMap: {name: app, optional: true}}"], &["config"]));
    let mut daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let config = node.path("web", "config");
    node.put("app.yaml", "kind: [");
    daemon.signal(Signal::SIGTERM);
    daemon.wait();
    let _daemon = node.start();
    eventually("the volume says why it does not follow its object", || {
        let reason = node.volume("web", "config").unwrap_or_default()["reason"].to_string();
        reason.contains("ConfigMap default/app may be in ")
            && reason.contains("app.yaml, which podfs could not read yet")
    });
    assert_eq!(fs::read_to_string(config.join("key")).expect("its content stays"), "one");
    node.put("app.yaml", &config_map("app", &[("key", "two")]));
    wait_content(&config.join("key"), "two");
}
