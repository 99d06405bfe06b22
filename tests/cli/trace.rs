//! `podfs trace`: it shows the requests of a running volume, and does not disturb them.

use std::fs::{self, File};
use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use crate::common::outcome::finish;
use crate::common::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use tempfile::TempDir;

/// A pod with a volume that has many requests, one that has few, one that podfs does not serve, and one that waits.
fn fixture() -> (Fixture, TempDir) {
    let source = TempDir::with_prefix("podfs-test-").expect("a directory");
    let volumes = format!(
        "[{{name: data, hostPath: {{path: {}}}}}, {{name: config, configMap: {{name: app}}}}, \
         {{name: device, hostPath: {{path: /dev/null}}}}, {{name: late, configMap: {{name: late}}}}]",
        source.path().display()
    );
    let fixture = Fixture::new(&pod(&volumes));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture.write("objects/late.json", &config_map("late", &[("a", "1")]));
    (fixture, source)
}

/// A `podfs trace`. Dropping it kills the process.
struct Tracing {
    child: Child,
    out: PathBuf,
    err: PathBuf,
    _directory: TempDir,
}

impl Tracing {
    /// Starts `podfs trace`, and waits until it traces the volume.
    fn start(fixture: &Fixture, running: &Running, volume: &str) -> Self {
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        let (out, err) = (directory.path().join("out"), directory.path().join("err"));
        let mut command = command(fixture, running, volume);
        command.stdout(File::create(&out).expect("a file")).stderr(File::create(&err).expect("a file"));
        fixture.mark(&mut command);
        let tracing = Self { child: command.spawn().expect("podfs starts"), out, err, _directory: directory };
        eventually("the volume is traced", || tracing.messages().contains("Ctrl-C ends this"));
        tracing
    }

    /// The requests on the standard output.
    fn shown(&self) -> String {
        fs::read_to_string(&self.out).expect("requests")
    }

    /// The messages on the standard error.
    fn messages(&self) -> String {
        fs::read_to_string(&self.err).expect("sentences")
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).expect("a pid")), signal).expect("it is there");
    }

    fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        eventually("podfs trace ends", || {
            status = self.child.try_wait().expect("a child");
            status.is_some()
        });
        status.expect("it has ended")
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(fixture: &Fixture, running: &Running, volume: &str) -> Command {
    let mut command = fixture.operator("trace");
    command.args(["--pod", &running.uid(), "--volume", volume]).stdin(Stdio::null());
    command
}

/// Pipes that a process has open.
fn pipes(process: Pid) -> usize {
    let open = fs::read_dir(format!("/proc/{process}/fd")).expect("descriptors").flatten();
    let targets = open.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("pipe:")).count()
}

#[test]
fn a_live_volume_is_traced_until_ctrl_c() {
    let (fixture, source) = fixture();
    let mut running = fixture.run();
    let before = pipes(running.server());
    let absent = |name: &str| assert!(fs::metadata(running.volume("data").join(name)).is_err());
    absent("unseen");
    let mut tracing = Tracing::start(&fixture, &running, "data");
    absent("looked-for");
    let line = format!("LOOKUP {}/looked-for pid=", source.path().display());
    eventually("the request is shown", || tracing.shown().contains(&line));
    assert!(
        tracing.shown().lines().any(|shown| shown.contains(&line) && shown.contains(" ENOENT ")),
        "{}",
        tracing.shown()
    );
    assert!(!tracing.shown().contains("unseen"));
    fs::write(source.path().join("file"), "").expect("written");
    assert!(!File::open(running.volume("data").join("file")).expect("a file").is_terminal());
    let line = format!("IOCTL {}/file pid=", source.path().display());
    eventually("isatty is shown by its name", || tracing.shown().contains(&line));
    tracing.signal(Signal::SIGINT);
    tracing.wait();
    // At the next request, the server finds the pipe closed.
    eventually("the server has closed its end", || {
        absent("after");
        pipes(running.server()) == before
    });
    assert_eq!(running.stop().code(), Some(0));
}

#[test]
fn an_unread_trace_delays_no_call_and_counts_missed_requests() {
    let (fixture, _source) = fixture();
    let running = fixture.run();
    let tracing = Tracing::start(&fixture, &running, "data");
    tracing.signal(Signal::SIGSTOP);
    for number in 0..3000 {
        assert!(fs::metadata(running.volume("data").join(format!("absent-{number}"))).is_err());
    }
    tracing.signal(Signal::SIGCONT);
    eventually("it says what it missed", || {
        let _ = fs::metadata(running.volume("data").join("later"));
        tracing.shown().contains(" requests not shown\n")
    });
}

