//! The planned mount of a volume that shows a source as it is.

use std::path::PathBuf;

use podfs_fuse::caller::credentials::ActAs;
use podfs_fuse::mount::private::ContainerAccess;

use super::RefreshFailure;
use super::nfs::ReachedExport;
use crate::host::HostSource;
use crate::host::serve::{self, SourceForm};
use crate::host::volume_users::VolumeUsersLock;
use crate::volume::Volume;

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
    /// A plan for a source of the node. Chooses its form. `is_path` is whether the volume is a path of the node, in which daemons may have
    /// sockets.
    pub(super) fn of_host(
        spec: &Volume,
        path: PathBuf,
        source: HostSource,
        access: ContainerAccess,
        is_path: bool,
    ) -> Result<MountPlan, RefreshFailure> {
        let form = serve::choose(&source, spec.preferences.served_by, &path, is_path)?;
        let content = PlannedContent::Source { source, form, limit: None, remote: None };
        Ok(MountPlan { path, content, access, selinux_context: None, lock: None })
    }
}

/// The content of a planned mount.
pub(super) enum PlannedContent {
    /// A source on this node, or an export that the kernel's NFS client has mounted. `remote` is for an export: the identity with
    /// which the server accesses it.
    Source { source: HostSource, form: SourceForm, limit: Option<u64>, remote: Option<ActAs> },
    /// An export that podfs's own NFS client serves.
    Export(Box<ReachedExport>),
}

/// The access of containers to a volume.
pub(super) fn access(read_only: bool) -> ContainerAccess {
    if read_only { ContainerAccess::ReadOnly } else { ContainerAccess::ReadWrite }
}
