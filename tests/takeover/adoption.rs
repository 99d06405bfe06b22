//! A supervisor is killed, and podfs is started again: the next supervisor adopts the running server, or covers dead
//! mounts with new ones.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use crate::common::identity::identity;
use crate::common::limit::limit_files;
use crate::common::locker::Locker;
use crate::common::namespace::{Container, Propagation, change_mount, mount_tmpfs};
use crate::common::outcome::finish;
use crate::common::passthrough::{disk_directory, within_timeout};
use crate::common::scratch::Scratch;
use crate::common::watch::Watcher;
use crate::common::*;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, umount2};
use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

/// A pod with a projection and a directory of the host, whose supervisor is killed.
struct OrphanedPod {
    fixture: Fixture,
    source: TempDir,
}

impl OrphanedPod {
    fn new() -> Self {
        let source = disk_directory();
        let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
        let fixture = Fixture::new(&pod(&format!("[{{name: config, configMap: {{name: app}}}}, {host}]")));
        let pod = Self { fixture, source };
        pod.write("1");
        pod
    }

    fn write(&self, content: &str) {
        self.fixture.write("objects/app.json", &config_map("app", &[("a", content)]));
    }

    /// The socket of the server, by which the next supervisor finds it.
    fn socket(&self) -> PathBuf {
        let pods = fs::read_dir(self.fixture.path("run")).expect("a run directory");
        pods.flatten().next().expect("a pod").path().join("server.sock")
    }
}

/// The number of generations, including those that podfs is removing.
fn generations(volume: &Path) -> usize {
    let names = fs::read_dir(volume).expect("a listing").map(|entry| entry.expect("an entry").file_name());
    names.filter(|name| name != "..data" && name.as_encoded_bytes().starts_with(b"..")).count()
}

#[track_caller]
pub fn kill_supervisor(running: &mut Running) {
    running.signal(Signal::SIGKILL);
    running.wait();
}

#[track_caller]
fn kill_both(fixture: &Fixture, running: &mut Running) {
    let server = running.server();
    running.signal(Signal::SIGKILL);
    kill(server, Signal::SIGKILL).expect("the server exists");
    running.wait();
    eventually("the keeper has ended", || fixture.processes().is_empty());
}

