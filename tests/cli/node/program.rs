//! The program podfs-supervisor: where podfs node finds it, its absence, and its start by the command line of an
//! earlier podfs.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};

use super::lifecycle::pod;
use crate::common::builds::Builds;
use crate::common::node::Node;
use crate::common::outcome::finish;
use crate::common::{PODFS, PODFS_FUSE, PODFS_SUPERVISOR, config_map, eventually, wait_content};

const CONFIG: &str = "{name: config, configMap: {name: app}}";
const SCRATCH: &str = "{name: scratch, emptyDir: {}}";

#[test]
fn a_missing_podfs_supervisor_is_named_with_the_places_where_it_is_looked_for() {
    let node = Node::new();
    fs::create_dir_all(node.fixture.path("usr/bin")).expect("a directory");
    for (name, program) in [("podfs", PODFS), ("podfs-fuse", PODFS_FUSE)] {
        fs::copy(program, node.fixture.path("usr/bin").join(name)).expect("copied");
    }
    let mut command = Command::new(node.fixture.path("usr/bin/podfs"));
    command.arg("node").arg("--root-dir").arg(node.fixture.path("root")).arg("--run-dir").arg(node.fixture.path("run"));
    let outcome = finish(command.arg("--manifests").arg(node.fixture.path("manifests")));
    let path = |place: &str| node.fixture.path(place).display().to_string();
    let sentence = format!(
        "podfs: podfs-supervisor, the program that manages the volumes of a pod of podfs node, is neither {} nor {}; install it \
         there, from the package or the build that this podfs is from\n",
        path("usr/bin/podfs-supervisor"),
        path("usr/libexec/podfs/podfs-supervisor")
    );
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(3), sentence.as_str()));
}

#[test]
fn the_command_line_with_which_an_earlier_daemon_started_a_supervisor_starts_the_program_that_the_daemon_adopts() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put("web.yaml", &pod("web", &[CONFIG, SCRATCH], &["config", "scratch"]));
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (config, scratch, first) = (node.path("web", "config"), node.path("web", "scratch"), node.supervisor("web"));
    fs::write(scratch.join("file"), "data").expect("written");
    assert_eq!(fs::read_link(format!("/proc/{first}/exe")).expect("a process").display().to_string(), PODFS_SUPERVISOR);
    drop(daemon);
    kill(first, Signal::SIGKILL).expect("killed");
    eventually("it is gone", || !node.fixture.processes().contains(&first));
    // As systemd starts the unit of an earlier daemon again.
    let mut command = Command::new(PODFS);
    command.args(["run", "--push", "--pod-once", "--agent-watches-mounts", "--keep-empty-dirs", "--uid", "uid-web"]);
    command.arg("--pod").arg(node.fixture.path("run/node/pods/uid-web/pod.json"));
    command.arg("--root-dir").arg(node.fixture.path("root")).arg("--run-dir").arg(node.fixture.path("run"));
    command.args(["--log", "info", "--log-format", "text", "--keep-old-generations", "1", "--sub-path", "pinned"]);
    let earlier = node.fixture.spawn(command.stdin(Stdio::null()));
    earlier.wait_log("podfs takes them over");
    let _daemon = node.start();
    eventually("it is adopted", || node.pod("web").is_some_and(|pod| pod["supervisor"] == earlier.pid().as_raw()));
    let program = fs::read_link(format!("/proc/{}/exe", earlier.pid())).expect("a process");
    assert_eq!(program.display().to_string(), PODFS_SUPERVISOR);
    node.put("app.yaml", &config_map("app", &[("key", "two")]));
    wait_content(&config.join("key"), "two");
    assert_eq!(fs::read_to_string(scratch.join("file")).expect("a file"), "data");
}

#[test]
fn a_supervisor_becomes_the_podfs_supervisor_that_is_on_disk_now() {
    let node = Node::new();
    let mut builds = Builds::new(&node.fixture);
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put("web.yaml", &pod("web", &[CONFIG, SCRATCH], &["config", "scratch"]));
    let mut command = Command::new(builds.program());
    command.arg("node").arg("--root-dir").arg(node.fixture.path("root")).arg("--run-dir").arg(node.fixture.path("run"));
    command.arg("--manifests").arg(node.fixture.path("manifests"));
    let _daemon = node.start_command(command);
    node.expect(&["wait", "default/web"]);
    let (config, scratch, supervisor) =
        (node.path("web", "config"), node.path("web", "scratch"), node.supervisor("web"));
    let mut open = fs::File::create(scratch.join("file")).expect("a file");
    builds.upgrade(&node.fixture);
    let program = fs::read_link(format!("/proc/{supervisor}/exe")).expect("the process stays");
    assert_eq!(program, builds.program().with_file_name("podfs-supervisor"));
    open.write_all(b"data").expect("the file is open still");
    node.put("app.yaml", &config_map("app", &[("key", "two")]));
    wait_content(&config.join("key"), "two");
    eventually("the daemon has it again", || node.pod("web").is_some_and(|pod| pod["supervisor"].is_number()));
    assert_eq!(node.supervisor("web"), supervisor);
}
