//! `podfs node`: the volume manager of a node.
//!
//! | module | owns |
//! |---|---|
//! | [`daemon`] | the parts below, put together and started |
//! | [`manager`] | the one task that owns the state of the pods, decides what to mount and unmount, and publishes the state |
//! | [`csi`] | the CSI driver: a kubelet publishes volumes |
//! | [`nri`] | the plugin of a container runtime: volumes of podfs in the place of the kubelet's |
//! | [`feed`] | the pods of all sources, and the objects of their volumes |
//! | [`pod`] | a pod of the node as its source describes it |
//! | [`state`] | the published state of the node, for commands and agents |
//! | [`publication`] | the records of the volumes that a kubelet publishes, for the next daemon |
//! | [`checkpoint`] | the checkpoint of a pod, for the next daemon |
//! | `files` | files that only root can read, replaced as a whole |
//! | `backing` | the PersistentVolumes behind the claims of a pod: names on the node, sizes, whether a controller attaches them |
//! | [`plugin`] | volume plugins: the properties of a kind of volume that the manager needs |
//! | [`world`] | the desired and the actual state of the world |
//! | [`reconciler`] | a pure function: compares the two worlds, and returns the operations that are due |
//! | [`operation`] | one operation for a volume at a time, and pauses after failures |
//! | [`handle`] | reading the manager's state, and sending it commands |
//! | [`supervisors`] | one `podfs-supervisor` for each pod: starting, adopting, changing and ending it |
//! | [`reconstruct`] | finding what earlier daemons left, by names, locks and sockets |
//! | `root_lock` | the lock that makes a daemon the only one of its root directory |
//! | `run_directory` | the daemon's files in the run directory, which it makes again after another process has deleted them |
//! | [`orphans`] | directories of pods that the node no longer has |
//! | [`local_volumes`] | PersistentVolumes that the node offers from its own directories, and cleans when they are released |
//! | `in_use` | the report of the volumes in use, in the status of the Node object |
//! | `registrations` | the registration of the node's CSI drivers, in the CSINode and the Node object |
//! | [`metrics`] | the daemon's own metrics, and its port for Prometheus |
//! | [`on_host`] | `podfs node --on-host`: the daemon of a container runs on the node, and so do the supervisors |
//! | `spans` | the spans with the pod and the volume of a log line |
//! | [`service`] | gRPC for agents on `RUN/node.sock`, and its client |
//!
//! The daemon owns no mount but the clones at the targets of CSI volumes, and no FUSE descriptor: each pod has a supervisor of its
//! own (`podfs run`), which continues when the daemon is killed.

mod backing;
pub mod checkpoint;
pub mod csi;
pub mod daemon;
mod error;
pub mod feed;
mod files;
pub mod handle;
mod in_use;
pub mod local_volumes;
pub mod manager;
pub mod metrics;
pub mod nri;
pub mod on_host;
pub mod operation;
pub mod orphans;
pub mod plugin;
pub mod pod;
pub mod publication;
pub mod reconciler;
pub mod reconstruct;
mod registrations;
mod root_lock;
mod run_directory;
#[cfg(test)]
mod sample;
pub mod service;
mod spans;
pub mod state;
pub mod supervisors;
pub mod world;

pub use daemon::{NodeOptions, run};
pub use error::NodeError;
pub use handle::{CommandError, ManagerCommand, NodeHandle};
pub use pod::{NodePod, PodOrigin, PodStage};
pub use state::{ContainerEntry, KeptMount, MountState, NodeState, PodEntry, VolumeEntry};
