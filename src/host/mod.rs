//! The host: work on the node for passthrough volumes, before podfs shows them and after.
//!
//! | module | owns |
//! |---|---|
//! | [`open`] | opening a source once, so that nothing can be swapped between a check and its use |
//! | [`host_path`] | the eight types of host paths, and making missing ones |
//! | [`local`] | local PersistentVolumes |
//! | [`block`] | devices that containers get as they are |
//! | [`disks`] | which disks a pod got |
//! | [`device`] | block devices: formatted, checked, mounted and grown |
//! | [`empty_dir`] | the content of emptyDirs: made, found again, deleted |
//! | [`kernel_nfs`] | exports of NFS servers, mounted by the kernel's client |
//! | [`memory`] | tmpfs and hugetlbfs for emptyDirs |
//! | [`global_mount`] | mounts of the node that several pods use, and which pods use them |
//! | [`fs_group`] | giving a volume to a group |
//! | [`serve`] | whether a source is served by podfs or by a bind mount |
//! | [`neighbours`] | whether other pods of this node use the same PersistentVolume |
//! | [`sub_path`] | a part of a volume: found or made, never outside of it |
//! | [`walk`], [`delete`] | walking a tree and deleting one, by descriptors |
//! | [`error`] | errors, one sentence each |

pub mod block;
pub mod delete;
pub mod device;
pub mod disks;
pub mod empty_dir;
pub mod error;
pub mod fs_group;
pub mod global_mount;
pub mod host_path;
pub mod kernel_nfs;
pub mod local;
pub mod memory;
pub mod neighbours;
pub mod open;
pub mod serve;
pub mod sub_path;
pub mod walk;

pub use error::HostError;
pub use open::{FileKind, HostSource};
