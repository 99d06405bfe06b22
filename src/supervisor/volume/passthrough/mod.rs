//! A volume that shows a source of the node or of an NFS server as it is. podfs finds and opens the source, then mounts it once.
//!
//! The mount stays as it is: a later change of the manifests has an effect only on pods that start later. If the path of a hostPath
//! leads to another file or directory when a container is prepared, this container and later ones get a mount of that one
//! ([`earlier`]).
//!
//! | module | owns |
//! |---|---|
//! | `host_path` | hostPath volumes: files and directories of the node |
//! | `empty_dir` | emptyDirs, which belong to the pod |
//! | `claim` | PersistentVolumes |
//! | `nfs` | nfs volumes: exports of NFS servers |
//! | `earlier` | mounts of a volume whose path leads elsewhere now |
//! | `flex`, `csi` | volumes that a driver of another vendor mounts |

pub(super) mod claim;
pub(super) mod csi;
mod earlier;
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
use podfs_fuse::mount::point::MountPoint;
use podfs_fuse::mount::private::{ContainerAccess, MountOptions, MountPointType};
use podfs_fuse::mount::visible::VisibleMount;
use podfs_fuse::passthrough::{CacheMode, DataPath, PassthroughOptions};
use podfs_fuse::region::VolumeKind;
use rustix::fs::{FileType, fstat};
use tracing::{info, warn};

use self::earlier::EarlierMounts;
use super::growth::Expansion;
use super::mount_plan::{MountPlan, PlannedContent, access};
use super::mounter::Mounter;
use super::nfs::ReachedExport;
use super::{PodEnd, RefreshFailure, ShownContent, VolumeContext};
use crate::host::HostSource;
use crate::host::serve::{BindReason, SourceForm};
use crate::manifest::PodView;
use crate::manifest::pod::PodIdentity;
use crate::supervisor::volume::adopted::KeptVolume;
use crate::volume::Volume;
use crate::volume::nfs_options::Backend;

/// A kind of volume that shows a source as it is.
pub(super) trait PassthroughSource: Send {
    /// Finds the source and plans the mount of a volume that is not mounted.
    fn find(
        &mut self,
        volume: &mut PassthroughParts,
        spec: &Volume,
        pod: &PodView,
    ) -> Result<MountPlan, RefreshFailure>;

    /// Whether the mount still shows the source. If it does not, podfs finds and mounts the source anew.
    fn is_current(
        &mut self,
        _volume: &PassthroughParts,
        _spec: &Volume,
        _pod: &PodView,
    ) -> Result<bool, RefreshFailure> {
        Ok(true)
    }

    /// What the path of the volume leads to now, if a container that starts gets that. `None` if it gets the mounted source.
    fn follow_path(
        &mut self,
        _: &PassthroughParts,
        _: &Volume,
        _: &PodView,
    ) -> Result<Option<HostSource>, RefreshFailure> {
        Ok(None)
    }

    /// A hook that podfs calls right after it has mounted the volume.
    fn complete(&mut self, _volume: &PassthroughParts, _spec: &Volume, _pod: &PodView) -> Result<(), RefreshFailure> {
        Ok(())
    }

    /// A hook that podfs calls at each refresh of a mounted volume, for example after a change of the pod's objects.
    fn follow(&mut self, _volume: &PassthroughParts, _spec: &Volume, _pod: &PodView) -> Result<(), RefreshFailure> {
        Ok(())
    }

    /// Most bytes that the volume may take now, for a volume that was mounted with a limit.
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

    /// Releases what ends with the pod. podfs calls it after it has unmounted the volume.
    fn take_down(self: Box<Self>, _volume: &PassthroughParts, _name: &str, _end: PodEnd) {}
}

/// The data that passthrough volumes of all kinds have in common.
pub(super) struct PassthroughParts {
    pub(super) setting: VolumeContext,
    /// The path at which the volume is, or will be, mounted; known once podfs has looked for the source.
    pub(super) path: Option<PathBuf>,
    /// A group that containers need to use the volume.
    pub(super) group: Option<u32>,
}

impl PassthroughParts {
    /// Sets and returns the path of the volume. `directory` is the kubelet's directory for the volume's plugin.
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
    /// The last mount, if it no longer shows the source or was given up, until a new mount covers it.
    outdated: Option<VisibleVolume>,
    earlier: EarlierMounts,
}

