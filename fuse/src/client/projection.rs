//! The supervisor's side of one projection: its mounts, and the commits from generation to generation.
//!
//! A commit stages the new generation with the server and then performs [`steps`] as
//! ordinary system calls on the private mount. So the kernel raises the same inotify events as for the kubelet's writer, in
//! every mount namespace, and keeps its caches correct.
//!
//! After a commit that failed before the switch, the old generation is current (AW-17); after one that failed later, the new
//! one is. The next commit removes the entries that the failed one has left in the root.
//!
//! After the switch the old generation stays for a while ([`old`](crate::projection::old)). Commits remove expired
//! generations. Between commits, the caller calls [`ProjectionMount::remove_old`] at [`ProjectionMount::next_removal`].
//!
//! The supervisor confirms each completed step in its replica of the tree. If the server dies, its successor begins with the
//! replica, and the kernel sends the successor the request of a step that is under way.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{
    AtFlags, Dir, Mode, OFlags, ResolveFlags, StatxFlags, chmodat, mkdirat, openat2, renameat, statx, symlinkat,
    unlinkat,
};

use crate::client::commit_error::CommitError;
use crate::client::held::{HeldProjection, TreeReplica};
use crate::client::identity::VolumeIdentity;
use crate::client::live::{LiveMount, LivePartError};
use crate::client::mounted::MountedVolume;
use crate::client::server_client::AnsweringThreads;
use crate::client::{ServerClient, VolumeObserver};
use crate::mount::MountError;
use crate::mount::point::MountPoint;
use crate::mount::private::{MountOptions, PrivateMount, open_device};
use crate::mount::visible::VisibleMount;
use crate::projection::GenerationName;
use crate::projection::image::{DirectoryAttributes, Image, ImageLayout};
use crate::projection::old::{OldGenerations, OldUsage};
use crate::projection::steps::{self, DATA, DATA_TMP, ProjectionStep, ShownGeneration};
use crate::projection::tree::{ProjectionTree, Root, StagedGeneration};
use crate::protocol::{Reporting, ServerRequest};

/// The outcome of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Commit {
    /// The volume already shows the payload, so the commit did nothing (AW-10).
    Unchanged,
    /// The new generation is current.
    Switched {
        /// Its name.
        generation: GenerationName,
        /// Time from the call of [`ProjectionMount::commit`] until the server had the generation.
        staged_in: Duration,
        /// Time from then until `..data` pointed to it.
        switched_in: Duration,
    },
}

/// A mounted projection.
pub struct ProjectionMount {
    mounted: MountedVolume,
    tree: TreeReplica<ProjectionTree>,
    hidden: BTreeSet<String>,
    current: Option<(GenerationName, Arc<Image>)>,
    old: OldGenerations,
    /// Why podfs could not remove an old generation, or must give up live parts, until [`Self::take_left`].
    problem: Option<String>,
    /// Whether a commit failed, so that the root may have entries that do not belong there.
    untidy: bool,
    answering: AnsweringThreads,
    /// The parts that change in place, after the first [`Self::live_part`].
    live: Option<LiveMount>,
}

impl ProjectionMount {
    /// Mounts an empty projection, with `server` as its server. It is not visible before [`show`](Self::show).
    ///
    /// # Errors
    /// When it cannot be mounted, or the server refuses it.
    pub fn start(
        server: &Arc<ServerClient>,
        root: &Root,
        options: &MountOptions,
        identity: &VolumeIdentity,
        reporting: &Reporting,
    ) -> Result<Self, MountError> {
        let device = open_device()?;
        let mount = PrivateMount::new(device.as_fd(), options)?;
        let reporting = identity.reporting(reporting);
        let kind = HeldProjection::new(root.clone(), reporting.clone());
        let tree = kind.tree();
        let root = root.clone();
        let request = |volume, about| ServerRequest::Serve { volume, about, root, reporting };
        let begun = MountedVolume::begin(server, device, mount, identity.about(), kind, request);
        let failed = |cause| MountError::Failed { what: "the server did not take the volume".to_owned(), cause };
        let (mounted, _) = begun.map_err(failed)?;
        Ok(Self::of(mounted, tree, None))
    }

