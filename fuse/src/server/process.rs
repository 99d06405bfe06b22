//! The server's main loop: it reads control messages, starts sessions, and adds generations to trees.
//!
//! A server outlives its supervisor: after the control socket was closed, it continues to serve, and waits for another supervisor
//! at its listening socket.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::sys::socket::{Backlog, SockFlag, accept4, getsockopt, listen, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use rustix::process::{Resource, getrlimit};

use super::fd_keeper::handover::Handover;
use super::fd_keeper::{self, FAR_END, FIRST_FREE, FdKeeperHandle, LISTENER};
use super::volumes::{
    LiveParts, NfsExport, Passthrough, ServedProjection, ServedVolumes, VolumeDescriptors, end_without_resources,
};
use crate::label::VolumeLabel;
use crate::live::tree::LiveUpdate;
use crate::log::standard_error::standard_error;
use crate::memory_lock;
use crate::mount::enclosed::SourceWithMounts;
use crate::passthrough;
use crate::projection::Image;
use crate::protocol::{Greeting, ServerReply, ServerRequest, check, receive, send};
use crate::region::Region;
use crate::shortage::is_shortage;

/// The socket to the supervisor: standard input.
const CONTROL: RawFd = 0;
/// Longest time from the first byte of a new supervisor's greeting to its last byte, in seconds.
const TIMEOUT: i64 = 2;
/// The pause before another attempt to accept a connection, when there are no descriptors or no memory.
const SHORTAGE_PAUSE: Duration = Duration::from_secs(1);
/// The time without a request of the supervisor after which the start of the server and its volumes is over.
const START_DURATION: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Most connections without a greeting. For another connection, the server closes the oldest one.
const MAX_CONNECTIONS: usize = 8;

/// Serves until the supervisor sends [`ServerRequest::End`], or has ended and no other supervisor can connect.
///
/// The control socket is standard input. `program` is the version of this program.
///
/// # Errors
/// When standard input is not a socket, or there are no descriptors left.
pub fn serve(program: &str, pod: &str) -> io::Result<()> {
    // The lines of audited volumes go there.
    let output = standard_error();
    let keeper = fd_keeper::reserve_numbers().and_then(|()| FdKeeperHandle::start_first()).map_err(with_file_limit);
    let keeper = keeper.inspect_err(|error| refuse(&error.to_string()))?;
    let greeting = Greeting::new(program, pod);
    let mut process = RunningServer {
        greeting,
        keeper,
        has_channel: true,
        volumes: ServedVolumes::new(output),
        listens: false,
        supervisor_knows_live: false,
    };
    loop {
        process.follow();
        process.serve_alone();
        if !process.listens || process.volumes.is_empty() {
            process.volumes.finish_nfs();
            return Ok(());
        }
        tracing::warn!("the supervisor is gone; this server serves the volumes until another supervisor adopts it");
        process.wait_for_supervisor()?;
    }
}

/// Adds the limit to the error that there are no descriptors left.
fn with_file_limit(error: io::Error) -> io::Error {
    match (error.raw_os_error(), getrlimit(Resource::Nofile).current) {
        (Some(libc::EMFILE), Some(limit)) => {
            io::Error::other(format!("{error}: it may have no more than {limit} (RLIMIT_NOFILE); raise the limit"))
        }
        _ => error,
    }
}

/// Answers the greeting of the supervisor with a reason why this program is not its server.
pub fn refuse(reason: &str) {
    if let Ok(Some((ServerRequest::Hello(_), _))) = receive(&control()) {
        let _supervisor_is_gone = send(&control(), &ServerReply::Failed(reason.to_owned()), &[]);
    }
}

struct RunningServer {
    greeting: Greeting,
    keeper: FdKeeperHandle,
    /// Whether no supervisor has got the far end of the keeper's channel yet.
    has_channel: bool,
    volumes: ServedVolumes,
    /// Whether another supervisor can connect.
    listens: bool,
    /// Whether the supervisor knows live parts of projections.
    supervisor_knows_live: bool,
}

impl RunningServer {
    /// Serves volumes that the supervisor has handed over, if it has ended before it could let this server start: the server before is
    /// dead.
    fn serve_alone(&mut self) {
        if self.listens {
            // No supervisor would start another server.
            drop(self.volumes.start(|volume, error| {
                let volume = volume.as_str();
                tracing::error!(volume, "this server cannot serve volume {volume:?} of the server before: {error}");
            }));
        }
    }

