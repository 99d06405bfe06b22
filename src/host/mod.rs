//! The host: work on the node for passthrough volumes, before podfs mounts them and after it has unmounted them.
//!
//! | module | owns |
//! |---|---|
//! | [`open`] | opening a source once, so that no process can replace it between a check and its use |
//! | [`host_path`] | the eight types of hostPath volumes, and making missing files and directories |
//! | [`local`] | local PersistentVolumes |
//! | [`block`] | block devices that containers get as they are |
//! | [`bounded_file`] | a file of limited size in memory, for the output of a program |
//! | [`disk_errors`] | the errors that the kernel has counted on the disk of a file system |
//! | [`disks`] | the record of the disks of a pod's hostPath volumes |
//! | [`device`] | block devices: formatted, checked, mounted and grown |
//! | [`empty_dir`] | the content of emptyDirs: made, found again, deleted |
//! | [`kernel_nfs`] | exports of NFS servers, mounted by the kernel's client |
//! | [`memory`] | tmpfs and hugetlbfs for emptyDirs |
//! | [`global_mount`] | mounts of the node that several pods use, and which pods use them |
//! | [`fs_group`] | giving a volume to the fsGroup of a pod |
//! | [`serve`] | whether podfs serves a source through FUSE, or a bind mount shows it |
//! | [`volume_users`] | whether other pods of this node use the same PersistentVolume |
//! | [`sub_path`] | a part of a volume (subPath): found or made, never outside of the volume |
//! | [`walk`], [`delete`] | walking a tree and deleting one, by descriptors |
//! | [`error`] | errors, one sentence each |

pub mod block;
pub mod bounded_file;
pub mod delete;
pub mod device;
pub mod disk_errors;
pub mod disks;
pub mod empty_dir;
pub mod error;
pub mod fs_group;
pub mod global_mount;
pub mod host_path;
pub mod kernel_nfs;
pub mod local;
pub mod memory;
pub mod open;
pub mod serve;
pub mod sub_path;
pub mod volume_users;
pub mod walk;

pub use error::HostError;
pub use open::{FileKind, HostSource};
