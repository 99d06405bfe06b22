//! The example of an agent that starts podfs for each pod: the agent serves its pods, and removes everything that it made,
//! however it ends.

use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use crate::common::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/examples/single");
const WEB: &str = "6f1c0a54-2f0e-4c6e-9d4e-1b7a5f3c9e01";
const WORKER: &str = "b2a7d1c8-83f5-4f0b-8a36-7c2e94d0f502";

/// An agent with a copy of the example's pods. Its files are in the directory of a fixture, which also finds its processes.
struct Agent {
    fixture: Fixture,
}

impl Agent {
    fn new() -> Self {
        let agent = Self { fixture: Fixture::new("") };
        let copied = Command::new("cp").arg("-r").arg(Path::new(EXAMPLES).join("pods")).arg(agent.pods()).status();
        assert!(copied.expect("cp").success());
        fs::create_dir(agent.temporary()).expect("a directory");
        agent
    }

    fn pods(&self) -> PathBuf {
        self.fixture.path("pods")
    }

    fn temporary(&self) -> PathBuf {
        self.fixture.path("tmp")
    }

    fn write(&self, uid: &str, name: &str, content: &str) {
        fs::write(self.pods().join(uid).join(name), content).expect("written");
    }

    /// Starts the agent, with the podfs of this build in its PATH.
    fn start(&self) -> Working {
        let programs = Path::new(PODFS).parent().expect("a directory").display().to_string();
        let path = programs + ":" + &std::env::var("PATH").expect("a PATH");
        let mut command = Command::new(Path::new(EXAMPLES).join("agent.sh"));
        command.arg("--fork").arg(self.pods()).env("PATH", path).env("TMPDIR", self.temporary());
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        command.stdin(Stdio::null()).stderr(writer.try_clone().expect("a descriptor")).stdout(writer);
        let child = self.fixture.mark(&mut command).spawn().expect("the agent starts");
        drop(command);
        let (sender, parts) = channel();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = reader.read(&mut buffer) {
                let _ = sender.send(String::from_utf8_lossy(&buffer[..length]).into_owned());
            }
        });
        Working { child, parts, output: String::new() }
    }

    fn assert_nothing_left(&self) {
        assert_eq!(self.fixture.mounts(), Vec::<PathBuf>::new());
        assert_eq!(self.fixture.processes(), []);
        assert_eq!(fs::read_dir(self.temporary()).expect("a directory").count(), 0, "files stay behind");
    }
}

/// A running agent.
struct Working {
    child: Child,
    /// The parts of the output that are not in `output` yet.
    parts: Receiver<String>,
    output: String,
}

impl Working {
    #[track_caller]
    fn wait_output(&mut self, text: &str) {
        while !self.output.contains(text) {
            let more = self.parts.recv_timeout(TIMEOUT);
            self.output += &more.unwrap_or_else(|_| panic!("{text:?} does not come:\n{}", self.output));
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).expect("it is there");
    }

    /// The agent's exit code and output, after the agent and all processes that it started have ended and closed the pipe.
    #[track_caller]
    fn end(mut self) -> (i32, String) {
        while let Some(more) = match self.parts.recv_timeout(TIMEOUT) {
            Ok(more) => Some(more),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => None,
            Err(_) => panic!("the agent does not end:\n{}", self.output),
        } {
            self.output += &more;
        }
        let status = self.child.wait().expect("a child");
        let code = status.code().unwrap_or_else(|| panic!("signal {:?}:\n{}", status.signal(), self.output));
        (code, std::mem::take(&mut self.output))
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        // The agent ends its child processes.
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

#[test]
fn containers_of_two_pods_use_their_volumes_and_see_a_change() {
    let agent = Agent::new();
    let (code, output) = agent.start().end();
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
    assert_eq!(code, 0, "{output}");
    agent.assert_nothing_left();
}

#[test]
fn a_bad_manifest_is_reported_and_the_other_pod_is_served() {
    for bad in [WEB, WORKER] {
        let agent = Agent::new();
        agent.write(bad, "pod.yaml", "apiVersion: v1\nkind: Pod\nmetadata: [");
        let (code, output) = agent.start().end();
        assert_eq!(code, 1, "{output}");
        let sentence = format!("agent: pod {bad}: podfs ended with exit code 2; it said: podfs: ");
        assert!(output.contains(&sentence) && output.contains("/pod.yaml:3:11: unclosed bracket"), "{output}");
        let other = if bad == WEB { "worker: my password is the second one now" } else { "web: I listen on 9090 now" };
        assert!(output.contains(other), "{output}");
        assert!(!output.contains("all pods have stopped well"), "{output}");
        agent.assert_nothing_left();
    }
}

#[test]
fn an_agent_that_is_interrupted_while_containers_run_leaves_nothing() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let agent = Agent::new();
        agent.write(WEB, "program.sh", "echo started >&4; echo 'web: I run'; sleep 1000");
        let mut working = agent.start();
        working.wait_output("web: I run\n");
        working.wait_output("worker: my password is the first one");
        working.signal(signal);
        let (code, output) = working.end();
        assert_eq!(code, 130, "{output}");
        agent.assert_nothing_left();
    }
}

#[test]
fn an_agent_that_is_interrupted_while_volumes_wait_leaves_nothing() {
    let agent = Agent::new();
    fs::remove_file(agent.pods().join(WEB).join("objects/web.yaml")).expect("removed");
    let working = agent.start();
    eventually("podfs has mounted what it can", || agent.fixture.mounts().iter().any(|at| at.ends_with("about")));
    working.signal(Signal::SIGTERM);
    let (code, output) = working.end();
    assert_eq!(code, 130, "{output}");
    agent.assert_nothing_left();
}

#[test]
fn a_container_that_fails_is_reported() {
    let agent = Agent::new();
    agent.write(WORKER, "program.sh", "echo started >&4; exit 7");
    let (code, output) = agent.start().end();
    assert_eq!(code, 1, "{output}");
    assert!(output.contains(&format!("agent: pod {WORKER}: its container failed")), "{output}");
    agent.assert_nothing_left();
}

#[test]
fn the_scripts_are_clean() {
    let pods = [WEB, WORKER].map(|uid| Path::new(EXAMPLES).join("pods").join(uid));
    let examples = Path::new(EXAMPLES).parent().expect("the examples");
    let own = [EXAMPLES.into(), examples.to_owned(), examples.join("agent")];
    let directories = own.into_iter().chain(pods);
    let files = directories.flat_map(|directory| fs::read_dir(directory).expect("examples"));
    let scripts = files.map(|entry| entry.expect("an entry").path());
    let scripts: Vec<_> = scripts.filter(|path| path.extension().is_some_and(|extension| extension == "sh")).collect();
    assert!(scripts.len() >= 8, "{scripts:?}");
    let checked = Command::new("shellcheck").args(scripts).output().expect("shellcheck");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}
