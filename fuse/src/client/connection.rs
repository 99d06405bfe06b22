//! One connection to one server process.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use crate::protocol::{Greeting, ServerReply, ServerRequest, check, receive, send};

/// How long a server may take for an answer until it serves: it only has to load what is there.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A server process that has answered.
pub(super) struct ServerConnection {
    /// Held from a question to its answer.
    control: Mutex<UnixStream>,
    /// The same socket, for when that takes too long.
    other_way: UnixStream,
    broken: AtomicBool,
    greeting: Greeting,
    keeper: Mutex<KeeperLink>,
}

/// The keeper of a server.
#[derive(Default)]
pub(super) struct KeeperLink {
    /// Its process.
    pub(super) pid: i32,
    /// Its channel, until a successor needs it.
    pub(super) channel: Option<OwnedFd>,
    /// Whether it can start a successor.
    pub(super) starts_successor: bool,
}

impl ServerConnection {
    /// Greets the server at the other end of `control`. Until [`Self::trust`] is called, it may not take long for an answer.
    ///
    /// # Errors
    /// When it does not answer, or speaks another language.
    pub(super) fn open(control: UnixStream, greeting: &Greeting) -> io::Result<ServerConnection> {
        let other_way = control.try_clone()?;
        control.set_read_timeout(Some(TIMEOUT))?;
        control.set_write_timeout(Some(TIMEOUT))?;
        let (reply, mut descriptors) = exchange(&control, &ServerRequest::Hello(greeting.clone()), &[])?;
        let ServerReply::Hello { greeting: theirs, keeper: pid, keeper_starts_successor: starts_successor } = reply
        else {
            return Err(unexpected(&reply));
        };
        check(greeting, &theirs).map_err(io::Error::other)?;
        Ok(ServerConnection {
            control: Mutex::new(control),
            other_way,
            broken: AtomicBool::new(false),
            greeting: theirs,
            keeper: Mutex::new(KeeperLink { pid, channel: descriptors.pop(), starts_successor }),
        })
    }

    /// From now on the server may take its time.
    ///
    /// # Errors
    /// When the socket is none.
    pub(super) fn trust(&self) -> io::Result<()> {
        self.other_way.set_read_timeout(None)?;
        self.other_way.set_write_timeout(None)
    }

    /// Whether the server answers within `limit`, as far as one can tell without disturbing another question.
    pub(super) fn is_responsive(&self, limit: Duration) -> bool {
        let Ok(control) = self.control.try_lock() else { return true };
        let set = |limit| control.set_read_timeout(limit).is_ok();
        let answered = set(Some(limit)) && exchange(&*control, &ServerRequest::Volumes, &[]).is_ok();
        if !answered {
            // What it answers later would be taken for the answer to another question.
            self.broken.store(true, Ordering::Relaxed);
            self.shut_down();
        }
        answered && set(None)
    }

    /// One question, and its answer.
    ///
    /// # Errors
    /// What the server could not do; see [`Self::is_broken`].
    pub(super) fn ask(
        &self,
        request: &ServerRequest,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<(ServerReply, Vec<OwnedFd>)> {
        let control = self.control.lock().expect("a thread that panics ends the process");
        exchange(&*control, request, descriptors).inspect_err(|error| {
            if error.kind() != io::ErrorKind::Other {
                self.broken.store(true, Ordering::Relaxed);
            }
        })
    }

    /// Whether the error of a question is that there is no server any more.
    pub(super) fn is_broken(&self, error: &io::Error) -> bool {
        error.kind() != io::ErrorKind::Other && self.broken.load(Ordering::Relaxed)
    }

    /// Ends all questions that wait for an answer.
    pub(super) fn shut_down(&self) {
        let _ = self.other_way.shutdown(Shutdown::Both);
    }

    /// Tells the server to end.
    pub(super) fn end(&self) {
        if let Ok(control) = self.control.try_lock() {
            let _ = send(&*control, &ServerRequest::End, &[]);
        }
        self.shut_down();
    }

    /// The version of the server's program.
    pub(super) fn program(&self) -> &str {
        &self.greeting.program
    }

    /// Whether the server knows of live parts of projections.
    pub(super) fn knows_live(&self) -> bool {
        self.greeting.live
    }

    /// The keeper's process.
    pub(super) fn keeper(&self) -> i32 {
        self.keeper_of().pid
    }

    /// The server's keeper, with its channel, which this no longer has.
    pub(super) fn take_keeper(&self) -> KeeperLink {
        let KeeperLink { pid, channel, starts_successor } = &mut *self.keeper_of();
        KeeperLink { pid: *pid, channel: channel.take(), starts_successor: *starts_successor }
    }

    /// The server has this keeper.
    pub(super) fn set_keeper(&self, keeper: KeeperLink) {
        *self.keeper_of() = keeper;
    }

    fn keeper_of(&self) -> MutexGuard<'_, KeeperLink> {
        self.keeper.lock().expect("a thread that panics ends the process")
    }
}

fn exchange(
    control: &impl AsFd,
    request: &ServerRequest,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<(ServerReply, Vec<OwnedFd>)> {
    send(control, request, descriptors)?;
    let gone = || io::Error::new(io::ErrorKind::BrokenPipe, "the server is gone");
    match receive(control)?.ok_or_else(gone)? {
        (ServerReply::Failed(reason), _) => Err(io::Error::other(reason)),
        answered => Ok(answered),
    }
}

pub(super) fn unexpected(reply: &ServerReply) -> io::Error {
    io::Error::other(format!("the server gave an answer to another question: {reply:?}"))
}