#[test]
fn the_next_supervisor_adopts_the_volumes_as_they_are_and_commits() {
    // RC-01
    let pod = OrphanedPod::new();
    let mut running = pod.fixture.run();
    let (config, host) = (running.volume("config"), running.volume("host"));
    fs::write(host.join("f"), "kept").expect("written");
    let mut open = OpenOptions::new().append(true).open(host.join("f")).expect("open");
    let mut owner = Locker::with(&host.join("f"));
    owner.does("lock f ofd exclusive 0 10");
    let mut contender = Locker::with(&host.join("f"));
    let server = running.server();
    for round in 2..7 {
        eventually("podfs has removed the old generation", || generations(&config) == 1);
        let before = (identity(&config), identity(&host));
        kill_supervisor(&mut running);
        open.write_all(b"!").expect("the server still answers");
        assert_eq!(fs::read_to_string(config.join("a")).expect("a file"), (round - 1).to_string());
        running = pod.fixture.run();
        running.wait_log("podfs takes them over");
        assert_eq!((identity(&config), identity(&host)), before);
        assert_eq!(running.server(), server, "the supervisor has adopted the server");
        contender.is_refused("lock f ofd exclusive 0 10");
        let watcher = Watcher::on("root", &config);
        pod.write(&round.to_string());
        wait_content(&config.join("a"), &round.to_string());
        eventually("the watcher sees one switch", || watcher.switches() == 1);
        // A supervisor that has adopted a server starts another one when the server dies.
        if round == 4 {
            kill(server, Signal::SIGKILL).expect("the server exists");
            running.wait_log("another one (pid ");
            open.write_all(b"?").expect("the next server answers");
            break;
        }
    }
    drop((owner, contender));
    assert_eq!(fs::read_to_string(pod.source.path().join("f")).expect("a file"), "kept!!!?");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

/// Gives the pod a further volume, whose mount point is in use: the next supervisor fails. Returns the mount point.
fn occupy_a_mount_point(fixture: &Fixture, config: &Path) -> PathBuf {
    let manifest = fs::read_to_string(fixture.pod()).expect("a manifest");
    let more = manifest.replace("[{name: config,", "[{name: more, configMap: {name: app}}, {name: config,");
    fixture.write("pod.yaml", &more);
    let point = config.with_file_name("more");
    fs::create_dir(&point).expect("a directory");
    fs::write(point.join("f"), "").expect("written");
    point
}

#[test]
fn a_supervisor_that_fails_after_the_adoption_leaves_the_volumes_as_they_are() {
    let pod = OrphanedPod::new();
    let mut running = pod.fixture.run();
    let (config, host, server) = (running.volume("config"), running.volume("host"), running.server());
    let before = (identity(&config), identity(&host));
    kill_supervisor(&mut running);
    let occupied = occupy_a_mount_point(&pod.fixture, &config);
    for _ in 0..2 {
        let mut failing = pod.fixture.start();
        assert_eq!(failing.wait().code(), Some(1), "{}", failing.log());
        assert!(failing.log().contains("more is not empty"), "{}", failing.log());
        assert_eq!((identity(&config), identity(&host)), before);
    }
    fs::remove_dir_all(occupied).expect("removed");
    let mut running = pod.fixture.run();
    assert_eq!((identity(&config), identity(&host), running.server()), (before.0, before.1, server));
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_supervisor_that_fails_leaves_the_leftovers_of_a_dead_one_to_the_next() {
    let fixture = Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: scratch, emptyDir: {}}]"));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let mut running = fixture.run();
    let (config, file) = (running.volume("config"), running.volume("scratch").join("f"));
    fs::write(&file, "1").expect("written");
    kill_both(&fixture, &mut running);
    let occupied = occupy_a_mount_point(&fixture, &config);
    let mut failing = fixture.start();
    assert_eq!(failing.wait().code(), Some(1), "{}", failing.log());
    fs::remove_dir_all(&occupied).expect("removed");
    let mut running = fixture.run();
    assert_eq!(fs::read_to_string(&file).expect("a file"), "1");
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn aw_16_the_next_supervisor_makes_the_links_that_a_killed_one_did_not_make() {
    const KEYS: usize = 4000;
    let keys: Vec<_> = (0..KEYS).map(|key| format!("key-{key:04}")).collect();
    let data: Vec<_> = keys.iter().map(|key| (key.as_str(), "value")).collect();
    let pod = OrphanedPod::new();
    let mut running = pod.fixture.run();
    let config = running.volume("config");
    let mut partial = 0;
    // The supervisor is killed as soon as its first new link exists. Usually it has not made all links then; if it has,
    // the test tries again.
    for _ in 0..20 {
        pod.fixture.write("objects/app.json", &config_map("app", &data));
        while !config.join(&keys[0]).exists() {}
        kill_supervisor(&mut running);
        let links = keys.iter().filter(|key| config.join(key).symlink_metadata().is_ok()).count();
        partial += usize::from(links < KEYS);
        running = pod.fixture.run();
        eventually("every link exists", || keys.iter().all(|key| config.join(key).exists()));
        if partial > 0 {
            break;
        }
        pod.write("1");
        eventually("podfs has removed the links", || !config.join(&keys[KEYS - 1]).exists());
    }
    assert!(partial > 0, "no supervisor was killed in the middle of a commit");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn old_generations_that_a_killed_supervisor_has_kept_are_removed_by_the_next_one() {
    let pod = OrphanedPod::new();
    let start = |seconds: &str| {
        let mut command = pod.fixture.command();
        command.args(["--keep-old-generations", seconds]);
        let mut running = pod.fixture.start_command(command);
        running.wait_ready();
        running
    };
    let mut running = start("60");
    let config = running.volume("config");
    let old = config.join(generation(&config));
    for number in ["2", "3"] {
        pod.write(number);
        wait_content(&config.join("a"), number);
    }
    let volume = &pod.fixture.pods()[0]["volumes"][0];
    assert_eq!(volume["oldGenerations"], 2, "{volume}");
    assert!(volume["oldGenerationBytes"].as_u64().is_some_and(|bytes| bytes > 0), "{volume}");
    let mut watcher = Watcher::on("root", &config);
    watcher.add("old", &old.join("a"));
    kill_supervisor(&mut running);
    assert_eq!(fs::read_to_string(old.join("a")).expect("the server keeps the old generation"), "1");
    let mut running = start("0.1");
    eventually("podfs has removed the old generations", || generations(&config) == 1);
    assert!(watcher.events().contains(&"old DELETE_SELF".to_owned()));
    assert_eq!(fs::read_to_string(config.join("a")).expect("a file"), "3");
    eventually("the status has no old generations", || {
        pod.fixture.pods()[0]["volumes"][0].get("oldGenerations").is_none()
    });

    // The pod ends while the server keeps an old generation.
    drop(watcher);
    pod.write("4");
    wait_content(&config.join("a"), "4");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_supervisor_ends_cleanly_at_sigusr1_and_the_next_one_adopts_the_volumes() {
    let pod = OrphanedPod::new();
    let mut running = pod.fixture.run();
    let (config, host) = (running.volume("config"), running.volume("host"));
    let mut open = File::create(host.join("f")).expect("a file");
    let server = running.server();
    let before = (identity(&config), identity(&host));
    running.signal(Signal::SIGUSR1);
    assert_eq!(running.wait().code(), Some(0), "{}", running.log());
    open.write_all(b"!").expect("the server still answers");
    assert_eq!(fs::read_to_string(config.join("a")).expect("a file"), "1");
    let mut running = pod.fixture.run();
    assert_eq!((identity(&config), identity(&host)), before);
    assert_eq!(running.server(), server, "the supervisor has adopted the server");
    drop(open);
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_supervisor_and_a_keeper_that_are_killed_at_once_are_replaced() {
    let pod = OrphanedPod::new();
    let mut running = pod.fixture.run();
    let (config, host) = (running.volume("config"), running.volume("host"));
    let mut open = File::create(host.join("f")).expect("a file");
    let mut owner = Locker::with(&host.join("f"));
    owner.does("lock f ofd exclusive 0 10");
    let mut contender = Locker::with(&host.join("f"));
    for round in 0..3 {
        let server = running.server();
        running.keepers().into_iter().for_each(|keeper| kill(keeper, Signal::SIGKILL).expect("the keeper exists"));
        kill_supervisor(&mut running);
        running = pod.fixture.run();
        assert_eq!(running.server(), server, "the supervisor has adopted the server");
        // In these rounds the server may die before it has another keeper.
        if round % 2 == 0 {
            kill(server, Signal::SIGKILL).expect("the server exists");
        }
        running.freed(|| {
            open.write_all(b"!").expect("the file is still open");
            contender.is_refused("lock f ofd exclusive 0 10");
            assert_eq!(fs::read_to_string(config.join("a")).expect("a file"), "1");
        });
        eventually("one server serves, with one keeper", || {
            (running.servers().len(), running.keepers().len()) == (1, 1)
        });
    }
    drop((open, owner, contender));
    assert_eq!(fs::read_to_string(pod.source.path().join("f")).expect("a file"), "!!!");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_keeper_that_is_killed_after_an_adoption_is_replaced() {
    let pod = OrphanedPod::new();
    let mut running = pod.fixture.run();
    let host = running.volume("host");
    let mut open = File::create(host.join("f")).expect("a file");
    kill_supervisor(&mut running);
    let mut running = pod.fixture.run();
    let [keeper] = running.keepers()[..] else { panic!("one keeper: {:?}", running.keepers()) };
    kill(keeper, Signal::SIGKILL).expect("the keeper exists");
    running.wait_log("the keeper of the server's open files ended; podfs has started another one");
    // The next server cannot open a removed file. It gets the descriptor of the file from the new keeper.
    fs::remove_file(host.join("f")).expect("removed");
    kill(running.server(), Signal::SIGKILL).expect("the server exists");
    open.write_all(b"!").expect("the next server has the file open");
    drop(open);
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn while_a_supervisor_lives_another_one_is_refused_also_after_an_adoption() {
    let pod = OrphanedPod::new();
    let mut running = pod.fixture.run();
    kill_supervisor(&mut running);
    let mut running = pod.fixture.run();
    let second = finish(&mut pod.fixture.command());
    second.says(1, &["is already served by podfs", &format!("(pid {})", running.pid()), "stop that one first"]);
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_supervisor_with_another_root_directory_is_refused_while_the_server_lives() {
    let pod = OrphanedPod::new();
    let mut running = pod.fixture.run();
    let config = running.volume("config");
    kill_supervisor(&mut running);
    let mut elsewhere = Command::new(PODFS);
    elsewhere.arg("run").arg("--pod").arg(pod.fixture.pod()).arg("--objects").arg(pod.fixture.objects());
    elsewhere.arg("--root-dir").arg(pod.fixture.path("elsewhere")).arg("--run-dir").arg(pod.fixture.path("run"));
    finish(&mut elsewhere)
        .says(2, &["are mounted elsewhere, such as at", "root/pods", "start podfs with the --root-dir"]);
    assert_eq!(fs::read_to_string(config.join("a")).expect("the server serves it still"), "1");
    // Nothing was recorded: the next podfs adopts the volumes.
    let inode = fs::metadata(&config).expect("a directory").ino();
    let mut running = pod.fixture.run();
    assert_eq!(fs::metadata(&config).expect("a directory").ino(), inode);
    assert!(!running.log().contains("the pod no longer has volume"), "{}", running.log());
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn the_next_supervisor_commits_the_changes_it_missed() {
    let pod = OrphanedPod::new();
    let mut running = pod.fixture.run();
    let config = running.volume("config");
    kill_supervisor(&mut running);
    pod.write("2");
    let mut running = pod.fixture.run();
    wait_content(&config.join("a"), "2");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_stopped_server_cannot_be_adopted_and_is_replaced() {
    let pod = OrphanedPod::new();
    let mut running = pod.fixture.run();
    let (config, server) = (running.volume("config"), running.server());
    // The supervisor is killed first, because the kernel continues a stopped process, with SIGHUP, when its parent
    // dies.
    kill_supervisor(&mut running);
    kill(server, Signal::SIGSTOP).expect("the server exists");
    let mut running = pod.fixture.run();
    running.wait_log("podfs cannot take over the server of the pod");
    assert_ne!(running.server(), server);
    wait_content(&config.join("a"), "1");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_socket_that_speaks_nonsense_is_no_server() {
    for answer in [&b"nonsense, and much of it"[..], b"\xff\xff\xff\xff\xff\xff\xff\xff", b""] {
        let pod = OrphanedPod::new();
        let mut running = pod.fixture.run();
        let (config, socket) = (running.volume("config"), pod.socket());
        kill_both(&pod.fixture, &mut running);
        fs::remove_file(&socket).expect("the socket exists");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let fake_server = thread::spawn(move || {
            let (mut connection, _) = listener.accept()?;
            connection.write_all(answer)?;
            connection.shutdown(std::net::Shutdown::Write)?;
            connection.read_to_end(&mut Vec::new())
        });
        let mut running = pod.fixture.run();
        within_timeout("podfs closes the connection to the fake server", move || drop(fake_server.join()));
        wait_content(&config.join("a"), "1");
        assert!(running.stop().success());
        pod.fixture.assert_nothing_left();
    }
}

#[test]
fn the_server_of_another_pod_is_left_alone() {
    let (pod, other_pod) = (OrphanedPod::new(), OrphanedPod::new());
    let manifest = fs::read_to_string(other_pod.fixture.pod()).expect("a manifest");
    other_pod.fixture.write("pod.yaml", &manifest.replace("name: web, labels", "name: db, labels"));
    let mut running = pod.fixture.run();
    let config = running.volume("config");
    kill_both(&pod.fixture, &mut running);
    let mut other_running = other_pod.fixture.run();
    let (other_config, other_server) = (other_running.volume("config"), other_running.server());
    let before = identity(&other_config);
    kill_supervisor(&mut other_running);
    fs::remove_file(pod.socket()).expect("the socket exists");
    symlink(other_pod.socket(), pod.socket()).expect("a link");

    let mut running = pod.fixture.run();
    running.wait_log("): it serves pod");
    wait_content(&config.join("a"), "1");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
    let mut other_running = other_pod.fixture.run();
    assert_eq!((identity(&other_config), other_running.server()), (before, other_server));
    assert!(other_running.stop().success());
    other_pod.fixture.assert_nothing_left();
}

#[test]
fn a_successor_starts_after_the_programs_were_deleted() {
    let pod = OrphanedPod::new();
    let programs = pod.fixture.path("programs");
    fs::create_dir(&programs).expect("a directory");
    fs::copy(PODFS, programs.join("podfs")).expect("copied");
    fs::copy(PODFS_FUSE, programs.join("podfs-fuse")).expect("copied");
    let mut running = pod.fixture.start_command(pod.fixture.command_of(&programs.join("podfs")));
    running.wait_ready();
    fs::remove_dir_all(&programs).expect("removed");
    let config = running.volume("config");
    kill(running.server(), Signal::SIGKILL).expect("the server exists");
    running.wait_log("another one (pid ");
    pod.write("2");
    wait_content(&config.join("a"), "2");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_server_that_cannot_be_followed_for_a_while_takes_no_mount_with_it() {
    let pod = OrphanedPod::new();
    let mut running = pod.fixture.run();
    let (config, host) = (running.volume("config"), running.volume("host"));
    let before = (identity(&config), identity(&host));
    let usual_limit = limit_files(running.pid(), 1);
    kill(running.server(), Signal::SIGKILL).expect("the server exists");
    running.wait_log("it tries again in 80 ms");
    let writer = thread::spawn({
        let host = host.clone();
        move || fs::write(host.join("new"), "written by the next server")
    });
    limit_files(running.pid(), usual_limit);
    within_timeout("the write ends", move || writer.join().expect("no panic")).expect("written");
    assert_eq!(identity(&config), before.0);
    assert_eq!(identity(&host).mount, before.1.mount, "the mount is still the same");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_server_that_has_no_descriptor_left_waits_for_the_next_supervisor() {
    let pod = OrphanedPod::new();
    let mut running = pod.fixture.run();
    let server = running.server();
    kill_supervisor(&mut running);
    running.wait_log("the supervisor is gone");
    let is_free = |number: &u64| fs::symlink_metadata(format!("/proc/{server}/fd/{number}")).is_err();
    let all = limit_files(server, (0..).find(is_free).expect("a number"));
    let refused = UnixStream::connect(pod.socket()).expect("the server listens");
    running.wait_log("cannot accept the connection of a supervisor");
    limit_files(server, all);
    drop(refused);
    let mut next = pod.fixture.run();
    assert_eq!(next.server(), server, "it is adopted");
    assert!(next.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_full_run_directory_stops_new_pods_and_no_adoption() {
    let pod = OrphanedPod::new();
    let disk = Scratch::tmpfs("size=64k");
    let (usual_directory, run_directory) = (pod.fixture.path("run"), disk.path().join("run"));
    let command = || {
        let usual_command = pod.fixture.command();
        let mut command = Command::new(PODFS);
        command.args(
            usual_command
                .get_args()
                .map(|argument| if argument == usual_directory { run_directory.as_os_str() } else { argument }),
        );
        command
    };
    let start = || {
        let mut running = pod.fixture.start_command(command());
        running.wait_ready();
        running
    };
    let mut running = start();
    let (config, server) = (running.volume("config"), running.server());
    let before = identity(&config);
    kill_supervisor(&mut running);
    let filler = disk.path().join("filler");
    let fill =
        || io::copy(&mut io::repeat(0), &mut File::create(&filler).expect("a file")).expect_err("the disk is full");
    fill();
    let mut running = start();
    assert_eq!((identity(&config), running.server()), (before, server));
    assert!(running.stop().success());
    assert_eq!(pod.fixture.mounts(), Vec::<PathBuf>::new());
    assert!(
        !run_directory.exists() && !pod.fixture.path("root").exists(),
        "podfs removes the directories that it made"
    );

    fill();
    let refused = pod.fixture.refused(&mut command());
    refused.says(1, &["No space left on device", &run_directory.display().to_string()]);
    fs::remove_file(&filler).expect("removed");
    assert!(start().stop().success());
    assert_eq!(fs::read_dir(disk.path()).expect("a listing").count(), 0, "podfs removes the directories that it made");
}

#[test]
fn a_container_sees_the_new_mount_over_the_dead_one() {
    // RC-05: the container starts before the new mount, and gets later mounts of the host.
    let pod = OrphanedPod::new();
    let root = pod.fixture.path("root");
    fs::create_dir(&root).expect("a directory");
    mount_tmpfs(&root);
    change_mount(&root, MsFlags::MS_SHARED | MsFlags::MS_REC);
    let mut running = pod.fixture.run();
    let config = running.volume("config");
    let container = Container::new(Propagation::FromHost);
    let read = |container: &Container| {
        let path = config.join("a");
        container.run(move || fs::read_to_string(path).map_err(|error| error.raw_os_error().map(Errno::from_raw)))
    };
    assert_eq!(read(&container).as_deref(), Ok("1"));
    kill_both(&pod.fixture, &mut running);
    let listed = fs::read_dir(&config).expect_err("no server answers").raw_os_error().map(Errno::from_raw);
    assert!(matches!(listed, Some(Errno::ENOTCONN | Errno::ECONNABORTED)), "{listed:?}");

    pod.write("2");
    let mut running = pod.fixture.run();
    assert_eq!(read(&container).as_deref(), Ok("2"));
    assert!(running.stop().success());
    let mounts = container.run(move || podfs_fuse::mount::table::mounts().expect("a table"));
    let remaining: Vec<_> = mounts.into_iter().map(|mount| mount.at).filter(|at| at.starts_with(&config)).collect();
    assert_eq!(remaining, Vec::<PathBuf>::new(), "the container has no mount of the volume any more");
    umount2(&root, MntFlags::MNT_DETACH).expect("the root directory is free");
}
