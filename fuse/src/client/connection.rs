//! A connection to a server process.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use crate::protocol::{
    Greeting, GreetingError, MAX_REPLY, OTHER_PROTOCOL, ServerReply, ServerRequest, check, receive_at_most, send,
};

/// Longest wait for an answer of a server that does not serve yet.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The connection to a server process that has answered the greeting.
pub(super) struct ServerConnection {
    /// Locked from a request to its answer.
    control: Mutex<UnixStream>,
    /// The same socket, to shut it down while `control` is locked.
    shutdown_handle: UnixStream,
    broken: AtomicBool,
    greeting: Greeting,
    keeper: Mutex<FdKeeperLink>,
}

/// The keeper of a server.
#[derive(Default)]
pub(super) struct FdKeeperLink {
    /// Its process.
    pub(super) pid: i32,
    /// Its channel, until [`ServerConnection::take_keeper`].
    pub(super) channel: Option<OwnedFd>,
    /// Whether it can start a successor.
    pub(super) starts_successor: bool,
}

impl ServerConnection {
    /// Greets the server at the other end of `control`. Until [`Self::trust`], each answer may take [`TIMEOUT`].
    ///
    /// # Errors
    /// When it does not answer, or its protocol is incompatible ([`io::ErrorKind::Unsupported`]).
    pub(super) fn open(control: UnixStream, greeting: &Greeting) -> io::Result<ServerConnection> {
        let shutdown_handle = control.try_clone()?;
        control.set_read_timeout(Some(TIMEOUT))?;
        control.set_write_timeout(Some(TIMEOUT))?;
        let greeted = exchange(&control, &ServerRequest::Hello(greeting.clone()), &[]);
        let (reply, mut descriptors) = greeted.map_err(|error| match error.to_string() {
            reason if reason.contains(OTHER_PROTOCOL) => io::Error::new(io::ErrorKind::Unsupported, reason),
            _ => error,
        })?;
        let ServerReply::Hello { greeting: theirs, keeper: pid, keeper_starts_successor: starts_successor } = reply
        else {
            return Err(unexpected(&reply));
        };
        check(greeting, &theirs).map_err(|error| match error {
            GreetingError::Protocol { .. } => io::Error::new(io::ErrorKind::Unsupported, error),
            GreetingError::Pod { .. } => io::Error::other(error),
        })?;
        Ok(ServerConnection {
            control: Mutex::new(control),
            shutdown_handle,
            broken: AtomicBool::new(false),
            greeting: theirs,
            keeper: Mutex::new(FdKeeperLink { pid, channel: descriptors.pop(), starts_successor }),
        })
    }

    /// Removes the limit on the time for an answer.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub(super) fn trust(&self) -> io::Result<()> {
        self.shutdown_handle.set_read_timeout(None)?;
        self.shutdown_handle.set_write_timeout(None)
    }

    /// Whether the server answers a request within `limit`. While another request waits for its answer, returns `true`.
    /// Closes the connection if the server does not answer.
    pub(super) fn is_responsive(&self, limit: Duration) -> bool {
        let Ok(control) = self.control.try_lock() else { return true };
        let set = |limit| control.set_read_timeout(limit).is_ok();
        let answered = set(Some(limit)) && exchange(&*control, &ServerRequest::Volumes, &[]).is_ok();
        if !answered {
            // A late answer would count as the answer to the next request.
            self.broken.store(true, Ordering::Relaxed);
            self.shut_down();
        }
        answered && set(None)
    }

    /// Sends a request, and waits for the answer.
    ///
    /// # Errors
    /// When the server refuses the request, or there is no server any more: see [`Self::is_broken`].
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

    /// Whether the connection has failed, so that the server gets no more requests.
    pub(super) fn has_failed(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Whether the error of a request means that there is no server any more.
    pub(super) fn is_broken(&self, error: &io::Error) -> bool {
        error.kind() != io::ErrorKind::Other && self.broken.load(Ordering::Relaxed)
    }

    /// Closes the connection. All requests that wait for an answer fail.
    pub(super) fn shut_down(&self) {
        let _ = self.shutdown_handle.shutdown(Shutdown::Both);
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
    pub(super) fn supports_live_parts(&self) -> bool {
        self.greeting.live
    }

    /// The keeper's process.
    pub(super) fn keeper(&self) -> i32 {
        self.keeper_of().pid
    }

    /// Takes the channel of the server's keeper out of the connection.
    pub(super) fn take_keeper(&self) -> FdKeeperLink {
        let FdKeeperLink { pid, channel, starts_successor } = &mut *self.keeper_of();
        FdKeeperLink { pid: *pid, channel: channel.take(), starts_successor: *starts_successor }
    }

    /// Notes the server's keeper.
    pub(super) fn set_keeper(&self, keeper: FdKeeperLink) {
        *self.keeper_of() = keeper;
    }

    fn keeper_of(&self) -> MutexGuard<'_, FdKeeperLink> {
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
    match receive_at_most(control, MAX_REPLY)?.ok_or_else(gone)? {
        (ServerReply::Failed(reason), _) => Err(io::Error::other(reason)),
        answered => Ok(answered),
    }
}

pub(super) fn unexpected(reply: &ServerReply) -> io::Error {
    io::Error::other(format!("the server gave an answer to another question: {reply:?}"))
}
