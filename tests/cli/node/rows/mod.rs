//! Rows of the kubelet's inventory that only the state of a daemon decides, each with a real daemon, real supervisors and real
//! mounts.

mod orphans;
mod recovery;
mod volume_manager;

use crate::common::node::Node;
use crate::common::{Running, config_map};

use super::lifecycle::pod;

const CONFIG: &str = "{name: config, configMap: {name: app}}";
const SCRATCH: &str = "{name: scratch, emptyDir: {}}";
const LATE: &str = "{name: late, configMap: {name: missing}}";

/// A node whose pod `web` has these volumes, of which its container mounts `used`.
fn node_with(volumes: &[&str], used: &[&str]) -> Node {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put("web.yaml", &pod("web", volumes, used));
    node
}

/// Starts a daemon that logs each operation.
#[track_caller]
fn start_verbose(node: &Node) -> Running {
    let mut command = node.command();
    command.args(["--log", "podfs=debug"]);
    node.start_command(command)
}

/// The line with which a daemon logs that an operation on a volume of the pod `web` begins or ends.
fn line(volume: &str, operation: &str, what: &str) -> String {
    format!("volume \"{volume}\" of pod uid-web: {operation} {what}")
}

/// How often [`line`] is in the daemon's log.
fn count(node: &Node, volume: &str, operation: &str, what: &str) -> usize {
    node.log().matches(&line(volume, operation, what)).count()
}

/// Whether the daemon takes the volume of the pod `web` for `mounted`, `uncertain` or `notMounted`.
fn is(node: &Node, volume: &str, mount: &str) -> bool {
    node.volume("web", volume).is_some_and(|volume| volume["mount"] == mount)
}

/// Why the volume of the pod `web` is not mounted, or not current.
fn reason(node: &Node, volume: &str) -> String {
    node.volume("web", volume).map(|volume| volume["reason"].to_string()).unwrap_or_default()
}

/// Deletes the pod `web`, as a user and an agent do, and waits until nothing of it is left.
#[track_caller]
fn end_web(node: &Node) {
    node.remove("web.yaml");
    crate::common::eventually("no source has the pod", || node.pod("web").is_none_or(|pod| pod["stage"].is_null()));
    node.expect(&["release", "uid-web"]);
    crate::common::eventually("nothing of the pod is left", || node.is_clean("uid-web"));
}
