//! Parts of the volume that podfs mounts for containers (`subPath`). A part is a file or a directory of the volume.
//!
//! 1. The volume's blocking thread opens the part, because that may wait for the server or the source. The thread owns the volume,
//!    so no commit switches generations meanwhile (SP-07).
//! 2. podfs mounts the open file or directory, by its descriptor. It sets the flags of the mount before it attaches the mount. See
//!    [`host::sub_path`](crate::host::sub_path) for why the part is never outside of the volume.
//! 3. podfs records the mount point before it mounts anything on it, so the next podfs of the pod and `podfs cleanup` find it.
//! 4. A container that starts again keeps its mount if the mount still shows the same file (SP-10). Otherwise it gets a new mount
//!    (SP-06).
//! 5. podfs unmounts parts before their volume (SP-09).
//! 6. A mount that a container makes in its part appears in the volume if the volumeMount has `Bidirectional` propagation, and
//!    stays there when podfs unmounts the part.
//! 7. A part of a projection may be live: then it changes with each commit, and does not belong to a generation. A path that
//!    begins with the name of a generation is never live.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use podfs_fuse::client::{CommitError, LivePartError};
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::bind::{ClonePropagation, bind_alone};
use podfs_fuse::mount::private::{ContainerAccess, MountPointType};
use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxAttributes, StatxFlags, statx};
use tracing::{debug, error};

use super::removal_error::{RemovalCause, RemovalError};
use super::{PodVolume, VolumeContext, VolumeLife};
use crate::host::sub_path::{self, IfMissing, SubPathError};
use crate::supervisor::run_dir::mount_points::MountPointsError;
use crate::volume::{SubPathMode, VolumeSource};

/// A container's request for a part of the volume.
#[derive(Clone, Debug)]
pub(in crate::supervisor) struct SubPathRequest {
    /// The volume's name in the `volumeMount`, for messages.
    pub(in crate::supervisor) volume: String,
    /// The container's name, a DNS label.
    pub(in crate::supervisor) container: String,
    /// The index of the `volumeMount` in the container.
    pub(in crate::supervisor) index: usize,
    /// The path of the part in the volume: relative, and without `..`.
    pub(in crate::supervisor) path: String,
    /// Whether the container can only read the part.
    pub(in crate::supervisor) read_only: bool,
    /// Whether mounts that the container makes in the part appear in the volume, too (`Bidirectional`).
    pub(in crate::supervisor) both_ways: bool,
}

