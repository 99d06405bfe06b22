//! Requests that a dead server left unanswered.
//!
//! The kernel keeps each request that was read until it is answered, and since Linux 6.9 a server can make it send all of them
//! again. Before 6.9 the content of these requests is lost; but an answer needs only the number of the request, so each is
//! answered with `EIO`, and its caller ends with an error instead of waiting for ever.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::abi::{NOTIFY_RESEND, UNIQUE_RESEND};
use super::answer::Responder;
use crate::region::Region;

/// The step by which the kernel's numbers of requests grow. Odd numbers belong to interrupts.
const STEP: u64 = 2;
/// The number of steps to try before and after the last known number. A request that a thread had just read is in no slot yet,
/// and messages without an answer have numbers, too.
const AROUND: u64 = 64;

/// The way to handle the requests that a dead server left unanswered.
pub(super) enum Unanswered {
    /// The kernel sends them again. If it cannot, each ends with `EIO`.
    AskedAgain,
    /// Each ends with `EIO`.
    Failed,
}

impl Unanswered {
    /// Handles the requests. No thread may read from the device before.
    pub(super) fn settle(self, device: &Arc<OwnedFd>, region: &Region) -> io::Result<()> {
        match self {
            Self::AskedAgain if ask_again(device)? => {}
            _ => fail_all(device, region),
        }
        // The kernel sends requests again that waited for a lock, or they have ended with `EIO`.
        region.waits().clear();
        Ok(())
    }
}

/// Asks the kernel to send all unanswered requests again. Returns `false` if the kernel cannot do that.
fn ask_again(device: &Arc<OwnedFd>) -> io::Result<bool> {
    let kernel = Responder::of_device(device, 0);
    match kernel.write(NOTIFY_RESEND, &[], &[]) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        sent => sent.map(|()| true),
    }
}

/// Answers all requests that may be unanswered with `EIO`. The kernel refuses an answer to any other number with `ENOENT`.
fn fail_all(device: &Arc<OwnedFd>, region: &Region) {
    let fail = |unique: u64| {
        let responder = Responder::of_device(device, unique);
        let _ = responder.send(Err(Errno::IO));
    };
    let known = region.in_flight().all_to_replay().chain(region.waits().all());
    known.flat_map(|unique| [unique, unique | UNIQUE_RESEND]).for_each(fail);
    for last in region.in_flight().last_requests() {
        let first = last.saturating_sub(AROUND * STEP).max(STEP);
        (first..=last.saturating_add(AROUND * STEP)).step_by(STEP as usize).for_each(fail);
    }
    region.in_flight().drop_all_replays();
}
