//! A volume that shows a source as it is, of the host or of an NFS server. podfs finds and opens the source, then
//! mounts it once.
//!
//! The mount stays as it is. A later change of the manifests or of the source's path concerns the next pod.
//!
//! | module | owns |
//! |---|---|
//! | `host_path` | files and directories of the node |
//! | `empty_dir` | emptyDirs, which belong to the pod |
//! | `claim` | PersistentVolumes |
//! | `nfs` | exports of NFS servers |
//! | `flex`, `csi` | mounts of another vendor's driver |

pub(super) mod claim;
pub(super) mod csi;
pub(super) mod empty_dir;
pub(super) mod flex;
pub(super) mod host_path;
pub(super) mod nfs;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use podfs_fuse::caller::credentials::ActAs;
use podfs_fuse::client::{MountedVolume, VolumeIdentity, VolumeObserver};
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::bind::bind;
use podfs_fuse::mount::private::{ContainerAccess, MountOptions, MountPointType};
use podfs_fuse::mount::visible::{MountPoint, VisibleMount};
use podfs_fuse::passthrough::{CacheMode, DataPath, PassthroughOptions};
use podfs_fuse::region::VolumeKind;

use super::growth::Expansion;
use super::mounter::Mounter;
use super::nfs::ReachedExport;
use super::{PodEnd, RefreshFailure, ShownContent, VolumeContext};
use crate::host::neighbours::NeighbourLock;
use crate::host::{HostError, HostSource, serve};
use crate::manifest::PodView;
use crate::supervisor::volume::adopted::KeptVolume;
use crate::volume::nfs_options::Backend;
use crate::volume::{ServedBy, Volume};

/// A kind of volume that shows a source as it is.
pub(super) trait PassthroughSource: Send {
    /// Finds the source and plans the mount of a volume that is not mounted.
    fn find(
        &mut self,
        volume: &mut PassthroughParts,
        spec: &Volume,
        pod: &PodView,
    ) -> Result<MountPlan, RefreshFailure>;

    /// Whether the mount still shows the source. If not, podfs finds and mounts the source anew.
    fn is_current(
        &mut self,
        _volume: &PassthroughParts,
        _spec: &Volume,
        _pod: &PodView,
    ) -> Result<bool, RefreshFailure> {
        Ok(true)
    }

    /// Called right after the volume was mounted.
    fn complete(&mut self, _volume: &PassthroughParts, _spec: &Volume, _pod: &PodView) -> Result<(), RefreshFailure> {
        Ok(())
    }

    /// Called at each refresh of a mounted volume, after a change of the pod's objects.
    fn follow(&mut self, _volume: &PassthroughParts, _spec: &Volume, _pod: &PodView) -> Result<(), RefreshFailure> {
        Ok(())
    }

    /// The most bytes that a volume which was mounted with a limit may take now.
    fn limit(&self, _spec: &Volume) -> Option<u64> {
        None
    }

    /// How long until podfs calls [`follow`](Self::follow) again without a change of an object.
    fn republish_in(&self) -> Option<Duration> {
        None
    }

    /// The outcome of the last growth of the source, if its claim does not report it.
    fn expansion(&self) -> Option<&Expansion> {
        None
    }

    /// Whether the pod alone uses the source, for all of its life.
    fn is_of_pod(&self) -> bool {
        false
    }

    /// Whether no container can have used the source so far.
    fn is_new(&self) -> bool {
        false
    }

    /// Called after the volume was unmounted. Releases what ends with the pod.
    fn take_down(self: Box<Self>, _volume: &PassthroughParts, _name: &str, _end: PodEnd) {}
}

/// What passthrough volumes of all kinds have in common.
pub(super) struct PassthroughParts {
    pub(super) setting: VolumeContext,
    /// Where the volume is, once podfs has looked for its source.
    pub(super) path: Option<PathBuf>,
    /// A group that containers need to use the volume.
    pub(super) group: Option<u32>,
}

impl PassthroughParts {
    /// Notes and returns the path of the volume, by its kind and name.
    fn place(&mut self, directory: &str, name: &str) -> PathBuf {
        let path = self.setting.site.volume(directory, name);
        self.path = Some(path.clone());
        path
    }
}

/// A passthrough volume, which is mounted once its source is found.
pub(super) struct PassthroughVolume {
    common: PassthroughParts,
    source: Box<dyn PassthroughSource>,
    mounted: Option<VisibleVolume>,
    /// A mount whose source or server is gone, until a new one covers it.
    outdated: Option<VisibleVolume>,
}

/// Fields are dropped in this order, so that the volume is no longer visible when its server is released.
struct VisibleVolume {
    visible: VisibleMount,
    access: ContainerAccess,
    /// The volume of the pod's server; `None` for a bind mount, which the kernel alone serves.
    served: Option<MountedVolume>,
}

impl VisibleVolume {
    fn shown(&self) -> ShownContent {
        let Some(volume) = &self.served else { return ShownContent::Bind };
        match (volume.kind(), volume.data_path()) {
            (VolumeKind::Nfs, _) => ShownContent::Nfs(Backend::User),
            _ if volume.is_remote() => ShownContent::Nfs(Backend::Kernel),
            (_, DataPath::Kernel) => ShownContent::Passthrough,
            (_, DataPath::Server) => ShownContent::ReadWrite,
        }
    }