    /// The projection of a supervisor that was killed, perhaps during a commit.
    ///
    /// # Errors
    /// The volume, if it is of another kind.
    pub(super) fn adopt(mounted: MountedVolume, live: Option<LiveMount>) -> Result<Self, MountedVolume> {
        let Some(tree) = mounted.held.of_kind::<HeldProjection>().map(HeldProjection::tree) else {
            return Err(mounted);
        };
        let mut projection = Self::of(mounted, tree, live);
        projection.untidy = true;
        let old = projection.tree.lock().old();
        old.into_iter().for_each(|(name, image)| projection.old.push(name, image));
        Ok(projection)
    }

    /// Keeps each old generation for `time` after the switch to the next one. For existing old generations, the time begins now.
    pub fn keep_old_for(&mut self, time: Duration) {
        self.old.keep_for(time);
    }

    /// The time for the next call of [`Self::remove_old`].
    pub fn next_removal(&self) -> Option<Instant> {
        self.old.next_removal().filter(|_| !self.is_given_up())
    }

    /// The number of old generations, and their memory.
    pub fn old_usage(&self) -> OldUsage {
        self.old.usage()
    }

    /// Removes expired generations. If one cannot be removed yet, for example because a file system is mounted on it, it tries
    /// again later.
    pub fn remove_old(&mut self) {
        if self.remove_due() {
            // An error means that the server has ended. The next commit goes to its successor.
            let _ = self.refresh_root();
        }
    }

    /// Removes expired generations. Returns whether it removed any.
    fn remove_due(&mut self) -> bool {
        let mut removed = false;
        for old in self.old.due(Instant::now()) {
            match self.remove_generation(ShownGeneration { name: &old.name, image: &old.image }) {
                Ok(()) => {
                    self.old.removed(&old.name);
                    removed = true;
                }
                Err(error) if self.old.failed(&old.name) => {
                    self.problem =
                        Some(format!("cannot remove the old generation {}: {error}; podfs tries again", old.name));
                }
                Err(_) => {}
            }
        }
        if removed {
            self.tree.lock().prune_generations();
        }
        removed
    }

    /// The reason why podfs could not remove an old generation, or must give up live parts. Each reason is returned once.
    pub fn take_left(&mut self) -> Option<String> {
        self.problem.take()
    }

    fn of(mounted: MountedVolume, tree: TreeReplica<ProjectionTree>, live: Option<LiveMount>) -> Self {
        let (hidden, current) = {
            let tree = tree.lock();
            let above = |path: &String| path.split('/').next().map(str::to_owned);
            (tree.root().directories.iter().filter_map(above).collect(), tree.current())
        };
        let (old, answering) = (OldGenerations::default(), AnsweringThreads::default());
        Self { mounted, tree, hidden, current, old, problem: None, untidy: false, answering, live }
    }

    /// Whether no successor could take over the projection after its server died. The caller has to mount it again.
    pub fn is_given_up(&self) -> bool {
        self.mounted.is_given_up()
    }

    /// Whether the projection has an access log.
    pub fn is_audited(&self) -> bool {
        self.mounted.is_audited()
    }

    /// The generation that `..data` points to.
    pub fn generation(&self) -> Option<&GenerationName> {
        self.current.as_ref().map(|(name, _)| name)
    }

    /// Makes `payload` the current generation, and then shows it in the live parts.
    ///
    /// # Errors
    /// If the commit fails before the switch, the old generation stays current; if it fails later, the new one is current, and
    /// the next commit completes it. It is no error that an old generation cannot be removed.
    pub fn commit(
        &mut self,
        payload: &ImageLayout<'_>,
        directories: DirectoryAttributes,
    ) -> Result<Commit, CommitError> {
        let committed = self.switch(payload, directories)?;
        if self.live.take_if(|live| live.is_given_up()).is_some() {
            let reason = "live subPath mounts of its containers do not answer any more; start these containers again";
            self.problem = Some(reason.to_owned());
        }
        if let (Some(live), Some((_, image))) = (&mut self.live, &self.current) {
            live.follow(image)?;
        }
        Ok(committed)
    }

    /// A detached, read-only mount of `path`, whose content changes in place with each commit. The first call mounts the file
    /// system of live parts, with `options`.
    ///
    /// # Errors
    /// When the path does not exist, or the kernel or the server refuses.
    pub fn live_part(&mut self, path: &str, options: &MountOptions) -> Result<OwnedFd, LivePartError> {
        let (_, image) = self.current.as_ref().ok_or_else(|| LivePartError::Missing(path.to_owned()))?;
        let live = match self.live.take().filter(|live| !live.is_given_up()) {
            Some(live) => live,
            None => {
                let MountedVolume { server, volume, held } = &self.mounted;
                LiveMount::start(server, *volume, options, held.about.clone(), held.is_traced())?
            }
        };
        self.live.insert(live).part(path, image)
    }

