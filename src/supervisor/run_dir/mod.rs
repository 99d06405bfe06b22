//! The files of a pod on the node: its run directory, and the files and directories that podfs makes for its volumes.
//!
//! | module | owns |
//! |---|---|
//! | [`claim`] | the lock on a pod |
//! | [`file_names`] | the names of the files in the run directory |
//! | [`timed_lock`] | a lock on an open file or directory, with a limit of the wait |
//! | [`volumes_lock`] | the lock on the directory of the pod's volumes |
//! | [`record`] | the record in the lock file: what its supervisor has made |
//! | [`defined_volume`] | the definition of a volume in the record |
//! | [`bounds`] | which recorded paths podfs unmounts and removes |
//! | [`trust`] | that no other user can change the run directory |
//! | `socket` | sockets in the run directory, however long its path is |
//! | `server_socket` | the socket on which the next supervisor finds the server |
//! | [`site`] | the paths of volumes |
//! | [`mount_points`] | directories and mount points: made, recorded, removed |
//! | `container_files` | the pod's `/etc/hosts`, and files for termination messages |
//! | `cgroup` | the cgroup of the server, for its memory |

pub mod bounds;
pub(crate) mod cgroup;
pub mod claim;
pub(in crate::supervisor) mod container_files;
pub mod defined_volume;
pub mod file_names;
pub mod mount_points;
pub mod record;
pub(crate) mod server_socket;
pub mod site;
pub(crate) mod socket;
pub mod timed_lock;
pub mod trust;
pub mod volumes_lock;
