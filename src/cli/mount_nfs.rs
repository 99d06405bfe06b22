//! `podfs mount-nfs`: mounts an NFS export. Supervisors start it; it is not for people.

use clap::Args;

use super::exit::Failure;
use crate::supervisor::program::mount_nfs;

/// Mount an NFS export for a supervisor, which is at the other end of standard input.
#[derive(Args)]
pub(super) struct MountNfs {}

impl MountNfs {
    pub(super) fn execute(self) -> Result<(), Failure> {
        mount_nfs()
    }
}
