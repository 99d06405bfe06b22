//! The state that the threads of a volume share, and the requests that they execute.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::wake::Waker;
use crate::caller::ending::has_signal;
use crate::region::{BegunRequest, Region};
use crate::session::abi::UNIQUE_RESEND;
use crate::session::answer::Responder;
use crate::session::request::Request;
use crate::session::ring_memory::RingMemory;
use crate::session::ring_reply::RingReply;
use crate::session::{Answer, Exchange, Filesystem};

/// State that the threads of a volume share.
pub(super) struct RingVolume {
    pub(super) memory: Arc<RingMemory>,
    pub(super) device: Arc<OwnedFd>,
    pub(super) region: Arc<Region>,
    pub(super) service: Arc<dyn Filesystem>,
    pub(super) waker: Option<Waker>,
}

impl RingVolume {
    /// Makes the kernel look into the queues of these CPUs.
    pub(super) fn wake(&self, cpus: &[usize]) {
        let woken = self.waker.as_ref().map_or(Ok(()), |waker| waker.wake(cpus));
        if let Err(error) = woken {
            let volume = self.memory.volume();
            tracing::warn!(
                volume,
                "podfs cannot make the kernel send requests that waited for the server: {error}; each waits for the next \
                 request on its CPU"
            );
        }
    }
}

/// A request that is being executed.
pub(super) struct ExecutingRequest {
    pub(super) reply: RingReply,
    /// Whether a dead server left it unanswered.
    pub(super) is_inherited: bool,
    pub(super) earlier: Option<BegunRequest>,
    pub(super) may_wait: bool,
}

impl ExecutingRequest {
    /// Has the service answer the request.
    pub(super) fn execute(self, served: &RingVolume, buffer: &mut Vec<u8>) {
        let Self { reply, is_inherited, earlier, .. } = self;
        let (memory, entry) = (&served.memory, reply.entry);
        let number = memory.commit_id(entry);
        let slot = memory.slot(entry);
        let mark = if is_inherited { UNIQUE_RESEND } else { 0 };
        let responder = Responder::of_ring(reply.clone(), number | mark);
        // SAFETY: only the service uses the borrowed bytes, before it answers.
        let Some(request) = Request::parse(unsafe { memory.request(entry) }) else {
            let _short = responder.send(Err(Errno::IO));
            return;
        };
        served.region.counts().request(request.opcode);
        buffer.clear();
        let mut exchange = Exchange { buffer, responder: &responder, region: &served.region, slot, earlier };
        let outcome = match served.service.answer(&request, &mut exchange) {
            // The kernel waits for an answer to each request that comes here.
            Ok(Answer::Silence) => Ok(Answer::Done),
            Ok(Answer::Later) => {
                // A signal that came before the kernel had put the request here interrupts nothing (Linux 6.18).
                if has_signal(request.caller.pid) {
                    served.service.interrupt(number);
                }
                return slot.clear_of(number);
            }
            outcome => outcome,
        };
        served.region.counts().answer(&outcome);
        if responder.send_with(outcome, buffer).is_err() {
            // The answer was too long.
            let _short = responder.send(Err(Errno::IO));
        }
    }
}