/// Why a volume fails in its part of an operation.
#[derive(Debug, thiserror::Error)]
pub(in crate::supervisor) enum PartError {
    /// The part cannot be mounted. The sentence is for the pod's user, so it has no text that could name paths of the node.
    #[error("{sentence}")]
    Prepare {
        sentence: String,
        #[source]
        trouble: SubPathTrouble,
    },
    /// What the path of the volume leads to now cannot be mounted. The sentence is for the pod's user.
    #[error("{0}")]
    Path(String),
    #[error(transparent)]
    Release(#[from] RemovalError),
}

/// Why a part cannot be mounted.
#[derive(Debug, thiserror::Error)]
pub(in crate::supervisor) enum SubPathTrouble {
    #[error("{}", not_there(.0))]
    NotThere(Option<String>),
    #[error(transparent)]
    SubPath(#[from] SubPathError),
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error(transparent)]
    Commit(#[from] CommitError),
    #[error(transparent)]
    MountPoints(#[from] MountPointsError),
}

fn not_there(reason: &Option<String>) -> String {
    format!("it is not mounted{}", reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default())
}

impl PodVolume {
    /// Mounts a part of the volume for a container, and returns the mount point.
    ///
    /// # Errors
    /// A sentence for the pod's user, in the kubelet's words. It has no text that could name paths of the node; the log has the
    /// whole error.
    pub(in crate::supervisor) fn prepare_sub_path(&mut self, request: &SubPathRequest) -> Result<PathBuf, PartError> {
        let _span = self.enter_span();
        self.mount_sub_path(request).map_err(|trouble| {
            let SubPathRequest { volume, container, path, .. } = request;
            error!("subPath {path:?} of volume {volume:?} for container {container:?}: {trouble}");
            let problem = match &trouble {
                SubPathTrouble::SubPath(SubPathError::Make(_)) => "failed to create subPath directory",
                _ => "failed to prepare subPath",
            };
            let reason = match &trouble {
                SubPathTrouble::SubPath(SubPathError::Make(_) | SubPathError::Open(_)) => String::new(),
                SubPathTrouble::SubPath(error) => format!(": {error}"),
                SubPathTrouble::NotThere(_) => format!(": {trouble}"),
                SubPathTrouble::Mount(_) | SubPathTrouble::Commit(_) | SubPathTrouble::MountPoints(_) => String::new(),
            };
            let sentence = format!("{problem} for volumeMount {volume:?} of container {container:?}{reason}");
            PartError::Prepare { sentence, trouble }
        })
    }

    /// Unmounts the parts of the volume for this container, or for all containers (`None`).
    ///
    /// # Errors
    /// When the kernel does not unmount a part, or the record cannot be written.
    pub(in crate::supervisor) fn release_sub_paths(&self, container: Option<&str>) -> Result<(), RemovalError> {
        let _span = self.enter_span();
        let Some(top) = self.setting().site.sub_paths() else { return Ok(()) };
        let of_volume = top.join(self.spec.name.as_str());
        let directory = container.map_or_else(|| of_volume.clone(), |container| of_volume.join(container));
        let removed = self.setting().mount_points().remove_targets(&directory, &top);
        let volume = self.spec.name.to_string();
        removed.map_err(|error| RemovalError::Volume { volume, cause: RemovalCause::SubPath(error) })
    }

    fn mount_sub_path(&mut self, request: &SubPathRequest) -> Result<PathBuf, SubPathTrouble> {
        let reason = self.state.reason().map(str::to_owned);
        let if_missing = match self.spec.source {
            VolumeSource::Projection(_) => IfMissing::Refuse,
            _ => IfMissing::Make,
        };
        if matches!(self.state, VolumeLife::Hidden(..)) {
            return Err(SubPathTrouble::NotThere(reason));
        }
        let (part, is_mount) = match self.live_part(&request.path) {
            Some(part) => (part?, true),
            None => {
                let root = self.visible().ok_or(SubPathTrouble::NotThere(reason))?.open()?;
                (sub_path::open(root.as_fd(), &request.path, if_missing)?, false)
            }
        };
        let setting = self.setting();
        let top = setting.site.sub_paths().ok_or(SubPathTrouble::NotThere(None))?;
        let target = top.join(self.spec.name.as_str()).join(&request.container).join(request.index.to_string());
        if setting.mount_points().has_target(&target) && shows(&target, &part) {
            debug!("{} shows {:?} already", target.display(), request.path);
            return Ok(target);
        }
        let access = if request.read_only { ContainerAccess::ReadOnly } else { ContainerAccess::ReadWrite };
        let shape = shape(&part)?;
        let propagation = if request.both_ways { ClonePropagation::Peer } else { ClonePropagation::Slave };
        let clone = if is_mount { part } else { bind_alone(part.as_fd(), access, propagation)? };
        let mut mount_points = setting.mount_points();
        let point = mount_points.prepare_target(&target, shape)?;
        // The record has the path of the mount, so podfs can forget this value without unmounting.
        point.attach(&clone)?.lose();
        Ok(target)
    }

    /// A mount of the part, if it is live.
    fn live_part(&mut self, path: &str) -> Option<Result<OwnedFd, SubPathTrouble>> {
        let preferences = &self.spec.preferences;
        let mode = preferences.sub_path.unwrap_or(self.setting().sub_path);
        let of_generation = path.starts_with("..") && path != "..data" && !path.starts_with("..data/");
        let is_live = mode == SubPathMode::Live && !preferences.audit && !of_generation;
        let part = is_live.then(|| self.mounter.live_part(path)).flatten()?;
        Some(part.map_err(|error| match error {
            LivePartError::Missing(path) => SubPathError::Missing(path).into(),
            LivePartError::NotADirectory(path) => SubPathError::NotADirectory(path).into(),
            LivePartError::Mount(error) => error.into(),
            LivePartError::Update(error) => error.into(),
        }))
    }

    pub(super) fn setting(&self) -> &VolumeContext {
        self.mounter.setting()
    }
}

/// Whether the mount at `target` shows the file or directory that `part` is open on (SP-10).
fn shows(target: &Path, part: &OwnedFd) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let (Ok(target), Ok(part)) = (statx(CWD, target, flags, StatxFlags::INO), status(part)) else { return false };
    let is_mounted = target.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    let file = |status: &Statx| (status.stx_dev_major, status.stx_dev_minor, status.stx_ino);
    is_mounted && file(&target) == file(&part)
}

/// The type of mount point for a part: a directory for a directory, and a file for every other type of file (SP-01).
fn shape(part: &OwnedFd) -> Result<MountPointType, SubPathTrouble> {
    let status = status(part).map_err(|errno| SubPathError::Open(errno.into()))?;
    let is_directory = FileType::from_raw_mode(status.stx_mode.into()) == FileType::Directory;
    Ok(if is_directory { MountPointType::Directory } else { MountPointType::File })
}

fn status(part: &OwnedFd) -> rustix::io::Result<Statx> {
    statx(part, c"", AtFlags::EMPTY_PATH, StatxFlags::INO | StatxFlags::TYPE)
}
