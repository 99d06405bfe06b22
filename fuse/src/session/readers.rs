//! The threads that read requests from the device and answer them, and how many there are.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use zerocopy::IntoBytes;

use super::answer::Responder;
use super::stall_guard::StallGuard;
use super::{Exchange, Filesystem, FuseOperation, InputBuffer, KernelReferences, Request, read};
use crate::label::VolumeLabel;
use crate::region::{Region, SLOTS};

/// The pause after which a thread reads again that gets only FORGET and INTERRUPT. The kernel wakes no thread meanwhile, and then
/// gives many forgotten nodes at once: `rm -r` forgets a node with each file.
const GATHERING_PAUSE: Duration = Duration::from_millis(1);

/// The threads of a session.
pub(super) struct Readers {
    label: VolumeLabel,
    device: Arc<OwnedFd>,
    region: Arc<Region>,
    service: Arc<dyn Filesystem>,
    /// `Some` if the source may be unreachable.
    stall_guard: Option<Arc<StallGuard>>,
    /// The number of threads while no request is slow.
    wanted: usize,
    /// Whether all requests but FORGET and INTERRUPT come through rings.
    beside_rings: bool,
    /// The number of threads that wait for a request.
    idle: AtomicUsize,
    /// The number of threads.
    running: AtomicUsize,
    /// The slots of the region that threads use, a bit for each.
    slots: AtomicU32,
}

