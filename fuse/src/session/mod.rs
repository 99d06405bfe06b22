//! FUSE sessions: the protocol between the kernel and a file system, and the threads that speak it.
//!
//! A session is a device, a [`Service`] and a few threads that read the one and ask the other. The threads are all
//! alike: each reads a request, answers it and reads the next.
//!
//! 1. A request is read by one thread and answered once: by that thread, or by the holder of its [`Responder`].
//! 2. A request that may take long never takes the last reader: another thread is started before, and goes when it is
//!    one too many. So a slow disk does not keep the volume from answering, and neither does a wait for a lock, which
//!    no thread of the session waits for.
//! 3. The threads end when the file system is unmounted everywhere; the last one drops the service.
//!
//! | module | owns |
//! |---|---|
//! | [`abi`] | the kernel's structs and numbers |
//! | [`request`] | bytes into requests |
//! | [`answer`] | answers into bytes |

pub mod abi;
pub mod answer;
pub mod request;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::io::Errno;
use zerocopy::IntoBytes;

use abi::{InitOut, MAJOR, MINOR, init};
pub use answer::{Answer, Exchange, ListedEntry, Notifier, Responder};
pub use request::{Caller, Operation, Request};

/// Most bytes of one WRITE, and of one READ.
const MAX_WRITE: u32 = 1 << 20;
/// A WRITE with its header, rounded up to pages.
const REQUEST_SIZE: usize = MAX_WRITE as usize + 4096;
/// Most requests that the kernel leaves waiting on its own account: read-ahead, releases.
const MAX_BACKGROUND: u16 = 64;
/// Most threads of a session, those for slow requests included.
const MAX_THREADS: usize = 16;

/// What answers requests.
pub trait Service: Send + Sync + 'static {
    /// Answers one request.
    ///
    /// # Errors
    /// What the caller is told.
    fn answer(&self, request: &Request<'_>, exchange: &mut Exchange<'_>) -> Result<Answer, Errno>;

    /// A thread of the session begins; it answers requests from now on.
    fn begin_thread(&self);

    /// Whether the answer may have to wait for a disk for long.
    fn may_wait(&self, operation: &Operation<'_>) -> bool;

    /// Who made the request `unique` waits no longer. It is still to be answered, with `EINTR` if nothing was done.
    fn interrupt(&self, unique: u64);
}

/// What a session asks the kernel for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Of [`init`]; what the kernel does not offer is left out.
    pub flags: u64,
    /// How deep the file systems below may be stacked, this one included; 0 for no passthrough (Linux 6.9).
    pub max_stack_depth: u32,
}

/// A session after its handshake.
pub struct Session {
    device: Arc<OwnedFd>,
    accepted: u64,
}

impl Session {
    /// Shakes hands on `device`, whose file system is mounted.
    ///
    /// # Errors
    /// When the kernel is too old, or the file system is unmounted already.
    pub fn open(device: OwnedFd, wanted: Wanted) -> io::Result<Session> {
        let device = Arc::new(device);
        let mut input = input_buffer();
        let length = read(&device, input.as_mut_bytes())?;
        let unexpected = || io::Error::new(io::ErrorKind::InvalidData, "the kernel does not begin with INIT");
        let request = Request::parse(&input.as_bytes()[..length]).ok_or_else(unexpected)?;
        let Operation::Init(offer) = request.operation else { return Err(unexpected()) };
        let responder = Responder { device: Arc::clone(&device), unique: request.unique };
        if offer.major != MAJOR || offer.minor < 31 {
            responder.send(Err(Errno::PROTO))?;
            let sentence = format!("the kernel speaks FUSE {}.{}; podfs needs 7.31", offer.major, offer.minor);
            return Err(io::Error::new(io::ErrorKind::Unsupported, sentence));
        }
        let offered = u64::from(offer.flags) | (u64::from(offer.flags2) << 32);
        // Without the extension the upper half of the offer is not there.
        let offered = if offered & init::INIT_EXT == 0 { offered & u64::from(u32::MAX) } else { offered };
        let accepted = (wanted.flags | init::INIT_EXT | init::MAX_PAGES | init::BIG_WRITES) & offered;
        responder.tell(&InitOut {
            major: MAJOR,
            minor: MINOR,
            max_readahead: offer.max_readahead,
            flags: accepted as u32,
            flags2: (accepted >> 32) as u32,
            max_background: MAX_BACKGROUND,
            congestion_threshold: MAX_BACKGROUND / 4 * 3,
            max_write: MAX_WRITE,
            time_gran: 1,
            max_pages: (MAX_WRITE / 4096) as u16,
            max_stack_depth: if accepted & init::PASSTHROUGH == 0 { 0 } else { wanted.max_stack_depth },
            ..Default::default()
        })?;
        Ok(Session { device, accepted })
    }

