//! `podfs mount-nfs`: mounts an NFS export. Supervisors start it; it is not for people.

use anyhow::anyhow;
use clap::Args;

use super::exit::Failure;
use crate::host::kernel_nfs::mounter;

/// Mount an NFS export for a supervisor, which is at the other end of standard input.
#[derive(Args)]
pub(super) struct MountNfs {}

impl MountNfs {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let socket = rustix::io::dup(rustix::stdio::stdin()).map_err(anyhow::Error::new);
        let answered = socket.and_then(|socket| mounter::answer(socket).map_err(anyhow::Error::new));
        answered.map_err(|error| Failure::general(anyhow!("cannot report the outcome of the mount: {error}")))
    }
}
