//! The calls of a connection that are not answered, and the queue of calls to write. Callers, the driver and the deadlines share
//! them.
//!
//! 1. A call is pending from when it is made until it is answered, given up or dropped by its caller.
//!    It keeps the bytes that were sent, and its payload.
//! 2. The client sends a pending call once on every connection, in the order in which the calls were made, and again on the same
//!    connection after `timeo`: always the same bytes with the same xid, so that a server that has executed the call answers from
//!    memory. The client repeats a call sooner if it has sent the call on an earlier connection, too: a server ignores a copy of a
//!    call that it is executing, and then answers on the connection that is gone.
//! 3. The caller writes its call at once if no other call waits before it; otherwise the driver writes it.
//! 4. A message whose writing has begun is written to its end, even if its call has ended. Until then, the queue has the call, and
//!    with it the owner of its payload, who must not change the bytes.
//! 5. A reply is given to the pending call with its xid. If the caller has cancelled the call, the reply is dropped.
//! 6. There is a socket only while calls are pending, or while the server keeps the connection open.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::dial::{Dialer, Stream};
use super::failure::RpcError;
use super::message::RpcCall;
use super::peer::Peer;
use super::policy::Policy;
use super::pool::Pool;
use super::slice::Slice;
use crate::xdr::XdrReader;

/// The first pause before the client repeats a call that it has sent on an earlier connection, too. It doubles up to `timeo`.
const FIRST_REPETITION_PAUSE: Duration = Duration::from_millis(250);
/// Most parts of messages that are written at once.
const PARTS: usize = 32;

/// State that callers, the driver and the deadlines share.
#[derive(Debug)]
pub(super) struct SharedConnection {
    pub(super) peer: Rc<Peer>,
    pub(super) dialer: Dialer,
    pub(super) pool: Pool,
    pub(super) pending: RefCell<HashMap<u32, Rc<PendingCall>>>,
    /// Calls to write.
    queue: RefCell<VecDeque<Rc<PendingCall>>>,
    /// The number of bytes of the first call in the queue that are written already.
    written: Cell<usize>,
    pub(super) stream: RefCell<Option<Rc<Stream>>>,
    /// Writing to the stream failed.
    pub(super) broken: Cell<Option<io::ErrorKind>>,
    pub(super) driver: Wake,
    pub(super) deadlines: Wake,
    /// Ends the stream, or the attempt to connect, after the server has moved.
    pub(super) cut: Notify,
    /// The time at which the deadlines task checks the calls next.
    pub(super) next_check: Cell<Option<Instant>>,
    next_xid: Cell<u32>,
    next_order: Cell<u64>,
}

/// A call that has not been answered.
#[derive(Debug)]
pub(super) struct PendingCall {
    xid: u32,
    /// Later calls have greater numbers.
    order: u64,
    message: RpcCall,
    pub(super) policy: Policy,
    /// The number of times that the call was sent, on this and earlier connections. A partly written call counts when its
    /// connection is lost, and a call that the process before this one may have sent counts as sent once.
    sent: Cell<u32>,
    queued: Cell<bool>,
    /// The number of times that its `timeo` has passed.
    pub(super) periods: Cell<u32>,
    /// The time at which its `timeo` passes next.
    pub(super) due: Cell<Instant>,
    /// The time at which to send the call again because the server may have ignored it, and the pause after that.
    pub(super) reminder: Cell<Option<(Instant, Duration)>>,
    outcome: RefCell<Option<Result<Reply, RpcError>>>,
    caller: Wake,
}

/// A call in flight.
#[derive(Debug)]
#[must_use = "a call without a waiting task is taken back"]
pub struct PendingReply<'a> {
    shared: &'a SharedConnection,
    call: Rc<PendingCall>,
}

/// The results of a call.
#[derive(Clone, Debug)]
pub struct Reply {
    record: Slice,
    results: usize,
    /// The call was sent more than once, so that this may be the answer to its second execution.
    pub retransmitted: bool,
}

impl Reply {
    /// A reader of the results. [`Self::slice`] takes positions of this reader.
    pub fn reader(&self) -> XdrReader<'_> {
        XdrReader::new(&self.record[self.results..])
    }

    /// A part of the results, without a copy.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Slice {
        self.record.part(self.results + range.start..self.results + range.end)
    }
}

/// The task to wake, if one waits.
#[derive(Debug, Default)]
pub(super) struct Wake(RefCell<Option<Waker>>);

