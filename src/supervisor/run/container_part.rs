//! The part of one volume in an operation for a container, which a blocking thread carries out.

use std::path::PathBuf;

use tracing::warn;

use crate::manifest::PodView;
use crate::supervisor::volume::PodVolume;
use crate::supervisor::volume::sub_path::{PartError, SubPathRequest};

/// The part of a volume in an operation.
pub(super) enum ContainerOperationPart {
    /// Follow the path of the volume for this container, and mount these subPaths.
    Prepare { container: String, sub_paths: Vec<SubPathRequest> },
    /// Note that a container has started without a look at the path.
    StartedBefore,
    /// End earlier mounts that only this container, or any container (`None`), may use, and unmount its subPaths.
    Release { container: Option<String>, has_sub_paths: bool },
}

impl ContainerOperationPart {
    /// Whether the operation can go on without this part: the container starts with what the volume has mounted, or has ended.
    pub(super) fn can_be_late(&self) -> bool {
        match self {
            ContainerOperationPart::Prepare { sub_paths, .. } => sub_paths.is_empty(),
            ContainerOperationPart::StartedBefore => true,
            ContainerOperationPart::Release { has_sub_paths, .. } => !has_sub_paths,
        }
    }

    /// Whether it is not worth to carry out both late parts of one volume.
    pub(super) fn says_the_same(&self, other: &ContainerOperationPart) -> bool {
        match (self, other) {
            (ContainerOperationPart::StartedBefore, ContainerOperationPart::StartedBefore) => true,
            (
                ContainerOperationPart::Release { container: one, .. },
                ContainerOperationPart::Release { container: other, .. },
            ) => one == other,
            _ => false,
        }
    }

    /// The part that is left when the operation has gone on without this one.
    pub(super) fn late(self) -> ContainerOperationPart {
        match self {
            ContainerOperationPart::Prepare { .. } => ContainerOperationPart::StartedBefore,
            part => part,
        }
    }

    /// Logs what the operation goes on without.
    pub(super) fn warn_late(&self, volume: &str) {
        if let ContainerOperationPart::Prepare { container, .. } = self {
            warn!("volume {volume:?} is busy; container {container:?} gets what podfs has mounted before");
        }
    }

    /// Carries out the part. Returns the mount points of subPaths, each with the index of the container's mount.
    pub(super) fn carry_out(self, volume: &mut PodVolume, view: &PodView) -> Result<Vec<(usize, PathBuf)>, PartError> {
        match self {
            ContainerOperationPart::Prepare { container, sub_paths } => {
                volume.follow_path(view, &container).map_err(PartError::Path)?;
                let prepare = |request: &SubPathRequest| Ok((request.index, volume.prepare_sub_path(request)?));
                sub_paths.iter().map(prepare).collect()
            }
            ContainerOperationPart::StartedBefore => {
                volume.keep_earlier_mounts();
                Ok(Vec::new())
            }
            ContainerOperationPart::Release { container, has_sub_paths } => {
                volume.release_container(container.as_deref());
                if has_sub_paths {
                    volume.release_sub_paths(container.as_deref())?;
                }
                Ok(Vec::new())
            }
        }
    }
}
