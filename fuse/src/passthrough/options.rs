//! Options of a passthrough volume, from the supervisor.

use serde::{Deserialize, Serialize};

use crate::caller::credentials::ActAs;
use crate::label::VolumeLabel;

/// The time for which the kernel may cache names and attributes. If the kernel reads and writes the source by itself, it always
/// gets the content of files from the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CacheMode {
    /// Not at all: each lookup is a request.
    None,
    /// For one second: callers see a change of the source after at most one second.
    #[default]
    Auto,
    /// For ever: the source changes only through this mount.
    Always,
}

/// The options of a passthrough volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassthroughOptions {
    /// The volume's name, for log lines.
    pub name: VolumeLabel,
    /// The time for which the kernel caches names and attributes.
    pub cache: CacheMode,
    /// The source is read and written only through this mount.
    pub exclusive: bool,
    /// Most bytes that files may take on the source, including those that are there already. A write beyond that fails with
    /// `ENOSPC`.
    pub limit: Option<u64>,
    /// Report every request on standard output.
    pub trace: bool,
    /// Advice about a socket of the source, to which processes cannot connect through FUSE: the end of the sentence that
    /// is logged when the first one is met. Without it, nothing is logged.
    pub socket_advice: Option<String>,
    /// The number of threads that answer requests; `None` means [`SESSION_THREADS`].
    pub threads: Option<u8>,
    /// For a source on another machine, which may be unreachable for long and checks permissions itself: the ids with which podfs
    /// calls it.
    #[serde(default)]
    pub remote: Option<ActAs>,
    /// Requests come over io_uring, if the kernel and the server can do that. The memory of the rings then belongs to the volume.
    #[serde(default)]
    pub io_uring: bool,
}

impl PassthroughOptions {
    /// Whether only callers of this mount read, write or lock the source. Then the kernel may remember that a name does not
    /// exist, and keeps locks by itself.
    pub fn has_exclusive_source(&self) -> bool {
        self.exclusive && self.cache == CacheMode::Always
    }
}

/// Threads of a session: one for each of two CPUs, which is what answers fastest (docs/benchmarks.md has the figures).
pub const SESSION_THREADS: usize = 2;
