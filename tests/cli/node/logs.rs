//! Logs of a node: lines say which pod and which volume they are about, whichever process, task or thread logs them.

use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use super::lifecycle::pod;
use crate::common::eventually;
use crate::common::node::Node;

/// The fields of the first line of the module `target` that has these words.
fn fields(log: &str, target: &str, words: &str) -> Value {
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).expect(line));
    let has = |line: &Value| {
        line["target"] == target && line["fields"]["message"].as_str().is_some_and(|message| message.contains(words))
    };
    lines.into_iter().find(has).unwrap_or_else(|| panic!("{target} says {words:?}:\n{log}"))["fields"].clone()
}

#[test]
fn every_line_about_a_volume_that_fails_names_its_pod_and_the_volume() {
    let node = Node::new();
    node.put("web.yaml", &pod("web", &["{name: config, configMap: {name: late}}"], &["config"]));
    let mut command = node.command();
    command.args(["--log-format", "json"]);
    let daemon = node.start_command(command);
    eventually("it has a supervisor", || node.pod("web").is_some_and(|pod| pod["supervisor"].is_number()));
    kill(node.supervisor("web"), Signal::SIGKILL).expect("killed");
    // The supervisor logs the failure, too.
    for target in ["podfs::node::manager::operations", "podfs::supervisor::volume"] {
        let is_failure =
            |line: &str| line.contains("MountVolume.SetUp failed") && line.contains(&format!("\"{target}\""));
        eventually("the failure is logged", || node.log().lines().any(is_failure));
    }
    daemon.wait_log("podfs starts another supervisor");
    drop(daemon);
    let log = node.log();
    let about = |target: &str, words: &str| {
        let fields = fields(&log, target, words);
        ["pod", "uid", "volume"].map(|field| fields[field].as_str().unwrap_or_default().to_owned())
    };
    let (of_pod, of_volume) = (["default/web", "uid-web", ""], ["default/web", "uid-web", "config"]);
    // These lines come from the manager, from a task of the pod, and from a blocking thread of the supervisor.
    assert_eq!(about("podfs::node::manager::operations", "MountVolume.SetUp failed"), of_volume);
    assert_eq!(about("podfs::node::manager", "podfs starts another supervisor"), of_pod);
    assert_eq!(about("podfs::node::supervisors::pod", "the supervisor of pod uid-web is gone"), of_pod);
    assert_eq!(about("podfs::supervisor::volume", "late"), of_volume);
}

#[test]
fn lines_of_text_of_a_supervisor_and_its_server_name_the_pod() {
    let node = Node::new();
    let volumes = ["{name: config, configMap: {name: late}}", "{name: scratch, emptyDir: {}}"];
    node.put("web.yaml", &pod("web", &volumes, &["config", "scratch"]));
    let daemon = node.start();
    daemon.wait_log("MountVolume.SetUp failed");
    daemon.wait_log("volume is mounted");
    kill(node.supervisor("web"), Signal::SIGKILL).expect("killed");
    daemon.wait_log("the supervisor is gone; this server serves");
    drop(daemon);
    let log = node.log();
    for target in ["podfs::supervisor::volume", "podfs_fuse::server::process"] {
        let lines: Vec<_> = log.lines().filter(|line| line.contains(&format!(" {target}: "))).collect();
        assert!(!lines.is_empty(), "{target}:\n{log}");
        lines.iter().for_each(|line| assert!(line.ends_with(r#" pod="default/web""#), "{line}"));
    }
}

#[test]
fn lines_of_a_daemon_that_finds_a_pod_name_it() {
    let node = Node::new();
    let start = || {
        let mut command = node.command();
        command.args(["--log-format", "json", "--log", "debug"]);
        node.start_command(command)
    };
    node.put("web.yaml", &pod("web", &["{name: scratch, emptyDir: {}}"], &["scratch"]));
    let daemon = start();
    node.expect(&["wait", "default/web"]);
    drop(daemon);
    node.remove("web.yaml");
    let daemon = start();
    daemon.wait_log("every source has listed its pods");
    node.expect(&["release", "default/web"]);
    eventually("nothing of the pod is left", || node.is_clean("uid-web"));
    drop(daemon);
    let log = node.log();
    for (target, words) in [
        ("podfs::node::manager::recovery", "found with its supervisor"),
        ("podfs::node::manager", "is released"),
        // The task of the next daemon knows the pod's name from the checkpoint.
        ("podfs::node::supervisors::pod", "has ended"),
    ] {
        let fields = fields(&log, target, words);
        assert_eq!((&fields["pod"], &fields["uid"]), (&"default/web".into(), &"uid-web".into()), "{target}: {words}");
    }
}
