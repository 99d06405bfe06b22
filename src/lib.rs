//! podfs: the volumes of a Kubernetes pod as FUSE mounts.
//!
//! Follow a ConfigMap through the house; each room is entered once, in this order:
//!
//! | room | what happens there |
//! |---|---|
//! | [`source`] | hears of objects and their changes |
//! | [`manifest`] | pods and objects: typed, validated, defaulted |
//! | [`volume`] | one file per kind of volume: what is to be mounted |
//! | [`payload`] | objects become files: items, modes, owners, path rules |
//! | [`binding`] | a claim leads to its PersistentVolume |
//! | [`host`] | directories and files of the node: opened, made, given to a group, deleted |
//! | [`supervisor`] | the life of one pod's volumes: mounts, commits, readiness |
//! | [`upkeep`] | what a person does with the pods of a node: asking how they are, cleaning up |
//! | [`metrics`] | what is told to a Prometheus: names, text, HTTP |
//! | [`podfs_fuse`] | the file systems, and the process that serves them |
//!
//! [`cli`] holds one file per subcommand. `manifest`, `volume`, `payload` and `binding` do no I/O.

pub mod binding;
pub mod cli;
pub mod host;
pub mod manifest;
pub mod metrics;
pub mod payload;
mod printable;
pub mod quantity;
pub mod secrecy;
pub mod source;
pub mod supervisor;
pub mod upkeep;
pub mod volume;
