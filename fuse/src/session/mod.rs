//! FUSE sessions: the protocol between the kernel and a file system, and the threads that speak it.
//!
//! A session is a device, a [`Filesystem`] (the *service*) and a few threads. Each thread reads a request from the device, lets the
//! service answer it, and reads the next.
//!
//! 1. A request is read by one thread and answered once: by that thread, or by the holder of its [`DeferredAnswer`].
//! 2. A request that may take long never occupies the last reader: the session starts another thread before, which ends when it is
//!    not needed. So a slow disk does not keep the volume from answering. A wait for a lock occupies no thread of the session.
//! 3. The threads end when the file system is unmounted everywhere; the last one drops the service.
//! 4. The request of each thread is in the volume's [`Region`], so that another process can resume the session when this one dies:
//!    [`region`](crate::region) has the order of steps.
//!
//! | module | owns |
//! |---|---|
//! | [`abi`] | the kernel's structs and numbers |
//! | [`ids`] | numbers of nodes, open files and owners of locks |
//! | [`request`] | bytes into requests |
//! | [`answer`] | answers into bytes |
//! | [`polled`] | a session without threads of its own |
//! | `stall_guard` | requests whose source may become unreachable |
//! | `readers` | the threads that read requests from the device |
//! | `input` | buffers for requests |
//! | `resume` | requests that a dead server left unanswered |
//! | [`uring`] | requests over io_uring: the rings and their threads |
//! | [`ring_memory`] | requests and answers of rings, in memory that outlives the server |
//! | `ring_reply` | answers to requests of a ring, on their way to its thread |

pub mod abi;
pub mod answer;
pub mod ids;
mod input;
mod page_invalidator;
pub mod polled;
mod readers;
pub mod request;
mod resume;
pub mod ring_memory;
mod ring_reply;
mod stall_guard;
pub mod uring;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::IntoBytes;

pub use crate::caller::Caller;
use crate::label::VolumeLabel;
use abi::{InitOut, MAJOR, MINOR, init};
use answer::Responder;
pub use answer::{Answer, DeferredAnswer, Exchange, Notifier, ReaddirEntry};
pub use ids::{HandleId, LockOwner, NodeId};
pub use input::InputBuffer;
pub use page_invalidator::{PageInvalidator, drop_content_of};
pub use polled::PolledSession;
use readers::Readers;
pub use request::{FuseOperation, Request, operation_name};
use resume::Unanswered;
use ring_memory::{PAYLOAD, RingMemory, RingState};
pub use stall_guard::RootQuestion;
use stall_guard::StallGuard;
use uring::Rings;

use crate::region::Region;

/// Most bytes of one WRITE, and of one READ.
const MAX_WRITE: u32 = 1 << 20;
/// The same where requests come over io_uring. Attributes with long values need a little more.
const RING_MAX_WRITE: u32 = 64 << 10;
/// A WRITE with its header, rounded up to pages.
pub const REQUEST_SIZE: usize = MAX_WRITE as usize + 4096;
/// Most requests that the kernel leaves waiting on its own account: read-ahead, releases.
const MAX_BACKGROUND: u16 = 64;

/// A file system that answers requests.
pub trait Filesystem: Send + Sync + 'static {
    /// Answers one request.
    ///
    /// # Errors
    /// The errno for the caller.
    fn answer(&self, request: &Request<'_>, exchange: &mut Exchange<'_>) -> Result<Answer, Errno>;

    /// A thread of the session begins; it answers requests from now on.
    fn begin_thread(&self);

    /// Whether the answer may have to wait for a disk for long.
    fn may_wait(&self, operation: &FuseOperation<'_>) -> bool;

    /// The length of the longest request that must not fail when this process is killed while the kernel copies it, in bytes.
    fn longest_request(&self) -> usize;

    /// The caller of the request with the [number](Request::number) `unique` was interrupted. The request must still be answered,
    /// with `EINTR` if nothing was done.
    fn interrupt(&self, unique: u64);

    /// Whether the source may be unreachable for long, so that no code may depend on its answer.
    fn is_remote(&self) -> bool {
        false
    }

    /// Undoes what an answer granted which the kernel dropped, because no caller waited any more: the kernel will not release it.
    fn release_references(&self, _granted: KernelReferences) {}

    /// The answer to a question about the root from memory, without the source.
    fn answer_from_cache(&self, _question: RootQuestion) -> Option<Answer> {
        None
    }
}

/// The lookups and handles that an answer leaves with the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelReferences {
    /// A node that the kernel counts once more.
    pub node: Option<NodeId>,
    /// An open file or directory.
    pub handle: Option<HandleId>,
}

