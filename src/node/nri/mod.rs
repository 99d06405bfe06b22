//! Transparent volumes: podfs node as a plugin of the container runtime (NRI). When a container of a chosen pod is created, its
//! mounts of the kubelet's volumes are replaced by mounts of podfs's volumes of the same pod.
//!
//! | module | owns |
//! |---|---|
//! | [`messages`] | the messages of NRI and of ttrpc |
//! | [`frames`] | messages as bytes on the socket |
//! | [`chosen`] | which pods are served, and until when |
//! | [`places`] | which mounts of a container show the kubelet's volumes |
//! | `volumes` | what stands in their place, as soon as it is there |
//! | `answers` | a request of the runtime and its answer |
//! | [`session`] | the connection to the runtime, its beginning and its next beginning |
//!
//! **Why podfs never keeps a container from starting.**
//!
//! 1. A request of a known method never has an error for an answer. What podfs cannot do is left as the kubelet has made it.
//! 2. An answer comes in half of the time that the runtime allows, and in a second at most: the runtime asks about one container at
//!    a time. A pod whose volumes were not there in time is not waited for again.
//! 3. A source is in an answer only if a volume was mounted there just before: a runtime fails a container whose source is missing.
//! 4. The runtime is asked for events that every version has: an unknown one would end the connection.

mod answers;
pub mod chosen;
pub mod frames;
pub mod messages;
pub mod places;
pub mod session;
mod volumes;

use std::path::PathBuf;

pub use chosen::{Choice, Chosen, RuntimeChange};
pub use session::{NriError, Plugin, serve};

/// The name of the plugin.
pub const PLUGIN: &str = "podfs";

/// How the plugin is started.
#[derive(Clone, Debug)]
pub struct NriSettings {
    /// The socket of the container runtime.
    pub socket: PathBuf,
    /// The place of the plugin among others: two digits.
    pub index: String,
    /// The directory of the kubelet: `/var/lib/kubelet`.
    pub kubelet_root: PathBuf,
    /// Which pods are served.
    pub choice: Choice,
}