/// Fields are dropped in this order, so that the volume is no longer visible when its server is released.
struct VisibleVolume {
    visible: VisibleMount,
    access: ContainerAccess,
    /// The volume of the pod's server; for a bind mount, which the kernel alone serves, its reason.
    served: Result<MountedVolume, BindReason>,
}

impl VisibleVolume {
    fn shown(&self) -> ShownContent {
        let volume = match &self.served {
            Ok(volume) => volume,
            Err(reason) => return ShownContent::Bind(*reason),
        };
        match (volume.kind(), volume.data_path()) {
            (VolumeKind::Nfs, _) => ShownContent::Nfs(Backend::User),
            _ if volume.is_remote() => ShownContent::Nfs(Backend::Kernel),
            (_, DataPath::Kernel) => ShownContent::Passthrough,
            (_, DataPath::Server) => ShownContent::ReadWrite,
        }
    }

    /// The type of the root of the mount, if it is visible.
    fn shape(&self) -> Option<MountPointType> {
        if let Ok(served) = &self.served {
            return Some(served.shape());
        }
        let root = self.visible.open().ok().and_then(|root| fstat(root).ok())?;
        Some(match FileType::from_raw_mode(root.st_mode) {
            FileType::Directory => MountPointType::Directory,
            _ => MountPointType::File,
        })
    }

    /// Whether the mount shows this file or directory of the node. The mount holds its source, so no other file can have the same inode
    /// number.
    fn shows(&self, source: &HostSource) -> bool {
        let shown = match &self.served {
            Ok(served) => served.source(),
            Err(_) => self.visible.open().ok().and_then(|root| fstat(root).ok()).map(|root| (root.st_dev, root.st_ino)),
        };
        shown.is_some() && shown == fstat(source).ok().map(|source| (source.st_dev, source.st_ino))
    }

    /// Whether a takeover has given the volume up: the successor of its dead server could not continue it.
    fn is_given_up(&self) -> bool {
        self.served.as_ref().is_ok_and(MountedVolume::is_given_up)
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

    /// Whether containers can only read the volume; false until it is mounted.
    fn is_read_only(&self) -> bool {
        self.mounted.as_ref().is_some_and(|mounted| mounted.access == ContainerAccess::ReadOnly)
    }

    fn shown(&self) -> Option<ShownContent> {
        self.mounted.as_ref().map(VisibleVolume::shown)
    }

    fn watch(&self) -> Option<VolumeObserver> {
        self.mounted.as_ref()?.served.as_ref().ok().map(MountedVolume::watch)
    }

    fn visible(&mut self) -> Option<&mut VisibleMount> {
        self.mounted.as_mut().map(|mounted| &mut mounted.visible)
    }

    fn adopt(&mut self, kept: KeptVolume) {
        let KeptVolume { record, served, visible, earlier, .. } = kept;
        let Err(volume) = served.into_projection() else { return };
        self.earlier = EarlierMounts::adopted(earlier.into_iter().filter_map(|mount| mount.into_projection().err()));
        let access = access(visible.is_read_only().or(record.read_only).unwrap_or_default());
        self.mounted = Some(VisibleVolume { visible, access, served: Ok(volume) });
        self.common.path = Some(record.path);
        self.common.group = record.group;
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
            if let Ok(served) = &mounted.served {
                served.set_limit(source.limit(spec));
            }
            source.follow(common, spec, pod)?;
            return Ok(mounted.shown());
        }
        let mount_plan = source.find(common, spec, pod)?;
        let outdated = self.outdated.as_ref().filter(|outdated| !outdated.visible.is_lost());
        let point = outdated.map(|outdated| MountPoint::of_mount(outdated.visible.path())).transpose();
        let point = point.map_err(RefreshFailure::temporary)?;
        let mut mounted = self.mount(spec, &pod.identity, mount_plan, point)?;
        let shown = mounted.shown();
        if let Some(outdated) = self.outdated.take() {
            mounted.visible.cover(outdated.visible);
        }
        self.mounted = Some(mounted);
        self.source.complete(&self.common, spec, pod)?;
        Ok(shown)
    }

