//! Where the pod and its objects come from, and how their changes are heard.
//!
//! A source gives one [`Snapshot`] when it is opened and another one whenever something differs. Nothing above this
//! module knows where a snapshot comes from. The embedded source is [`FileSource`]: manifest files, no cluster needed.

mod files;
mod tokens;

use std::sync::Arc;

use crate::manifest::objects::Objects;
use crate::manifest::pod::Pod;

pub use files::{FileSource, PodInput, SourceError};
pub use tokens::Tokens;

/// What a source knows at one moment.
#[derive(Clone)]
pub struct Snapshot {
    /// The pod, when the source was asked for one.
    pub pod: Option<Arc<Pod>>,
    /// All objects podfs can use.
    pub objects: Objects,
    /// The tokens its volumes ask for.
    pub tokens: Tokens,
}