    /// Whether podfs gave it up, because no successor of its dead server could take it over.
    fn is_given_up(&self) -> bool {
        self.served.as_ref().is_some_and(MountedVolume::is_given_up)
    }
}

/// A planned mount.
pub(super) struct MountPlan {
    pub(super) path: PathBuf,
    pub(super) content: PlannedContent,
    pub(super) access: ContainerAccess,
    pub(super) selinux_context: Option<String>,
    /// The lock of a volume that one pod alone may use. Held until the mount is in the mount table.
    pub(super) turn: Option<NeighbourLock>,
}

impl MountPlan {
    /// A plan for a source of the host, which FUSE or the kernel alone serves.
    fn of_host(
        spec: &Volume,
        path: PathBuf,
        source: HostSource,
        access: ContainerAccess,
    ) -> Result<MountPlan, RefreshFailure> {
        let served_by = serve::choose(&source, spec.preferences.served_by, &path)?;
        let content = PlannedContent::Source { source, served_by, limit: None, remote: None };
        Ok(MountPlan { path, content, access, selinux_context: None, turn: None })
    }
}

/// The content of a planned mount.
pub(super) enum PlannedContent {
    /// A source on this node, or an export that the kernel has mounted; `remote` is the identity of calls to its
    /// server.
    Source { source: HostSource, served_by: ServedBy, limit: Option<u64>, remote: Option<ActAs> },
    /// An export, by podfs's own client.
    Export(Box<ReachedExport>),
}

impl From<HostError> for RefreshFailure {
    fn from(error: HostError) -> RefreshFailure {
        RefreshFailure::Temporary(error.to_string())
    }
}

impl Mounter for PassthroughVolume {
    fn setting(&self) -> &VolumeContext {
        &self.common.setting
    }

    fn path(&self) -> Option<&Path> {
        self.common.path.as_deref()
    }

    fn group(&self) -> Option<u32> {
        self.common.group
    }

    /// False until it is mounted.
    fn is_read_only(&self) -> bool {
        self.mounted.as_ref().is_some_and(|mounted| mounted.access == ContainerAccess::ReadOnly)
    }

    fn shown(&self) -> Option<ShownContent> {
        self.mounted.as_ref().map(VisibleVolume::shown)
    }

    fn watch(&self) -> Option<VolumeObserver> {
        self.mounted.as_ref()?.served.as_ref().map(MountedVolume::watch)
    }

    fn visible(&mut self) -> Option<&mut VisibleMount> {
        self.mounted.as_mut().map(|mounted| &mut mounted.visible)
    }

    fn adopt(&mut self, kept: KeptVolume) {
        let KeptVolume { about, served, visible, .. } = kept;
        let Err(volume) = served.into_projection() else { return };
        let access = access(visible.is_read_only().or(about.read_only).unwrap_or_default());
        self.mounted = Some(VisibleVolume { visible, access, served: Some(volume) });
        self.common.path = Some(about.path);
        self.common.group = about.group;
    }

    fn show(&mut self, spec: &Volume, pod: &PodView, _: Option<Instant>) -> Result<ShownContent, RefreshFailure> {
        let Self { common, source, .. } = self;
        if let Some(mounted) = self.mounted.take_if(|mounted| mounted.is_given_up()) {
            self.outdated = Some(mounted);
        }
        if self.mounted.is_some() && !source.is_current(common, spec, pod)? {
            self.outdated = self.mounted.take();
        }
        if let Some(mounted) = &self.mounted {
            if let Some(served) = &mounted.served {
                served.set_limit(source.limit(spec));
            }
            source.follow(common, spec, pod)?;
            return Ok(mounted.shown());
        }
        let mount_plan = source.find(common, spec, pod)?;
        let mut mounted = self.mount(spec, mount_plan)?;
        let shown = mounted.shown();
        if let Some(outdated) = self.outdated.take() {
            mounted.visible.cover(outdated.visible);
        }
        self.mounted = Some(mounted);
        self.source.complete(&self.common, spec, pod)?;
        Ok(shown)
    }

    /// A bind mount has no private mount to clone: this drops it, and [`show`](Self::show) mounts it anew.
    fn show_again(&mut self) -> Result<(), RefreshFailure> {
        if let Some(bind) = self.mounted.take_if(|mounted| mounted.served.is_none()) {
            drop(bind);
        }
        let Some(mounted) = self.mounted.as_mut().filter(|mounted| !mounted.is_given_up()) else { return Ok(()) };
        let Some(volume) = &mounted.served else { return Ok(()) };
        let point = self.common.setting.prepare(mounted.visible.path(), volume.shape())?;
        mounted.visible.replace(volume.show(&point, mounted.access).map_err(RefreshFailure::of_mount)?);
        Ok(())
    }

    fn expansion(&self) -> Option<&Expansion> {
        self.source.expansion()
    }

    fn republish_in(&self) -> Option<Duration> {
        self.source.republish_in()
    }

