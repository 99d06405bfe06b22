//! The volumes of a server: those it answers for, and those it is about to take over.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::SystemTime;

use podfs_nfs::rpc::dial::inode;
use serde_json::Value;

use super::process::Held;
use crate::audit::Audit;
use crate::audit::output::Output;
use crate::live::filesystem::{LiveFilesystem, SharedLiveTree};
use crate::live::tree::{LiveTree, Update};
use crate::mount::enclosed::Enclosed;
use crate::mount::table::MountTable;
use crate::nfs;
use crate::nfs::options::Place;
use crate::nfs::thread::{NfsThread, Served};
use crate::passthrough::{self, DataPath, Loaded, Options};
use crate::projection::filesystem::{self, ProjectionFilesystem, SharedTree};
use crate::projection::steps::Step;
use crate::projection::tree::{Root, Staged, Tree};
use crate::projection::undo::Undo;
use crate::projection::{GenerationName, Image};
use crate::protocol::{Body, Description, Reporting, VolumeId};
use crate::region::{Kind, Region};
use crate::session::{Notifier, Session};
use crate::trace::Trace;

/// All volumes, by their numbers.
pub(super) struct Volumes {
    /// Where lines of audited volumes go.
    output: Arc<Output>,
    volumes: BTreeMap<VolumeId, Volume>,
    /// Those to resume.
    resumed: BTreeMap<VolumeId, Resumed>,
    /// Serves all NFS volumes, once there is one.
    nfs: Option<NfsThread>,
}

/// A volume, with all that a supervisor needs to adopt it.
struct Volume {
    about: Value,
    device: OwnedFd,
    mount: OwnedFd,
    region: Arc<Region>,
    content: Content,
    trace: Arc<Trace>,
}

enum Content {
    Projection {
        tree: SharedTree,
        reporting: Reporting,
    },
    Passthrough {
        source: OwnedFd,
        table: Arc<MountTable>,
        options: Options,
    },
    Nfs {
        log_and_sockets: Vec<OwnedFd>,
        options: Box<nfs::options::Options>,
    },
    /// The notifier is that of the session, once it runs.
    Live {
        of: VolumeId,
        tree: SharedLiveTree,
        notifier: Option<Notifier>,
    },
}

/// A volume that is known, but not answered for yet.
struct Resumed {
    volume: Volume,
    loaded: Option<Loaded>,
}

