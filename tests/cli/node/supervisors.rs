//! Supervisors that a daemon starts, adopts and ends.

use std::fs;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getsid};
use podfs::node::reconstruct::FoundSupervisor;
use podfs::node::supervisors::{FailureKind, SupervisorReport};
use podfs::supervisor::status::PodState;

use super::daemon::{Daemon, Node, node_pod};
use crate::common::*;

const VOLUMES: &str =
    "[{name: config, configMap: {name: app}}, {name: scratch, emptyDir: {}}, {name: host, hostPath: {path: /usr}}]";
const ALL: [&str; 3] = ["config", "scratch", "host"];

/// Mounts all volumes of a pod. Returns the pod's supervisor.
fn served(node: &Node, daemon: &mut Daemon) -> Pid {
    let pod = node_pod(&node.uid(), VOLUMES);
    let supervisors = daemon.supervisors.clone();
    let mounts: Vec<_> = ALL
        .iter()
        .map(|volume| {
            let (supervisors, pod) = (supervisors.clone(), pod.clone());
            daemon.spawn(async move { supervisors.mount(&pod, volume, TIMEOUT).await })
        })
        .collect();
    let supervisor = daemon.wait_up();
    daemon.push(&[config_map("app", &[("a", "1")])]);
    for mount in mounts {
        daemon.block_on(mount).expect("no panic").unwrap_or_else(|error| panic!("{error}:\n{}", node.log()));
    }
    supervisor
}

#[test]
fn operations_on_the_volumes_of_a_pod_share_one_supervisor_that_ends_with_the_last_volume() {
    let node = Node::new();
    let mut daemon = node.daemon();
    let supervisor = served(&node, &mut daemon);
    assert_eq!(node.supervisors(), [supervisor]);
    assert_eq!(fs::read_to_string(node.volume("configmap", "config").join("a")).expect("a file"), "1");
    fs::write(node.volume("empty-dir", "scratch").join("kept"), "1").expect("written");
    // Neither a Ctrl-C on the daemon's terminal nor the end of its session reaches it.
    assert_eq!(getsid(Some(supervisor)).expect("a session"), supervisor);
    assert_eq!(daemon.unmount(&ALL), [Ok(()), Ok(()), Ok(())]);
    node.assert_nothing_left();
    assert_eq!(daemon.unmount(&["config"]), [Ok(())], "it is gone already");
    assert_eq!(daemon.retire(), Ok(()), "so is the pod");
}

#[test]
fn a_volume_that_waits_fails_with_its_reason_and_comes_up_with_its_object() {
    let node = Node::new();
    let mut daemon = node.daemon();
    let pod = node_pod(&node.uid(), VOLUMES);
    let outcome = daemon.mount_within(&pod, &["config"], Duration::from_millis(700));
    let failure = outcome[0].clone().expect_err("its object is not known");
    assert_eq!(failure.kind, FailureKind::Uncertain);
    assert!(failure.reason.contains("configmap \"app\""), "{failure}");
    daemon.push(&[config_map("app", &[("a", "1")])]);
    daemon.wait_report(
        "all is mounted",
        |report| matches!(report, SupervisorReport::Status(status) if status.state == PodState::Running),
    );
    assert_eq!(daemon.mount(&pod, &["config"]), [Ok(())]);
    assert_eq!(daemon.unmount(&["config"]), [Ok(())]);
    node.assert_nothing_left();
}

#[test]
fn rc_06_a_supervisor_that_was_killed_is_reported_and_started_again_with_all_volumes() {
    let node = Node::new();
    let mut daemon = node.daemon();
    let supervisor = served(&node, &mut daemon);
    let config = node.volume("configmap", "config");
    let shown = generation(&config);
    node.kill(supervisor);
    daemon.wait_report("gone", |report| *report == SupervisorReport::Gone);
    assert_eq!(fs::read_to_string(config.join("a")).expect("its server goes on"), "1");
    eventually("its lock is free", || node.reconstructed()[0].supervisor == FoundSupervisor::Dead);
    assert_eq!(daemon.mount(&node_pod(&node.uid(), VOLUMES), &["host"]), [Ok(())]);
    let next = daemon.wait_up();
    assert_ne!(next, supervisor);
    assert_eq!((generation(&config), node.supervisors()), (shown, vec![next]), "no volume is touched");
    assert_eq!(daemon.unmount(&ALL), [Ok(()), Ok(()), Ok(())]);
    node.assert_nothing_left();
}

