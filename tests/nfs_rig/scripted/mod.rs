//! A server that does what no real one does on demand: it fails, lies, falls silent and sends garbage on order of a test.
//!
//! One port speaks NFSv3, MOUNT and the port mapper's GETPORT. Without rules it is a good server of a small file system in
//! memory (`files`): all procedures but MKNOD, no permissions, no limits. The server offers each call to the rules, the last
//! one first. A rule answers the call or leaves it to the next rule, and at last to the file system; [`trouble`] has the
//! common rules.
//!
//! It has no cache of duplicate requests, as a server that was restarted in between: it executes a repeated call again. Its
//! calls are answered one after the other on each connection. It does not prove that podfs speaks the protocol correctly;
//! [`super::ganesha`] does.

mod attributes;
mod connection;
mod directory;
mod files;
mod procedures;
pub mod trouble;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};

use super::protocol::NFS;
use super::rpc::Call;
use connection::Listener;

pub use files::{Files, Handle, Node};
pub use procedures::failed;

/// A server; it ends, with all its connections, when it is dropped.
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
    asked: Vec<(u32, u32)>,
    port: u16,
}

/// Answers a call, or leaves it to others. Closures are rules.
pub trait Rule: FnMut(&Asked, &mut Files) -> Option<Reply> + Send + 'static {}

impl<R: FnMut(&Asked, &mut Files) -> Option<Reply> + Send + 'static> Rule for R {}

/// A call, as a rule sees it.
#[derive(Clone, Debug)]
pub struct Asked {
    pub call: Call,
    /// The number of calls of this procedure so far, with this one.
    pub count: usize,
    /// The first handle of the arguments; empty if they have none.
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
    /// An error of NFS or MOUNT, with as much beside it as the procedure has.
    Error(u32),
    /// A record, whatever it says.
    Record(Vec<u8>),
    /// Bytes, whatever they are.
    Bytes(Vec<u8>),
    Nothing,
    /// The connection ends.
    Close,
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

    /// Adds a rule, which the server tries before all others.
    pub fn rule(&self, rule: impl FnMut(&Asked, &mut Files) -> Option<Reply> + Send + 'static) {
        self.script().rules.push(Box::new(rule));
    }

    /// Takes away all rules.
    pub fn behave(&self) {
        self.script().rules.clear();
    }

    /// Looks at its files, or changes them.
    pub fn files<T>(&self, look: impl FnOnce(&mut Files) -> T) -> T {
        look(&mut self.script().files)
    }

    /// The number of calls of an NFS procedure so far.
    pub fn asked(&self, procedure: u32) -> usize {
        let nfs = (NFS.0, procedure);
        self.script().asked.iter().filter(|asked| **asked == nfs).count()
    }

    /// Crashes and starts again: connections end, and uncommitted data is lost.
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
        self.asked.push((call.program, call.procedure));
        let count = self.asked.iter().filter(|asked| **asked == (call.program, call.procedure)).count();
        let asked = procedures::look_at(call, count);
        let ruled = self.rules.iter_mut().rev().find_map(|rule| rule(&asked, &mut self.files));
        ruled.unwrap_or_else(|| procedures::answer(&asked, &mut self.files, self.port))
    }
}
