//! The successor of a dead server: after a SIGKILL, a clone of its keeper, which needs no exec; otherwise a newly executed
//! program.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::thread;

use crate::common::builds::{Builds, VERSION, another};
use crate::common::passthrough::disk_directory;
use crate::common::stopped::Stopped;
use crate::common::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpgid};
use tempfile::TempDir;

/// A pod with a projection and a directory of the host.
struct Pod {
    fixture: Fixture,
    _source: TempDir,
}

impl Pod {
    fn new() -> Self {
        let source = disk_directory();
        let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
        let fixture = Fixture::new(&pod(&format!("[{{name: config, configMap: {{name: app}}}}, {host}]")));
        fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
        Self { fixture, _source: source }
    }
}

/// The way in which a server was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Cloned,
    Executed,
}

/// Signals the server, waits until another one serves, and gives that one and how it was started.
#[track_caller]
fn follow(running: &Running, signal: Signal) -> (Pid, Start) {
    let before = running.server();
    let stack = start_of_stack(before);
    kill(before, signal).expect("it is there");
    let (server, start) = next(running, before, stack);
    // A server answers requests before the supervisor knows that it is ready. If it died until then, the program would be executed.
    running.wait_log(&format!("another one (pid {server}) goes on"));
    (server, start)
}

/// Kills the server, and returns the next one, which is a clone of the keeper. If podfs has logged that the keeper was late, as on a
/// busy machine, it executes the program instead; then this kills the server again.
#[track_caller]
fn follow_clone(running: &Running) -> Pid {
    let late = || running.log().matches("the keeper of the server's open files starts no server: ").count();
    for _ in 0..5 {
        let before = late();
        match follow(running, Signal::SIGKILL) {
            (server, Start::Cloned) => return server,
            (_, Start::Executed) => assert!(late() > before, "no keeper was late:\n{}", running.log()),
        }
    }
    panic!("each keeper was late:\n{}", running.log())
}

#[track_caller]
fn next(running: &Running, before: Pid, stack: u64) -> (Pid, Start) {
    running.freed(|| rustix::fs::statvfs(running.volume("config")).expect("a server answers"));
    eventually("one server serves, with one keeper", || {
        running.servers() != [before] && (running.servers().len(), running.keepers().len()) == (1, 1)
    });
    let next = running.server();
    // The kernel chooses another address for each program that is executed.
    (next, if start_of_stack(next) == stack { Start::Cloned } else { Start::Executed })
}

/// The address at which a process's stack begins.
fn start_of_stack(process: Pid) -> u64 {
    status_field(process, 25).expect("it is there")
}

/// Lines of `proc_pid_status(5)` that say what a process may do.
fn rights(process: Pid) -> Vec<String> {
    const NAMES: [&str; 9] = ["Uid", "Gid", "Groups", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "SigIgn"];
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("it is there");
    let line = |name: &&str| status.lines().find(|line| line.split(':').next() == Some(*name)).map(str::to_owned);
    NAMES.iter().filter_map(line).chain(["net", "mnt"].map(|name| namespace(process, name))).collect()
}

fn namespace(process: Pid, name: &str) -> String {
    let link = fs::read_link(format!("/proc/{process}/ns/{name}")).expect("it is there");
    link.display().to_string()
}

/// A number of kilobytes in `proc_pid_status(5)`.
fn kilobytes(process: Pid, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("it is there");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line of this name");
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().expect("a number")
}

fn read(process: Pid, name: &str) -> String {
    fs::read_to_string(format!("/proc/{process}/{name}")).expect("it is there").trim().to_owned()
}

