//! The requests of one volume: read, answered each by a task of its own, interrupted.
//!
//! 1. The volume reads requests as they come, and a task answers each. So a request that has to wait for the NFS server delays no
//!    other.
//! 2. The volume accepts written data in the buffer that it was read into, without another copy and without a task, if there is
//!    room for it.
//! 3. Each request that was read is answered: by its task, or with `EINTR` when the task is dropped.
//! 4. A caller that is being killed waits no longer; see [`ending`](crate::caller::ending).
//! 5. When the file system is unmounted everywhere, reading fails, and the volume ends.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, spawn_local, yield_now};
use tokio::time::{sleep, timeout};
use zerocopy::IntoBytes;

use super::busy_poll::BusyPoll;
use super::filesystem::nfs_request::NfsRequest;
use super::filesystem::{NfsAnswer, NfsFilesystem};
use crate::caller::ending::is_dying;
use crate::session::{DeferredAnswer, FuseOperation, InputBuffer, PolledSession, Request};
use crate::trace::Trace;

/// The device reports by an error, and by nothing else, that its file system is unmounted.
const WANTED: Interest = Interest::READABLE.add(Interest::ERROR);
/// The interval at which podfs checks whether an interrupted caller is being killed.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Requests that are read before other volumes have their turn.
const AT_A_TIME: usize = 64;
/// Bytes that take longer to copy than a thread takes to wake up.
const LARGE_TRANSFER: usize = 64 << 10;
/// The longest time that the end of a volume waits for its NFS server.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// A volume that is served.
pub struct NfsVolume {
    filesystem: Rc<NfsFilesystem>,
    session: AsyncFd<PolledSession>,
    input: Rc<RefCell<InputBuffer>>,
    busy_poll: Rc<BusyPoll>,
    trace: Arc<Trace>,
    /// Requests that are being answered, by their numbers.
    running: RefCell<HashMap<u64, RunningRequest>>,
    has_ended: Cell<bool>,
    ended: Notify,
}

struct RunningRequest {
    pid: u32,
    task: AbortHandle,
}

impl NfsVolume {
    /// Serves a file system whose requests come in by `polled`, one at a time into `input`.
    ///
    /// # Errors
    /// When the device cannot be polled.
    pub fn new(
        filesystem: Rc<NfsFilesystem>,
        session: PolledSession,
        input: Rc<RefCell<InputBuffer>>,
        busy_poll: Rc<BusyPoll>,
        trace: Arc<Trace>,
    ) -> io::Result<Rc<Self>> {
        // SAFETY: the session has the device open for as long as it lives, and always names it by the same number.
        let session = unsafe { AsyncFd::register_with_interest(session, WANTED) }?;
        Ok(Rc::new(Self {
            filesystem,
            session,
            input,
            busy_poll,
            trace,
            running: RefCell::default(),
            has_ended: Cell::new(false),
            ended: Notify::new(),
        }))
    }

    /// Answers until the file system is unmounted everywhere.
    pub async fn run(self: Rc<Self>) {
        self.answer_all().await;
        self.has_ended.set(true);
        self.ended.notify_waiters();
    }