    /// Answers the supervisor's requests until the connection ends, or a message is invalid.
    fn follow(&mut self) {
        let mut has_started = false;
        loop {
            // Most of the program's code starts servers and volumes. Volumes whose files the kernel has cached need no code at all.
            if !has_started && !has_request(START_DURATION) {
                memory_lock::unmap_program();
                has_started = true;
            }
            let message = match receive(&control()) {
                Ok(Some(message)) => message,
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!("the control socket fails: {error}");
                    return hang_up();
                }
            };
            if let (ServerRequest::End, _) = message {
                self.listens = false;
                return;
            }
            let (request, descriptors) = message;
            // Not for `Start`: containers wait for the volumes of a killed server, and to return memory takes time.
            let begins_volume = request.begins_volume();
            has_started &= !begins_volume;
            let answered = self.answer(request, descriptors);
            let (reply, descriptors) =
                answered.unwrap_or_else(|error| (ServerReply::Failed(error.to_string()), Vec::new()));
            let hands_over = matches!(reply, ServerReply::Hello { .. } | ServerReply::Kept { .. });
            let far_end = hands_over.then(|| fd_keeper::reserved(FAR_END));
            let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).chain(far_end).collect();
            let sent = send(&control(), &reply, &borrowed);
            if hands_over {
                fd_keeper::close_far_end();
            }
            if sent.is_err() {
                return hang_up();
            }
            if begins_volume {
                drop((reply, borrowed));
                memory_lock::return_free_memory();
            }
        }
    }

    fn answer(&mut self, request: ServerRequest, descriptors: Vec<OwnedFd>) -> io::Result<(ServerReply, Vec<OwnedFd>)> {
        let mut descriptors = Descriptors(descriptors.into_iter());
        let volumes = &mut self.volumes;
        let reply = match request {
            ServerRequest::Hello(theirs) => self.greet(&theirs)?,
            ServerRequest::Listen => {
                let socket = descriptors.next()?;
                listen(&socket, Backlog::new(4)?)?;
                fd_keeper::place_at(socket, LISTENER)?;
                self.listens = true;
                ServerReply::Done
            }
            ServerRequest::Serve { volume, about, root, reporting } => {
                volumes.begin(volume, about, descriptors.held()?, ServedProjection::new(root, reporting))?
            }
            ServerRequest::Pass { volume, about, options } => {
                let held = descriptors.held()?;
                let source = SourceWithMounts { source: descriptors.next()?, table: descriptors.next()?.into() };
                volumes.begin(volume, about, held, Passthrough::new(source, options, descriptors.0)?)?
            }
            ServerRequest::Export { volume, about, options } => {
                let held = descriptors.held()?;
                volumes.begin(volume, about, held, NfsExport::new(options, descriptors.0.collect()))?
            }
            ServerRequest::Mirror { volume, about, of, trace } => {
                volumes.begin(volume, about, descriptors.held()?, LiveParts::new(of, trace))?
            }
            ServerRequest::Inherit { keeper } => {
                let handover = if keeper { Some(descriptors.next()?) } else { None };
                inherit(handover, descriptors.0)?;
                ServerReply::Done
            }
            ServerRequest::Resume(description) => {
                let held = descriptors.held()?;
                let label = VolumeLabel::in_record(&description.about);
                let loaded = volumes.load(description, held, descriptors.0.collect());
                loaded.inspect_err(|error| end_without_resources(&label, error))?;
                ServerReply::Done
            }
            ServerRequest::Start => match volumes.start(end_without_resources) {
                failed if failed.is_empty() => ServerReply::Done,
                failed => ServerReply::Started { failed },
            },
            ServerRequest::Volumes => ServerReply::Volumes(volumes.numbers(self.supervisor_knows_live)),
            ServerRequest::Describe { volume } => {
                let (description, descriptors) = volumes.describe(volume)?;
                return Ok((ServerReply::Described(description), descriptors));
            }
            ServerRequest::Keep => {
                self.keeper = FdKeeperHandle::start_another()?;
                ServerReply::Kept { keeper: self.keeper.pid() }
            }
            ServerRequest::Announce { volume, steps, staged, time } => {
                let staged = staged.map(|name| descriptors.next().map(|image| (name, image))).transpose()?;
                let session = volumes.announce(volume, steps, staged, time)?;
                let control = rustix::thread::gettid().as_raw_nonzero().get();
                ServerReply::Announced { session, control }
            }
            ServerRequest::Close { volume, generation } => ServerReply::Known(volumes.close(volume, &generation)?),
            ServerRequest::Update { volume, slots, steps, number, time } => {
                let image = Arc::new(Image::adopt(descriptors.next()?)?);
                ServerReply::Unlinked(volumes.update(volume, LiveUpdate { slots, steps, number, image, time })?)
            }
            ServerRequest::Take { volume, applied } => {
                volumes.take(volume, applied)?;
                ServerReply::Done
            }
            ServerRequest::DropImages { volume, but } => {
                volumes.drop_images(volume, &but)?;
                ServerReply::Done
            }
            ServerRequest::Trace { volume } => {
                volumes.trace(volume, descriptors.next().ok())?;
                ServerReply::Done
            }
            ServerRequest::Move { volume, place } => {
                volumes.move_nfs(volume, place)?;
                ServerReply::Done
            }
            ServerRequest::Remove { volume } => {
                volumes.remove(volume);
                ServerReply::Done
            }
            ServerRequest::End => ServerReply::Done,
        };
        Ok((reply, Vec::new()))
    }

    fn greet(&mut self, theirs: &Greeting) -> io::Result<ServerReply> {
        check(&self.greeting, theirs).map_err(io::Error::other)?;
        self.supervisor_knows_live = theirs.live;
        if !std::mem::take(&mut self.has_channel) {
            fd_keeper::open_channel()?;
        }
        // After its greeting, a supervisor has no time limit.
        setsockopt(&control(), sockopt::ReceiveTimeout, &TimeVal::zero())?;
        Ok(ServerReply::Hello {
            greeting: self.greeting.clone(),
            keeper: self.keeper.pid(),
            keeper_starts_successor: self.keeper.starts_successor(),
        })
    }

    /// Waits until a process connects and sends a byte, and makes its connection the new standard input. A process that sends
    /// nothing does not delay others.
    fn wait_for_supervisor(&mut self) -> io::Result<()> {
        let mut connections: VecDeque<OwnedFd> = VecDeque::new();
        loop {
            let sockets = std::iter::once(fd_keeper::reserved(LISTENER)).chain(connections.iter().map(AsFd::as_fd));
            let mut state: Vec<_> = sockets.map(|one| PollFd::from_borrowed_fd(one, PollFlags::IN)).collect();
            match poll(&mut state, None) {
                Err(rustix::io::Errno::INTR) => continue,
                polled => polled?,
            };
            let ready: Vec<_> = state.iter().map(|one| !one.revents().is_empty()).collect();
            if let Some(readable) = ready[1..].iter().position(|ready| *ready) {
                let Some(connection) = connections.remove(readable) else { continue };
                if has_sent(&connection) {
                    setsockopt(&connection, sockopt::ReceiveTimeout, &TimeVal::seconds(TIMEOUT))?;
                    return fd_keeper::place_at(connection, CONTROL);
                }
            } else if ready[0] {
                connections.extend(accept()?);
                if connections.len() > MAX_CONNECTIONS {
                    connections.pop_front();
                }
            }
        }
    }
}