impl KernelReferences {
    fn of(answer: &Answer) -> Option<KernelReferences> {
        match answer {
            Answer::Entry(entry) => Some(Self { node: Some(entry.nodeid), handle: None }),
            Answer::Created(entry, open) => Some(Self { node: Some(entry.nodeid), handle: Some(open.fh) }),
            Answer::Open(open) => Some(Self { node: None, handle: Some(open.fh) }),
            _ => None,
        }
    }
}

/// The features that a session negotiates.
#[derive(Clone, Copy, Debug, Default)]
pub struct WantedFeatures {
    /// Flags of [`init`]. The session leaves out those that the kernel does not offer.
    pub flags: u64,
    /// The number of stacked file systems that the kernel allows below, this one included; 0 without passthrough (Linux 6.9).
    pub max_stack_depth: u32,
}

/// A session after its handshake.
pub struct Session {
    device: Arc<OwnedFd>,
    region: Arc<Region>,
    accepted: u64,
    beginning: SessionStart,
    /// The volume, for log lines.
    label: VolumeLabel,
    /// Threads for requests that come over io_uring.
    rings: Option<Rings>,
}

/// The origin of a session.
enum SessionStart {
    /// A new connection, after the handshake: the server has read no request yet.
    Handshake,
    /// The connection of a dead server, which may have left requests unanswered.
    Resumed(Unanswered),
}

impl Session {
    /// Does the FUSE handshake on `device`, whose file system is mounted. Records the result in `region`, which is new.
    ///
    /// # Errors
    /// When the kernel is too old, or the file system is unmounted already.
    pub fn open(device: OwnedFd, wanted: WantedFeatures, region: Arc<Region>) -> io::Result<Session> {
        Self::open_on(device, wanted, region, None)
    }