    /// Replaces the mount by another clone of the volume's private mount. A bind mount has no private mount: this drops it, and
    /// [`show`](Self::show) mounts it anew.
    fn show_again(&mut self) -> Result<(), RefreshFailure> {
        if let Some(bind) = self.mounted.take_if(|mounted| mounted.served.is_err()) {
            drop(bind);
        }
        let Some(mounted) = self.mounted.as_mut().filter(|mounted| !mounted.is_given_up()) else { return Ok(()) };
        let Ok(volume) = &mounted.served else { return Ok(()) };
        let point = self.common.setting.prepare(mounted.visible.path(), volume.shape())?;
        mounted.visible.replace(volume.show(&point, mounted.access).map_err(RefreshFailure::of_mount)?);
        Ok(())
    }

    fn follow_path(&mut self, spec: &Volume, pod: &PodView, container: &str) -> Result<bool, RefreshFailure> {
        let moved = self.show_path(spec, pod);
        if moved.is_ok() {
            self.earlier.prepare(container);
        }
        moved
    }

    fn keep_earlier_mounts(&mut self) {
        self.earlier.keep();
    }

    fn release_container(&mut self, container: Option<&str>) {
        self.earlier.release(container);
    }

    fn expansion(&self) -> Option<&Expansion> {
        self.source.expansion()
    }

    fn republish_in(&self) -> Option<Duration> {
        self.source.republish_in()
    }

