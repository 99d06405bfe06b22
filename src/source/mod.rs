//! Sources of the pod and its objects, and of their changes.
//!
//! A source gives one [`Snapshot`] when it is opened and another one after each change. No module above this one
//! knows where a snapshot comes from:
//!
//! | source | origin of the objects |
//! |---|---|
//! | [`FileSource`] | manifest files, no cluster needed |
//! | [`ApiSource`] | an API server, and manifest files, which win |
//! | [`PushSource`] | an agent of the node that pushes objects over the control socket |

mod api;
mod files;
mod push;

use std::sync::Arc;
use std::time::Instant;

use crate::manifest::pod::{Pod, PodFacts, PodIdentity};
use crate::manifest::{KnownObjects, PodView};
use crate::types::Allocatable;
use crate::volume::Volume;

pub(crate) use api::{
    AbortOnDrop, Conditions, IssuedCredentials, ObjectRequest, ObjectUpdate, ObjectWatcher, ProblemLog, SETTLE_DELAY,
    ServedObject, SignerWatcher, grown, origin, post as post_events, post_growth, post_read_only, title_of_signer,
};
pub use api::{
    ApiPlan, ApiSource, Condition, Contact, Contacts, SettingsSource, StartError, TokenPolicy, Unreachable, live_pod,
};
pub use files::{AcceptedDocuments, FileSource, PodInput, SourceError};
pub(crate) use files::{
    BadDocument, CombinationProblem, CombinedFiles, FileCombiner, Files, IMMUTABLE, ParsedFile, PathRole, Scanned,
    Subject,
};
pub(crate) use push::PodCertificate;
pub use push::{Certificate, DeletedObject, Push, PushCounts, PushError, PushReceiver, PushSource, UnknownObject};

/// The source of the pod and its objects.
pub enum Source {
    /// Manifest files.
    Files(FileSource),
    /// An API server, and manifest files, which win.
    Api(ApiSource),
    /// Manifest files, and objects that an agent pushes.
    Push(PushSource),
}

impl Source {
    /// Waits for a snapshot that differs in the pod or its objects. Cancel-safe; a problem never ends the wait.
    pub async fn changed(&mut self) -> Snapshot {
        match self {
            Source::Files(files) => files.changed().await,
            Source::Api(api) => api.changed().await,
            Source::Push(push) => push.changed().await,
        }
    }

    /// Takes a newer manifest of the pod.
    ///
    /// # Errors
    /// When the source is an API server, which has the pod itself.
    pub fn publish(&mut self, pod: &Arc<Pod>) -> Result<(), ServerHasPod> {
        match self {
            Source::Files(_) => Ok(()),
            Source::Push(push) => {
                push.publish(pod);
                Ok(())
            }
            Source::Api(_) => Err(ServerHasPod),
        }
    }

    /// Sets the pod's volumes. Returns a new snapshot if the known objects depend on the volumes.
    pub fn want(&mut self, volumes: Vec<Volume>) -> Option<Snapshot> {
        match self {
            Source::Files(_) => None,
            Source::Api(api) => api.want(volumes),
            Source::Push(push) => Some(push.want(volumes)),
        }
    }

    /// Sets the present condition of a volume, for events of the pod. Never waits.
    pub fn set_condition(&self, volume: &str, condition: Condition) {
        match self {
            Source::Files(_) | Source::Push(_) => {}
            Source::Api(api) => api.set_condition(volume, condition),
        }
    }

    /// The state of the requests to a server, for each object.
    pub fn contacts(&self) -> Contacts {
        match self {
            Source::Files(_) | Source::Push(_) => Contacts::default(),
            Source::Api(api) => api.contacts(),
        }
    }

    /// Why a podfs that started now would refuse the manifest files of the pod, in one sentence.
    pub fn start_problem(&self) -> Option<String> {
        match self {
            Source::Files(files) => files.start_problem().sentence(),
            Source::Api(api) => api.start_problem(),
            Source::Push(push) => push.start_problem(),
        }
    }

    /// The pod that a podfs that started now would read from the manifest files; `None` if an API server has the pod.
    pub fn manifest(&self) -> Option<Arc<Pod>> {
        match self {
            Source::Files(files) => files.manifest().pod(),
            Source::Api(api) => api.manifest(),
            Source::Push(push) => push.manifest(),
        }
    }

    /// The inbox for pushed objects, if the source has one.
    pub fn inbox(&self) -> Option<PushReceiver> {
        match self {
            Source::Push(push) => Some(push.inbox()),
            Source::Files(_) | Source::Api(_) => None,
        }
    }
}

/// The source does not take a manifest of the pod, because an API server has the pod.
#[derive(Debug, thiserror::Error)]
#[error(
    "podfs asks the API server for the objects of this pod itself; volumes are published to a podfs run --push, or to one that \
     reads its objects from files"
)]
pub struct ServerHasPod;

/// The pod and its objects at one moment.
#[derive(Clone)]
pub struct Snapshot {
    /// The pod, if the source has one.
    pub pod: Option<Arc<Pod>>,
    /// What the source knows of its objects.
    pub known: KnownObjects,
    /// When podfs received the change that led to this snapshot; the first snapshot follows from no change.
    pub noticed_at: Option<Instant>,
}

impl Snapshot {
    /// The view of a pod for its volumes. `facts` are those of the pod if the source does not have it.
    pub fn view(&self, identity: &PodIdentity, facts: &PodFacts, machine: Allocatable) -> PodView {
        let facts = self.pod.as_ref().map_or(facts, |pod| &pod.facts);
        PodView { identity: identity.clone(), facts: facts.clone(), known: self.known.clone(), machine }
    }
}
