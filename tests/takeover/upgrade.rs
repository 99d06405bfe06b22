//! `podfs upgrade`: the processes of a pod switch to the programs on disk, or keep the ones they had.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::builds::{Builds, VERSION, upgrade};
use crate::common::identity::{Identity, identity};
use crate::common::outcome::Outcome;
use crate::common::passthrough::{disk_directory, within_timeout};
use crate::common::*;
use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

/// A pod with a projection and a directory of the host. The tests replace its programs on disk, and upgrade it.
struct Pod {
    fixture: Fixture,
    builds: Builds,
    running: Running,
    _source: TempDir,
}

impl Pod {
    fn new() -> Self {
        let source = disk_directory();
        let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
        let fixture = Fixture::new(&pod(&format!("[{{name: config, configMap: {{name: app}}}}, {host}]")));
        fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
        let builds = Builds::new(&fixture);
        let running = builds.run(&fixture);
        Self { fixture, builds, running, _source: source }
    }

    fn config(&self) -> PathBuf {
        self.running.volume("config")
    }

    fn identity(&self) -> (Identity, Identity) {
        (identity(&self.config()), identity(&self.running.volume("host")))
    }

    /// The version of the server, as `podfs status` shows it.
    fn server_version(&self) -> String {
        let server = &self.fixture.pods()[0]["server"];
        server["version"].as_str().unwrap_or_else(|| panic!("no version: {server}")).to_owned()
    }

    /// The number of open descriptors of the supervisor and of the server.
    fn open_descriptors(&self) -> [usize; 2] {
        let count = |process| fs::read_dir(format!("/proc/{process}/fd")).expect("descriptors").count();
        [self.running.pid(), self.running.server()].map(count)
    }

    /// The same numbers, when they have not changed for half a second: after an upgrade, podfs still closes descriptors
    /// for a while.
    fn settled_descriptors(&self) -> [usize; 2] {
        let mut open = self.open_descriptors();
        let mut since = Instant::now();
        while since.elapsed() < Duration::from_millis(500) {
            thread::sleep(Duration::from_millis(20));
            let now = self.open_descriptors();
            if now != open {
                (open, since) = (now, Instant::now());
            }
        }
        open
    }

    /// Checks that podfs commits changes and replaces a killed server, and that it ends cleanly.
    fn assert_works_and_stops(mut self) {
        self.fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
        wait_content(&self.config().join("a"), "2");
        kill(self.running.server(), Signal::SIGKILL).expect("the server exists");
        fs::write(self.running.volume("host").join("f"), "written by the next server").expect("written");
        assert!(self.running.stop().success());
        self.fixture.assert_nothing_left();
    }

    /// Checks that the upgrade failed, and that its output contains these texts.
    fn assert_not_upgraded(&self, outcome: &Outcome, texts: &[&str]) {
        outcome.says(1, &["1 of 1 pods are not upgraded"]);
        for text in texts {
            assert!(outcome.stdout.contains(text), "{text:?} is not in: {}", outcome.stdout);
        }
    }
}

/// Installs a podfs that cannot take a pod over. When it starts as a supervisor, a script puts the socket of a fake server in the place of
/// the server's socket. The fake server moves the socket of the real server back, so the earlier program finds the real server. The thread
/// ends when the fake server has a connection.
fn put_program_that_cannot_adopt(fixture: &Fixture, builds: &Builds) -> thread::JoinHandle<std::io::Result<()>> {
    let socket = fixture.run_files().join("server.sock");
    let (hidden, fake) = (fixture.path("hidden"), fixture.path("fake"));
    let listener = UnixListener::bind(&fake).expect("a socket");
    let real = builds.last();
    let [socket_path, hidden_path, fake_path] = [&socket, &hidden, &fake].map(|path| path.display());
    // The script also removes podfs-fuse from the disk. The earlier program has its podfs-fuse open.
    let podfs_fuse = builds.server_program();
    let podfs_fuse = podfs_fuse.display();
    builds.put_script(&format!(
        "[ \"$1\" = run ] && mv {socket_path} {hidden_path} && mv {fake_path} {socket_path} && rm {podfs_fuse}\n\
         exec {} \"$@\"",
        real.display()
    ));
    thread::spawn(move || {
        let (mut connection, _) = listener.accept()?;
        fs::rename(hidden, socket)?;
        connection.write_all(b"nonsense")
    })
}