    fn switch(&mut self, payload: &ImageLayout<'_>, directories: DirectoryAttributes) -> Result<Commit, CommitError> {
        let began = Instant::now();
        let left_over = self.tidy()?;
        self.untidy = left_over;
        self.old.retry_now();
        if self.current.as_ref().is_some_and(|(_, image)| payload.equals(image)) {
            self.remove_old();
            return Ok(Commit::Unchanged);
        }
        self.untidy = true;
        let server = Arc::clone(&self.mounted.server);
        let _together = server.together(self.answering);
        let time = SystemTime::now();
        let generation = GenerationName::new(time);
        let image = Arc::new(payload.image().map_err(CommitError::Memory)?);
        let next = ShownGeneration { name: &generation, image: &image };
        let steps = steps::switch(self.shown(), next, directories.mode, &self.hidden);
        self.tree.lock().prune();
        self.answering = self.announce(&steps, Some((&generation, &image)), time)?;
        let staged_in = began.elapsed();
        let switch = steps.iter().position(|step| *step == ProjectionStep::Switch).map_or(0, |at| at + 1);
        self.perform(&steps[..switch])?;
        let switched_in = began.elapsed() - staged_in;
        self.mounted.held.region.counts().commits.add(staged_in + switched_in);
        if let Some((name, image)) = self.current.replace((generation.clone(), image)) {
            self.old.push(name, image);
        }
        self.perform(&steps[switch..])?;
        self.remove_due();
        self.refresh_root()?;
        self.untidy = left_over;
        Ok(Commit::Switched { generation, staged_in, switched_in })
    }