impl Volumes {
    /// None yet. The lines of audited ones will go to `output`.
    pub(super) fn new(output: Output) -> Self {
        Self { output: Arc::new(output), nfs: None, volumes: BTreeMap::new(), resumed: BTreeMap::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.volumes.is_empty()
    }

    /// Live parts are left out for a supervisor of an earlier version.
    pub(super) fn numbers(&self, with_live: bool) -> Vec<VolumeId> {
        let is_told = |volume: &Volume| with_live || !matches!(volume.content, Content::Live { .. });
        self.volumes.iter().filter(|(_, volume)| is_told(volume)).map(|(number, _)| *number).collect()
    }

    /// Answers for a new, empty projection.
    pub(super) fn project(
        &mut self,
        number: VolumeId,
        about: Value,
        held: Held,
        root: Root,
        reporting: Reporting,
    ) -> io::Result<()> {
        let tree = SharedTree::new(Tree::new(root, SystemTime::now()));
        let Held { device, mount, region } = held;
        let region = Arc::new(adopt(region, Kind::Projection)?);
        let session = Session::open(device.try_clone()?, filesystem::wanted(reporting.trace), Arc::clone(&region))?;
        let trace = start_trace(reporting.trace)?;
        let content = Content::Projection { tree, reporting };
        let volume = Volume { about, device, mount, region, content, trace };
        volume.run_projection(session, &self.output)?;
        self.volumes.insert(number, volume);
        Ok(())
    }

    /// Answers for the live parts of a projection, none yet.
    pub(super) fn mirror(
        &mut self,
        number: VolumeId,
        about: Value,
        held: Held,
        of: VolumeId,
        trace: bool,
    ) -> io::Result<()> {
        let tree = SharedLiveTree::new(LiveTree::new(SystemTime::now()));
        let Held { device, mount, region } = held;
        let region = Arc::new(adopt(region, Kind::Live)?);
        let session = Session::open(device.try_clone()?, filesystem::wanted(trace), Arc::clone(&region))?;
        let content = Content::Live { of, tree, notifier: None };
        let mut volume = Volume { about, device, mount, region, content, trace: start_trace(trace)? };
        volume.run_live(session)?;
        self.volumes.insert(number, volume);
        Ok(())
    }

    /// Answers for a new passthrough volume.
    pub(super) fn pass(
        &mut self,
        number: VolumeId,
        about: Value,
        held: Held,
        source: Enclosed,
        options: Options,
    ) -> io::Result<DataPath> {
        let Held { device, mount, region } = held;
        let region = Arc::new(adopt(region, Kind::Passthrough)?);
        region.begin();
        let Enclosed { source, table } = source;
        let (own, table) = (source.try_clone()?, Arc::new(table));
        let trace = start_trace(options.trace)?;
        let (region_of_session, reports) = (Arc::clone(&region), Arc::clone(&trace));
        let (device_of_session, mounts) = (device.try_clone()?, Arc::clone(&table));
        let data_path =
            passthrough::serve(device_of_session, own, mounts, options.clone(), region_of_session, reports)?;
        let content = Content::Passthrough { source, table, options };
        self.volumes.insert(number, Volume { about, device, mount, region, content, trace });
        Ok(data_path)
    }

    /// Answers for a new NFS volume.
    pub(super) fn export(
        &mut self,
        number: VolumeId,
        about: Value,
        held: Held,
        log_and_sockets: Vec<OwnedFd>,
        options: Box<nfs::options::Options>,
    ) -> io::Result<()> {
        let Held { device, mount, region } = held;
        let region = Arc::new(adopt(region, Kind::Nfs)?);
        let trace = start_trace(options.trace)?;
        let volume = Volume { about, device, mount, region, content: Content::Nfs { log_and_sockets, options }, trace };
        let served = volume.to_serve()?;
        self.nfs()?.serve(served)?;
        self.volumes.insert(number, volume);
        Ok(())
    }

    /// The thread that serves NFS volumes.
    fn nfs(&mut self) -> io::Result<&NfsThread> {
        let thread = match self.nfs.take() {
            Some(thread) => thread,
            None => NfsThread::start()?,
        };
        Ok(self.nfs.insert(thread))
    }

    /// Gets ready to go on with a volume.
    pub(super) fn resume(
        &mut self,
        description: Description,
        held: Held,
        mut descriptors: Vec<OwnedFd>,
    ) -> io::Result<()> {
        let Description { volume: number, about, body } = description;
        let Held { device, mount, region } = held;
        let (content, region, trace, loaded) = match body {
            Body::Projection { tree, reporting } => {
                let region = Arc::new(adopt(region, Kind::Projection)?);
                let mut tree = Tree::restore(*tree, images(descriptors)?).ok_or_else(broken)?;
                tree.catch_up(region.applied()).map_err(|_| broken())?;
                let (tree, trace) = (SharedTree::new(tree), start_trace(reporting.trace)?);
                (Content::Projection { tree, reporting }, region, trace, None)
            }
            Body::Passthrough { options } => {
                let region = Arc::new(adopt(region, Kind::Passthrough)?);
                let table = Arc::new(MountTable::from(descriptors.pop().ok_or_else(broken)?));
                let source = descriptors.pop().ok_or_else(broken)?;
                let (own, trace) = (source.try_clone()?, start_trace(options.trace)?);
                let (region_of_session, reports) = (Arc::clone(&region), Arc::clone(&trace));
                let loaded =
                    passthrough::load(region_of_session, Some(own), Arc::clone(&table), options.clone(), reports);
                let loaded = loaded.map_err(io::Error::other)?;
                (Content::Passthrough { source, table, options }, region, trace, Some(loaded))
            }
            Body::Live { of, tree } => {
                let region = Arc::new(adopt(region, Kind::Live)?);
                let mut tree = LiveTree::restore(*tree, images(descriptors)?).ok_or_else(broken)?;
                tree.catch_up(region.applied()).map_err(|_| broken())?;
                let tree = SharedLiveTree::new(tree);
                (Content::Live { of, tree, notifier: None }, region, start_trace(false)?, None)
            }
            Body::Nfs { options } => {
                let region = Arc::new(adopt(region, Kind::Nfs)?);
                let trace = start_trace(options.trace)?;
                nfs::thread::can_resume(&region, descriptors.first().ok_or_else(broken)?)?;
                (Content::Nfs { log_and_sockets: descriptors, options }, region, trace, None)
            }
        };
        let volume = Volume { about, device, mount, region, content, trace };
        self.resumed.insert(number, Resumed { volume, loaded });
        Ok(())
    }

    /// Answers for the volumes that were resumed.
    pub(super) fn start(&mut self) -> io::Result<()> {
        for (number, resumed) in std::mem::take(&mut self.resumed) {
            let Resumed { mut volume, loaded } = resumed;
            match loaded {
                Some(loaded) => drop(loaded.start(volume.device.try_clone()?)?),
                None if matches!(volume.content, Content::Nfs { .. }) => {
                    let served = volume.to_serve()?;
                    self.nfs()?.resume(served)?;
                }
                None if matches!(volume.content, Content::Live { .. }) => {
                    let session = Session::resume(volume.device.try_clone()?, Arc::clone(&volume.region))?;
                    volume.run_live(session)?;
                }
                None => {
                    let session = Session::resume(volume.device.try_clone()?, Arc::clone(&volume.region))?;
                    volume.run_projection(session, &self.output)?;
                }
            }
            self.volumes.insert(number, volume);
        }
        Ok(())
    }

    /// Describes a volume to a supervisor that adopts it.
    pub(super) fn describe(&self, number: VolumeId) -> io::Result<(Description, Vec<OwnedFd>)> {
        let volume = self.volume(number)?;
        let mut descriptors =
            vec![volume.device.try_clone()?, volume.mount.try_clone()?, volume.region.as_fd().try_clone_to_owned()?];
        let body = match &volume.content {
            Content::Projection { tree, reporting } => {
                let (tree, images) = tree.lock().save();
                for image in images {
                    descriptors.push(image.as_fd().try_clone_to_owned()?);
                }
                Body::Projection { tree: Box::new(tree), reporting: reporting.clone() }
            }
            Content::Passthrough { source, table, options } => {
                descriptors.push(source.try_clone()?);
                descriptors.push(table.as_fd().try_clone_to_owned()?);
                Body::Passthrough { options: options.clone() }
            }
            Content::Live { of, tree, .. } => {
                let (tree, images) = tree.lock().save();
                for image in images {
                    descriptors.push(image.as_fd().try_clone_to_owned()?);
                }
                Body::Live { of: *of, tree: Box::new(tree) }
            }
            Content::Nfs { log_and_sockets, options } => {
                for one in log_and_sockets {
                    descriptors.push(one.try_clone()?);
                }
                Body::Nfs { options: options.clone() }
            }
        };
        Ok((Description { volume: number, about: volume.about.clone(), body }, descriptors))
    }

    /// Announces the next steps to a tree. Returns the thread that answers for it.
    pub(super) fn announce(
        &mut self,
        number: VolumeId,
        steps: Vec<Step>,
        staged: Option<(GenerationName, OwnedFd)>,
        time: SystemTime,
    ) -> io::Result<Option<i32>> {
        let stage = |(name, image)| io::Result::Ok(Staged { name, image: Arc::new(Image::adopt(image)?) });
        let staged = staged.map(stage).transpose()?;
        self.tree(number)?.lock().announce(steps, staged, time);
        Ok(self.volume(number)?.region.session_thread())
    }

    /// Announces the next steps to the tree of live parts. Returns its unlinked nodes that the kernel knows.
    pub(super) fn update(&self, number: VolumeId, update: Update) -> io::Result<Vec<u64>> {
        let Content::Live { tree, .. } = &self.volume(number)?.content else { return Err(no_live_parts(number)) };
        let mut tree = tree.lock();
        tree.announce(update);
        Ok(tree.unlinked())
    }

    /// Zeroes images of live parts that no server needs.
    pub(super) fn drop_images(&self, number: VolumeId, but: &[u64]) -> io::Result<()> {
        let Content::Live { tree, .. } = &self.volume(number)?.content else { return Err(no_live_parts(number)) };
        tree.lock().drop_images(but);
        Ok(())
    }

    /// Makes a change of live parts for which there is no system call.
    pub(super) fn take(&self, number: VolumeId, applied: u64) -> io::Result<()> {
        let volume = self.volume(number)?;
        let Content::Live { tree, notifier, .. } = &volume.content else { return Err(no_live_parts(number)) };
        Ok(tree.take(applied, &volume.region, notifier.as_ref())?)
    }

    pub(super) fn close(&self, number: VolumeId, generation: &GenerationName) -> io::Result<Vec<u32>> {
        Ok(self.tree(number)?.lock().close_generation(generation.as_str())?)
    }

    /// The NFS server of a volume is elsewhere, for all volumes that share its sockets.
    pub(super) fn move_nfs(&mut self, number: VolumeId, place: Place) -> io::Result<()> {
        let first = self.volume(number)?.first_socket().ok_or_else(broken)?;
        for volume in self.volumes.values_mut().filter(|volume| volume.first_socket() == Some(first)) {
            if let Content::Nfs { options, .. } = &mut volume.content {
                **options = options.as_ref().clone().at(place);
            }
        }
        self.nfs()?.move_server(first, place);
        Ok(())
    }

    pub(super) fn remove(&mut self, number: VolumeId) {
        if let Some(volume) = self.volumes.remove(&number) {
            // Its session may go on for processes that still use the mount.
            volume.trace.detach();
        }
    }

    /// Lets another reader see the volume's requests, or all readers go.
    pub(super) fn trace(&self, number: VolumeId, reader: Option<OwnedFd>) -> io::Result<()> {
        let trace = &self.volume(number)?.trace;
        match reader {
            Some(pipe) => trace.attach(pipe),
            None => {
                trace.detach();
                Ok(())
            }
        }
    }

    fn tree(&self, number: VolumeId) -> io::Result<&SharedTree> {
        match &self.volume(number)?.content {
            Content::Projection { tree, .. } => Ok(tree),
            _ => Err(io::Error::other(format!("volume {} is no projection", number.0))),
        }
    }

    fn volume(&self, number: VolumeId) -> io::Result<&Volume> {
        self.volumes.get(&number).ok_or_else(|| io::Error::other(format!("volume {} is not served", number.0)))
    }
}

impl Volume {
    /// What the thread of NFS volumes needs.
    fn to_serve(&self) -> io::Result<Served> {
        let Content::Nfs { log_and_sockets, options } = &self.content else { return Err(broken()) };
        let mut own = log_and_sockets.iter().map(OwnedFd::try_clone).collect::<io::Result<Vec<_>>>()?.into_iter();
        Ok(Served {
            device: self.device.try_clone()?,
            region: Arc::clone(&self.region),
            log: own.next().ok_or_else(broken)?,
            sockets: own.collect(),
            options: options.as_ref().clone(),
            trace: Arc::clone(&self.trace),
        })
    }

