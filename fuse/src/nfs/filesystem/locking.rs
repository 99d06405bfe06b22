//! Locks. podfs takes no locks at the server: NFSv3 has a separate protocol for that (NLM). With the mount option `nolock` the
//! kernel keeps locks for this mount alone, and sends no lock requests. Without the option podfs refuses locks, because a lock
//! that excludes no other client would be worse than none.

use rustix::io::Errno;

use super::{NfsAnswer, NfsFilesystem};
use crate::session::Answer;
use crate::session::abi::LkIn;

impl NfsFilesystem {
    pub(super) fn set_lock(&self, arguments: &LkIn) -> Result<NfsAnswer, Errno> {
        if arguments.lk.typ == libc::F_UNLCK as u32 {
            return Ok(Answer::Done.into());
        }
        Err(self.no_locks())
    }

    /// The errno for a lock. Logs once that podfs takes no locks at the server.
    pub(super) fn no_locks(&self) -> Errno {
        if !self.is_locking_logged.replace(true) {
            let (volume, server) = (self.options.name.as_str(), &self.options.export.server);
            tracing::warn!(
                volume,
                "volume {volume:?}: a program wants to lock a file of NFS server {server}, and gets ENOLCK: podfs locks \
                 nothing at the server; give the volume the mount option nolock if locks within this pod are enough"
            );
        }
        Errno::NOLCK
    }
}