    fn take_down(self: Box<Self>, volume: &str, end: PodEnd) -> Result<(), MountError> {
        let Self { common, source, mounted, outdated } = *self;
        let unmounted = mounted.or(outdated).map_or(Ok(()), |mounted| {
            let is_remote = mounted.served.as_ref().is_some_and(MountedVolume::is_remote);
            // The NFS server that it waits for may be unreachable, and after the pod's end no supervisor goes on with the
            // unmount.
            match is_remote && end == PodEnd::Clean {
                true => mounted.visible.unmount_and_abort(),
                false => mounted.visible.unmount(),
            }
        });
        source.take_down(&common, volume, end);
        unmounted
    }
}

impl PassthroughVolume {
    pub(super) fn new(source: Box<dyn PassthroughSource>, setting: VolumeContext) -> Self {
        let common = PassthroughParts { setting, path: None, group: None };
        Self { common, source, mounted: None, outdated: None }
    }

    fn mount(&self, spec: &Volume, mount_plan: MountPlan) -> Result<VisibleVolume, RefreshFailure> {
        let MountPlan { path, content, access, selinux_context, turn: _until_it_is_mounted } = mount_plan;
        let passing = |error: &dyn std::fmt::Display| RefreshFailure::Temporary(error.to_string());
        if let PlannedContent::Source { served_by: ServedBy::Bind, .. } = &content
            && let Some((_, visible)) =
                self.common.setting.mount_points().keep(&path).map_err(|error| passing(&error))?
        {
            // A supervisor before this one mounted it, and it needs no server.
            return Ok(VisibleVolume { visible, access, served: None });
        }
        let shape = match &content {
            PlannedContent::Source { source, .. } => source.shape(),
            PlannedContent::Export(_) => MountPointType::Directory,
        };
        let point = match &self.outdated {
            Some(outdated) if !outdated.visible.is_lost() => MountPoint::of_mount(outdated.visible.path()),
            _ => {
                let mut mount_points = self.common.setting.mount_points();
                mount_points.expect(&path, shape).map_err(|error| passing(&error))?;
                let point = mount_points.prepare(&path, shape);
                mount_points.record().map_err(|error| passing(&error))?;
                point
            }
        };
        let point = point.map_err(|error| passing(&error))?;
        let mount = MountOptions { selinux_context, shape };
        match content {
            PlannedContent::Source { source, served_by: ServedBy::Bind, .. } => {
                let attached = bind(source.as_fd(), access).and_then(|clone| point.attach_bind(&clone));
                Ok(VisibleVolume { visible: attached.map_err(|error| passing(&error))?, access, served: None })
            }
            PlannedContent::Source { source, served_by: ServedBy::Fuse, limit, remote } => {
                let options = self.passthrough_options(spec, limit, remote);
                let (server, identity) = (&self.common.setting.server, self.identity(spec, &point, access));
                let volume = MountedVolume::of_source(server, source.as_fd(), &options, &mount, &identity);
                let volume = volume.map_err(RefreshFailure::of_mount)?;
                let visible = volume.show(&point, access).map_err(RefreshFailure::of_mount)?;
                Ok(VisibleVolume { visible, access, served: Some(volume) })
            }
            PlannedContent::Export(export) => {
                let ReachedExport { options, sockets, attributes, .. } = *export;
                let (server, identity) = (&self.common.setting.server, self.identity(spec, &point, access));
                let volume = MountedVolume::of_export(server, sockets, &options, attributes, &mount, &identity);
                let volume = volume.map_err(RefreshFailure::of_mount)?;
                let visible = volume.show(&point, access).map_err(RefreshFailure::of_mount)?;
                Ok(VisibleVolume { visible, access, served: Some(volume) })
            }
        }
    }

    fn identity(&self, spec: &Volume, point: &MountPoint, access: ContainerAccess) -> VolumeIdentity {
        VolumeContext::identity(spec, point.path(), self.common.group, access)
    }

    fn passthrough_options(&self, spec: &Volume, limit: Option<u64>, remote: Option<ActAs>) -> PassthroughOptions {
        // Sockets in a source of the pod were made through it, and the listeners at sockets of an export are on other machines.
        let advice = (!self.source.is_of_pod() && remote.is_none()).then(|| {
            format!("to reach it, give the pod the annotation podfs.io/host-path.{}: bind", spec.name.as_str())
        });
        // Containers may still have files of older content open through an earlier mount.
        let nothing_else_changes = self.source.is_of_pod() && self.source.is_new() && self.outdated.is_none();
        PassthroughOptions {
            cache: match spec.preferences.cache {
                CacheMode::Auto if nothing_else_changes && limit.is_none() => CacheMode::Always,
                chosen => chosen,
            },
            exclusive: self.source.is_of_pod(),
            limit,
            trace: self.common.setting.trace,
            socket_advice: advice,
            remote,
            io_uring: self.common.setting.io_uring && remote.is_none(),
            ..PassthroughOptions::default()
        }
    }
}

pub(super) fn access(read_only: bool) -> ContainerAccess {
    if read_only { ContainerAccess::ReadOnly } else { ContainerAccess::ReadWrite }
}
