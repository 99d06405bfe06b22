//! The supervisor's end of the control socket.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, SystemTime};

use rustix::thread::Pid;

use super::affinity::{Affinity, SharedCpuGuard};
use super::connection::{FdKeeperLink, ServerConnection, unexpected};
use super::held::{HeldPassthrough, HeldVolume};
use crate::label::name_in;
use crate::live::tree::LiveUpdate;
use crate::nfs::sockets::SocketSets;
use crate::passthrough::SpaceUsage;
use crate::projection::steps::ProjectionStep;
use crate::projection::{GenerationName, Image};
use crate::protocol::{Greeting, ServerReply, ServerRequest, VolumeNumber};
use crate::region::{Distribution, Moment, OpenCount, Region, VolumeKind};
use crate::session::abi::init;
use crate::session::{NodeId, operation_name};

/// The present server of a pod, for its supervisor. Calls block until the server has answered, and while there is no server. Any
/// thread may call; the connection handles one call at a time.
pub struct ServerClient {
    pub(super) greeting: Greeting,
    pub(super) link: Mutex<ServerLink>,
    changed: Condvar,
    pub(super) volumes: Mutex<BTreeMap<VolumeNumber, Arc<HeldVolume>>>,
    /// Locked while a volume is made, so that no takeover happens between the server's answer and the entry in `volumes`.
    pub(super) joining: Mutex<()>,
    pub(super) next: AtomicU32,
    /// The bound socket at which the next supervisor finds the server.
    pub(super) listener: Mutex<Option<OwnedFd>>,
    affinity: Affinity,
    /// The number of servers that have died.
    deaths: AtomicU64,
    /// The sockets of the volumes' connections to NFS servers.
    nfs_sockets: SocketSets,
}

/// A handle to observe a volume. It is cheap to clone, and keeps no mount alive.
#[derive(Clone)]
pub struct VolumeObserver {
    server: Arc<ServerClient>,
    volume: VolumeNumber,
    region: Arc<Region>,
    audited: bool,
    held: Weak<HeldVolume>,
}

impl VolumeObserver {
    /// A handle of a volume of `server`.
    pub(crate) fn new(server: &Arc<ServerClient>, volume: VolumeNumber, held: &Arc<HeldVolume>) -> Self {
        let (region, audited) = (Arc::clone(&held.region), held.is_audited());
        Self { server: Arc::clone(server), volume, region, audited, held: Arc::downgrade(held) }
    }

    /// Number of FUSE requests so far. Never blocks.
    pub fn requests(&self) -> u64 {
        self.region.requests()
    }

    /// Whether requests arrive over io_uring, not through `/dev/fuse`. Never blocks.
    pub fn is_over_io_uring(&self) -> bool {
        self.region.accepted().is_some_and(|accepted| accepted & init::OVER_IO_URING != 0)
    }

    /// The opens so far and their lost lines, if the volume has an access log. Never blocks.
    pub fn opens(&self) -> Option<OpenCount> {
        self.audited.then(|| self.region.opens().counted())
    }

    /// The number of FUSE requests by operation, under its name in the kernel's header. Operations without requests are left out.
    pub fn requests_by_operation(&self) -> BTreeMap<&'static str, u64> {
        let mut operations = BTreeMap::new();
        for (opcode, count) in self.region.counts().requests().filter(|(_, count)| *count > 0) {
            *operations.entry(operation_name(opcode)).or_default() += count;
        }
        operations
    }

    /// The calls that failed because of the volume's source, by errno. A projection has no source that can fail. Never blocks.
    pub fn source_errors(&self) -> BTreeMap<&'static str, u64> {
        source_errors(&self.region)
    }

    /// The switches to new generations so far, by duration in seconds.
    pub fn commits(&self) -> Distribution {
        self.region.counts().commits.distribution()
    }

    /// The changes so far, by the seconds from when podfs received them until containers saw them.
    pub fn propagations(&self) -> Distribution {
        self.region.counts().propagations.distribution()
    }

    /// The size of a passthrough volume and its free space, as statfs(2) reports them to containers; `None` for other kinds. Blocks
    /// while the source does, and keeps only the source open meanwhile.
    ///
    /// # Errors
    /// When the volume has ended, or statfs(2) fails on the source.
    pub fn space_usage(&self) -> io::Result<Option<SpaceUsage>> {
        let held = self.held.upgrade().ok_or(io::ErrorKind::NotFound)?;
        let Some(passthrough) = held.of_kind::<HeldPassthrough>() else { return Ok(None) };
        let (source, limit) = (passthrough.source().try_clone_to_owned()?, passthrough.options().limit);
        drop(held);
        SpaceUsage::of(&source, limit, &self.region).map(Some)
    }

    /// Makes the server write a line for each FUSE request to `pipe`, until the pipe's reader or the volume ends. Blocks like the
    /// calls of [`ServerClient`].
    ///
    /// # Errors
    /// When there is no server any more, or the server refuses the pipe.
    pub fn trace(&self, pipe: BorrowedFd<'_>) -> io::Result<()> {
        self.server.expect_done(&ServerRequest::Trace { volume: self.volume }, &[pipe])
    }
}

