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
    /// It is a clone of the keeper.
    Cloned,
    /// The supervisor executed the program.
    Executed,
}

/// Ends the server with a signal, and waits for its successor. Returns the successor, and how it was started.
#[track_caller]
fn end_server(running: &Running, signal: Signal) -> (Pid, Start) {
    let before = running.server();
    let stack = start_of_stack(before);
    kill(before, signal).expect("the server exists");
    let (server, start) = wait_for_successor(running, before, stack);
    // A server answers requests before the supervisor knows that it is ready. If it died until then, the program would be executed.
    running.wait_log(&format!("another one (pid {server}) goes on"));
    (server, start)
}

/// Kills the server, and returns its successor, a clone of the keeper. On a busy machine the keeper may answer too late; then
/// podfs logs this and executes the program, and the function kills the server again.
#[track_caller]
fn replace_with_clone(running: &Running) -> Pid {
    let late_keepers = || running.log().matches("podfs-keeper cannot start the next server: ").count();
    for _ in 0..5 {
        let before = late_keepers();
        match end_server(running, Signal::SIGKILL) {
            (server, Start::Cloned) => return server,
            (_, Start::Executed) => assert!(late_keepers() > before, "no keeper was late:\n{}", running.log()),
        }
    }
    panic!("each keeper was late:\n{}", running.log())
}

/// Waits for the successor of the server `before`, whose stack began at `stack`. Returns the successor, and how it was started.
#[track_caller]
fn wait_for_successor(running: &Running, before: Pid, stack: u64) -> (Pid, Start) {
    running.freed(|| rustix::fs::statvfs(running.volume("config")).expect("a server answers"));
    eventually("one server serves, with one keeper", || {
        running.servers() != [before] && (running.servers().len(), running.keepers().len()) == (1, 1)
    });
    let successor = running.server();
    // The kernel chooses another address for each program that is executed. A clone has the address of its parent.
    (successor, if start_of_stack(successor) == stack { Start::Cloned } else { Start::Executed })
}

/// The address at which a process's stack begins.
fn start_of_stack(process: Pid) -> u64 {
    stat_field(process, 25).expect("the process exists")
}

/// The privileges of a process: lines of `proc_pid_status(5)`, and its network and mount namespaces.
fn rights(process: Pid) -> Vec<String> {
    const NAMES: [&str; 9] = ["Uid", "Gid", "Groups", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "SigIgn"];
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("the process exists");
    let line = |name: &&str| status.lines().find(|line| line.split(':').next() == Some(*name)).map(str::to_owned);
    NAMES.iter().filter_map(line).chain(["net", "mnt"].map(|name| namespace(process, name))).collect()
}

fn namespace(process: Pid, name: &str) -> String {
    let link = fs::read_link(format!("/proc/{process}/ns/{name}")).expect("the process exists");
    link.display().to_string()
}

/// A number of kilobytes in `proc_pid_status(5)`.
fn kilobytes(process: Pid, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("the process exists");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line of this name");
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().expect("a number")
}

fn read_proc_file(process: Pid, name: &str) -> String {
    fs::read_to_string(format!("/proc/{process}/{name}")).expect("the process exists").trim().to_owned()
}

