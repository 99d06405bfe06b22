//! The one thread that serves all exports of a process.
//!
//! It reads the FUSE devices and the sockets to servers, so that no call has to wake another thread. The thread never blocks:
//! each wait is a task. `busy_poll` decides whether the thread sleeps between two calls.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use podfs_nfs::ExportAddress;
use podfs_nfs::export::{CallOptions, Export};
use podfs_nfs::rpc::{Credential, Policy, SilenceObserver};
use podfs_nfs::server::Servers;
use podfs_nfs::v3::{Attributes, NfsFileHandle};
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::timeout;

use super::busy_poll::BusyPoll;
use super::client_state::ClientState;
use super::client_state::calls::Calls;
use super::client_state::inherit::InheritedState;
use super::client_state::node::{NewNfsNode, NfsNodes};
use super::client_state::open_files::NfsOpenFiles;
use super::filesystem::{NfsFilesystem, NfsFilesystemSetup, root_record, wanted_features};
use super::options::{ExportOptions, NfsAddress};
use super::volume::NfsVolume;
use super::writeback::log::Log;
use crate::region::{Moment, Region, VolumeKind};
use crate::session::{InputBuffer, REQUEST_SIZE, Session};
use crate::trace::Trace;

/// The longest time that podfs waits for the attributes of the root when a volume starts.
const ROOT_BUDGET: Duration = Duration::from_secs(15);

/// An export to serve.
pub struct ServedExport {
    /// The device, whose file system is mounted.
    pub device: OwnedFd,
    /// The volume's region.
    pub region: Arc<Region>,
    /// The file of its log.
    pub log: OwnedFd,
    /// [Bound](podfs_nfs::rpc::dial::bound) sockets: one for each connection to the server, and one for other services.
    pub sockets: Vec<OwnedFd>,
    /// The options of the mount.
    pub options: ExportOptions,
    /// The trace of its requests.
    pub trace: Arc<Trace>,
}

/// The supervisor and successors read in the region that the volume's NFS server is silent.
impl SilenceObserver for Region {
    fn silent_since(&self, since: Option<Instant>) {
        self.silence().set(since.map(Moment::of));
    }
}

/// The sender of tasks to the thread. The thread runs until the process ends.
pub struct NfsThread {
    tasks: UnboundedSender<ThreadTask>,
}

/// A task for the thread.
enum ThreadTask {
    Serve { export: Box<ServedExport>, resumes: bool, outcome: Sender<io::Result<()>> },
    Move { socket: u64, place: NfsAddress },
    Finish { finished: Sender<()> },
}

impl NfsThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// When there are no threads or descriptors left.
    pub fn start() -> io::Result<Self> {
        let (tasks, mut incoming) = unbounded_channel::<ThreadTask>();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let run = move || {
            // As in every session, the buffer has its memory before a request is read into it.
            let input = match InputBuffer::new(REQUEST_SIZE) {
                Ok(input) => input,
                Err(error) => return tracing::error!("no memory for requests of NFS volumes: {error}"),
            };
            let local_set = LocalSet::new();
            let work = async move {
                let state = Rc::new(ThreadState::new(input));
                spawn_local(Rc::clone(&state.busy_poll).run());
                while let Some(task) = incoming.recv().await {
                    let (export, resumes, outcome) = match task {
                        ThreadTask::Serve { export, resumes, outcome } => (export, resumes, outcome),
                        ThreadTask::Move { socket, place } => {
                            state.move_server(socket, place);
                            continue;
                        }
                        ThreadTask::Finish { finished } => {
                            let state = Rc::clone(&state);
                            spawn_local(async move {
                                state.finish().await;
                                // The thread that waits may have ended.
                                let _ = finished.send(());
                            });
                            continue;
                        }
                    };
                    let state = Rc::clone(&state);
                    spawn_local(async move {
                        let served = if resumes { state.resume(*export) } else { state.serve(*export).await };
                        // The thread that waits for the outcome may have ended.
                        let _ = outcome.send(served);
                    });
                }
            };
            local_set.spawn_local(work);
            runtime.block_on(local_set);
        };
        thread::Builder::new().name("nfs".to_owned()).spawn(run)?;
        Ok(Self { tasks })
    }

    /// Serves a new volume.
    ///
    /// # Errors
    /// When the kernel's handshake fails, or the options do not have the root's attributes and the server does not answer.
    pub fn serve(&self, export: ServedExport) -> io::Result<()> {
        self.begin(export, false)
    }

    /// Continues to serve a volume whose server process died.
    ///
    /// # Errors
    /// When the inherited state cannot be read.
    pub fn resume(&self, export: ServedExport) -> io::Result<()> {
        self.begin(export, true)
    }

    /// Records that the NFS server of the socket with this inode number has moved. Calls that wait for it continue at the new
    /// address.
    pub fn move_server(&self, socket: u64, place: NfsAddress) {
        // A thread that has ended serves nothing.
        let _ = self.tasks.send(ThreadTask::Move { socket, place });
    }

    /// Waits until all volumes that are unmounted have ended: the process is about to end.
    pub fn finish(&self) {
        let (finished, all) = channel();
        if self.tasks.send(ThreadTask::Finish { finished }).is_ok() {
            // An error means that the thread has ended.
            let _ = all.recv();
        }
    }

    fn begin(&self, export: ServedExport, resumes: bool) -> io::Result<()> {
        let (outcome, served) = channel();
        let ended = || io::Error::other("the thread that serves NFS volumes has ended");
        self.tasks.send(ThreadTask::Serve { export: Box::new(export), resumes, outcome }).map_err(|_| ended())?;
        served.recv().map_err(|_| ended())?
    }
}