/// Accepts a connection; `None` if it is not of a process of root, or if the node lacks a resource for it at this moment: then the
/// connection waits.
fn accept() -> io::Result<Option<OwnedFd>> {
    let accepted = match accept4(LISTENER, SockFlag::SOCK_CLOEXEC) {
        Err(nix::errno::Errno::EINTR | nix::errno::Errno::ECONNABORTED) => return Ok(None),
        Err(errno) if is_shortage(&errno.into()) => {
            tracing::warn!("cannot accept the connection of a supervisor: {errno}; podfs tries again");
            thread::sleep(SHORTAGE_PAUSE);
            return Ok(None);
        }
        accepted => accepted?,
    };
    // SAFETY: accept4(2) has returned this descriptor, and no other code owns it.
    let connection = unsafe { OwnedFd::from_raw_fd(accepted) };
    Ok(getsockopt(&connection, sockopt::PeerCredentials).is_ok_and(|peer| peer.uid() == 0).then_some(connection))
}

/// Closes the connection to the supervisor, which may wait for an answer. The supervisor then starts another server.
fn hang_up() {
    // An error means that the supervisor has ended.
    let _ = shutdown(control(), Shutdown::Both);
}

/// Whether the supervisor sends a request, or closes the connection, within `time`.
fn has_request(time: Timespec) -> bool {
    let control = control();
    let mut state = [PollFd::new(&control, PollFlags::IN)];
    !matches!(retry_on_intr(|| poll(&mut state, Some(&time))), Ok(0))
}