    /// Shows the projection read-only at `point`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn show(&self, point: &MountPoint) -> Result<VisibleMount, MountError> {
        point.attach(&self.mounted.held.clone_mount(PrivateMount::read_only_clone)?)
    }

    /// Like [`Self::show`] on a kernel before 6.15, on any kernel.
    ///
    /// # Errors
    /// When the kernel refuses.
    #[doc(hidden)]
    pub fn show_as_before_6_15(&self, point: &MountPoint) -> Result<VisibleMount, MountError> {
        point.attach(&self.mounted.held.clone_mount(PrivateMount::read_only_clone_before_6_15)?)
    }

    /// Counts a change, with the time from when podfs received it until containers saw it.
    pub fn note_propagation(&self, took: Duration) {
        self.mounted.held.region.counts().propagations.add(took);
    }

    /// A handle to observe the volume.
    pub fn watch(&self) -> VolumeObserver {
        self.mounted.watch()
    }

    /// Number of FUSE requests served so far.
    ///
    /// # Errors
    /// When the server is gone.
    pub fn requests(&self) -> io::Result<u64> {
        Ok(self.mounted.requests())
    }

    fn shown(&self) -> Option<ShownGeneration<'_>> {
        self.current.as_ref().map(|(name, image)| ShownGeneration { name, image })
    }

    fn remove_generation(&self, old: ShownGeneration<'_>) -> Result<(), CommitError> {
        let known = self.mounted.server.close(self.mounted.volume, old.name).map_err(CommitError::Server)?;
        let closed = self.tree.lock().close_generation_but(old.name.as_str(), &known);
        closed.map_err(|errno| CommitError::Server(errno.into()))?;
        let steps = steps::removal(old, &known);
        self.announce(&steps, None, SystemTime::now())?;
        self.perform(&steps)
    }

    /// Announces steps to the replica, then to the server, so that a successor that starts meanwhile accepts them.
    fn announce(
        &self,
        steps: &[ProjectionStep],
        staged: Option<(&GenerationName, &Arc<Image>)>,
        time: SystemTime,
    ) -> Result<AnsweringThreads, CommitError> {
        let replica = staged.map(|(name, image)| StagedGeneration { name: name.clone(), image: Arc::clone(image) });
        self.tree.lock().announce(steps.to_vec(), replica, time);
        let staged = staged.map(|(name, image)| (name, &**image));
        self.mounted.server.announce(self.mounted.volume, steps, staged, time).map_err(CommitError::Server)
    }

    /// Makes the kernel request the root's attributes again. It may have got an answer before the commit and store it after the
    /// commit; it would then use the old attributes for ever. The kernel drops an answer that is older than its present one.
    fn refresh_root(&self) -> Result<(), CommitError> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
        let refreshed = statx(&self.mounted.held.mount, c"", flags, StatxFlags::BASIC_STATS);
        refreshed
            .map(drop)
            .map_err(|errno| CommitError::Step { call: "stat of the root".to_owned(), cause: errno.into() })
    }

    /// Repairs the root after a failed commit. Returns whether a step failed: an entry that podfs cannot remove yet, such as a
    /// mount point, delays no update.
    fn tidy(&mut self) -> Result<bool, CommitError> {
        if !self.untidy {
            return Ok(false);
        }
        let entries =
            self.entries().map_err(|cause| CommitError::Step { call: "reading the root".to_owned(), cause })?;
        let mut left_over = false;
        for step in steps::repair(&entries, self.shown(), &self.hidden, |name| self.old.contains(name)) {
            // One by one: after a failed step, the server would accept only that step as the next one.
            let step = [step];
            self.announce(&step, None, SystemTime::now())?;
            left_over |= self.perform(&step).is_err();
        }
        Ok(left_over)
    }

    fn entries(&self) -> io::Result<Vec<String>> {
        let root = openat2(
            &self.mounted.held.mount,
            c".",
            OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::BENEATH,
        )?;
        let mut names = Vec::new();
        for entry in Dir::new(root)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn perform(&self, steps: &[ProjectionStep]) -> Result<(), CommitError> {
        steps.iter().try_for_each(|step| {
            let failed = |cause| CommitError::Step { call: describe(step), cause };
            let performed = self.perform_one(step);
            let mut tree = self.tree.lock();
            // Before Linux 6.9, the call fails if the server is killed after it has applied the step. The next server begins with the
            // applied steps, so this tree has to have them, too.
            if performed.is_ok() || self.mounted.held.region.applied() == tree.applied() + 1 {
                tree.confirm(step).map_err(|errno| failed(errno.into()))?;
            }
            performed.map_err(failed)
        })
    }

    fn perform_one(&self, step: &ProjectionStep) -> io::Result<()> {
        let root = self.mounted.held.mount.as_fd();
        // The server shares the image's memory. A compromised server must not make the supervisor follow a link.
        if step.name().contains('/') {
            return Err(io::ErrorKind::InvalidFilename.into());
        }
        match step {
            ProjectionStep::MakeGeneration { name } => mkdirat(root, name, Mode::from_raw_mode(0o700))?,
            ProjectionStep::SetMode { name, mode } => {
                chmodat(root, name, Mode::from_raw_mode((*mode).into()), AtFlags::empty())?
            }
            ProjectionStep::MakeLink { name, target, .. } => symlinkat(target, root, name)?,
            ProjectionStep::Switch => renameat(root, DATA_TMP, root, DATA)?,
            ProjectionStep::Unlink { directory, name } => unlinkat(self.directory(directory)?, name, AtFlags::empty())?,
            ProjectionStep::RemoveDirectory { directory, name } => {
                unlinkat(self.directory(directory)?, name, AtFlags::REMOVEDIR)?
            }
        }
        Ok(())
    }

    /// Opens a directory of the mount. It follows no links and stays in the mount, so a server cannot lead podfs elsewhere.
    fn directory(&self, path: &str) -> io::Result<OwnedFd> {
        let path = if path.is_empty() { "." } else { path };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        Ok(openat2(&self.mounted.held.mount, path, flags, Mode::empty(), resolve)?)
    }
}

fn describe(step: &ProjectionStep) -> String {
    match step {
        ProjectionStep::MakeGeneration { name } => format!("mkdir {name}"),
        ProjectionStep::SetMode { name, mode } => format!("chmod {mode:o} {name}"),
        ProjectionStep::MakeLink { name, .. } => format!("symlink {name}"),
        ProjectionStep::Switch => format!("rename {DATA_TMP} {DATA}"),
        ProjectionStep::Unlink { directory, name } => format!("unlink {directory}/{name}"),
        ProjectionStep::RemoveDirectory { directory, name } => format!("rmdir {directory}/{name}"),
    }
}