fn source_errors(region: &Region) -> BTreeMap<&'static str, u64> {
    match region.kind() {
        VolumeKind::Passthrough | VolumeKind::Nfs => region.counts().errors(),
        VolumeKind::Projection | VolumeKind::Live => BTreeMap::new(),
    }
}

/// The connection to the server, if there is one.
pub(super) enum ServerLink {
    /// The server runs.
    Up(Arc<ServerConnection>),
    /// The server is dead; a successor will come.
    Down,
    /// The pod no longer needs a server.
    Over,
}

/// The activity of a volume at one moment, from shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeActivity {
    /// The number of the volume. Several volumes may have one name: a mount and the earlier ones that containers still use.
    pub number: VolumeNumber,
    /// Its name.
    pub volume: String,
    /// The number of requests so far.
    pub requests: u64,
    /// The ids of the threads that answer a request, each with the request's number.
    pub busy: Vec<(i32, u64)>,
    /// The number of requests that wait without a thread: for a lock, or for an NFS server.
    pub waits: usize,
    /// Since when its NFS server has owed an answer, if podfs's own client serves the volume.
    pub silent_since: Option<Moment>,
    /// The number of its connection below `/sys/fs/fuse/connections`.
    pub connection: Option<u32>,
}

/// The known threads of the server that take part in a commit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AnsweringThreads {
    /// The number of servers that had died before.
    deaths: u64,
    session: Option<Pid>,
    control: Option<Pid>,
}

impl ServerClient {
    /// Connects to the server at the other end of `control`, which has no volumes yet.
    ///
    /// # Errors
    /// When it does not answer, or its protocol is incompatible.
    pub fn new(control: UnixStream, greeting: Greeting) -> io::Result<Self> {
        let connection = ServerConnection::open(control, &greeting)?;
        connection.trust()?;
        Ok(Self::with_connection(connection, greeting, SocketSets::default()))
    }

    pub(super) fn with_connection(connection: ServerConnection, greeting: Greeting, nfs_sockets: SocketSets) -> Self {
        Self {
            greeting,
            link: Mutex::new(ServerLink::Up(Arc::new(connection))),
            changed: Condvar::new(),
            volumes: Mutex::default(),
            joining: Mutex::default(),
            next: AtomicU32::new(0),
            listener: Mutex::default(),
            affinity: Affinity::current(),
            deaths: AtomicU64::new(0),
            nfs_sockets,
        }
    }

    /// The sockets for NFS servers that its volumes share.
    pub fn nfs_sockets(&self) -> &SocketSets {
        &self.nfs_sockets
    }

    /// Makes the server and its successors listen at the bound `socket`, where the next supervisor finds them.
    ///
    /// # Errors
    /// When the server cannot listen there.
    pub fn listen(&self, socket: OwnedFd) -> io::Result<()> {
        self.expect_done(&ServerRequest::Listen, &[socket.as_fd()])?;
        *self.listener.lock().expect("a thread that panics ends the process") = Some(socket);
        Ok(())
    }