#[test]
fn a_clone_of_the_keeper_follows_a_server_that_was_killed_with_the_same_rights_and_open_files() {
    // FU-06
    let pod = Pod::new();
    let mut running = pod.fixture.run();
    let (config, host) = (running.volume("config"), running.volume("host"));
    let mut file = File::create(host.join("f")).expect("a file");
    let first = running.server();
    let (first_rights, score) = (rights(first), read_proc_file(first, "oom_score_adj"));
    for round in 0..5 {
        let server = replace_with_clone(&running);
        assert_eq!(rights(server), first_rights);
        assert!(kilobytes(server, "VmLck") > 0, "the memory of the server is locked");
        assert_eq!(read_proc_file(server, "comm"), "podfs-fuse");
        assert_eq!(read_proc_file(server, "oom_score_adj"), score);
        eventually("the server leads a process group", || getpgid(Some(server)) == Ok(server));
        let [keeper] = running.keepers()[..] else { panic!("one keeper: {:?}", running.keepers()) };
        // The uid of the servers is derived from the pid of the first one. The keeper stays in the process group of the first
        // server, so the kernel gives this pid to no other process.
        assert_eq!(getpgid(Some(keeper)), Ok(first));
        file.write_all(b"!").expect("the file is still open");
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
        assert_eq!(end_server(&running, signal).1, Start::Executed, "{signal}");
        replace_with_clone(&running);
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
    kill(keeper, Signal::SIGKILL).expect("the keeper exists");
    running.wait_log("the keeper of the server's open files ended; podfs has started another one");
    assert_eq!(end_server(&running, Signal::SIGKILL).1, Start::Executed);
    replace_with_clone(&running);
    let (before, stack) = (running.server(), start_of_stack(running.server()));
    running.kill_server_and_keeper(|| file.write_all(b"1").expect("the file is still open"));
    assert_eq!(wait_for_successor(&running, before, stack).1, Start::Executed);
    replace_with_clone(&running);
    file.write_all(b"2").expect("the file is still open");
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
    kill(before, Signal::SIGKILL).expect("the server exists");
    running.wait_log("podfs-keeper cannot start the next server");
    drop(stopped);
    file.write_all(b"1").expect("the file is still open");
    assert_eq!(wait_for_successor(&running, before, stack).1, Start::Executed);
    eventually("podfs waits for its children", || running.zombies().is_empty());
    replace_with_clone(&running);
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
        replace_with_clone(&running);
        assert_eq!(version(), Some(another(VERSION)));
    }
    running.signal(Signal::SIGKILL);
    running.wait();
    builds.put_other();
    running = builds.run(&pod.fixture);
    running.wait_log("podfs takes them over");
    assert_eq!(version(), Some(another(VERSION)), "the next supervisor keeps the server");
    assert_eq!(end_server(&running, Signal::SIGKILL).1, Start::Executed);
    assert_eq!(version(), Some(VERSION.to_owned()));
    replace_with_clone(&running);
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_pod_whose_first_volume_of_the_node_comes_late_gets_clones_with_the_rights_for_it() {
    let pod = crate::publishing::Dynamic::new(&["one"]);
    let mut running = pod.fixture.run();
    let config: PathBuf = pod.volume("configmap", "one").join("k");
    let replace_server = || {
        let (before, stack) = (running.server(), start_of_stack(running.server()));
        kill(before, Signal::SIGKILL).expect("the server exists");
        let statvfs = || rustix::fs::statvfs(config.parent().expect("a volume")).expect("a server answers");
        running.freed(statvfs);
        eventually("another server serves", || running.servers() != [before] && running.servers().len() == 1);
        let successor = running.server();
        running.wait_log(&format!("another one (pid {successor}) goes on"));
        assert_eq!(start_of_stack(successor), stack, "the successor is a clone");
        successor
    };
    let rights_for_projections = rights(replace_server());
    pod.publish(&["one", "host"]);
    pod.wait_live();
    let rights_for_host_path = rights(running.server());
    assert_ne!(rights_for_host_path, rights_for_projections);
    let host = pod.volume("host-path", "host");
    for round in 0..2 {
        assert_eq!(rights(replace_server()), rights_for_host_path);
        fs::write(host.join("g"), round.to_string()).expect("the server answers");
    }
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn servers_that_are_killed_again_and_again_leave_no_process_and_no_descriptor_behind() {
    let pod = Pod::new();
    let mut running = pod.fixture.run();
    let (config, host) = (running.volume("config"), running.volume("host"));
    let open_descriptors = |process: Pid| fs::read_dir(format!("/proc/{process}/fd")).expect("descriptors").count();
    let replace_under_load = || {
        thread::scope(|scope| {
            scope.spawn(|| fs::write(host.join("f"), "1").expect("written"));
            scope.spawn(|| rustix::fs::statvfs(&config).expect("a server answers"));
            replace_with_clone(&running)
        })
    };
    let server = replace_under_load();
    eventually("the server has closed the file", || open_descriptors(server) == open_descriptors(running.keepers()[0]));
    let before = open_descriptors(server);
    let stack_size = kilobytes(server, "VmStk");
    for _ in 0..50 {
        replace_under_load();
    }
    let server = running.server();
    eventually("the server has as many descriptors as before", || open_descriptors(server) == before);
    assert!(kilobytes(server, "VmStk") <= stack_size, "the stack does not grow from clone to clone");
    assert_eq!(pod.fixture.processes().len(), 3, "supervisor, server, keeper");
    assert_eq!(running.zombies(), Vec::<String>::new());
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}