#[test]
fn rc_01_the_next_daemon_adopts_supervisors_that_live() {
    let node = Node::new();
    let mut daemon = node.daemon();
    let supervisor = served(&node, &mut daemon);
    daemon.block_on(daemon.supervisors.set_released(&daemon.uid, true)).expect("recorded");
    drop(daemon);
    let found = node.reconstructed();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].supervisor, FoundSupervisor::Alive(supervisor.as_raw().unsigned_abs()));
    let checkpoint = found[0].checkpoint.clone().expect("it is written down");
    assert!(checkpoint.released);
    assert_eq!(checkpoint.volumes.iter().collect::<Vec<_>>(), ["config", "host", "scratch"]);
    let names: Vec<_> = found[0].volumes.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(names, ["config", "scratch", "host"]);
    let mut next = node.daemon();
    next.adopt(&found);
    assert_eq!(next.wait_up(), supervisor);
    assert_eq!(next.mount(&node_pod(&node.uid(), VOLUMES), &["config"]), [Ok(())]);
    assert_eq!(node.supervisors(), [supervisor]);
    assert_eq!(next.unmount(&ALL), [Ok(()), Ok(()), Ok(())]);
    node.assert_nothing_left();
}

#[test]
fn rc_03_a_mount_that_hangs_does_not_delay_reconstruction() {
    let node = Node::new();
    let mut daemon = node.daemon();
    let supervisor = served(&node, &mut daemon);
    let server = server(&node, supervisor);
    node.kill(supervisor);
    eventually("its lock is free", || node.reconstructed()[0].supervisor == FoundSupervisor::Dead);
    kill(server, Signal::SIGSTOP).expect("it is there");
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(sender.send(node.reconstructed())));
        let pods = receiver.recv_timeout(TIMEOUT);
        // Calls that wait for the server end when it continues.
        kill(server, Signal::SIGCONT).expect("it is there");
        let pods = pods.expect("nothing waits for a mount");
        assert_eq!((pods[0].volumes.len(), pods[0].supervisor), (3, FoundSupervisor::Dead));
    });
    assert_eq!(daemon.retire(), Ok(()));
    node.assert_nothing_left();
}

#[test]
fn a_supervisor_that_does_not_answer_is_reported_and_not_started_twice() {
    let node = Node::new();
    let mut daemon = node.daemon();
    let supervisor = served(&node, &mut daemon);
    kill(supervisor, Signal::SIGSTOP).expect("it is there");
    drop(daemon);
    daemon = node.daemon();
    daemon.adopt(&node.reconstructed());
    daemon.wait_report(
        "not answering",
        |report| matches!(report, SupervisorReport::Status(status) if status.state == PodState::NotAnswering),
    );
    let outcome = daemon.mount_within(&node_pod(&node.uid(), VOLUMES), &["config"], Duration::from_millis(100));
    let failure = outcome[0].clone().expect_err("it does not answer");
    assert!(failure.kind == FailureKind::Uncertain && failure.reason.contains("does not answer"), "{failure}");
    assert_eq!(node.supervisors(), [supervisor]);
    kill(supervisor, Signal::SIGCONT).expect("it is there");
    assert_eq!(daemon.wait_up(), supervisor);
    assert_eq!(daemon.unmount(&ALL), [Ok(()), Ok(()), Ok(())]);
    node.assert_nothing_left();
}

#[test]
fn a_pod_whose_supervisor_cannot_start_leaves_nothing() {
    let node = Node::with_arguments("--no-such-option");
    let daemon = node.daemon();
    let failure = daemon.mount(&node_pod(&node.uid(), VOLUMES), &["host"])[0].clone().expect_err("it ends");
    assert_eq!(failure.kind, FailureKind::Final);
    let words = "the supervisor of the pod ended (exit status: 2): error: unexpected argument '--no-such-option' found";
    assert!(failure.reason.contains(words), "{failure}");
    node.assert_nothing_left();
}

#[test]
fn a_pod_whose_supervisor_fails_has_the_words_of_the_supervisor() {
    let node = Node::new();
    let daemon = node.daemon();
    let in_the_way = node.run().join(node.uid());
    fs::create_dir_all(node.run()).expect("a directory");
    fs::write(&in_the_way, "").expect("written");
    let failure = daemon.mount(&node_pod(&node.uid(), VOLUMES), &["host"])[0].clone().expect_err("it ends");
    let (begin, path) = ("the supervisor of the pod ended (exit status: ", in_the_way.display().to_string());
    assert!(failure.reason.contains(begin) && failure.reason.contains(&path), "{failure}");
    assert!(node.log().contains(failure.reason.split_once("): ").expect("its words").1), "{failure}");
    fs::remove_file(&in_the_way).expect("removed");
    node.assert_nothing_left();
}