#[test]
fn a_clone_of_the_keeper_follows_a_server_that_was_killed_with_the_same_rights_and_open_files() {
    // FU-06
    let pod = Pod::new();
    let mut running = pod.fixture.run();
    let (config, host) = (running.volume("config"), running.volume("host"));
    let mut file = File::create(host.join("f")).expect("a file");
    let first = running.server();
    let (had, score) = (rights(first), read(first, "oom_score_adj"));
    for round in 0..5 {
        let server = follow_clone(&running);
        assert_eq!(rights(server), had);
        assert!(kilobytes(server, "VmLck") > 0, "its memory is locked");
        assert_eq!((read(server, "comm"), read(server, "oom_score_adj")), ("podfs-fuse".to_owned(), score.clone()));
        eventually("it leads a process group", || getpgid(Some(server)) == Ok(server));
        let [keeper] = running.keepers()[..] else { panic!("one keeper: {:?}", running.keepers()) };
        // The number of the first server, of which they have their uid, stays theirs.
        assert_eq!(getpgid(Some(keeper)), Ok(first));
        file.write_all(b"!").expect("it is open as before");
        let content = round.to_string();
        pod.fixture.write("objects/app.json", &config_map("app", &[("a", &content)]));
        wait_content(&config.join("a"), &content);
        assert_eq!(running.zombies(), Vec::<String>::new());
    }
    drop(file);
    assert_eq!(fs::read_to_string(host.join("f")).expect("a file"), "!!!!!");
    assert!(!running.log().contains("was refused"), "{}", running.log());
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn the_successor_of_a_crashed_server_has_another_memory_layout() {
    let pod = Pod::new();
    let mut running = pod.fixture.run();
    for signal in [Signal::SIGABRT, Signal::SIGILL, Signal::SIGQUIT] {
        assert_eq!(follow(&running, signal).1, Start::Executed, "{signal}");
        follow_clone(&running);
    }
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn the_successor_is_executed_if_the_first_keeper_has_died() {
    let pod = Pod::new();
    let mut running = pod.fixture.run();
    let mut file = File::create(running.volume("host").join("f")).expect("a file");
    let [keeper] = running.keepers()[..] else { panic!("one keeper: {:?}", running.keepers()) };
    kill(keeper, Signal::SIGKILL).expect("it is there");
    running.wait_log("the keeper of the server's open files ended; podfs has started another one");
    assert_eq!(follow(&running, Signal::SIGKILL).1, Start::Executed);
    follow_clone(&running);
    let (before, stack) = (running.server(), start_of_stack(running.server()));
    running.kill_server_and_keeper(|| file.write_all(b"1").expect("it is open as before"));
    assert_eq!(next(&running, before, stack).1, Start::Executed);
    follow_clone(&running);
    file.write_all(b"2").expect("it is open as before");
    drop(file);
    assert_eq!(running.zombies(), Vec::<String>::new());
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_keeper_that_does_not_answer_starts_no_server_and_leaves_none_when_it_continues() {
    let pod = Pod::new();
    let mut running = pod.fixture.run();
    let mut file = File::create(running.volume("host").join("f")).expect("a file");
    let [keeper] = running.keepers()[..] else { panic!("one keeper: {:?}", running.keepers()) };
    let (before, stack) = (running.server(), start_of_stack(running.server()));
    let stopped = Stopped::process(keeper);
    kill(before, Signal::SIGKILL).expect("it is there");
    running.wait_log("the keeper of the server's open files starts no server");
    drop(stopped);
    file.write_all(b"1").expect("it is open as before");
    assert_eq!(next(&running, before, stack).1, Start::Executed);
    eventually("podfs waits for its children", || running.zombies().is_empty());
    follow_clone(&running);
    drop(file);
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn after_an_upgrade_or_an_adoption_the_next_server_is_of_the_supervisors_version() {
    let pod = Pod::new();
    let mut builds = Builds::new(&pod.fixture);
    let mut running = builds.run(&pod.fixture);
    let version = || pod.fixture.pods()[0]["server"]["version"].as_str().map(str::to_owned);
    builds.upgrade(&pod.fixture);
    for _ in 0..2 {
        follow_clone(&running);
        assert_eq!(version(), Some(another(VERSION)));
    }
    running.signal(Signal::SIGKILL);
    running.wait();
    builds.put_other();
    running = builds.run(&pod.fixture);
    running.wait_log("podfs takes them over");
    assert_eq!(version(), Some(another(VERSION)), "the server stays");
    assert_eq!(follow(&running, Signal::SIGKILL).1, Start::Executed);
    assert_eq!(version(), Some(VERSION.to_owned()));
    follow_clone(&running);
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_pod_whose_first_volume_of_the_node_comes_late_gets_clones_with_the_rights_for_it() {
    let pod = crate::publishing::Dynamic::new(&["one"]);
    let mut running = pod.fixture.run();
    let config: PathBuf = pod.volume("configmap", "one").join("k");
    let kill_one = || {
        let (before, stack) = (running.server(), start_of_stack(running.server()));
        kill(before, Signal::SIGKILL).expect("it is there");
        let statvfs = || rustix::fs::statvfs(config.parent().expect("a volume")).expect("a server answers");
        running.freed(statvfs);
        eventually("another server serves", || running.servers() != [before] && running.servers().len() == 1);
        let next = running.server();
        assert_eq!(start_of_stack(next), stack, "it is a clone");
        next
    };
    let narrow = rights(kill_one());
    pod.publish(&["one", "host"]);
    pod.wait_live();
    let wide = rights(running.server());
    assert_ne!(wide, narrow);
    let host = pod.volume("host-path", "host");
    for round in 0..2 {
        assert_eq!(rights(kill_one()), wide);
        fs::write(host.join("g"), round.to_string()).expect("a server serves it");
    }
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn servers_that_are_killed_again_and_again_leave_no_process_and_no_descriptor_behind() {
    let pod = Pod::new();
    let mut running = pod.fixture.run();
    let (config, host) = (running.volume("config"), running.volume("host"));
    let open = |process: Pid| fs::read_dir(format!("/proc/{process}/fd")).expect("descriptors").count();
    let once = || {
        thread::scope(|scope| {
            scope.spawn(|| fs::write(host.join("f"), "1").expect("written"));
            scope.spawn(|| rustix::fs::statvfs(&config).expect("a server answers"));
            follow_clone(&running)
        })
    };
    let server = once();
    eventually("the file is closed", || open(server) == open(running.keepers()[0]));
    let before = open(server);
    let depth = kilobytes(server, "VmStk");
    for _ in 0..50 {
        once();
    }
    let server = running.server();
    eventually("no more is open than before", || open(server) == before);
    assert!(kilobytes(server, "VmStk") <= depth, "its stack is as deep as the first one's");
    assert_eq!(pod.fixture.processes().len(), 3, "supervisor, server, keeper");
    assert_eq!(running.zombies(), Vec::<String>::new());
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}