    /// By which those that share their sockets are known.
    fn first_socket(&self) -> Option<u64> {
        let Content::Nfs { log_and_sockets, .. } = &self.content else { return None };
        inode(log_and_sockets.get(1)?).ok()
    }

    /// Starts the thread of live parts. One, as for a projection.
    fn run_live(&mut self, session: Session) -> io::Result<()> {
        let Content::Live { tree, notifier, .. } = &mut self.content else { return Ok(()) };
        tree.lock().own_images();
        let notify = notifier.insert(session.notifier()).clone();
        let (region, trace) = (Arc::clone(&self.region), Arc::clone(&self.trace));
        session.run(Arc::new(LiveFilesystem::new(tree.clone(), region, Undo::new(notify), trace)), 1)
    }

    /// Starts the thread of a projection.
    fn run_projection(&self, session: Session, output: &Arc<Output>) -> io::Result<()> {
        let Content::Projection { tree, reporting } = &self.content else { return Ok(()) };
        tree.lock().own_images();
        let (region, trace) = (Arc::clone(&self.region), Arc::clone(&self.trace));
        let audit = reporting.audit.clone().map(|subject| Audit::new(subject, Arc::clone(&region), Arc::clone(output)));
        let filesystem = ProjectionFilesystem::new(tree.clone(), region, Undo::new(session.notifier()), trace, audit);
        // One thread: a projection's requests are short, and waking a second CPU costs more than it gives.
        session.run(Arc::new(filesystem), 1)
    }
}

/// The trace of a volume: on standard output if that is wanted from the start.
fn start_trace(wanted: bool) -> io::Result<Arc<Trace>> {
    let trace = if wanted { Trace::to(rustix::io::dup(rustix::stdio::stdout())?) } else { Trace::default() };
    Ok(Arc::new(trace))
}

fn adopt(region: OwnedFd, kind: Kind) -> io::Result<Region> {
    let region = Region::adopt(region).map_err(io::Error::other)?;
    if region.kind() == kind { Ok(region) } else { Err(broken()) }
}

/// The images of a volume that is resumed. A server that gives up before it serves leaves them to the next one.
fn images(descriptors: Vec<OwnedFd>) -> io::Result<Vec<Image>> {
    let images = descriptors.into_iter().map(Image::adopt).collect::<io::Result<Vec<_>>>()?;
    images.iter().for_each(Image::disown);
    Ok(images)
}

fn no_live_parts(number: VolumeId) -> io::Error {
    io::Error::other(format!("volume {} is not of live parts", number.0))
}

fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "what the last server has left does not fit together")
}
