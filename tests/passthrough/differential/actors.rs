//! The processes that make the calls (`tests/peers/actor.py`). The tests make none by themselves: a call in a volume without a server
//! would hang.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use serde_json::Value;

use super::program::Actor;
use crate::common::TIMEOUT;

/// A process that makes calls in a directory. Dropping this kills it.
pub struct ActorProcess {
    child: Child,
    requests: ChildStdin,
    answers: Receiver<String>,
}

/// The program of the processes, which is also the frame of a printed script.
pub fn peer() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/actor.py")
}

impl ActorProcess {
    /// A process that can work in each of these directories, in the first at the beginning.
    pub fn start(actor: Actor, bases: &[&Path]) -> ActorProcess {
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-I", "-S"]).arg(peer()).arg("serve").arg(actor.uid().to_string()).args(bases);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python starts");
        let requests = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (answer, answers) = channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| answer.send(line)));
        ActorProcess { child, requests, answers }
    }

    pub fn ask(&mut self, name: &str, arguments: &[Value]) {
        let request: Vec<Value> = [Value::from(name)].into_iter().chain(arguments.iter().cloned()).collect();
        writeln!(self.requests, "{}", Value::from(request)).expect("it listens");
    }

    /// The result of the last call; an error if there is none.
    pub fn answer(&mut self) -> Result<Value, String> {
        let line = self.answers.recv_timeout(TIMEOUT).map_err(|reason| format!("no answer: {reason}"))?;
        serde_json::from_str(&line).map_err(|error| format!("{line}: {error}"))
    }
}

impl Drop for ActorProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