impl Wake {
    pub(super) fn wait(&self, context: &Context<'_>) {
        match &mut *self.0.borrow_mut() {
            Some(known) => known.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
    }

    pub(super) fn wake(&self) {
        if let Some(waker) = self.0.take() {
            waker.wake();
        }
    }
}

impl SharedConnection {
    /// The state of a connection to `peer` that has no call yet. [`Self::next_xid`] begins at `first_xid`.
    pub(super) fn new(peer: Rc<Peer>, dialer: Dialer, pool: Pool, first_xid: u32) -> Self {
        Self {
            peer,
            dialer,
            pool,
            pending: RefCell::default(),
            queue: RefCell::default(),
            written: Cell::default(),
            stream: RefCell::default(),
            broken: Cell::default(),
            driver: Wake::default(),
            deadlines: Wake::default(),
            cut: Notify::new(),
            next_check: Cell::default(),
            next_xid: Cell::new(first_xid),
            next_order: Cell::default(),
        }
    }

    /// An xid that no call in flight has.
    pub(super) fn next_xid(&self) -> u32 {
        loop {
            let xid = self.next_xid.get();
            self.next_xid.set(xid.wrapping_add(1));
            if !self.is_in_use(xid) {
                return xid;
            }
        }
    }

    /// Whether a call with this xid is in flight.
    pub(super) fn is_in_use(&self, xid: u32) -> bool {
        self.pending.borrow().contains_key(&xid)
    }

    /// Makes a call. `again` says that another process may have sent it before. No other call in flight has its xid.
    pub(super) fn call(&self, xid: u32, message: RpcCall, policy: Policy, again: bool) -> PendingReply<'_> {
        let now = Instant::now();
        let order = self.next_order.get();
        self.next_order.set(order + 1);
        let call = Rc::new(PendingCall {
            xid,
            order,
            message,
            policy,
            sent: Cell::new(again.into()),
            queued: Cell::default(),
            periods: Cell::default(),
            due: Cell::new(now + policy.timeo),
            reminder: Cell::default(),
            outcome: RefCell::default(),
            caller: Wake::default(),
        });
        let replaced = self.pending.borrow_mut().insert(xid, Rc::clone(&call));
        assert!(replaced.is_none(), "no two calls have the same xid");
        self.peer.call_begins(now);
        call.remind(now);
        if self.next_check.get().is_none_or(|check| call.next() < check) {
            self.deadlines.wake();
        }
        self.send(&call);
        PendingReply { shared: self, call }
    }

    /// Whether a call waits for its answer.
    pub(super) fn has_work(&self) -> bool {
        !self.pending.borrow().is_empty()
    }

    fn is_pending(&self, call: &Rc<PendingCall>) -> bool {
        self.pending.borrow().get(&call.xid).is_some_and(|pending| Rc::ptr_eq(pending, call))
    }

    /// Whether a call waits to be written.
    pub(super) fn has_queue(&self) -> bool {
        !self.queue.borrow().is_empty()
    }

    /// Sends a call now, or leaves it to the driver if there is no stream or the socket is full.
    fn send(&self, call: &Rc<PendingCall>) {
        if self.stream.borrow().is_none() {
            // The driver connects, and then queues all pending calls.
            self.driver.wake();
            return;
        }
        let first = {
            let mut queue = self.queue.borrow_mut();
            call.queued.set(true);
            queue.push_back(Rc::clone(call));
            queue.len() == 1
        };
        if first {
            self.write();
            if self.has_queue() {
                self.driver.wake();
            }
        }
    }

    /// Sends a call once more on the same connection, unless it still waits to be written.
    pub(super) fn send_again(&self, call: &Rc<PendingCall>) {
        if !call.queued.get() && self.stream.borrow().is_some() {
            self.send(call);
        }
    }

    /// Uses a new stream from now on: sends all pending calls on it, oldest first.
    pub(super) fn attach(&self, stream: Stream) {
        let mut calls: Vec<Rc<PendingCall>> = self.pending.borrow().values().cloned().collect();
        calls.sort_unstable_by_key(|call| call.order);
        let now = Instant::now();
        for call in &calls {
            call.queued.set(true);
            call.remind(now);
        }
        self.deadlines.wake();
        *self.queue.borrow_mut() = calls.into();
        self.written.set(0);
        self.broken.set(None);
        *self.stream.borrow_mut() = Some(Rc::new(stream));
        self.write();
    }

