//! The planned mount of a volume that shows a source as it is.

use std::path::PathBuf;

use podfs_fuse::caller::credentials::ActAs;
use podfs_fuse::mount::private::ContainerAccess;

use super::RefreshFailure;
use super::nfs::ReachedExport;
use crate::host::volume_users::VolumeUsersLock;
use crate::host::{HostSource, serve};
use crate::volume::{ServedBy, Volume};

/// A planned mount.
pub(super) struct MountPlan {
    pub(super) path: PathBuf,
    pub(super) content: PlannedContent,
    pub(super) access: ContainerAccess,
    pub(super) selinux_context: Option<String>,
    /// The lock of a volume that one pod alone may use. podfs holds it until the mount is in the mount table.
    pub(super) lock: Option<VolumeUsersLock>,
}

impl MountPlan {
    /// A plan for a source of the node. Chooses whether the server serves it, or a bind mount shows it.
    pub(super) fn of_host(
        spec: &Volume,
        path: PathBuf,
        source: HostSource,
        access: ContainerAccess,
    ) -> Result<MountPlan, RefreshFailure> {
        let served_by = serve::choose(&source, spec.preferences.served_by, &path)?;
        let content = PlannedContent::Source { source, served_by, limit: None, remote: None };
        Ok(MountPlan { path, content, access, selinux_context: None, lock: None })
    }
}

/// The content of a planned mount.
pub(super) enum PlannedContent {
    /// A source on this node, or an export that the kernel's NFS client has mounted. `remote` is for an export: the identity with
    /// which the server accesses it.
    Source { source: HostSource, served_by: ServedBy, limit: Option<u64>, remote: Option<ActAs> },
    /// An export that podfs's own NFS client serves.
    Export(Box<ReachedExport>),
}

/// The access of containers to a volume.
pub(super) fn access(read_only: bool) -> ContainerAccess {
    if read_only { ContainerAccess::ReadOnly } else { ContainerAccess::ReadWrite }
}
