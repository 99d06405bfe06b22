//! Local volumes that the node offers: what is mounted, and which devices are, in directories that the operator names become
//! PersistentVolumes (`podfs node --discover CLASS=DIR`). A released one with the reclaim policy `Delete` is cleaned and offered again.
//!
//! | module | owns |
//! |---|---|
//! | `directory` | a class and its directory, as the operator says them |
//! | `entries` | what is in the directories: a cheap look |
//! | `wake` | a thread that looks again after each change |
//! | `inspection` | a thorough look at an entry, before it is offered or erased |
//! | `identity` | which file system or disk an entry is |
//! | `volume` | PersistentVolumes, as far as they matter here |
//! | `record` | what was begun to be cleaned, in a file |
//! | `plan` | from all of these to the next steps; a pure function |
//! | `clean` | erasing what a user has left |
//! | `board` | what the metrics tell |
//! | `provisioner` | the task that does the steps |
//!
//! Why no data of a user is lost, or seen by another user, whenever podfs is killed:
//!
//! 1. Podfs erases only what its own PersistentVolume names that is `Released`, by the uid of the volume and of its claim,
//!    with the reclaim policy `Delete`. It asks the server again right before.
//! 2. The PersistentVolume says which file system or disk it is (`identity`). If the entry is another one by now, podfs erases nothing.
//! 3. The erasure works on descriptors: of a directory in one mount, never into another one, or of a device that is open for podfs
//!    alone. So nothing that changes at the path leads it elsewhere.
//! 4. The record is on the disk before the first byte is erased, and stays until the PersistentVolume is gone. No entry
//!    with a record is offered. So an interrupted erasure is done again, even if the PersistentVolume was deleted meanwhile.
//! 5. The erasure is on the disk before the record says so, and before the PersistentVolume is deleted.
//! 6. The name of a PersistentVolume follows from the node, the class and the path. The server has one of each name, so two podfs
//!    cannot offer an entry twice.

mod board;
mod clean;
mod directory;
mod entries;
mod identity;
mod inspection;
mod plan;
mod provisioner;
mod record;
mod volume;
mod wake;

pub use board::Board;
pub use directory::{ClassDirectory, InvalidClassDirectory};
pub(super) use provisioner::{Place, serve};