#[test]
fn a_pod_that_another_program_serves_is_left_alone() {
    let node = Node::new();
    let daemon = node.daemon();
    node.fixture.write(
        "pod.yaml",
        &pod("[{name: host, hostPath: {path: /usr}}]").replace("labels", &format!("uid: {}, labels", node.uid())),
    );
    let mut running = node.fixture.run();
    let failure = daemon.mount(&node_pod(&node.uid(), VOLUMES), &["host"])[0].clone().expect_err("it is served");
    let expected = format!("the pod is served by podfs run (pid {}), which podfs node did not start", running.pid());
    assert!(failure.kind == FailureKind::Final && failure.reason.contains(&expected), "{failure}");
    assert!(daemon.retire().expect_err("it is served").contains("has the pod"));
    assert!(running.volume("host").join("bin").exists());
    assert_eq!(running.stop().code(), Some(0));
    node.assert_nothing_left();
}

#[test]
fn rc_02_a_pod_without_supervisor_is_retired_in_any_state() {
    // The steps that an earlier retirement, or a reboot, had already done.
    type Step = fn(&Node);
    let unmount: Step = |node| unmount_below(&node.root());
    let forget_run: Step = |node| fs::remove_dir_all(node.run().join(node.uid())).expect("it was there");
    let delete_some: Step = |node| {
        let home = node.root().join("pods").join(node.uid()).join("plugins/kubernetes.io~empty-dir/scratch");
        fs::remove_file(home.join("ready")).expect("it was there");
    };
    let cut_record: Step = |node| fs::write(node.run().join(node.uid()).join("lock"), "{\"pid\":").expect("written");
    let rows: &[(&str, &[Step])] = &[
        ("nothing", &[]),
        ("its record is cut", &[cut_record]),
        ("its server was killed", &[kill_servers]),
        ("its mounts are gone, too", &[kill_servers, unmount]),
        ("some content is gone, too", &[kill_servers, unmount, delete_some]),
        ("the run directory is gone, the mounts are dead", &[kill_servers, forget_run]),
        ("only the checkpoint and the content are left", &[kill_servers, unmount, forget_run]),
    ];
    for (row, steps) in rows {
        let node = Node::new();
        let mut daemon = node.daemon();
        let supervisor = served(&node, &mut daemon);
        let scratch = node.volume("empty-dir", "scratch");
        fs::create_dir(scratch.join("deep")).expect("a directory");
        fs::write(scratch.join("deep/file"), "1").expect("written");
        node.kill(supervisor);
        daemon.wait_report("gone", |report| *report == SupervisorReport::Gone);
        steps.iter().for_each(|step| step(&node));
        assert_eq!(daemon.retire(), Ok(()), "{row}");
        node.assert_nothing_left();
        assert_eq!(daemon.retire(), Ok(()), "{row}");
    }
}

/// Kills all servers, whose supervisors are gone, and their keepers.
fn kill_servers(node: &Node) {
    node.fixture.kill_all();
    let socket = node.run().join(node.uid()).join("server.sock");
    eventually("the socket is closed", || UnixStream::connect(&socket).is_err());
}

/// The server of a supervisor.
fn server(node: &Node, supervisor: Pid) -> Pid {
    let parent = |pid: &Pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").and_then(|(_, fields)| fields.split(' ').nth(1)?.parse().ok())
    };
    let mut children = node.fixture.processes().into_iter().filter(|pid| parent(pid) == Some(supervisor.as_raw()));
    children.next().expect("a server")
}

#[test]
fn volumes_come_to_and_go_from_a_pod_that_is_served() {
    let node = Node::new();
    let mut daemon = node.daemon();
    let pod = node_pod(&node.uid(), VOLUMES);
    assert_eq!(daemon.mount(&pod, &["host"]), [Ok(())]);
    let supervisor = daemon.wait_up();
    assert_eq!(daemon.mount(&pod, &["scratch"]), [Ok(())]);
    let scratch = node.volume("empty-dir", "scratch");
    fs::write(scratch.join("kept"), "1").expect("written");
    let host = node.volume("host-path", "host");
    assert_eq!(daemon.unmount(&["host"]), [Ok(())]);
    assert!(!host.exists() && fs::read_to_string(scratch.join("kept")).expect("a file") == "1");
    node.kill(supervisor);
    daemon.wait_report("gone", |report| *report == SupervisorReport::Gone);
    // No supervisor serves the volume now. podfs unmounts it all the same, and the other volume stays mounted.
    assert_eq!(daemon.mount(&pod, &["host"]), [Ok(())]);
    assert_eq!(fs::read_to_string(scratch.join("kept")).expect("a file"), "1");
    node.kill(daemon.wait_up());
    daemon.wait_report("gone", |report| *report == SupervisorReport::Gone);
    assert_eq!(daemon.unmount(&["scratch"]), [Ok(())]);
    assert!(!scratch.exists() && host.join("bin").exists(), "{}", node.log());
    assert_eq!(daemon.unmount(&["host"]), [Ok(())]);
    node.assert_nothing_left();
}
