//! `podfs upgrade`: a pod switches to the podfs on disk, or keeps the one it had.

use std::fs;
use std::io::{Read, Write};
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

/// A pod with a projection and a directory of the host, whose podfs is upgraded.
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
    fn open(&self) -> [usize; 2] {
        let count = |process| fs::read_dir(format!("/proc/{process}/fd")).expect("descriptors").count();
        [self.running.pid(), self.running.server()].map(count)
    }

    /// The same, once it has not changed for a while: podfs is still closing descriptors.
    fn open_at_rest(&self) -> [usize; 2] {
        let mut open = self.open();
        let mut since = Instant::now();
        while since.elapsed() < Duration::from_millis(500) {
            thread::sleep(Duration::from_millis(20));
            let now = self.open();
            if now != open {
                (open, since) = (now, Instant::now());
            }
        }
        open
    }

    /// Checks that the pod is served on as ever, and that its podfs ends as it should.
    fn ends_well(mut self) {
        self.fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
        wait_content(&self.config().join("a"), "2");
        kill(self.running.server(), Signal::SIGKILL).expect("it is there");
        fs::write(self.running.volume("host").join("f"), "there is a server").expect("written");
        assert!(self.running.stop().success());
        self.fixture.assert_nothing_left();
    }

    fn is_not_upgraded(&self, outcome: &Outcome, told: &[&str]) {
        outcome.says(1, &["1 of 1 pods are not upgraded"]);
        for part in told {
            assert!(outcome.stdout.contains(part), "{part:?} is not in: {}", outcome.stdout);
        }
    }
}

#[test]
fn a_pod_becomes_the_program_on_disk_with_its_open_files_and_so_do_its_next_servers() {
    let mut pod = Pod::new();
    let mut file = fs::File::create(pod.running.volume("host").join("f")).expect("a file");
    // After each further upgrade, podfs must have the same descriptors open as after the first one.
    pod.builds.upgrade(&pod.fixture);
    let open = pod.open_at_rest();
    for _ in 0..3 {
        let (before, supervisor) = (pod.identity(), pod.running.pid());
        pod.builds.upgrade(&pod.fixture);
        assert_eq!(pod.identity(), before);
        assert_eq!(pod.running.pid(), supervisor);
        file.write_all(b"!").expect("the file is open as before");
        eventually("nothing else is open", || pod.open() == open);
    }
    drop(file);
    pod.ends_well();
}

#[test]
fn a_program_that_is_no_podfs_is_refused_and_nothing_happens() {
    let pod = Pod::new();
    let (before, server) = (pod.identity(), pod.running.server());
    pod.builds.put_script("exit 1");
    let outcome = upgrade(&pod.fixture);
    pod.is_not_upgraded(&outcome, &["default/web: started, refused: the new podfs does not answer", "exit status: 1"]);
    assert_eq!(pod.running.server(), server, "the same server serves");
    assert_eq!(pod.identity(), before);
    pod.ends_well();
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
    pod.is_not_upgraded(&outcome, &["default/web: started, refused: ", &sentence]);
    fs::remove_file(pod.builds.server_program()).expect("removed");
    let outcome = upgrade(&pod.fixture);
    pod.is_not_upgraded(
        &outcome,
        &["default/web: started, refused: ", "podfs-fuse, the program that serves volumes, is neither"],
    );
    assert_eq!(pod.running.server(), server, "the same server serves");
    assert_eq!(pod.identity(), before);
    pod.ends_well();
}

#[test]
fn programs_on_disk_that_were_replaced_change_nothing_until_the_upgrade() {
    let mut pod = Pod::new();
    pod.builds.put_other();
    kill(pod.running.server(), Signal::SIGKILL).expect("it is there");
    pod.running.wait_log("another one (pid ");
    assert_eq!(pod.server_version(), VERSION);
    let name = fs::read_to_string(format!("/proc/{}/comm", pod.running.server())).expect("a name");
    assert_eq!(name, "podfs-fuse\n");
    let outcome = upgrade(&pod.fixture);
    assert!(outcome.stdout.contains("default/web: started, done, podfs "), "{}{}", outcome.stdout, outcome.stderr);
    assert_ne!(pod.server_version(), VERSION);
    pod.ends_well();
}

#[test]
fn a_pod_whose_program_is_gone_from_the_disk_is_not_upgraded() {
    let pod = Pod::new();
    let server = pod.running.server();
    fs::remove_file(pod.builds.program()).expect("removed");
    let outcome = upgrade(&pod.fixture);
    pod.is_not_upgraded(&outcome, &["refused: there is no podfs at", &pod.builds.program().display().to_string()]);
    assert_eq!(pod.running.server(), server, "the same server serves");
    pod.ends_well();
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
    pod.is_not_upgraded(&outcome, &["default/web: started, rolled back: "]);
    assert_eq!(pod.identity(), before);
    for mut file in &files {
        file.write_all(b"!").expect("the file is open as before");
    }
    drop(files);
    pod.ends_well();
}

#[test]
fn a_supervisor_that_cannot_adopt_becomes_the_program_before_again() {
    let pod = Pod::new();
    let (before, supervisor) = (pod.identity(), pod.running.pid());
    // The new supervisor finds a stranger where the server should be; the one before finds the server.
    let socket = pod.fixture.run_files().join("server.sock");
    let (hidden, stranger) = (pod.fixture.path("hidden"), pod.fixture.path("stranger"));
    let listener = UnixListener::bind(&stranger).expect("a socket");
    let real = pod.builds.last();
    let [at, away, other] = [&socket, &hidden, &stranger].map(|path| path.display());
    // The podfs-fuse of the program before is gone by then; that program has it open.
    let podfs_fuse = pod.builds.server_program();
    let podfs_fuse = podfs_fuse.display();
    pod.builds.put_script(&format!(
        "[ \"$1\" = run ] && mv {at} {away} && mv {other} {at} && rm {podfs_fuse}\nexec {} \"$@\"",
        real.display()
    ));
    let restored = thread::spawn(move || {
        let (mut connection, _) = listener.accept()?;
        fs::rename(hidden, socket)?;
        connection.write_all(b"nonsense")
    });
    let outcome = upgrade(&pod.fixture);
    pod.is_not_upgraded(&outcome, &["default/web: started, rolled back: "]);
    within_timeout("the stranger was asked", move || restored.join().expect("no panic")).expect("restored");
    assert_eq!((pod.identity(), pod.running.pid()), (before, supervisor));
    pod.ends_well();
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
    let shown = |name: &str| {
        let _missing = fs::metadata(at.join(name));
        let out = fs::read_to_string(fixture.path("out")).unwrap_or_default();
        out.lines().any(|line| line.contains("LOOKUP") && line.contains(name))
    };
    eventually("a request is shown", || is_mounted(&at) && shown("before"));
    kill(running.server(), Signal::SIGKILL).expect("it is there");
    let mut number = 0;
    eventually("a request to the next server is shown", || {
        number += 1;
        shown(&format!("after-{number}"))
    });
    assert!(running.stop().success());
}

fn is_mounted(at: &Path) -> bool {
    podfs_fuse::mount::table::mounts().expect("a table").iter().any(|mounted| mounted.at == at)
}

#[test]
fn a_signal_to_stop_that_arrives_during_an_upgrade_stops_the_pod() {
    // Before the new program starts, while it starts, and while it adopts the server.
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
        upgrading.wait().expect("it ends");
        eventually("no process is left", || fixture.processes().is_empty());
        fixture.assert_nothing_left();
    }
}