    async fn answer_all(self: &Rc<Self>) {
        while let Ok(mut ready) = self.session.ready(WANTED).await {
            for _ in 0..AT_A_TIME {
                match self.take_one() {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        ready.clear_ready();
                        break;
                    }
                    Err(_) => return self.end().await,
                }
            }
            yield_now().await;
        }
    }

    /// Whether the file system is unmounted everywhere.
    pub fn is_unmounted(&self) -> bool {
        let device = self.session.get_ref().as_fd();
        let mut device = [PollFd::from_borrowed_fd(device, PollFlags::empty())];
        poll(&mut device, Some(&Timespec::default())).is_ok() && device[0].revents().contains(PollFlags::ERR)
    }

    /// Waits until no request comes any more, and podfs has done what was left to do.
    pub async fn wait_for_end(&self) {
        let ended = self.ended.notified();
        if !self.has_ended.get() {
            ended.await;
        }
    }

    /// Reads one request, and begins to answer it.
    fn take_one(self: &Rc<Self>) -> io::Result<()> {
        let mut input = self.input.borrow_mut();
        let length = self.session.get_ref().read(&mut input)?;
        let bytes = &input.as_bytes()[..length];
        let Some(request) = Request::parse(bytes) else { return Ok(()) };
        self.session.get_ref().count(&request);
        self.note_event(&request);
        match request.operation {
            FuseOperation::Forget { lookups } => self.filesystem.forget(request.node, lookups),
            FuseOperation::BatchForget { nodes } => {
                nodes.iter().for_each(|one| self.filesystem.forget(one.nodeid, one.nlookup));
            }
            FuseOperation::Interrupt { unique } => self.interrupt(unique),
            FuseOperation::Destroy => {}
            _ => self.begin(&request, bytes),
        }
        Ok(())
    }

    fn begin(self: &Rc<Self>, request: &Request<'_>, bytes: &[u8]) {
        let reply = PendingAnswer(Some(self.session.get_ref().owe(request)));
        let nfs_request = Rc::new(NfsRequest::new(request.number(), request.caller, request.is_resent()));
        let is_write = matches!(request.operation, FuseOperation::Write { .. });
        if is_write && !self.filesystem.options().stable && !self.trace.is_on() {
            let answer = pin!(self.filesystem.answer(request, &nfs_request));
            if let Poll::Ready(outcome) = answer.poll(&mut Context::from_waker(Waker::noop())) {
                reply.send(outcome);
                return self.filesystem.end(&nfs_request);
            }
            // The log has no room yet. The task accepts bytes that were accepted already once more, which changes nothing.
        }
        let (volume, buffer, number) = (Rc::clone(self), RequestBuffer::new(bytes), request.number());
        let task = spawn_local(async move {
            volume.answer(&buffer, nfs_request, reply).await;
            volume.running.borrow_mut().remove(&number);
        });
        let running = RunningRequest { pid: request.caller.pid, task: task.abort_handle() };
        self.running.borrow_mut().insert(number, running);
    }

    async fn answer(&self, buffer: &RequestBuffer, nfs_request: Rc<NfsRequest>, reply: PendingAnswer) {
        let Some(request) = buffer.request() else { return };
        // The records of the request are needed until the answer is written, because the kernel would send the request to a
        // successor again. This is dropped after the answer, also if the task is dropped.
        let _end = RequestEnd { filesystem: &self.filesystem, nfs_request: &nfs_request };
        let reply = reply;
        let entry = request.operation.entry().map(|name| name.as_encoded_bytes());
        let line = self.trace.begin(|| self.filesystem.path(request.node, entry));
        let outcome = self.filesystem.answer(&request, &nfs_request).await;
        if let Some(line) = line {
            let error = outcome.as_ref().err().map(|errno| nix::errno::Errno::from_raw(errno.raw_os_error()));
            line.end(request.name(), request.caller, error);
        }
        reply.send(outcome);
        self.note_event(&request);
    }

    /// Keeps the thread awake for the next request, unless this request has much data: then the CPU has other work meanwhile.
    fn note_event(&self, request: &Request<'_>) {
        let bytes = match request.operation {
            FuseOperation::Read(arguments) => arguments.size as usize,
            FuseOperation::Write { data, .. } => data.len(),
            _ => 0,
        };
        if bytes < LARGE_TRANSFER {
            self.busy_poll.note_event();
        }
    }

    /// Handles a signal that the caller of a request got: the request ends if the caller is being killed.
    fn interrupt(self: &Rc<Self>, number: u64) {
        let Some(pid) = self.running.borrow().get(&number).map(|running| running.pid) else { return };
        let volume = Rc::clone(self);
        spawn_local(async move {
            while volume.running.borrow().contains_key(&number) {
                if is_dying(pid) {
                    if let Some(running) = volume.running.borrow_mut().remove(&number) {
                        running.task.abort();
                    }
                    return;
                }
                sleep(CHECK_INTERVAL).await;
            }
        });
    }

    /// The file system is unmounted everywhere: no request comes any more.
    async fn end(&self) {
        self.running.take().into_values().for_each(|running| running.task.abort());
        let filesystem = &self.filesystem;
        let final_work = async {
            filesystem.finish_changes().await;
            filesystem.write_all().await;
            filesystem.remove_all_silly().await;
        };
        let is_done = timeout(END_TIMEOUT, final_work).await.is_ok();
        let lost = filesystem.writeback().uncommitted();
        if !is_done && lost > 0 {
            let (volume, server) = (filesystem.options().name.as_str(), &filesystem.options().export.server);
            tracing::error!(
                volume,
                "volume {volume:?} ends, and {lost} bytes that were written to it are lost: NFS server {server} did not \
                 answer"
            );
        }
    }
}

/// The bytes of a request while a task answers it.
struct RequestBuffer {
    words: Vec<u64>,
    length: usize,
}

impl RequestBuffer {
    fn new(bytes: &[u8]) -> Self {
        let mut words = vec![0_u64; bytes.len().div_ceil(size_of::<u64>())];
        words.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
        Self { words, length: bytes.len() }
    }

    fn request(&self) -> Option<Request<'_>> {
        Request::parse(&self.words.as_bytes()[..self.length])
    }
}

/// Dropping it forgets the inherited state of a request, which is answered.
struct RequestEnd<'a> {
    filesystem: &'a NfsFilesystem,
    nfs_request: &'a NfsRequest,
}

impl Drop for RequestEnd<'_> {
    fn drop(&mut self) {
        self.filesystem.end(self.nfs_request);
    }
}

/// An answer that the kernel waits for. Dropping it answers `EINTR`.
struct PendingAnswer(Option<DeferredAnswer>);

impl PendingAnswer {
    fn send(mut self, outcome: Result<NfsAnswer, Errno>) {
        let Some(owed) = self.0.take() else { return };
        // The write fails if the request was aborted: no caller waits then.
        let _ = match outcome {
            Ok(NfsAnswer::Plain(answer)) => owed.send(Ok(answer)),
            Ok(NfsAnswer::Bytes(bytes)) => owed.send_bytes(&bytes),
            Ok(NfsAnswer::Data(data)) => owed.send_bytes(&data),
            Err(errno) => owed.send(Err(errno)),
        };
    }
}

impl Drop for PendingAnswer {
    fn drop(&mut self) {
        if let Some(owed) = self.0.take() {
            // The write fails if the request was aborted.
            let _ = owed.send(Err(Errno::INTR));
        }
    }
}