#[test]
fn a_pod_becomes_the_program_on_disk_with_its_open_files_and_so_do_its_next_servers() {
    let mut pod = Pod::new();
    let mut file = fs::File::create(pod.running.volume("host").join("f")).expect("a file");
    // After each further upgrade, podfs must have the same descriptors open as after the first one.
    pod.builds.upgrade(&pod.fixture);
    let open = pod.settled_descriptors();
    for _ in 0..3 {
        let (before, supervisor) = (pod.identity(), pod.running.pid());
        pod.builds.upgrade(&pod.fixture);
        assert_eq!(pod.identity(), before);
        assert_eq!(pod.running.pid(), supervisor);
        file.write_all(b"!").expect("the file is open as before");
        eventually("the same number of descriptors is open", || pod.open_descriptors() == open);
    }
    drop(file);
    pod.assert_works_and_stops();
}

#[test]
fn a_pod_that_waits_for_an_object_reports_readiness_after_upgrades_and_rollbacks() {
    let fixture = Fixture::new(&config_pod());
    let mut builds = Builds::new(&fixture);
    let mut running = fixture.start_command(fixture.command_of(&builds.program()));
    running.wait_log("app");
    builds.upgrade(&fixture);
    // A new program refuses its arguments before it takes the descriptor. Another one has taken the descriptor, and cannot adopt the pod.
    let refused = || upgrade(&fixture).says(1, &["1 of 1 pods are not upgraded"]);
    let real = builds.last();
    let real = real.display();
    builds.put_script(&format!("[ \"$1\" = run ] && exec {real} \"$@\" --ready-fd=none\nexec {real} \"$@\""));
    refused();
    let restored = put_program_that_cannot_adopt(&fixture, &builds);
    refused();
    within_timeout("the fake server gets a connection", move || restored.join().expect("no panic")).expect("restored");
    assert!(!running.is_ready(), "the descriptor is closed:\n{}", running.log());
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    running.wait_ready();
    wait_content(&running.volume("config").join("a"), "1");
    // The object is written once, and later programs get no such descriptor.
    builds.upgrade(&fixture);
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn a_program_that_is_no_podfs_is_refused_and_nothing_happens() {
    let pod = Pod::new();
    let (before, server) = (pod.identity(), pod.running.server());
    pod.builds.put_script("exit 1");
    let outcome = upgrade(&pod.fixture);
    pod.assert_not_upgraded(
        &outcome,
        &["default/web: started, refused: the new podfs does not answer", "exit status: 1"],
    );
    assert_eq!(pod.running.server(), server, "the same server serves");
    assert_eq!(pod.identity(), before);
    pod.assert_works_and_stops();
}

#[test]
fn an_upgrade_is_refused_while_the_manifest_of_an_object_is_invalid_and_nothing_happens() {
    let mut pod = Pod::new();
    let (before, server) = (pod.identity(), pod.running.server());
    let manifest = fs::read_to_string(pod.fixture.path("objects/app.json")).expect("a manifest");
    pod.fixture.write("objects/app.json", "{\"a\": [");
    pod.running.wait_log("app.json");
    pod.builds.put_other();
    let outcome = upgrade(&pod.fixture);
    pod.assert_not_upgraded(&outcome, &["default/web: refused: ", "objects/app.json", "correct it, then try again"]);
    assert_eq!((pod.identity(), pod.running.server()), (before, server));
    // A file of other objects does not matter.
    pod.fixture.write("objects/other.yaml", "a: [");
    pod.fixture.write("objects/app.json", &manifest);
    eventually("the pod is upgraded once its object is good", || upgrade(&pod.fixture).code == Some(0));
    pod.running.wait_log("other.yaml");
    pod.assert_works_and_stops();
}

#[test]
fn an_upgrade_is_refused_after_the_manifest_was_changed_to_other_volumes_or_another_pod() {
    let mut pod = Pod::new();
    let (before, server) = (pod.identity(), pod.running.server());
    let manifest = fs::read_to_string(pod.fixture.pod()).expect("a manifest");
    pod.builds.put_other();
    let other_volumes =
        manifest.replace("configMap: {name: app}", "emptyDir: {}").replace("name: host,", "name: more,");
    let renamed = manifest.replace("name: web", "name: other");
    let edits = [
        (
            &other_volumes,
            "do not change with its manifest",
            r#"as the manifest file has them now: "config", "host", "more""#,
        ),
        (&renamed, "default/other", "describes pod default/other "),
    ];
    for (edited, logged, reason) in edits {
        assert_ne!(*edited, manifest);
        pod.fixture.write("pod.yaml", edited);
        pod.running.wait_log(logged);
        let outcome = upgrade(&pod.fixture);
        pod.assert_not_upgraded(
            &outcome,
            &["default/web: refused: ", reason, "stop podfs by SIGTERM and start it again"],
        );
        assert_eq!((&pod.identity(), pod.running.server()), (&before, server));
    }
    pod.fixture.write("pod.yaml", &manifest);
    eventually("the pod is upgraded once its manifest is restored", || upgrade(&pod.fixture).code == Some(0));
    assert_eq!(pod.identity(), before);
    pod.assert_works_and_stops();
}

#[test]
fn both_programs_are_replaced_or_neither() {
    let pod = Pod::new();
    let (before, server) = (pod.identity(), pod.running.server());
    let version = pod.builds.put_podfs_alone();
    let (podfs, podfs_fuse) = (pod.builds.program(), pod.builds.server_program());
    let (podfs, podfs_fuse) = (podfs.display(), podfs_fuse.display());
    let sentence =
        format!("podfs {version} ({podfs}) does not work with podfs-fuse {VERSION} ({podfs_fuse}); install both");
    let outcome = upgrade(&pod.fixture);
    pod.assert_not_upgraded(&outcome, &["default/web: started, refused: ", &sentence]);
    fs::remove_file(pod.builds.server_program()).expect("removed");
    let outcome = upgrade(&pod.fixture);
    pod.assert_not_upgraded(
        &outcome,
        &["default/web: started, refused: ", "podfs-fuse, the program that serves volumes, is neither"],
    );
    assert_eq!(pod.running.server(), server, "the same server serves");
    assert_eq!(pod.identity(), before);
    pod.assert_works_and_stops();
}

#[test]
fn programs_on_disk_that_were_replaced_change_nothing_until_the_upgrade() {
    let mut pod = Pod::new();
    pod.builds.put_other();
    kill(pod.running.server(), Signal::SIGKILL).expect("the server exists");
    pod.running.wait_log("another one (pid ");
    assert_eq!(pod.server_version(), VERSION);
    let name = fs::read_to_string(format!("/proc/{}/comm", pod.running.server())).expect("a name");
    assert_eq!(name, "podfs-fuse\n");
    let outcome = upgrade(&pod.fixture);
    assert!(outcome.stdout.contains("default/web: started, done, podfs "), "{}{}", outcome.stdout, outcome.stderr);
    assert_ne!(pod.server_version(), VERSION);
    pod.assert_works_and_stops();
}

#[test]
fn a_pod_whose_program_is_gone_from_the_disk_is_not_upgraded() {
    let pod = Pod::new();
    let server = pod.running.server();
    fs::remove_file(pod.builds.program()).expect("removed");
    let outcome = upgrade(&pod.fixture);
    pod.assert_not_upgraded(&outcome, &["refused: there is no podfs at", &pod.builds.program().display().to_string()]);
    assert_eq!(pod.running.server(), server, "the same server serves");
    pod.assert_works_and_stops();
}

#[test]
fn an_upgrade_says_that_it_waits_for_a_supervisor_that_is_stopped() {
    let pod = Pod::new();
    let supervisor = pod.running.pid();
    kill(supervisor, Signal::SIGSTOP).expect("it is there");
    let mut command = pod.fixture.operator("upgrade");
    let mut upgrading =
        command.arg("--all").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("podfs starts");
    let mut said = String::new();
    BufReader::new(upgrading.stderr.take().expect("a pipe")).read_line(&mut said).expect("a line");
    kill(supervisor, Signal::SIGCONT).expect("it is there");
    let waits = format!("podfs: default/web: the supervisor (pid {supervisor}) does not answer yet: it is stopped");
    assert!(said.starts_with(&waits), "{said}");
    assert!(upgrading.wait().expect("it ends").success());
    pod.assert_works_and_stops();
}

#[test]
fn an_upgraded_server_that_cannot_continue_is_replaced_by_the_program_before() {
    let pod = Pod::new();
    // Containers have more files open than the new server's limit allows, so it cannot take them over.
    let host = pod.running.volume("host");
    let files: Vec<_> = (0..100).map(|n| fs::File::create(host.join(format!("{n}"))).expect("a file")).collect();
    let before = pod.identity();
    let real = pod.builds.last();
    pod.builds.put_script(&format!("[ \"$1\" = server ] && ulimit -n 100\nexec {} \"$@\"", real.display()));
    let outcome = upgrade(&pod.fixture);
    pod.assert_not_upgraded(&outcome, &["default/web: started, rolled back: "]);
    assert_eq!(pod.identity(), before);
    for mut file in &files {
        file.write_all(b"!").expect("the file is open as before");
    }
    drop(files);
    pod.assert_works_and_stops();
}

#[test]
fn a_supervisor_that_cannot_adopt_becomes_the_program_before_again() {
    let pod = Pod::new();
    let (before, supervisor) = (pod.identity(), pod.running.pid());
    let restored = put_program_that_cannot_adopt(&pod.fixture, &pod.builds);
    let outcome = upgrade(&pod.fixture);
    pod.assert_not_upgraded(&outcome, &["default/web: started, rolled back: "]);
    within_timeout("the fake server gets a connection", move || restored.join().expect("no panic")).expect("restored");
    assert_eq!((pod.identity(), pod.running.pid()), (before, supervisor));
    pod.assert_works_and_stops();
}

#[test]
fn a_supervisor_that_refuses_its_arguments_becomes_the_program_before_again() {
    // The program before does not get these options.
    for (option, reason) in [
        ("--ready-fd=none", "invalid value 'none' for '--ready-fd"),
        ("--ready-fd=77", "--ready-fd 77: there is no such open descriptor"),
        ("--config=/none", "/none"),
    ] {
        let pod = Pod::new();
        let (before, supervisor) = (pod.identity(), pod.running.pid());
        let real = pod.builds.last();
        let real = real.display();
        pod.builds.put_script(&format!("[ \"$1\" = run ] && exec {real} \"$@\" {option}\nexec {real} \"$@\""));
        let outcome = upgrade(&pod.fixture);
        pod.assert_not_upgraded(&outcome, &["default/web: started, rolled back: ", reason]);
        assert_eq!((pod.identity(), pod.running.pid()), (before, supervisor));
        pod.assert_works_and_stops();
    }
}

#[test]
fn a_supervisor_that_cannot_execute_the_new_program_still_ignores_sigpipe() {
    let pod = Pod::new();
    let before = pod.identity();
    let real = pod.builds.last();
    pod.builds.put_script(&format!("[ \"$1\" = server ] && rm \"$0\"\nexec {} \"$@\"", real.display()));
    let outcome = upgrade(&pod.fixture);
    pod.assert_not_upgraded(&outcome, &["default/web: started, rolled back: ", "No such file or directory"]);
    let status = fs::read_to_string(format!("/proc/{}/status", pod.running.pid())).expect("a status");
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("the ignored signals");
    let ignored = u64::from_str_radix(ignored.trim(), 16).expect("a number");
    assert_ne!(ignored & 1 << (Signal::SIGPIPE as u32 - 1), 0, "{status}");
    assert_eq!(pod.identity(), before);
    pod.assert_works_and_stops();
}

#[test]
fn a_traced_volume_is_traced_on_by_the_next_server() {
    let source = disk_directory();
    let fixture = Fixture::new("");
    let volume = format!("{{name: host, hostPath: {{path: {}}}}}", source.path().display());
    fixture.write("volume.yaml", &volume);
    let at = fixture.path("at");
    fs::create_dir(&at).expect("a directory");
    let mut command = std::process::Command::new(PODFS);
    command.args(["mount", "--trace", "--volume"]).arg(fixture.path("volume.yaml")).arg(&at);
    let mut running = fixture.spawn(&mut command);
    let is_traced = |name: &str| {
        let _missing = fs::metadata(at.join(name));
        let trace = fs::read_to_string(fixture.path("out")).unwrap_or_default();
        trace.lines().any(|line| line.contains("LOOKUP") && line.contains(name))
    };
    eventually("the trace shows a request", || is_mounted(&at) && is_traced("before"));
    kill(running.server(), Signal::SIGKILL).expect("the server exists");
    let mut number = 0;
    eventually("the trace shows a request to the next server", || {
        number += 1;
        is_traced(&format!("after-{number}"))
    });
    assert!(running.stop().success());
}

fn is_mounted(at: &Path) -> bool {
    podfs_fuse::mount::table::mounts().expect("a table").iter().any(|mounted| mounted.at == at)
}

#[test]
fn a_signal_to_stop_that_arrives_during_an_upgrade_stops_the_pod() {
    // With these pauses the signal arrives before the new program starts, while it starts, and while it adopts the
    // server.
    for pause in [0, 20, 40, 60, 80, 120].map(Duration::from_millis) {
        let Pod { fixture, mut builds, mut running, _source } = Pod::new();
        builds.put_other();
        let mut upgrading = Command::new(builds.program());
        upgrading.args(["upgrade", "--all", "--run-dir"]).arg(fixture.path("run"));
        let mut upgrading = upgrading.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("podfs");
        let mut output = upgrading.stdout.take().expect("a pipe");
        let mut read = String::new();
        while !read.contains("started") {
            let mut byte = [0];
            output.read_exact(&mut byte).expect("the supervisor has begun with the upgrade");
            read.push(byte[0].into());
        }
        thread::sleep(pause);
        running.signal(Signal::SIGTERM);
        let status = running.wait();
        assert!(status.success(), "after {pause:?}: {status}\n{}", running.log());
        upgrading.wait().expect("the upgrade ends");
        eventually("every process has ended", || fixture.processes().is_empty());
        fixture.assert_nothing_left();
    }
}
