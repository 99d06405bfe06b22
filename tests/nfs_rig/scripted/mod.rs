//! A server with faults that a real server does not have on demand: when a test says so, it fails, sends wrong answers or
//! garbage, or does not answer.
//!
//! One port serves NFSv3, MOUNT and the port mapper's GETPORT. Without rules, this is a correct server of a small file system
//! in memory (`files`), with all procedures except MKNOD, without permissions and limits. The server passes each call to the
//! rules, the last added rule first. A rule answers the call or leaves it to the next rule; without an answer of a rule, the
//! file system answers. [`trouble`] has the common rules.
//!
//! The server has no cache of duplicate requests: as a server that has restarted, it executes a repeated call again. On each
//! connection, it answers one call after the other, except for replies that a rule holds. Tests with it do not prove that podfs speaks the protocol correctly; tests
//! with [`super::ganesha`] do.

mod attributes;
mod connection;
mod directory;
mod files;
mod procedures;
pub mod trouble;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use super::protocol::NFS;
use super::rpc::Call;
use connection::Listener;

pub use files::{Files, Handle, Node};
pub use procedures::failed;

/// A server. Dropping it ends it with all its connections.
pub struct Scripted {
    listener: Listener,
    script: Arc<Mutex<Script>>,
}

/// The state of the server.
#[derive(Default)]
struct Script {
    files: Files,
    /// The server tries the last rule first.
    rules: Vec<Box<dyn Rule>>,
    /// The program and the procedure of each call so far.
    calls: Vec<(u32, u32)>,
    port: u16,
}

/// Answers a call, or leaves it to the next rule (`None`). Closures are rules.
pub trait Rule: FnMut(&ReceivedCall, &mut Files) -> Option<Reply> + Send + 'static {}

impl<R: FnMut(&ReceivedCall, &mut Files) -> Option<Reply> + Send + 'static> Rule for R {}

/// A call with the arguments that rules need.
#[derive(Clone, Debug)]
pub struct ReceivedCall {
    pub call: Call,
    /// The number of calls of this procedure so far, including this call.
    pub count: usize,
    /// The first handle of the arguments; empty if they have no handle.
    pub handle: Handle,
    /// The first name of the arguments, or the path of a MNT.
    pub name: Vec<u8>,
    /// The offset, or the cookie of a directory.
    pub at: u64,
}

/// The reply to a call.
#[derive(Clone, Debug)]
pub enum Reply {
    /// These results.
    Results(Vec<u8>),
    /// An error of NFS or MOUNT, with the results that the procedure has in case of an error.
    Error(u32),
    /// A whole record, which need not be a valid reply.
    Record(Vec<u8>),
    /// Bytes, which need not be a valid record.
    Bytes(Vec<u8>),
    Nothing,
    /// The end of the connection.
    Close,
    /// The regular reply, once the gate is open. The server executes the call before it waits, or after that. It answers later
    /// calls of the connection meanwhile.
    Held {
        gate: Gate,
        executed_first: bool,
    },
}

/// A gate at which replies wait until a test opens it.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<(Mutex<GateState>, Condvar)>);

#[derive(Debug, Default)]
struct GateState {
    is_open: bool,
    waiting: usize,
}

impl Gate {
    /// Lets all replies pass.
    pub fn open(&self) {
        self.0.0.lock().expect("no panic").is_open = true;
        self.0.1.notify_all();
    }

    /// The number of replies that have come to the gate.
    pub fn arrived(&self) -> usize {
        self.0.0.lock().expect("no panic").waiting
    }

    fn arrive(&self) {
        self.0.0.lock().expect("no panic").waiting += 1;
    }

    fn pass(&self) {
        let state = self.0.0.lock().expect("no panic");
        drop(self.0.1.wait_while(state, |state| !state.is_open).expect("no panic"));
    }
}

impl Scripted {
    /// A server of an empty file system, exported as `/export`.
    pub fn start() -> Self {
        let script = Arc::new(Mutex::new(Script::default()));
        let listener = Listener::start(Arc::clone(&script));
        script.lock().expect("no rule panics").port = listener.address().port();
        Self { listener, script }
    }

    /// The address of its port, on which it speaks all its RPC programs.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.listener.address().port()).into()
    }

    /// Adds a rule, which the server tries before the earlier rules.
    pub fn rule(&self, rule: impl FnMut(&ReceivedCall, &mut Files) -> Option<Reply> + Send + 'static) {
        self.script().rules.push(Box::new(rule));
    }

    /// Removes all rules.
    pub fn clear_rules(&self) {
        self.script().rules.clear();
    }

    /// Calls `act` with the files of the server, to read or change them.
    pub fn files<T>(&self, act: impl FnOnce(&mut Files) -> T) -> T {
        act(&mut self.script().files)
    }

    /// The number of calls of an NFS procedure so far.
    pub fn calls(&self, procedure: u32) -> usize {
        let nfs = (NFS.0, procedure);
        self.script().calls.iter().filter(|call| **call == nfs).count()
    }

    /// Simulates a crash and a restart: connections end, and uncommitted data is lost.
    pub fn restart(&self) {
        self.files(Files::lose_uncommitted);
        self.listener.cut();
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().expect("no rule panics")
    }
}

impl Script {
    /// The reply to a call.
    fn reply(&mut self, call: Call) -> Reply {
        let procedure = (call.program, call.procedure);
        self.calls.push(procedure);
        let count = self.calls.iter().filter(|earlier| **earlier == procedure).count();
        let received = procedures::parse(call, count);
        let reply = self.rules.iter_mut().rev().find_map(|rule| rule(&received, &mut self.files));
        if let Some(Reply::Held { gate, .. }) = &reply {
            gate.arrive();
        }
        reply.unwrap_or_else(|| procedures::answer(&received, &mut self.files, self.port))
    }

    /// The regular reply to a call that a rule holds.
    fn regular_reply(&mut self, call: Call) -> Reply {
        procedures::answer(&procedures::parse(call, 0), &mut self.files, self.port)
    }
}