    /// Announces the next steps of live parts, and sends the image after them. Returns the unlinked nodes that the
    /// kernel knows.
    ///
    /// # Errors
    /// When the pod no longer needs a server.
    pub(crate) fn update(&self, volume: VolumeNumber, update: &LiveUpdate) -> io::Result<Vec<NodeId>> {
        let LiveUpdate { slots, steps, number, image, time } = update;
        let (slots, steps) = (slots.clone(), steps.clone());
        let request = ServerRequest::Update { volume, slots, steps, number: *number, time: *time };
        match self.ask(&request, &[image.as_fd()])? {
            ServerReply::Unlinked(known) => {
                image.disown();
                Ok(known)
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Makes the server zero the images of live parts, except those in `but`.
    ///
    /// # Errors
    /// When the pod no longer needs a server.
    pub(crate) fn drop_images(&self, volume: VolumeNumber, but: Vec<u64>) -> io::Result<()> {
        self.expect_done(&ServerRequest::DropImages { volume, but }, &[])
    }

    /// Makes the server apply the step after `applied` steps of the live parts, for which there is no system call. Idempotent.
    ///
    /// # Errors
    /// When the pod no longer needs a server, or another step is the next one.
    pub(crate) fn take(&self, volume: VolumeNumber, applied: u64) -> io::Result<()> {
        self.expect_done(&ServerRequest::Take { volume, applied }, &[])
    }

    /// Whether the server knows of live parts of projections.
    ///
    /// # Errors
    /// When the pod no longer needs a server.
    pub(super) fn supports_live_parts(&self) -> io::Result<bool> {
        Ok(self.connection()?.supports_live_parts())
    }

    /// Moves the server's threads to the calling thread's CPU, until the guard is dropped.
    pub(crate) fn together(&self, answering: AnsweringThreads) -> SharedCpuGuard<'_> {
        // The numbers of a dead server's threads may be those of other processes.
        let is_present = answering.deaths == self.deaths.load(Ordering::Relaxed);
        let threads = [answering.session, answering.control].into_iter().flatten();
        self.affinity.together(threads.filter(|_| is_present))
    }

    /// Announces the next steps of a projection, and sends their new generation.
    ///
    /// # Errors
    /// When the pod no longer needs a server.
    pub(crate) fn announce(
        &self,
        volume: VolumeNumber,
        steps: &[ProjectionStep],
        staged: Option<(&GenerationName, &Image)>,
        time: SystemTime,
    ) -> io::Result<AnsweringThreads> {
        let (name, image) = staged.unzip();
        let deaths = self.deaths.load(Ordering::Relaxed);
        let request = ServerRequest::Announce { volume, steps: steps.to_vec(), staged: name.cloned(), time };
        match self.ask(&request, image.map(Image::as_fd).as_slice())? {
            ServerReply::Announced { session, control } => {
                if let Some(image) = image {
                    image.disown();
                }
                let (session, control) = (session.and_then(Pid::from_raw), Pid::from_raw(control));
                Ok(AnsweringThreads { deaths, session, control })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Closes a generation. Returns the indexes of the nodes that the kernel knows.
    ///
    /// # Errors
    /// When there is no server any more, or there is no such generation.
    pub(crate) fn close(&self, volume: VolumeNumber, generation: &GenerationName) -> io::Result<Vec<u32>> {
        match self.ask(&ServerRequest::Close { volume, generation: generation.clone() }, &[])? {
            ServerReply::Known(known) => Ok(known),
            other => Err(unexpected(&other)),
        }
    }

    /// Forgets a volume that is unmounted.
    ///
    /// # Errors
    /// When the pod no longer needs a server.
    pub(crate) fn remove(&self, volume: VolumeNumber) -> io::Result<()> {
        let held = self.volumes().remove(&volume);
        let connection = match &*self.link() {
            ServerLink::Up(connection) => Some(Arc::clone(connection)),
            // The volume is not in `volumes` any more. podfs tells a successor that has got it already to remove it when it serves.
            ServerLink::Down | ServerLink::Over => None,
        };
        let request = ServerRequest::Remove { volume };
        let removed = connection.map_or(Ok(()), |connection| connection.ask(&request, &[]).map(drop));
        // This drops the last copy of the mount here, not in the server, which answers the mount's requests.
        drop(held);
        removed
    }

    /// Ends the server, because the pod no longer needs one. Calls that wait for a server fail.
    pub fn end(&self) {
        let link = std::mem::replace(&mut *self.link(), ServerLink::Over);
        self.changed.notify_all();
        if let ServerLink::Up(connection) = link {
            connection.end();
            drop(connection.take_keeper());
        }
    }

    /// Makes the server start a new keeper, if its keeper is still the process `gone`.
    ///
    /// # Errors
    /// When there is no server any more, or the server cannot start a process.
    pub fn start_keeper(&self, gone: i32) -> io::Result<()> {
        let connection = match &*self.link() {
            ServerLink::Up(connection) if connection.keeper() == gone => Arc::clone(connection),
            // A successor has its own keeper.
            _ => return Ok(()),
        };
        match connection.ask(&ServerRequest::Keep, &[])? {
            (ServerReply::Kept { keeper: pid }, mut descriptors) => {
                // The new keeper is a clone of a process with threads, so it cannot start one.
                let starts_successor = false;
                connection.set_keeper(FdKeeperLink { pid, channel: descriptors.pop(), starts_successor });
                Ok(())
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// The activity of each volume at this moment.
    pub fn activities(&self) -> Vec<VolumeActivity> {
        let activity = |(number, held): (&VolumeNumber, &Arc<HeldVolume>)| VolumeActivity {
            number: *number,
            volume: name_in(&held.about).unwrap_or_default().to_owned(),
            requests: held.region.requests(),
            busy: held.busy(),
            waits: held.region.waits().all().count(),
            silent_since: held.region.silent_since(),
            connection: held.mount.connection(),
        };
        self.volumes().iter().map(activity).collect()
    }

    /// The calls of each volume that failed because of its source, by errno, with the volume's number and name. Never blocks.
    pub fn source_errors(&self) -> Vec<(VolumeNumber, String, BTreeMap<&'static str, u64>)> {
        let errors = |(number, held): (&VolumeNumber, &Arc<HeldVolume>)| {
            (*number, name_in(&held.about).unwrap_or_default().to_owned(), source_errors(&held.region))
        };
        self.volumes().iter().map(errors).collect()
    }

    /// The type of the file system that the volume's source is on, and the number of its block device, if it has one. Sends no request
    /// to the file system.
    pub fn source_disk(&self, volume: VolumeNumber) -> Option<(String, u64)> {
        let held = self.volumes().get(&volume).cloned();
        held?.of_kind::<HeldPassthrough>()?.disk()
    }

    /// Whether the connection to the present server has failed. The server may still serve its volumes, and gets no more requests.
    pub fn is_disconnected(&self) -> bool {
        matches!(&*self.link(), ServerLink::Up(connection) if connection.has_failed())
    }

    /// Whether the server answers a request within `limit`. While another request waits for its answer, returns `true`.
    pub fn is_responsive(&self, limit: Duration) -> bool {
        // The lock on the link is free while the server answers: a server that is found dead meanwhile has to be replaced at once.
        let connection = match &*self.link() {
            ServerLink::Up(connection) => Arc::clone(connection),
            ServerLink::Down | ServerLink::Over => return true,
        };
        connection.is_responsive(limit)
    }

    /// Number of FUSE requests so far, of all present volumes.
    pub fn requests(&self) -> u64 {
        self.volumes().values().map(|held| held.region.requests()).sum()
    }

    /// Notes that the server is dead, so that calls wait for its successor. Returns its connection.
    pub(super) fn lose(&self) -> Option<Arc<ServerConnection>> {
        let mut link = self.link();
        match std::mem::replace(&mut *link, ServerLink::Down) {
            ServerLink::Up(connection) => {
                self.deaths.fetch_add(1, Ordering::Relaxed);
                // The keeper has the other end, too, so only a shutdown ends the calls that wait for an answer.
                connection.shut_down();
                Some(connection)
            }
            ServerLink::Down => None,
            ServerLink::Over => {
                *link = ServerLink::Over;
                None
            }
        }
    }

    /// Makes the server of `connection` the present server.
    pub(super) fn join_link(&self, connection: Arc<ServerConnection>) {
        let mut link = self.link();
        if !matches!(*link, ServerLink::Over) {
            *link = ServerLink::Up(connection);
        }
        self.changed.notify_all();
    }

    /// The process id of the server's keeper, and the version of the server's program.
    pub fn facts(&self) -> Option<(i32, String)> {
        match &*self.link() {
            ServerLink::Up(connection) => Some((connection.keeper(), connection.program().to_owned())),
            ServerLink::Down | ServerLink::Over => None,
        }
    }

    pub(super) fn connection(&self) -> io::Result<Arc<ServerConnection>> {
        let mut link = self.link();
        loop {
            match &*link {
                ServerLink::Up(connection) => return Ok(Arc::clone(connection)),
                ServerLink::Down => link = self.changed.wait(link).expect("a thread that panics ends the process"),
                ServerLink::Over => return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the server is gone")),
            }
        }
    }

    /// Sends a request whose answer is [`ServerReply::Done`].
    pub(super) fn expect_done(&self, request: &ServerRequest, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        match self.ask(request, descriptors)? {
            ServerReply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Sends a request to the server; if it dies meanwhile, to its successor.
    fn ask(&self, request: &ServerRequest, descriptors: &[BorrowedFd<'_>]) -> io::Result<ServerReply> {
        loop {
            let connection = self.connection()?;
            match connection.ask(request, descriptors) {
                Err(error) if connection.is_broken(&error) => self.wait_for_end_of(&connection),
                answered => return answered.map(|(reply, _)| reply),
            }
        }
    }

    /// Waits until the server of the connection `broken` is not the present server any more.
    fn wait_for_end_of(&self, broken: &Arc<ServerConnection>) {
        let mut link = self.link();
        while matches!(&*link, ServerLink::Up(connection) if Arc::ptr_eq(connection, broken)) {
            link = self.changed.wait(link).expect("a thread that panics ends the process");
        }
    }

    pub(super) fn link(&self) -> MutexGuard<'_, ServerLink> {
        self.link.lock().expect("a thread that panics ends the process")
    }

    pub(super) fn volumes(&self) -> MutexGuard<'_, BTreeMap<VolumeNumber, Arc<HeldVolume>>> {
        self.volumes.lock().expect("a thread that panics ends the process")
    }
}