impl Readers {
    /// `wanted` is the number of threads while no request is slow. Beside rings there is one thread: only FORGET and INTERRUPT
    /// come through the device then.
    pub(super) fn new(
        label: VolumeLabel,
        device: Arc<OwnedFd>,
        region: Arc<Region>,
        service: Arc<dyn Filesystem>,
        stall_guard: Option<Arc<StallGuard>>,
        wanted: usize,
        beside_rings: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            label,
            device,
            region,
            service,
            stall_guard,
            wanted: if beside_rings { 1 } else { wanted.min(SLOTS) },
            beside_rings,
            idle: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            slots: AtomicU32::new(0),
        })
    }

    /// Starts the threads.
    ///
    /// # Errors
    /// When one cannot be started.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<()> {
        (0..self.wanted).try_for_each(|_| Arc::clone(self).spawn())
    }

    fn spawn(self: Arc<Self>) -> io::Result<()> {
        self.running.fetch_add(1, Ordering::Relaxed);
        let readers = Arc::clone(&self);
        let started = thread::Builder::new().name("session".to_owned()).spawn(move || readers.serve());
        started.map(drop).inspect_err(|_| {
            self.running.fetch_sub(1, Ordering::Relaxed);
        })
    }

    fn serve(self: Arc<Self>) {
        if let Some(slot) = self.register() {
            self.serve_from(slot);
            self.release(slot);
        }
        self.running.fetch_sub(1, Ordering::Relaxed);
    }

    fn serve_from(self: &Arc<Self>, slot: usize) {
        if slot == 0 {
            self.region.set_session_thread(rustix::thread::gettid().as_raw_nonzero().get());
        }
        self.region.in_flight().slot(slot).register();
        self.service.begin_thread();
        let mut input = InputBuffer::new(self.service.longest_request()).unwrap_or_else(|error| {
            // Without memory this server ends, and the supervisor starts another one.
            tracing::error!(volume = self.label.as_str(), "no memory for requests: {error}");
            std::process::abort()
        });
        let mut buffer = Vec::new();
        while let Some(length) = self.next(input.as_mut_bytes()) {
            let Some(request) = Request::parse(&input.as_bytes()[..length]) else { continue };
            match request.operation {
                FuseOperation::Interrupt { unique } => self.interrupt(unique),
                FuseOperation::Destroy => {}
                _ => match &self.stall_guard {
                    Some(stall_guard) => {
                        self.answer_guarded(stall_guard, &request, &input.as_bytes()[..length], slot, &mut buffer)
                    }
                    None => self.answer(&request, slot, &mut buffer),
                },
            }
            if self.beside_rings {
                thread::sleep(GATHERING_PAUSE);
            }
        }
    }

    fn interrupt(&self, unique: u64) {
        self.service.interrupt(unique);
        if let Some(stall_guard) = &self.stall_guard {
            stall_guard.interrupt(unique);
        }
    }

    /// Answers `request`, whose source may be unreachable, or lets the guard park it. After an answer, the thread also answers the
    /// requests that are parked.
    fn answer_guarded(
        self: &Arc<Self>,
        stall_guard: &StallGuard,
        request: &Request<'_>,
        bytes: &[u8],
        slot: usize,
        buffer: &mut Vec<u8>,
    ) {
        if let FuseOperation::Forget { .. } | FuseOperation::BatchForget { .. } = request.operation {
            return self.answer(request, slot, buffer);
        }
        if let Some(known) = stall_guard.answer_from_cache(request) {
            self.region.counts().request(request.opcode);
            let _ = Responder::of_device(&self.device, request.unique).send(Ok(known));
            return;
        }
        if !stall_guard.enter(request, bytes) {
            return;
        }
        self.answer(request, slot, buffer);
        let mut answered = request.number();
        while let Some(parked) = stall_guard.leave(answered) {
            // The guard parks only bytes that were parsed as a request.
            let Some(request) = Request::parse(parked.bytes()) else { return };
            self.answer(&request, slot, buffer);
            answered = request.number();
        }
    }

    fn answer(self: &Arc<Self>, request: &Request<'_>, slot: usize, buffer: &mut Vec<u8>) {
        let (slots, number) = (self.region.in_flight(), request.number());
        let slot = slots.slot(slot);
        slot.take(number);
        let earlier = if request.is_resent() { slots.earlier(number) } else { None };
        self.region.counts().request(request.opcode);
        if self.idle.load(Ordering::Relaxed) == 0 && self.service.may_wait(&request.operation) {
            self.start_next_reader();
        }
        let responder = Responder::of_device(&self.device, request.unique);
        buffer.clear();
        let mut exchange = Exchange { buffer, responder: &responder, region: &self.region, slot, earlier };
        let outcome = self.service.answer(request, &mut exchange);
        self.region.counts().answer(&outcome);
        // The kernel takes no answer to a request that was aborted, or that another thread has answered.
        let granted = outcome.as_ref().ok().and_then(KernelReferences::of);
        let is_refused = responder.send_with(outcome, buffer).is_err();
        if let (true, Some(granted), true) = (is_refused, granted, self.stall_guard.is_some()) {
            self.service.release_references(granted);
        }
        slot.clear();
        if request.is_resent() {
            slots.drop_replay(number);
        }
    }

    /// Takes a free slot.
    fn register(&self) -> Option<usize> {
        let lowest = |taken: u32| taken.trailing_ones() as usize;
        let take = |taken| (lowest(taken) < SLOTS).then(|| taken | (1 << lowest(taken)));
        self.slots.fetch_update(Ordering::Acquire, Ordering::Relaxed, take).ok().map(lowest)
    }

    fn release(&self, slot: usize) {
        self.slots.fetch_and(!(1 << slot), Ordering::Release);
    }

    /// Starts a thread that reads requests while this one waits. If none can start, the volume is slower, not wrong.
    fn start_next_reader(self: &Arc<Self>) {
        if self.running.load(Ordering::Relaxed) < SLOTS {
            let _ = Arc::clone(self).spawn();
        }
    }

    /// Reads the next request. Returns its length; `None` when this thread has to end.
    fn next(&self, input: &mut [u8]) -> Option<usize> {
        if self.idle.fetch_add(1, Ordering::Relaxed) >= self.wanted {
            self.idle.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let length = read(&self.device, input);
        self.idle.fetch_sub(1, Ordering::Relaxed);
        match length {
            Ok(length) => Some(length),
            // The file system is unmounted, or its connection was aborted.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ECONNABORTED)) => None,
            Err(error) => {
                // Callers would wait for ever. When this server ends, the supervisor starts another one.
                tracing::error!(volume = self.label.as_str(), "cannot read requests: {error}");
                std::process::abort()
            }
        }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        if let Some(stall_guard) = &self.stall_guard {
            stall_guard.end();
        }
    }
}