    fn take_down(self: Box<Self>, volume: &str, end: PodEnd) -> Result<(), MountError> {
        let Self { common, source, mounted, outdated, earlier: _ended } = *self;
        let unmounted = mounted.or(outdated).map_or(Ok(()), |mounted| {
            let is_remote = mounted.served.as_ref().is_ok_and(MountedVolume::is_remote);
            // The unmount may wait for an NFS server that cannot be reached. After the pod's end, no supervisor tries it again.
            match is_remote && end == PodEnd::Stopped {
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
        Self { common, source, mounted: None, outdated: None, earlier: EarlierMounts::default() }
    }

    /// Mounts what the path leads to now in place of the present mount. Returns whether that is another file or directory.
    fn show_path(&mut self, spec: &Volume, pod: &PodView) -> Result<bool, RefreshFailure> {
        let can_follow = |mounted: &&VisibleVolume| mounted.visible.open().is_ok() && !mounted.is_given_up();
        let Some(mounted) = self.mounted.as_ref().filter(can_follow) else { return Ok(false) };
        let found = self.source.follow_path(&self.common, spec, pod)?;
        let Some(source) = found.filter(|source| !mounted.shows(source)) else { return Ok(false) };
        let path = mounted.visible.path().to_owned();
        let (has_same_shape, access) = (mounted.shape() == Some(source.shape()), mounted.access);
        let mount_plan = MountPlan::of_host(spec, path, source, access, true)?;
        let Some(old) = self.mounted.take() else { return Ok(false) };
        if has_same_shape {
            let point = MountPoint::beneath(&old.visible).map_err(RefreshFailure::temporary);
            let mounted = point.and_then(|point| self.mount(spec, &pod.identity, mount_plan, Some(point)));
            let mut new = match mounted {
                Ok(new) => new,
                Err(error) => {
                    self.mounted = Some(old);
                    return Err(error);
                }
            };
            new.visible.take_place_of(old.visible).unwrap_or_else(|error| warn!("{error}"));
            self.mounted = Some(new);
            old.served.into_iter().for_each(|served| self.earlier.replace(served));
        } else {
            // Running containers keep the mount, whatever fails from here on.
            old.served.into_iter().for_each(|served| self.earlier.replace(served));
            // A directory cannot be mounted on a file, nor a file on a directory, so the path has nothing for a moment.
            let (setting, path) = (&self.common.setting, old.visible.path().to_owned());
            old.visible.unmount().map_err(RefreshFailure::temporary)?;
            let forgotten = setting.mount_points().forget(&path, None, setting.site.path());
            forgotten.map_err(RefreshFailure::temporary)?;
            self.mounted = Some(self.mount(spec, &pod.identity, mount_plan, None)?);
        }
        info!(
            earlier_mounts = self.earlier.len(),
            "the path of volume {:?} leads to another file or directory now; containers that start from now on get that one",
            spec.name.as_str()
        );
        Ok(true)
    }

    /// Mounts the volume as planned, at `point` if there is an earlier mount. Otherwise adopts a bind mount of an earlier supervisor
    /// instead, if there is one.
    fn mount(
        &self,
        spec: &Volume,
        pod: &PodIdentity,
        mount_plan: MountPlan,
        point: Option<MountPoint>,
    ) -> Result<VisibleVolume, RefreshFailure> {
        let MountPlan { path, content, access, selinux_context, lock: _until_it_is_mounted } = mount_plan;
        if point.is_none()
            && let PlannedContent::Source { form: SourceForm::Bind(reason), .. } = &content
            && let Some((_, visible)) =
                self.common.setting.mount_points().adopt(&path).map_err(RefreshFailure::temporary)?
        {
            // An earlier supervisor has made the bind mount, which needs no server.
            return Ok(VisibleVolume { visible, access, served: Err(*reason) });
        }
        let shape = match &content {
            PlannedContent::Source { source, .. } => source.shape(),
            PlannedContent::Export(_) => MountPointType::Directory,
        };
        let point = match point {
            Some(point) => point,
            None => {
                let mut mount_points = self.common.setting.mount_points();
                mount_points.expect(&path, shape).map_err(RefreshFailure::temporary)?;
                let point = mount_points.prepare(&path, shape);
                mount_points.record().map_err(RefreshFailure::temporary)?;
                point.map_err(RefreshFailure::temporary)?
            }
        };
        let mount = MountOptions { selinux_context, shape };
        match content {
            PlannedContent::Source { source, form: SourceForm::Bind(reason), .. } => {
                let attached = bind(source.as_fd(), access).and_then(|clone| point.attach_bind(&clone));
                Ok(VisibleVolume { visible: attached.map_err(RefreshFailure::temporary)?, access, served: Err(reason) })
            }
            PlannedContent::Source { source, form: SourceForm::Fuse, limit, remote } => {
                let options = self.passthrough_options(spec, limit, remote);
                let (server, identity) = (&self.common.setting.server, self.identity(spec, pod, &point, access));
                let volume = MountedVolume::of_source(server, source.as_fd(), &options, &mount, &identity);
                let volume = volume.map_err(RefreshFailure::of_mount)?;
                let visible = volume.show(&point, access).map_err(RefreshFailure::of_mount)?;
                Ok(VisibleVolume { visible, access, served: Ok(volume) })
            }
            PlannedContent::Export(export) => {
                let ReachedExport { options, sockets, attributes, .. } = *export;
                let (server, identity) = (&self.common.setting.server, self.identity(spec, pod, &point, access));
                let volume = MountedVolume::of_export(server, sockets, &options, attributes, &mount, &identity);
                let volume = volume.map_err(RefreshFailure::of_mount)?;
                let visible = volume.show(&point, access).map_err(RefreshFailure::of_mount)?;
                Ok(VisibleVolume { visible, access, served: Ok(volume) })
            }
        }
    }

    fn identity(
        &self,
        spec: &Volume,
        pod: &PodIdentity,
        point: &MountPoint,
        access: ContainerAccess,
    ) -> VolumeIdentity {
        VolumeContext::identity(spec, pod, point.path(), self.common.group, access)
    }

    fn passthrough_options(&self, spec: &Volume, limit: Option<u64>, remote: Option<ActAs>) -> PassthroughOptions {
        // A socket in a source that only the pod uses was made through the volume, so it works. The process that listens on a
        // socket of an export is on another machine, so a bind mount would not help.
        let advice = (!self.source.is_of_pod() && remote.is_none()).then(|| {
            format!("to reach it, give the pod the annotation podfs.io/host-path.{}: bind", spec.name.as_str())
        });
        // The kernel may cache the files for ever if all changes go through this volume. With an earlier mount, containers may
        // still have files open that they change without this volume.
        let has_all_changes = self.source.is_of_pod() && self.source.is_new() && self.outdated.is_none();
        PassthroughOptions {
            cache: match spec.preferences.cache {
                CacheMode::Auto if has_all_changes && limit.is_none() => CacheMode::Always,
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
