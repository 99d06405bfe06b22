//! The supervisor's end of the control socket.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, SystemTime};

use rustix::thread::Pid;

use super::affinity::{Affinity, Together};
use super::connection::{KeeperLink, ServerConnection, unexpected};
use super::held::{HeldPassthrough, HeldVolume};
use super::identity::name_in;
use crate::live::tree::Update;
use crate::nfs::sockets::SocketSets;
use crate::passthrough::Room;
use crate::projection::steps::ProjectionStep;
use crate::projection::{GenerationName, Image};
use crate::protocol::{Greeting, ServerReply, ServerRequest, VolumeId};
use crate::region::{Distribution, Moment, OpenCount, Region};
use crate::session::abi::init;
use crate::session::{NodeId, operation_name};

/// The server of a pod, as its supervisor sees it: whichever process that is at the moment. Calls block until the server
/// has answered, and while there is none; any thread may make them, one is under way at a time.
pub struct ServerClient {
    pub(super) greeting: Greeting,
    pub(super) link: Mutex<ServerLink>,
    changed: Condvar,
    pub(super) volumes: Mutex<BTreeMap<VolumeId, Arc<HeldVolume>>>,
    /// Held while a volume is made, so that no successor comes between the server's answer and the entry in `volumes`.
    pub(super) joining: Mutex<()>,
    pub(super) next: AtomicU32,
    /// Where supervisors find the server when this one is gone.
    pub(super) listener: Mutex<Option<OwnedFd>>,
    affinity: Affinity,
    /// Of the volumes' connections to NFS servers.
    nfs_sockets: SocketSets,
}

/// A volume, for observers only. Cheap to clone, and keeps no mount alive.
#[derive(Clone)]
pub struct Watch {
    server: Arc<ServerClient>,
    volume: VolumeId,
    region: Arc<Region>,
    audited: bool,
    held: Weak<HeldVolume>,
}

impl Watch {
    /// Looks at a volume of `server`.
    pub(crate) fn new(server: &Arc<ServerClient>, volume: VolumeId, held: &Arc<HeldVolume>) -> Self {
        let (region, audited) = (Arc::clone(&held.region), held.is_audited());
        Self { server: Arc::clone(server), volume, region, audited, held: Arc::downgrade(held) }
    }

    /// Number of FUSE requests served so far. Blocks never.
    pub fn requests(&self) -> u64 {
        self.region.requests()
    }

    /// Whether requests come over io_uring, not through `/dev/fuse`. Blocks never.
    pub fn is_over_io_uring(&self) -> bool {
        self.region.accepted().is_some_and(|accepted| accepted & init::OVER_IO_URING != 0)
    }

    /// The opens so far and their lost lines, if the volume has an access log. Never blocks.
    pub fn opens(&self) -> Option<OpenCount> {
        self.audited.then(|| self.region.opens().counted())
    }

    /// The same by operation, each by its name in the kernel's header; those of which there were none are left out.
    pub fn requests_by_operation(&self) -> BTreeMap<&'static str, u64> {
        let mut operations = BTreeMap::new();
        for (opcode, count) in self.region.counts().requests().filter(|(_, count)| *count > 0) {
            *operations.entry(operation_name(opcode)).or_default() += count;
        }
        operations
    }

    /// Generations shown so far, by how many seconds it took to switch to them.
    pub fn commits(&self) -> Distribution {
        self.region.counts().commits.distribution()
    }

    /// Changes shown so far, by the seconds from when podfs saw them until containers could.
    pub fn propagations(&self) -> Distribution {
        self.region.counts().propagations.distribution()
    }

    /// How much room there is in a passthrough volume, as statfs(2) reports it to containers; none for a projection. Blocks for
    /// as long as the source does, and holds nothing but the source meanwhile.
    ///
    /// # Errors
    /// When the volume has ended, or statfs(2) fails on the source.
    pub fn room(&self) -> io::Result<Option<Room>> {
        let held = self.held.upgrade().ok_or(io::ErrorKind::NotFound)?;
        let Some(passthrough) = held.of_kind::<HeldPassthrough>() else { return Ok(None) };
        let (source, limit) = (passthrough.source().try_clone_to_owned()?, passthrough.options().limit);
        drop(held);
        Room::of(&source, limit, &self.region).map(Some)
    }

    /// Lets the server write a line per FUSE request to `pipe`, until the pipe's reader or the volume is gone. Blocks as the
    /// calls of [`ServerClient`] do.
    ///
    /// # Errors
    /// When there is no server any more, or the server does not take the pipe.
    pub fn trace(&self, pipe: BorrowedFd<'_>) -> io::Result<()> {
        self.server.done(&ServerRequest::Trace { volume: self.volume }, &[pipe])
    }
}

/// The connection to the server, if there is one.
pub(super) enum ServerLink {
    /// There is.
    Up(Arc<ServerConnection>),
    /// The server is dead; a successor will come.
    Down,
    /// The pod needs no server any more.
    Over,
}