    /// As [`open`](Self::open). Requests come over io_uring, in memory that is new, if the kernel and this process can do that.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn open_on(
        device: OwnedFd,
        wanted: WantedFeatures,
        region: Arc<Region>,
        rings: Option<Arc<RingMemory>>,
    ) -> io::Result<Session> {
        let device = Arc::new(device);
        let mut input = InputBuffer::new(0)?;
        let length = read(&device, input.as_mut_bytes())?;
        let unexpected = || io::Error::new(io::ErrorKind::InvalidData, "the kernel does not begin with INIT");
        let request = Request::parse(&input.as_bytes()[..length]).ok_or_else(unexpected)?;
        let FuseOperation::Init(offer) = request.operation else { return Err(unexpected()) };
        let responder = Responder::of_device(&device, request.unique);
        if offer.major != MAJOR || offer.minor < 31 {
            responder.send(Err(Errno::PROTO))?;
            let sentence = format!("the kernel speaks FUSE {}.{}; podfs needs 7.31", offer.major, offer.minor);
            return Err(io::Error::new(io::ErrorKind::Unsupported, sentence));
        }
        let offered = u64::from(offer.flags) | (u64::from(offer.flags2) << 32);
        // Without the extension the kernel does not send the upper half of the offer.
        let offered = if offered & init::INIT_EXT == 0 { offered & u64::from(u32::MAX) } else { offered };
        // After the answer the kernel waits for the rings, so they are ready before.
        let rings = rings.filter(|_| offered & init::OVER_IO_URING != 0).and_then(|memory| {
            let volume = Arc::clone(&memory);
            let refused = |error: &io::Error| {
                let volume = volume.volume();
                tracing::warn!(volume, "there are no rings for requests ({error}); they come through /dev/fuse");
            };
            Rings::prepare(memory).inspect_err(refused).ok()
        });
        let over_io_uring = if rings.is_some() { init::OVER_IO_URING } else { 0 };
        let accepted = ((wanted.flags | init::INIT_EXT | init::MAX_PAGES | init::BIG_WRITES) & offered) | over_io_uring;
        // A write must fit into an entry of a ring. If the kernel reads and writes the source by itself, requests carry
        // little but names.
        let (max_write, max_pages) =
            if rings.is_some() { (RING_MAX_WRITE, PAYLOAD / 4096) } else { (MAX_WRITE, MAX_WRITE as usize / 4096) };
        // The region has this before the kernel acts on the answer: the kernel sends INIT only once, so a successor reads it here.
        if rings.is_some() {
            region.expect_rings();
        }
        region.set_accepted(accepted);
        responder.send_body(&InitOut {
            major: MAJOR,
            minor: MINOR,
            max_readahead: offer.max_readahead,
            flags: accepted as u32,
            flags2: (accepted >> 32) as u32,
            max_background: MAX_BACKGROUND,
            congestion_threshold: MAX_BACKGROUND / 4 * 3,
            max_write,
            time_gran: 1,
            max_pages: max_pages as u16,
            max_stack_depth: if accepted & init::PASSTHROUGH == 0 { 0 } else { wanted.max_stack_depth },
            ..Default::default()
        })?;
        Ok(Session {
            device,
            region,
            accepted,
            beginning: SessionStart::Handshake,
            label: VolumeLabel::default(),
            rings,
        })
    }

    /// Continues the connection of a dead server on `device`. From here on `region` is this session's: no thread of the
    /// predecessor may be alive.
    ///
    /// # Errors
    /// When the server died before its handshake was done.
    pub fn resume(device: OwnedFd, region: Arc<Region>) -> io::Result<Session> {
        Self::resume_on(device, region, None)
    }

    /// As [`resume`](Self::resume), with the memory that the dead server had for requests over io_uring.
    ///
    /// # Errors
    /// Those of [`resume`](Self::resume), and when this process can have no rings although the kernel relies on them.
    pub fn resume_on(device: OwnedFd, region: Arc<Region>, rings: Option<Arc<RingMemory>>) -> io::Result<Session> {
        let absent = || io::Error::other("the server died before it had agreed with the kernel; start the volume anew");
        let accepted = region.accepted().ok_or_else(absent)?;
        let rings = match rings {
            _ if accepted & init::OVER_IO_URING == 0 => None,
            Some(memory) if memory.state() == RingState::Refused => None,
            Some(memory) => Some(Rings::prepare(memory)?),
            None => return Err(io::Error::other("the memory of the volume's rings is gone; start the volume anew")),
        };
        region.in_flight().collect_replays();
        let beginning = SessionStart::Resumed(Unanswered::AskedAgain);
        Ok(Session { device: Arc::new(device), region, accepted, beginning, label: VolumeLabel::default(), rings })
    }

    /// Lets a resumed session end all unanswered requests with an error, as on a kernel that cannot send requests again.
    pub fn without_resend(mut self) -> Session {
        if let SessionStart::Resumed(unanswered) = &mut self.beginning {
            *unanswered = Unanswered::Failed;
        }
        self
    }

    /// Names the volume of the session, for log lines.
    pub fn labelled(mut self, label: VolumeLabel) -> Session {
        self.label = label;
        self
    }

    /// The flags of INIT that the kernel offered and this session accepted.
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Returns the sender of notifications to the kernel.
    pub fn notifier(&self) -> Notifier {
        Notifier { device: Arc::clone(&self.device) }
    }

    /// The device, for calls that are not answers.
    pub fn device(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.device)
    }

    /// Answers with `service` on `threads` threads until the file system is unmounted everywhere. What a dead server
    /// left unanswered comes first.
    ///
    /// # Errors
    /// When no thread can be started, or the descriptor is not a FUSE device.
    pub fn run(self, service: Arc<dyn Filesystem>, threads: usize) -> io::Result<()> {
        self.run_waking(service, threads, None)
    }

    /// As [`run`](Self::run). The session wakes requests that wait for an entry of a ring through `mount`, which shows the file
    /// system.
    ///
    /// # Errors
    /// Those of [`run`](Self::run), and when a ring fails that the kernel relies on.
    pub fn run_waking(
        mut self,
        service: Arc<dyn Filesystem>,
        threads: usize,
        mount: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        self.settle()?;
        let over_rings = match &self.rings {
            Some(rings) => rings.start(&self.device, &self.region, &service, mount)?,
            None => false,
        };
        if self.rings.is_some() && !over_rings {
            // A successor does not look for rings, either.
            self.region.set_accepted(self.accepted & !init::OVER_IO_URING);
        }
        let stall_guard = || StallGuard::start(&self.device, &self.region, &service);
        let stall_guard = service.is_remote().then(stall_guard).transpose()?;
        Readers::new(self.label, self.device, self.region, service, stall_guard, threads, over_rings).start()
    }
}

impl Session {
    /// Makes the kernel send the requests again that a dead server left unanswered, or ends them. No thread may read a request
    /// before: the kernel would send that request twice.
    fn settle(&mut self) -> io::Result<()> {
        match std::mem::replace(&mut self.beginning, SessionStart::Handshake) {
            SessionStart::Resumed(unanswered) => unanswered.settle(&self.device, &self.region),
            SessionStart::Handshake => Ok(()),
        }
    }
}

/// Reads the next request into `input`. Returns its length.
fn read(device: &OwnedFd, input: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::io::read(device, &mut *input) {
            // The kernel withdrew a request before it was read.
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
            read => return Ok(read?),
        }
    }
}

#[cfg(test)]
mod tests;