    /// Records that the stream has ended. A call whose writing had begun counts as sent.
    pub(super) fn detach(&self) {
        self.stream.take();
        if let Some(begun) = self.queue.borrow().front().filter(|_| self.written.get() > 0) {
            begun.sent.set(begun.sent.get() + 1);
        }
        self.queue.take().iter().for_each(|call| call.queued.set(false));
        self.written.set(0);
    }

    /// Writes as much of the queue as the socket takes.
    pub(super) fn write(&self) {
        let Some(stream) = self.stream.borrow().clone() else { return };
        let mut queue = self.queue.borrow_mut();
        while !queue.is_empty() {
            match stream.try_write_vectored(gather(&queue, self.written.get(), &mut [IoSlice::new(&[]); PARTS])) {
                Ok(count) => self.advance(&mut queue, count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    self.broken.set(Some(error.kind()));
                    return self.driver.wake();
                }
            }
        }
    }

    /// Removes written bytes from the queue.
    fn advance(&self, queue: &mut VecDeque<Rc<PendingCall>>, count: usize) {
        let mut written = self.written.get() + count;
        while let Some(call) = queue.front().filter(|call| call.message.len() <= written) {
            written -= call.message.len();
            call.queued.set(false);
            if call.sent.replace(call.sent.get() + 1) > 0 {
                self.peer.retransmitted();
            }
            queue.pop_front();
            if written == 0 {
                break;
            }
        }
        self.written.set(written);
    }

    /// Gives a reply to the call that waits for it. Returns whether there was one.
    pub(super) fn deliver(&self, xid: u32, record: Slice, results: Result<usize, RpcError>) -> bool {
        let Some(call) = self.remove(xid) else { return false };
        self.peer.call_answered();
        let retransmitted = call.sent.get() > 1;
        call.end(results.map(|results| Reply { record, results, retransmitted }));
        true
    }

    /// Ends a call that has taken too long.
    pub(super) fn give_up(&self, call: &PendingCall, failure: RpcError) {
        if self.remove(call.xid).is_some() {
            self.peer.call_given_up();
        }
        call.end(Err(failure));
    }

    /// Removes a call from the pending ones, and from the queue unless its writing has begun.
    fn remove(&self, xid: u32) -> Option<Rc<PendingCall>> {
        let call = self.pending.borrow_mut().remove(&xid)?;
        if call.queued.get() {
            let mut begun = self.written.get() > 0;
            self.queue.borrow_mut().retain(|queued| std::mem::take(&mut begun) || !Rc::ptr_eq(queued, &call));
        }
        Some(call)
    }
}

impl Future for PendingReply<'_> {
    type Output = Result<Reply, RpcError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.call.outcome.take() {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                self.call.caller.wait(context);
                Poll::Pending
            }
        }
    }
}

impl Drop for PendingReply<'_> {
    fn drop(&mut self) {
        // Another call may have reused the xid of an answered call.
        if self.shared.is_pending(&self.call) {
            self.shared.remove(self.call.xid);
            self.shared.peer.call_cancelled();
        }
    }
}

impl PendingCall {
    /// Returns the time of the next timeout or repetition.
    pub(super) fn next(&self) -> Instant {
        self.reminder.get().map_or(self.due.get(), |(at, _)| at.min(self.due.get()))
    }

    /// Sets the reminder if the call was sent before: the server may ignore the copy that the client sends next.
    fn remind(&self, now: Instant) {
        self.reminder.set((self.sent.get() > 0).then_some((now + FIRST_REPETITION_PAUSE, 2 * FIRST_REPETITION_PAUSE)));
    }

    fn end(&self, outcome: Result<Reply, RpcError>) {
        *self.outcome.borrow_mut() = Some(outcome);
        self.caller.wake();
    }
}

/// The next parts of the queue to write. `written` bytes of the first message are written already.
fn gather<'s, 'q: 's>(
    queue: &'q VecDeque<Rc<PendingCall>>,
    written: usize,
    parts: &'s mut [IoSlice<'q>; PARTS],
) -> &'s [IoSlice<'q>] {
    let messages = queue.iter().enumerate();
    let all = messages.flat_map(|(index, call)| call.message.parts(if index == 0 { written } else { 0 }));
    let count = parts.iter_mut().zip(all).map(|(place, part)| *place = part).count();
    &parts[..count]
}