/// The activity of a volume at one moment, from shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doing {
    /// Its name.
    pub volume: String,
    /// How many requests were read so far.
    pub requests: u64,
    /// The threads that answer one, each with its number.
    pub busy: Vec<(i32, u64)>,
    /// How many wait without a thread that is busy with them: for a lock, or for an NFS server.
    pub waits: usize,
    /// Since when its NFS server owes an answer, if podfs's own client serves the volume.
    pub silent_since: Option<Moment>,
    /// The number of its connection below `/sys/fs/fuse/connections`.
    pub connection: Option<u32>,
}

/// The server's threads that take part in a commit, as far as they are known.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Answering {
    session: Option<Pid>,
    control: Option<Pid>,
}

impl ServerClient {
    /// Talks to the server at the other end of `control`, which has no volumes yet.
    ///
    /// # Errors
    /// When it does not answer, or speaks another language.
    pub fn new(control: UnixStream, greeting: Greeting) -> io::Result<Self> {
        let connection = ServerConnection::open(control, &greeting)?;
        connection.trust()?;
        Ok(Self::over(connection, greeting, SocketSets::default()))
    }

    pub(super) fn over(connection: ServerConnection, greeting: Greeting, nfs_sockets: SocketSets) -> Self {
        Self {
            greeting,
            link: Mutex::new(ServerLink::Up(Arc::new(connection))),
            changed: Condvar::new(),
            volumes: Mutex::default(),
            joining: Mutex::default(),
            next: AtomicU32::new(0),
            listener: Mutex::default(),
            affinity: Affinity::current(),
            nfs_sockets,
        }
    }

    /// The sockets for NFS servers that its volumes share.
    pub fn nfs_sockets(&self) -> &SocketSets {
        &self.nfs_sockets
    }

    /// Lets the server, and whichever follows it, be found at `socket`, which is bound, when this process is gone.
    ///
    /// # Errors
    /// When the server cannot listen there.
    pub fn listen(&self, socket: OwnedFd) -> io::Result<()> {
        self.done(&ServerRequest::Listen, &[socket.as_fd()])?;
        *self.listener.lock().expect("a thread that panics ends the process") = Some(socket);
        Ok(())
    }

    /// Announces the next changes of live parts, and hands over the image they lead to. Gives the unlinked nodes that the
    /// kernel knows.
    ///
    /// # Errors
    /// When the tree has no server any more.
    pub(crate) fn update(&self, volume: VolumeId, update: &Update) -> io::Result<Vec<NodeId>> {
        let Update { slots, steps, number, image, time } = update;
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

    /// Lets the server zero the images of live parts that no node needs any more, but these.
    ///
    /// # Errors
    /// When the tree has no server any more.
    pub(crate) fn drop_images(&self, volume: VolumeId, but: Vec<u64>) -> io::Result<()> {
        self.done(&ServerRequest::DropImages { volume, but }, &[])
    }

    /// Lets the server make the change of live parts that comes after so many, for which there is no system call. It does no
    /// harm if it was made already.
    ///
    /// # Errors
    /// When the tree has no server any more, or another change is the next one.
    pub(crate) fn take(&self, volume: VolumeId, applied: u64) -> io::Result<()> {
        self.done(&ServerRequest::Take { volume, applied }, &[])
    }

    /// Whether the server knows of live parts of projections.
    ///
    /// # Errors
    /// When the pod needs no server any more.
    pub(super) fn knows_live(&self) -> io::Result<bool> {
        Ok(self.connection()?.knows_live())
    }

    /// Lets the calling thread share its CPU with the threads that answer it, until the guard is dropped.
    pub(crate) fn together(&self, answering: Answering) -> Together<'_> {
        self.affinity.together([answering.session, answering.control].into_iter().flatten())
    }