/// Whether a successor can take over this region and log. Changes nothing, except that it frees invalid records of the log.
///
/// # Errors
/// The reason why it cannot.
pub fn can_resume(region: &Arc<Region>, log: &OwnedFd) -> io::Result<()> {
    let broken = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    if region.kind() != VolumeKind::Nfs {
        return Err(broken("the state is that of another kind of volume; start the volume anew"));
    }
    if InheritedState::read(region).is_none() {
        return Err(broken("the state of the volume is damaged: it has no root; start the volume anew"));
    }
    Log::adopt(log.try_clone()?).map(drop).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// State that all volumes of the thread share.
struct ThreadState {
    servers: Servers,
    input: Rc<RefCell<InputBuffer>>,
    busy_poll: Rc<BusyPoll>,
    filesystems: RefCell<Vec<Weak<NfsFilesystem>>>,
    volumes: RefCell<Vec<Weak<NfsVolume>>>,
}

impl ThreadState {
    fn new(input: InputBuffer) -> Self {
        Self {
            servers: Servers::default(),
            input: Rc::new(RefCell::new(input)),
            busy_poll: BusyPoll::new(),
            filesystems: RefCell::default(),
            volumes: RefCell::default(),
        }
    }

    fn move_server(&self, socket: u64, place: NfsAddress) {
        let Some(server) = self.servers.with_socket(socket) else { return };
        for filesystem in self.filesystems.borrow().iter().filter_map(Weak::upgrade) {
            if Rc::ptr_eq(filesystem.server(), &server) {
                filesystem.move_mountd(place.mountd);
            }
        }
        server.move_to(place.nfs);
    }

    async fn serve(&self, new: ServedExport) -> io::Result<()> {
        let ServedExport { device, region, log, sockets, options, trace } = new;
        region.begin();
        let session = Session::open(device, wanted_features(&options), Arc::clone(&region))?;
        let export = self.export(&options, sockets, &region)?;
        let attributes = match options.root_attributes {
            Some(attributes) => attributes,
            // A supervisor of an earlier version mounts the export.
            None => look_at_root(&export, &options).await?,
        };
        let root = NewNfsNode { handle: export.root(), kind: attributes.kind, fileid: attributes.fileid };
        let state = ClientState {
            nodes: NfsNodes::new(Arc::clone(&region), root)?,
            files: NfsOpenFiles::new(Arc::clone(&region), Default::default(), Default::default()),
            calls: Calls::new(Arc::clone(&region), Default::default()),
        };
        let root = root_record(&region, &attributes)?;
        let (log, inherited) = Log::adopt(log).map_err(io::Error::other)?;
        let setup = NfsFilesystemSetup { options, export, region, state, root, notifier: session.notifier() };
        let filesystem = NfsFilesystem::start(setup, log, inherited)?;
        self.run(filesystem, session, trace)
    }

    fn resume(&self, inherited: ServedExport) -> io::Result<()> {
        let ServedExport { device, region, log, sockets, options, trace } = inherited;
        let broken = || io::Error::new(io::ErrorKind::InvalidData, "the volume has no root; start the volume anew");
        let (log, inherited) = Log::adopt(log).map_err(io::Error::other)?;
        let InheritedState { state, lost, root, silly } = InheritedState::read(&region).ok_or_else(broken)?;
        region.take_over();
        region.cells().erase(&lost);
        let export = self.export(&options, sockets, &region)?;
        let root = match root {
            Some(root) => root,
            None => root_record(&region, &unknown_root(&state))?,
        };
        let session = Session::resume(device, Arc::clone(&region))?;
        let setup = NfsFilesystemSetup { options, export, region, state, root, notifier: session.notifier() };
        let filesystem = NfsFilesystem::start(setup, log, inherited)?;
        spawn_local(Rc::clone(&filesystem).resume_inherited());
        silly.into_iter().for_each(|node| drop(spawn_local(Rc::clone(&filesystem).remove_silly(node))));
        self.run(filesystem, session, trace)
    }

    fn run(&self, filesystem: Rc<NfsFilesystem>, session: Session, trace: Arc<Trace>) -> io::Result<()> {
        let mut all = self.filesystems.borrow_mut();
        all.retain(|other| other.strong_count() > 0);
        all.push(Rc::downgrade(&filesystem));
        let volume = NfsVolume::new(
            filesystem,
            session.into_polled()?,
            Rc::clone(&self.input),
            Rc::clone(&self.busy_poll),
            trace,
        )?;
        let mut volumes = self.volumes.borrow_mut();
        volumes.retain(|other| other.strong_count() > 0);
        volumes.push(Rc::downgrade(&volume));
        spawn_local(volume.run());
        Ok(())
    }

    /// Waits until all unmounted volumes have ended. Other processes may still have the other volumes mounted.
    async fn finish(&self) {
        let volumes: Vec<_> = self.volumes.borrow().iter().filter_map(Weak::upgrade).collect();
        for volume in volumes.into_iter().filter(|volume| volume.is_unmounted()) {
            volume.wait_for_end().await;
        }
    }

    fn export(&self, options: &ExportOptions, mut sockets: Vec<OwnedFd>, region: &Arc<Region>) -> io::Result<Export> {
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let root = NfsFileHandle::new(&options.root).ok_or_else(|| wrong("the root's file handle is none"))?;
        let spare = sockets.pop().filter(|_| !sockets.is_empty());
        let spare = spare.ok_or_else(|| wrong("an NFS volume comes with two sockets at least"))?;
        let connections = sockets.len();
        let server = self.servers.given(&options.export.server, options.nfs, sockets, spare)?;
        server.add_observer(Arc::<Region>::clone(region));
        Ok(Export::new(server, root, options.limits, options.policy(), connections))
    }
}

async fn look_at_root(export: &Export, options: &ExportOptions) -> io::Result<Attributes> {
    let credential = Credential::root();
    let call_options = CallOptions { policy: Some(Policy::within(ROOT_BUDGET)), ..CallOptions::new(&credential) };
    let root = export.root();
    let answer = timeout(ROOT_BUDGET, export.getattr(call_options, &root)).await;
    let attributes = answer.map_err(|_| RootProblem::NoAnswer).and_then(|answer| Ok(answer?));
    attributes.map_err(|cause| io::Error::other(RootError { export: options.export.clone(), cause }))
}

/// podfs cannot read the attributes of the root of an export.
#[derive(Debug, thiserror::Error)]
#[error("podfs cannot read the attributes of the root of {} of NFS server {}: {cause}", export.path, export.server)]
struct RootError {
    export: ExportAddress,
    #[source]
    cause: RootProblem,
}

#[derive(Debug, thiserror::Error)]
enum RootProblem {
    #[error("it does not answer")]
    NoAnswer,
    #[error(transparent)]
    Failed(#[from] podfs_nfs::error::Error),
}

/// The attributes of the root of a volume whose server process died before it had the NFS server's answer.
fn unknown_root(state: &ClientState) -> Attributes {
    let time = Default::default();
    Attributes {
        kind: podfs_nfs::v3::FileType::Directory,
        mode: 0o755,
        links: 2,
        uid: 0,
        gid: 0,
        size: 4096,
        used: 4096,
        device: (0, 0),
        fsid: 0,
        fileid: state.nodes.root().fileid,
        atime: time,
        mtime: time,
        ctime: time,
    }
}
