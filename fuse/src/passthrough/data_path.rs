//! Whether the kernel or the server reads and writes files: what the kernel offers, and what the region records for a successor.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Acquire;

use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::open_node::BackingId;
use crate::region::Region;
use crate::session::Session;
use crate::session::abi::init;

/// Whether the kernel or the server reads and writes files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DataPath {
    /// Reads and writes go from the kernel to the source (`FUSE_PASSTHROUGH`, Linux 6.9).
    Kernel,
    /// The server reads and writes.
    Server,
}

impl DataPath {
    /// Returns the data path that the kernel offers: `Kernel` if it accepts a file of this process as a backing file.
    pub(super) fn probe(session: &Session) -> Self {
        if session.accepted() & init::PASSTHROUGH == 0 {
            return Self::Server;
        }
        let device = session.device();
        let file = memfd_create(c"probe", MemfdFlags::CLOEXEC);
        let backed = file.and_then(|file| BackingId::open(&device, file.as_fd())).map(|id| id.close(&device));
        if backed.is_ok() { Self::Kernel } else { Self::Server }
    }

    /// The data path that a server of the volume has recorded.
    pub(crate) fn recorded(region: &Region) -> Option<Self> {
        Self::from_word(region.header().counters.data_path.load(Acquire))
    }

    /// The word for the data path in the region's header.
    pub(super) fn to_word(self) -> u32 {
        match self {
            Self::Kernel => 1,
            Self::Server => 2,
        }
    }

    fn from_word(word: u32) -> Option<Self> {
        [Self::Kernel, Self::Server].into_iter().find(|path| path.to_word() == word)
    }
}