#[test]
fn several_traces_see_the_same_and_too_many_are_refused() {
    let (fixture, _source) = fixture();
    let running = fixture.run();
    let tracings: Vec<_> = (0..4).map(|_| Tracing::start(&fixture, &running, "data")).collect();
    finish(&mut command(&fixture, &running, "data")).says(1, &["4 traces of the volume are running"]);
    assert!(fs::metadata(running.volume("data").join("absent")).is_err());
    for tracing in &tracings {
        eventually("the request is shown", || tracing.shown().contains("/absent pid="));
    }
}

#[test]
fn a_trace_ends_with_its_volume() {
    let (fixture, _source) = fixture();
    let mut running = fixture.run();
    let mut tracing = Tracing::start(&fixture, &running, "config");
    assert_eq!(running.stop().code(), Some(0));
    assert_eq!(tracing.wait().code(), Some(0));
    assert!(tracing.messages().ends_with("podfs: volume \"config\" has ended\n"), "{}", tracing.messages());
    fixture.assert_nothing_left();
}

#[test]
fn a_trace_says_that_the_supervisor_is_gone() {
    let (fixture, _source) = fixture();
    let mut running = fixture.run();
    let mut tracing = Tracing::start(&fixture, &running, "config");
    fixture.kill_both(&mut running);
    assert_eq!(tracing.wait().code(), Some(1));
    assert!(tracing.messages().contains("no supervisor listens on"), "{}", tracing.messages());
}

#[test]
fn a_trace_ends_with_a_volume_that_is_unmounted_alone() {
    let (fixture, _source) = fixture();
    let running = fixture.run();
    let mut tracing = Tracing::start(&fixture, &running, "config");
    let unpublish = json!({"unpublish": {"volumes": ["config"]}});
    assert!(control::ask(&fixture.run_files(), &unpublish).is_object());
    assert_eq!(tracing.wait().code(), Some(0));
    assert!(tracing.messages().ends_with("podfs: volume \"config\" has ended\n"), "{}", tracing.messages());
}

#[test]
fn the_steps_of_a_commit_are_shown() {
    let (fixture, _source) = fixture();
    let running = fixture.run();
    let tracing = Tracing::start(&fixture, &running, "config");
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    eventually("the switch is shown", || tracing.shown().contains(" RENAME /..data_tmp "));
}

#[test]
fn a_trace_whose_reader_goes_ends_quietly() {
    let (fixture, _source) = fixture();
    let running = fixture.run();
    let mut child = command(&fixture, &running, "data").stdout(Stdio::piped()).spawn().expect("podfs starts");
    let mut out = child.stdout.take().expect("a pipe");
    eventually("a line is shown", || {
        let _ = fs::metadata(running.volume("data").join("absent"));
        let mut poll = [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(&out), nix::poll::PollFlags::POLLIN)];
        nix::poll::poll(&mut poll, nix::poll::PollTimeout::ZERO).expect("poll") > 0
    });
    out.read_exact(&mut [0]).expect("a byte");
    drop(out);
    let mut status = None;
    eventually("podfs trace ends", || {
        let _ = fs::metadata(running.volume("data").join("absent"));
        status = child.try_wait().expect("a child");
        status.is_some()
    });
    assert_eq!(status.expect("it has ended").code(), Some(0));
}

#[test]
fn a_volume_that_cannot_be_traced_is_refused_with_the_reason() {
    let (fixture, _source) = fixture();
    fixture.remove("objects/late.json");
    let mut running = fixture.start();
    running.wait_log(r#"configmap "late" not found"#);
    eventually("the others are up", || {
        let volumes = fixture.pods().swap_remove(0)["volumes"].take();
        volumes.as_array().is_some_and(|all| all.iter().filter(|volume| volume["state"] == "live").count() == 3)
    });
    let uid = fixture.run_files().file_name().expect("a uid").to_string_lossy().into_owned();
    let refused = |volume: &str, uid: &str| finish(fixture.operator("trace").args(["--pod", uid, "--volume", volume]));
    refused("nothing", &uid).says(1, &[r#"has no volume "nothing""#, "data, config, device, late"]);
    refused("device", &uid).says(1, &["bind mount"]);
    refused("late", &uid).says(1, &["not mounted yet", r#"configmap "late" not found"#]);
    refused("data", "nobody").says(1, &["pod nobody is not served here"]);
    fixture.write("objects/late.json", &config_map("late", &[("a", "1")]));
    running.wait_ready();
}

#[test]
fn a_trace_continues_with_the_next_server() {
    let (fixture, source) = fixture();
    let running = fixture.run();
    let tracing = Tracing::start(&fixture, &running, "data");
    kill(running.server(), Signal::SIGKILL).expect("the server is there");
    eventually("the next server is traced", || tracing.messages().contains("the server was replaced"));
    assert!(fs::metadata(running.volume("data").join("looked-for")).is_err());
    let line = format!("LOOKUP {}/looked-for pid=", source.path().display());
    eventually("the request is shown", || tracing.shown().contains(&line));
}