    /// Announces the next changes of a volume, and hands over the generation they attach.
    ///
    /// # Errors
    /// When the tree has no server any more.
    pub(crate) fn announce(
        &self,
        volume: VolumeId,
        steps: &[ProjectionStep],
        staged: Option<(&GenerationName, &Image)>,
        time: SystemTime,
    ) -> io::Result<Answering> {
        let (name, image) = staged.unzip();
        let request = ServerRequest::Announce { volume, steps: steps.to_vec(), staged: name.cloned(), time };
        match self.ask(&request, image.map(Image::as_fd).as_slice())? {
            ServerReply::Announced { session, control } => {
                if let Some(image) = image {
                    image.disown();
                }
                Ok(Answering { session: session.and_then(Pid::from_raw), control: Pid::from_raw(control) })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Closes a generation; gives the indexes of the nodes that the kernel knows.
    ///
    /// # Errors
    /// When there is no server any more, or there is no such generation.
    pub(crate) fn close(&self, volume: VolumeId, generation: &GenerationName) -> io::Result<Vec<u32>> {
        match self.ask(&ServerRequest::Close { volume, generation: generation.clone() }, &[])? {
            ServerReply::Known(known) => Ok(known),
            other => Err(unexpected(&other)),
        }
    }

    /// Forgets a volume that is unmounted.
    ///
    /// # Errors
    /// When the tree has no server any more.
    pub(crate) fn remove(&self, volume: VolumeId) -> io::Result<()> {
        let held = self.volumes().remove(&volume);
        let told = match &*self.link() {
            ServerLink::Up(connection) => Some(Arc::clone(connection)),
            // A successor does not get the volume any more.
            ServerLink::Down | ServerLink::Over => None,
        };
        let told = told.map_or(Ok(()), |connection| connection.ask(&ServerRequest::Remove { volume }, &[]).map(drop));
        // The mount goes here at last, not in the process that answers for it.
        drop(held);
        told
    }

    /// Tells the server that the pod needs it no more. Calls that wait for a server fail from now on.
    pub fn end(&self) {
        let link = std::mem::replace(&mut *self.link(), ServerLink::Over);
        self.changed.notify_all();
        if let ServerLink::Up(connection) = link {
            connection.end();
            drop(connection.take_keeper());
        }
    }

    /// Lets the server have another keeper, if it is still the one whose keeper was `gone`.
    ///
    /// # Errors
    /// When there is no server any more, or no process can be started.
    pub fn keep(&self, gone: i32) -> io::Result<()> {
        let connection = match &*self.link() {
            ServerLink::Up(connection) if connection.keeper() == gone => Arc::clone(connection),
            // A server that follows comes with its own.
            _ => return Ok(()),
        };
        match connection.ask(&ServerRequest::Keep, &[])? {
            (ServerReply::Kept { keeper: pid }, mut descriptors) => {
                // It is a clone of a process with threads.
                let starts_successor = false;
                connection.set_keeper(KeeperLink { pid, channel: descriptors.pop(), starts_successor });
                Ok(())
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// The activity of each volume at this moment.
    pub fn doings(&self) -> Vec<Doing> {
        let doing = |held: &Arc<HeldVolume>| Doing {
            volume: name_in(&held.about).unwrap_or_default().to_owned(),
            requests: held.region.requests(),
            busy: held.busy(),
            waits: held.region.waits().all().count(),
            silent_since: held.region.silent_since(),
            connection: held.mount.connection(),
        };
        self.volumes().values().map(doing).collect()
    }

    /// Whether the server answers a question within `limit`. While another question waits for its answer, none is sent.
    pub fn is_responsive(&self, limit: Duration) -> bool {
        let ServerLink::Up(connection) = &*self.link() else { return true };
        let connection = Arc::clone(connection);
        connection.is_responsive(limit)
    }

    /// Number of requests served so far, for all volumes that there are now.
    pub fn requests(&self) -> u64 {
        self.volumes().values().map(|held| held.region.requests()).sum()
    }

    /// The server is dead: calls wait for its successor. Gives what was its connection.
    pub(super) fn lose(&self) -> Option<Arc<ServerConnection>> {
        let mut link = self.link();
        match std::mem::replace(&mut *link, ServerLink::Down) {
            ServerLink::Up(connection) => {
                // Its keeper has the other end, too, so only this ends the calls that wait for an answer.
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

    /// Calls go to this server from now on.
    pub(super) fn join_link(&self, connection: ServerConnection) {
        let mut link = self.link();
        if !matches!(*link, ServerLink::Over) {
            *link = ServerLink::Up(Arc::new(connection));
        }
        self.changed.notify_all();
    }

    /// The process that keeps the server's descriptors, and the version of the server's program.
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

    pub(super) fn done(&self, request: &ServerRequest, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        match self.ask(request, descriptors)? {
            ServerReply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Asks the server, or its successor if it dies meanwhile.
    fn ask(&self, request: &ServerRequest, descriptors: &[BorrowedFd<'_>]) -> io::Result<ServerReply> {
        loop {
            let connection = self.connection()?;
            match connection.ask(request, descriptors) {
                Err(error) if connection.is_broken(&error) => self.wait_for_other(&connection),
                answered => return answered.map(|(reply, _)| reply),
            }
        }
    }

    /// Waits until the server is another one than it was.
    fn wait_for_other(&self, than: &Arc<ServerConnection>) {
        let mut link = self.link();
        while matches!(&*link, ServerLink::Up(connection) if Arc::ptr_eq(connection, than)) {
            link = self.changed.wait(link).expect("a thread that panics ends the process");
        }
    }

    pub(super) fn link(&self) -> MutexGuard<'_, ServerLink> {
        self.link.lock().expect("a thread that panics ends the process")
    }

    pub(super) fn volumes(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Arc<HeldVolume>>> {
        self.volumes.lock().expect("a thread that panics ends the process")
    }
}