    /// The flags that are in force.
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// The way to tell the kernel what it did not ask for.
    pub fn notifier(&self) -> Notifier {
        Notifier { device: Arc::clone(&self.device) }
    }

    /// The device, for calls that are not answers.
    pub fn device(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.device)
    }

    /// Answers with `service` on `threads` threads until the file system is unmounted everywhere.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn run(self, service: Arc<dyn Service>, threads: usize) -> io::Result<()> {
        let readers = Arc::new(Readers {
            device: self.device,
            service,
            wanted: threads,
            idle: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
        });
        (0..threads).try_for_each(|_| Arc::clone(&readers).spawn())
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

/// The threads of a session.
struct Readers {
    device: Arc<OwnedFd>,
    service: Arc<dyn Service>,
    /// How many there are when nothing is slow.
    wanted: usize,
    /// How many wait for a request.
    idle: AtomicUsize,
    /// How many there are.
    running: AtomicUsize,
}

impl Readers {
    fn spawn(self: Arc<Self>) -> io::Result<()> {
        self.running.fetch_add(1, Ordering::Relaxed);
        let readers = Arc::clone(&self);
        let started = thread::Builder::new().name("session".to_owned()).spawn(move || readers.serve());
        started.map(drop).inspect_err(|_| {
            self.running.fetch_sub(1, Ordering::Relaxed);
        })
    }

    fn serve(self: Arc<Self>) {
        self.service.begin_thread();
        let mut input = input_buffer();
        let mut buffer = Vec::new();
        while let Some(length) = self.next(input.as_mut_bytes()) {
            let Some(request) = Request::parse(&input.as_bytes()[..length]) else { continue };
            match request.operation {
                Operation::Interrupt { unique } => self.service.interrupt(unique),
                Operation::Destroy => {}
                _ => self.answer(&request, &mut buffer),
            }
        }
        self.running.fetch_sub(1, Ordering::Relaxed);
    }

    fn answer(self: &Arc<Self>, request: &Request<'_>, buffer: &mut Vec<u8>) {
        if self.idle.load(Ordering::Relaxed) == 0 && self.service.may_wait(&request.operation) {
            self.make_room();
        }
        let responder = Responder { device: Arc::clone(&self.device), unique: request.unique };
        buffer.clear();
        let outcome = self.service.answer(request, &mut Exchange { buffer, responder: &responder });
        // Nobody waits for the answer to a request that was aborted.
        let _ = responder.send_with(outcome, buffer);
    }

    /// Starts a thread in the place of this one. Without it the volume is slower, not wrong.
    fn make_room(self: &Arc<Self>) {
        if self.running.load(Ordering::Relaxed) < MAX_THREADS {
            let _ = Arc::clone(self).spawn();
        }
    }

    /// The length of the next request; none when this thread is to end.
    fn next(&self, input: &mut [u8]) -> Option<usize> {
        if self.idle.fetch_add(1, Ordering::Relaxed) >= self.wanted {
            self.idle.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let length = read(&self.device, input);
        self.idle.fetch_sub(1, Ordering::Relaxed);
        length.ok()
    }
}

fn read(device: &OwnedFd, input: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::io::read(device, &mut *input) {
            // A request was taken back before it could be read.
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
            read => return Ok(read?),
        }
    }
}

/// Room for a request, aligned as its structs are.
fn input_buffer() -> Box<[u64]> {
    vec![0; REQUEST_SIZE / 8].into_boxed_slice()
}
