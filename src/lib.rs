//! podfs: the volumes of a Kubernetes pod as FUSE mounts.
//!
//! The modules, in the order in which a ConfigMap passes through them:
//!
//! | module | owns |
//! |---|---|
//! | [`source`] | where objects come from, and how podfs gets their changes |
//! | [`manifest`] | pods and objects: typed, validated, defaulted |
//! | [`types`] | values that several of the others share |
//! | [`volume`] | one file per kind of volume: the description of its mount |
//! | [`payload`] | objects become files: items, modes, owners, path rules |
//! | [`render`] | payloads as text, JSON, directories and archives, without a mount |
//! | [`view`] | payloads as a live file system of an ordinary user |
//! | [`mounts`] | the mounts of a container, for its runtime |
//! | [`binding`] | from a claim to its PersistentVolume |
//! | [`host`] | directories and files of the node: opened, made, given to a group, deleted |
//! | `kube` | a client of the Kubernetes API |
//! | [`driver`] | CSI and FlexVolume drivers of other vendors: the calls that mount and unmount |
//! | [`csi`] | messages and services of the Container Storage Interface |
//! | [`supervisor`] | the life of one pod's volumes: mounts, commits, readiness |
//! | [`node`] | the volume manager of a node: its pods, and the volumes to mount for them |
//! | [`admin`] | commands of an operator for the pods of a node: status, cleanup |
//! | [`metrics`] | metrics for Prometheus: names, text, HTTP |
//! | [`podfs_fuse`] | the file systems, and the process that serves them |
//!
//! [`cli`] holds one file per subcommand. `manifest`, `volume`, `payload`, `mounts` and `binding` do no I/O.

pub mod admin;
pub mod binding;
pub mod cli;
pub mod csi;
pub mod driver;
pub mod host;
mod kube;
pub mod manifest;
pub mod metrics;
pub mod mounts;
pub mod node;
pub mod payload;
pub mod render;
pub mod source;
pub mod supervisor;
pub mod types;
pub mod view;
pub mod volume;
