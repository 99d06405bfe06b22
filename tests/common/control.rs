//! The control socket, as an agent uses it: the length of a message in four bytes, then JSON.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::{Value, json};

use super::TIMEOUT;

/// A connection to the supervisor of the pod with this run directory.
pub struct Connection(UnixStream);

impl Connection {
    /// Connects, and sends a question.
    pub fn ask(directory: &Path, question: &Value) -> Connection {
        let mut stream = UnixStream::connect(directory.join("control.sock")).expect("a supervisor listens");
        stream.set_read_timeout(Some(TIMEOUT)).expect("set");
        let text = json!({"version": 1, "message": question}).to_string();
        let length = u32::try_from(text.len()).expect("short").to_ne_bytes();
        stream.write_all(&[&length, text.as_bytes()].concat()).expect("it is read");
        Connection(stream)
    }

    /// The next answer; none when the connection was closed.
    pub fn next(&mut self) -> Option<Value> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).ok()?;
        let mut text = vec![0; u32::from_ne_bytes(length) as usize];
        self.0.read_exact(&mut text).expect("all of it");
        let envelope: Value = serde_json::from_slice(&text).expect("JSON");
        assert_eq!(envelope["version"], 1);
        Some(envelope["message"].clone())
    }
}

/// The answer to one question.
#[track_caller]
pub fn ask(directory: &Path, question: &Value) -> Value {
    Connection::ask(directory, question).next().expect("an answer")
}
