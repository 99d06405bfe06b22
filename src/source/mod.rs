//! Where the pod and its objects come from, and how their changes are heard.
//!
//! A source gives one [`Snapshot`] when it is opened and another one whenever something differs. Nothing above this
//! module knows where a snapshot comes from. The embedded source is [`FileSource`]: manifest files, no cluster needed.
//! [`ApiSource`] asks an API server, and goes by manifest files for what they describe.

mod api;
mod files;
mod tokens;

use std::sync::Arc;

use crate::manifest::objects::Objects;
use crate::manifest::pod::Pod;

pub use api::{Access, ApiSource, Contact, Contacts, Plan, PodName, StartError};
pub use files::{FileSource, PodInput, SourceError};
pub use tokens::Tokens;

/// Where the pod and its objects come from.
pub enum Source {
    /// Manifest files.
    Files(FileSource),
    /// An API server, and manifest files for what they describe.
    Api(ApiSource),
}

impl Source {
    /// The next snapshot that differs in what is known. Cancel-safe; trouble never ends the wait.
    pub async fn changed(&mut self) -> Snapshot {
        match self {
            Source::Files(files) => files.changed().await,
            Source::Api(api) => api.changed().await,
        }
    }

    /// Says what is wrong with a volume at this moment, if anything is, for who cares. Never waits.
    pub fn tell(&self, volume: &str, reason: Option<&str>) {
        match self {
            Source::Files(_) => {}
            Source::Api(api) => api.tell(volume, reason),
        }
    }

    /// What is known of the talk with a server, for each object that is asked for.
    pub fn contacts(&self) -> Contacts {
        match self {
            Source::Files(_) => Contacts::default(),
            Source::Api(api) => api.contacts(),
        }
    }
}

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
