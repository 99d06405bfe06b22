//! Local volumes that the node offers: mounts and devices in directories that the operator names become PersistentVolumes
//! (`podfs node --discover CLASS=DIR`). podfs erases a released PersistentVolume with the reclaim policy `Delete`, and offers it
//! again.
//!
//! | module | owns |
//! |---|---|
//! | `directory` | a class and its directory, from the command line |
//! | `entries` | the entries of the directories: a cheap scan |
//! | `wake` | a thread that scans the directories again after each change |
//! | `inspection` | a thorough check of an entry, before it is offered or erased |
//! | `identity` | which file system or disk an entry is |
//! | `volume` | PersistentVolumes, with the fields that podfs uses here |
//! | `record` | the record of an erasure that has begun, in a file |
//! | `plan` | from all of these to the next steps; a pure function |
//! | `clean` | erasing the data of a user |
//! | `error` | why an entry is not offered or not erased |
//! | `metrics` | the metrics |
//! | `provisioner` | the task that performs the steps |
//!
//! Why no data of a user is lost, or seen by another user, whenever podfs is killed:
//!
//! 1. podfs erases an entry only if the PersistentVolume that podfs made for it, matched by the uids of the volume and of its
//!    claim, is `Released` and has the reclaim policy `Delete`. It reads the PersistentVolume again right before.
//! 2. The PersistentVolume records its file system or disk (`identity`). If the entry is another file system or disk by now, podfs
//!    erases nothing.
//! 3. The erasure works on a descriptor: of a directory, below which it enters no other mount, or of a device that is open for
//!    podfs alone. So no change at the path leads it elsewhere.
//! 4. The record is on the disk before the first byte is erased, and stays until the PersistentVolume is gone. No entry
//!    with a record is offered. So podfs does an interrupted erasure again, even if the PersistentVolume was deleted meanwhile.
//! 5. The erasure is on the disk before the record says so, and before the PersistentVolume is deleted.
//! 6. The name of a PersistentVolume follows from the node, the class and the path. The API server has at most one of a name, so
//!    two podfs cannot offer an entry twice.

mod clean;
mod directory;
mod entries;
mod error;
mod identity;
mod inspection;
mod metrics;
mod plan;
mod provisioner;
mod record;
mod volume;
mod wake;

pub use directory::{ClassDirectory, InvalidClassDirectory};
pub use metrics::LocalVolumeMetrics;
pub(super) use provisioner::{ProvisionerSettings, serve};
