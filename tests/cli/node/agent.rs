//! The example of an agent that uses `podfs node`: the agent serves its pods, and removes everything that it made,
//! however it ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::packages::top;
use crate::common::{Fixture, PODFS, eventually};

/// An agent with a copy of the example's pods. Its files are in the directory of a fixture, which also finds its
/// processes.
struct Agent {
    fixture: Fixture,
}

impl Agent {
    fn new() -> Agent {
        let agent = Agent { fixture: Fixture::new("") };
        for name in ["pods", "agent"] {
            let copied = Command::new("cp").arg("-r").arg(examples().join(name)).arg(agent.fixture.path(name)).status();
            assert!(copied.expect("cp").success());
        }
        fs::create_dir(agent.temporary()).expect("a directory");
        agent
    }

    fn temporary(&self) -> PathBuf {
        self.fixture.path("tmp")
    }

    /// Starts the agent, with the podfs of this build in its PATH.
    fn start(&self) -> Working<'_> {
        self.start_with(&["--fork"])
    }

    fn start_with(&self, options: &[&str]) -> Working<'_> {
        let programs = Path::new(PODFS).parent().expect("a directory").display().to_string();
        let path = programs + ":" + &std::env::var("PATH").expect("a PATH");
        let mut command = Command::new(examples().join("agent.sh"));
        command.args(options).arg(self.fixture.path("pods")).arg(self.fixture.path("agent"));
        command.env("PATH", path).env("TMPDIR", self.temporary());
        let output = fs::File::create(self.fixture.path("output")).expect("a file");
        command.stdin(Stdio::null()).stderr(output.try_clone().expect("a descriptor")).stdout(output);
        Working { child: self.fixture.mark(&mut command).spawn().expect("the agent starts"), agent: self }
    }

    fn assert_nothing_left(&self) {
        assert_eq!(self.fixture.mounts(), Vec::<PathBuf>::new());
        assert_eq!(self.fixture.processes(), []);
        assert_eq!(fs::read_dir(self.temporary()).expect("a directory").count(), 0, "files stay behind");
    }
}

/// A running agent.
struct Working<'a> {
    child: Child,
    agent: &'a Agent,
}

impl Working<'_> {
    fn output(&self) -> String {
        fs::read_to_string(self.agent.fixture.path("output")).expect("the output")
    }

    #[track_caller]
    fn wait_output(&self, text: &str) {
        eventually(&format!("the agent writes {text:?}"), || self.output().contains(text));
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).expect("it is there");
    }

    /// The agent's exit code and output, after it has ended.
    #[track_caller]
    fn end(mut self) -> (Option<i32>, String) {
        let mut code = None;
        eventually("the agent ends", || {
            code = self.child.try_wait().expect("a child");
            code.is_some()
        });
        (code.and_then(|status| status.code()), self.output())
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        // The agent ends its child processes.
        let _gone = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
        let _ended = self.child.wait();
    }
}

fn examples() -> PathBuf {
    top().join("packaging/examples")
}

#[test]
fn containers_of_two_pods_use_their_volumes_and_see_a_change() {
    for options in [&["--fork"][..], &["--fork", "--podman"]] {
        sees_a_change(options);
    }
}

#[track_caller]
fn sees_a_change(options: &[&str]) {
    let agent = Agent::new();
    let (code, output) = agent.start_with(options).end();
    for line in [
        "agent: pod default/web has the volumes config, about",
        "web: I am app=\"web\", and listen on 8080",
        "web: I cannot write to my configuration",
        "web: I listen on 9090 now",
        "agent: pod default/worker has the volumes credentials, scratch",
        "worker: my password is the first one, my work is done",
        "worker: my password is the second one now",
        "agent: all pods have stopped well",
    ] {
        assert!(output.lines().any(|output_line| output_line == line), "{line:?} is not in:\n{output}");
    }
    assert_eq!(code, Some(0), "{output}");
    agent.assert_nothing_left();
}

#[test]
fn a_bad_manifest_is_reported_and_the_other_pod_is_served() {
    let agent = Agent::new();
    fs::write(agent.fixture.path("pods/web.yaml"), "apiVersion: v1\nkind: Pod\nmetadata: [").expect("written");
    let (code, output) = agent.start().end();
    assert_eq!(code, Some(1), "{output}");
    assert!(
        output.contains("agent: podfs node says: ") && output.contains("web.yaml:3:11: unclosed bracket"),
        "{output}"
    );
    assert!(output.contains("worker: my password is the second one now"), "{output}");
    assert!(!output.contains("all pods have stopped well"), "{output}");
    agent.assert_nothing_left();
}

#[test]
fn an_agent_that_is_interrupted_while_containers_run_leaves_nothing() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let agent = Agent::new();
        fs::write(agent.fixture.path("agent/web.sh"), "echo started >&4; echo 'web: I run'; sleep 1000")
            .expect("written");
        let working = agent.start();
        working.wait_output("web: I run\n");
        working.wait_output("worker: my password is the first one");
        working.signal(signal);
        let (code, output) = working.end();
        assert_eq!(code, Some(130), "{output}");
        agent.assert_nothing_left();
    }
}

#[test]
fn an_agent_that_is_interrupted_while_volumes_wait_leaves_nothing() {
    let agent = Agent::new();
    fs::remove_file(agent.fixture.path("pods/web-config.yaml")).expect("removed");
    let working = agent.start();
    eventually("podfs has mounted what it can", || agent.fixture.mounts().iter().any(|at| at.ends_with("about")));
    working.signal(Signal::SIGTERM);
    let (code, output) = working.end();
    assert_eq!(code, Some(130), "{output}");
    agent.assert_nothing_left();
}
