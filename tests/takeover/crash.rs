//! Several instances of podfs on one machine, and processes of podfs that are killed.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::common::limit::limit_server;
use crate::common::outcome::finish;
use crate::common::*;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};

/// A pod whose one volume `config` has the file `a` with content 1.
fn fixture() -> Fixture {
    let fixture = Fixture::new(&config_pod());
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture
}

#[test]
fn a_second_podfs_for_the_pod_is_refused_and_the_first_continues() {
    let fixture = fixture();
    let mut running = fixture.run();
    let second = finish(&mut fixture.command());
    second.says(1, &["is already served by podfs", &format!("(pid {})", running.pid()), "stop that one first"]);
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&running.volume("config").join("a"), "2");
    assert_eq!(running.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

#[test]
fn two_pods_below_one_root_stop_independently() {
    // FU-17, VM-13
    let fixture = fixture();
    let mut first = fixture.run();
    fixture.write("pod.yaml", &config_pod().replace("name: web, labels", "name: db, labels"));
    let mut second = fixture.run();
    assert_ne!(first.volume("config"), second.volume("config"));
    assert_eq!(first.stop().code(), Some(0));
    assert_eq!(fixture.mounts(), [second.volume("config")]);
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&second.volume("config").join("a"), "2");
    assert_eq!(second.stop().code(), Some(0));
    assert_eq!((fixture.mounts(), fixture.processes()), (vec![], vec![]));
}

#[test]
fn a_supervisor_and_a_server_that_are_killed_leave_a_dead_mount_that_the_next_run_covers() {
    // RC-05
    let volumes = "[{name: config, configMap: {name: app}}, {name: more, configMap: {name: app}}]";
    let fixture = Fixture::new(&pod(volumes));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let mut killed = fixture.run();
    let dead = killed.volume("config");
    let server = killed.server();
    killed.signal(Signal::SIGKILL);
    kill(server, Signal::SIGKILL).expect("the server exists");
    killed.wait();
    eventually("the keeper has ended", || fixture.processes().is_empty());
    let errno = fs::read_dir(&dead).expect_err("no server answers").raw_os_error().map(Errno::from_raw);
    assert!(matches!(errno, Some(Errno::ENOTCONN | Errno::ECONNABORTED)), "{errno:?}");
    assert_eq!(fixture.mounts().len(), 2, "the dead mounts still exist");

    let mut next = fixture.run();
    assert_eq!(next.volume("config"), dead);
    wait_content(&dead.join("a"), "1");
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&dead.join("a"), "2");
    assert_eq!(next.stop().code(), Some(0));
    // podfs has also removed the dead mounts, and the directories that the killed supervisor made.
    fixture.assert_nothing_left();
}

#[test]
fn podfs_replaces_a_killed_server_and_continues() {
    // FU-06
    let fixture = fixture();
    let mut running = fixture.run();
    let volume = running.volume("config");
    let (generation, inode) = (generation(&volume), fs::metadata(volume.join("a")).expect("a file").ino());
    kill(running.server(), Signal::SIGKILL).expect("the server exists");
    running.wait_log("the server ended (signal: 9 (SIGKILL)); another one (pid ");
    assert_eq!(fs::metadata(volume.join("a")).expect("a file").ino(), inode);
    assert_eq!(crate::common::generation(&volume), generation);
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&volume.join("a"), "2");
    assert_eq!(running.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

#[test]
fn a_successor_that_lacks_threads_is_followed_by_another_one() {
    let fixture = fixture();
    let mut running = fixture.run();
    let volume = running.volume("config");
    let inode = fs::metadata(volume.join("a")).expect("a file").ino();
    // The keeper starts the successor, which has the same limit: no room for the thread of the volume.
    let keeper = running.keepers()[0];
    limit_server(keeper, "--nproc=3:");
    kill(running.server(), Signal::SIGKILL).expect("the server exists");
    running.wait_log("this server cannot take over now");
    assert_eq!(fs::metadata(volume.join("a")).expect("a file").ino(), inode);
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&volume.join("a"), "2");
    assert_eq!(running.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

#[test]
fn a_server_that_cannot_receive_a_descriptor_is_replaced() {
    let fixture = fixture();
    let mut running = fixture.run();
    let volume = running.volume("config");
    limit_server(running.server(), "--nofile=64:");
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&volume.join("a"), "2");
    running.wait_log("it has closed the connection to its supervisor");
    assert_eq!(running.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

#[test]
fn podfs_replaces_a_server_that_is_killed_while_a_volume_comes_up() {
    // The second volume waits for its ConfigMap, so the pod is not ready yet.
    let fixture = Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: late, configMap: {name: late}}]"));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let mut running = fixture.start();
    running.wait_log(r#"configmap "late" not found"#);
    kill(running.server(), Signal::SIGKILL).expect("the server exists");
    fixture.write("objects/late.json", &config_map("late", &[("b", "1")]));
    running.wait_ready();
    wait_content(&running.volume("config").join("a"), "1");
    wait_content(&running.volume("late").join("b"), "1");
    assert_eq!(running.stop().code(), Some(0));
    fixture.assert_nothing_left();
    let log = running.log();
    assert!(!log.contains("cannot commit"), "no commit failed:\n{log}");
}