/// Whether the other process has sent a byte. A readable connection without a byte is closed.
fn has_sent(connection: &OwnedFd) -> bool {
    let mut byte = [0; 1];
    recv(connection, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT).is_ok_and(|(_, length)| length > 0)
}

/// Inherits the descriptors to which the regions refer. Before, this process has only the reserved numbers and the regions'
/// descriptors in use. It erases the numbers of lost descriptors from the regions at once, before it opens a file under such a
/// number.
fn inherit(handover: Option<OwnedFd>, regions: impl Iterator<Item = OwnedFd>) -> io::Result<()> {
    let handover = handover.map(Handover::new).transpose()?;
    let files: Vec<_> = regions.collect();
    let mut numbers: Vec<_> = files.iter().flat_map(|file| numbers_in(file.as_fd())).collect();
    numbers.retain(|number| *number >= FIRST_FREE);
    numbers.sort_unstable();
    numbers.dedup();
    let regions = adopt_above(files, numbers.last().copied())?;
    let gone = match handover {
        Some(handover) => {
            numbers.last().map_or(Ok(()), |highest| check_limit(*highest))?;
            handover.inherit(&numbers)?
        }
        None => numbers,
    };
    regions.iter().for_each(|region| passthrough::forget_descriptors(region, &gone));
    Ok(())
}

/// The numbers of descriptors in a region. There are none in an invalid region; the server refuses it in
/// [`ServerRequest::Resume`].
fn numbers_in(file: BorrowedFd<'_>) -> Vec<RawFd> {
    let Ok(file) = file.try_clone_to_owned() else { return Vec::new() };
    Region::adopt(file).ok().and_then(|region| passthrough::descriptors(&region).ok()).unwrap_or_default()
}

/// The regions of these files, with their descriptors moved above `highest`, the last inherited number. At the lowest free numbers,
/// where they arrive, they could occupy numbers of inherited descriptors.
fn adopt_above(files: Vec<OwnedFd>, highest: Option<RawFd>) -> io::Result<Vec<Region>> {
    let mut regions = Vec::new();
    for file in files {
        let file = match highest {
            Some(highest) => {
                check_limit(highest + 1)?;
                rustix::io::fcntl_dupfd_cloexec(&file, highest + 1)?
            }
            None => file,
        };
        regions.extend(Region::adopt(file).ok());
    }
    Ok(regions)
}

/// Fails if the limit `RLIMIT_NOFILE` forbids a descriptor with this number. The predecessor may have had a higher limit.
fn check_limit(number: RawFd) -> io::Result<()> {
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit <= u64::from(number.cast_unsigned()) => Err(io::Error::other(format!(
            "the last server had a file open as descriptor {number}, and this one may have no more than {limit} \
             (RLIMIT_NOFILE); raise the limit of the podfs that starts it, with prlimit(1)"
        ))),
        _ => Ok(()),
    }
}

fn control() -> BorrowedFd<'static> {
    fd_keeper::reserved(CONTROL)
}

/// The descriptors of a message, in order.
struct Descriptors(std::vec::IntoIter<OwnedFd>);

impl Descriptors {
    fn next(&mut self) -> io::Result<OwnedFd> {
        let missing = || io::Error::new(io::ErrorKind::InvalidInput, "the message came without its descriptor");
        self.0.next().ok_or_else(missing)
    }

    fn held(&mut self) -> io::Result<VolumeDescriptors> {
        Ok(VolumeDescriptors { device: self.next()?, mount: self.next()?, region: self.next()? })
    }
}
