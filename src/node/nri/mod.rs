//! Transparent volumes: podfs node as a plugin of the container runtime (NRI). When the runtime creates a container of a chosen
//! pod, podfs replaces the container's mounts of the kubelet's volumes by mounts of podfs's volumes of the same pod.
//!
//! | module | owns |
//! |---|---|
//! | [`messages`] | the messages of NRI and of ttrpc |
//! | [`frames`] | messages as bytes on the socket |
//! | [`places`] | which mounts of a container show the kubelet's volumes |
//! | `volumes` | podfs's volumes that replace them |
//! | `answers` | a request of the runtime and its answer |
//! | [`session`] | the connection to the runtime, also after it was lost |
//!
//! **Why podfs never keeps a container from starting.**
//!
//! 1. podfs never answers a request of a known method with an error. A mount that podfs cannot replace keeps the kubelet's
//!    volume.
//! 2. podfs answers within half of the time that the runtime allows, and within a second at most: the runtime asks about one
//!    container at a time. If a pod's volumes were not mounted in time, podfs does not wait for this pod again.
//! 3. An answer names a source only if a volume was mounted there just before: a runtime fails a container whose source is missing.
//! 4. podfs subscribes only to events that every version of the runtime has: an event that the runtime does not know would end
//!    the connection.

mod answers;
pub mod frames;
pub mod messages;
pub mod places;
pub mod session;
mod volumes;

use std::path::PathBuf;

use super::feed::Choice;
pub use session::{NriError, NriPlugin, serve};

/// The name of the plugin.
pub const PLUGIN: &str = "podfs";

/// The settings of the plugin.
#[derive(Clone, Debug)]
pub struct NriSettings {
    /// The socket of the container runtime.
    pub socket: PathBuf,
    /// The index of the plugin, two digits: the runtime calls its plugins in the order of their indexes.
    pub index: String,
    /// The directory of the kubelet: `/var/lib/kubelet`.
    pub kubelet_root: PathBuf,
    /// Which pods podfs serves.
    pub choice: Choice,
}
