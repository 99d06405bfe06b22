//! Two versions of podfs on one node, as during an upgrade and after a rollback: the version of this tree, and the previous one,
//! which the file `previous` names by its commit and the script `build` compiles. Each meets what the other has left, in both
//! orders. No call of a container may fail, no effect may be lost, no emptyDir may be deleted, and nothing may stay behind.

mod commands;
#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "these tests need no faults of the driver")]
#[path = "../common/csi_driver.rs"]
mod csi_driver;
mod every_kind;
#[allow(dead_code, reason = "these tests start the daemons of both versions")]
#[path = "../cli/node/csi/kubelet.rs"]
mod kubelet;
#[path = "../nfs_rig/mod.rs"]
mod nfs_rig;
mod node;
mod pods;
#[allow(dead_code, reason = "some functions are for pods with nothing but exports")]
#[path = "../nfs/pod_volumes/pods.rs"]
mod pods_with_claims;
mod previous;
mod publications;
