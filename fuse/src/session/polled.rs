//! A session without threads of its own: its owner reads requests when there are some, and answers each when it can.
//!
//! So one thread may serve many volumes, and a request that has to wait delays no later one. A request that was read and not
//! answered is among the region's waits, as a wait for a lock is: no thread is busy with it.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::Session;
use super::answer::{DeferredAnswer, Notifier, Responder};
use super::input::InputBuffer;
use super::request::Request;
use crate::region::Region;

/// A session whose owner reads the requests and sends the answers.
pub struct PolledSession {
    device: Arc<OwnedFd>,
    region: Arc<Region>,
}

impl Session {
    /// Lets the caller read the requests. What a dead server left unanswered comes first.
    ///
    /// # Errors
    /// When the descriptor is not a FUSE device.
    pub fn into_polled(mut self) -> io::Result<PolledSession> {
        self.settle()?;
        fcntl_setfl(&self.device, fcntl_getfl(&self.device)? | OFlags::NONBLOCK)?;
        self.region.set_session_thread(rustix::thread::gettid().as_raw_nonzero().get());
        Ok(PolledSession { device: self.device, region: self.region })
    }
}

impl PolledSession {
    /// Reads the next request into `input`; returns its length in bytes.
    ///
    /// # Errors
    /// `WouldBlock` when no request is pending; any other error when the connection has ended.
    pub fn read(&self, input: &mut InputBuffer) -> io::Result<usize> {
        loop {
            match rustix::io::read(&*self.device, input.as_mut_bytes()) {
                // The kernel withdrew a request before it was read.
                Err(Errno::NOENT | Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(ErrorKind::WouldBlock.into()),
                read => return Ok(read?),
            }
        }
    }

    /// Counts a request that was read.
    pub fn count(&self, request: &Request<'_>) {
        self.region.counts().request(request.opcode);
    }

    /// The answer to `request`, which the server owes the kernel from now on.
    pub fn owe(&self, request: &Request<'_>) -> DeferredAnswer {
        // The slot has the number until the waits have it. It keeps the number as its last one if the waits have no room.
        let slot = self.region.in_flight().slot(0);
        slot.take(request.number());
        let place = self.region.waits().add(request.number());
        slot.clear();
        let responder = Responder::of_device(&self.device, request.unique);
        DeferredAnswer { responder, region: Arc::clone(&self.region), place }
    }

    /// Returns the sender of notifications to the kernel.
    pub fn notifier(&self) -> Notifier {
        Notifier { device: Arc::clone(&self.device) }
    }
}

impl AsFd for PolledSession {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl AsRawFd for PolledSession {
    fn as_raw_fd(&self) -> RawFd {
        self.device.as_raw_fd()
    }
}
