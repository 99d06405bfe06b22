//! What a pod has on the node: its run directory, and what podfs makes around its volumes.
//!
//! | module | owns |
//! |---|---|
//! | [`claim`] | that one pod has one supervisor; what its supervisor has made, written down |
//! | [`bounds`] | which paths that an earlier podfs recorded are believed |
//! | [`trust`] | that no other user can change the run directory |
//! | `socket` | sockets in the run directory, however long its path is |
//! | [`site`] | where volumes appear |
//! | [`mount_points`] | directories and mount points, made and taken back |
//! | `container_files` | the pod's `/etc/hosts`, and files for termination messages |
//! | `cgroup` | where the server's memory is counted and limited |

pub mod bounds;
pub(crate) mod cgroup;
pub mod claim;
pub(in crate::supervisor) mod container_files;
pub mod mount_points;
pub mod site;
pub(crate) mod socket;
pub mod trust;
