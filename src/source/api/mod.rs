//! A Kubernetes API server as a source: the pod's objects, and the pod itself if it is known by name only. [`crate::kube`] talks
//! to the server.
//!
//! | module | owns |
//! |---|---|
//! | `single` | one object, followed and parsed |
//! | `bundles` | the ClusterTrustBundles of signers |
//! | `credential` | the pod of a token or a certificate, and the time for which podfs uses it |
//! | `tokens` | tokens, issued and replaced in time |
//! | `certificates` | certificates of the pod, requested and replaced in time |
//! | `start` | the pod, which podfs reads before it serves a volume |
//! | `live` | the pod, or the template of the workload, that the server has at this moment |
//! | `follow` | snapshots of the pod and all followed objects |
//! | `object_request` | requests that the server has not answered |
//! | `problem_log` | problems with objects, in the log |
//! | `events` | problems with volumes, as events of the pod |
//! | `notices` | which events are due |
//! | [`contacts`] | the state of the requests to the server, for `podfs status` |
//!
//! One thread owns the connection and all followers. It publishes snapshots; [`ApiSource::changed`] only waits for
//! the next publication, so it may be cancelled at any point, and a slow caller skips outdated snapshots.

mod bundles;
mod certificates;
mod contacts;
mod credential;
mod events;
mod follow;
mod live;
mod notices;
mod object_request;
mod problem_log;
mod single;
mod start;
mod tokens;

use std::io;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch::{self, Receiver};

use super::Snapshot;
use super::files::{FileSource, LastManifest, StartProblem};
use crate::kube::client::ApiClient;
use crate::manifest::pod::Pod;
use crate::types::PodName;
use crate::volume::Volume;
use follow::{Follow, VolumesToFollow};

pub use crate::kube::settings::SettingsSource;
pub(crate) use bundles::{SignerWatcher, title_of_signer};
pub use contacts::{Contact, Contacts, Unreachable};
pub(crate) use events::{Conditions, grown, post, post_growth, post_read_only};
pub use live::live_pod;
pub use notices::Condition;
pub(crate) use object_request::ObjectRequest;
pub(crate) use problem_log::{ProblemLog, SETTLE_DELAY};
pub(crate) use single::{AbortOnDrop, ObjectUpdate, ObjectWatcher, ServedObject, origin};
pub use start::StartError;
pub(crate) use tokens::IssuedCredentials;

/// How long the thread may take to take other volumes.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The settings of the source.
pub struct ApiPlan {
    /// The access to the server.
    pub access: SettingsSource,
    /// The name of the pod, if only the server has the pod.
    pub pod: Option<PodName>,
    /// The node that the pod has to be on.
    pub node: Option<String>,
    /// The volumes, if they are not all those of the pod.
    pub volumes: Option<Vec<Volume>>,
    /// Manifest files and their objects, which take precedence over those of the server.
    pub files: Option<(FileSource, Snapshot)>,
    /// How podfs gets the tokens of volumes.
    pub tokens: TokenPolicy,
}

/// How podfs gets the tokens of volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenPolicy {
    /// The server issues them.
    Issued,
    /// podfs does not request them, and each is empty, because the output of the command shows no tokens.
    Empty,
}

/// An API server as the source of objects and their changes.
pub struct ApiSource {
    updates: Receiver<Snapshot>,
    served: UnboundedSender<VolumesToFollow>,
    contacts: Contacts,
    conditions: Option<Conditions>,
    /// The problem of the manifest files, if there are any.
    start_problem: StartProblem,
    /// The manifest of the pod in these files.
    manifest: Option<LastManifest>,
}

/// The tasks that the thread has started.
struct StartedTasks {
    follow: Follow,
    snapshot: Snapshot,
    /// The conditions of the pod's volumes, if events are posted.
    conditions: Option<Conditions>,
}

impl ApiSource {
    /// Begins to follow the pod and its objects. If only the pod's name is known, waits until the server can be reached; for
    /// objects it waits only for a moment.
    ///
    /// # Errors
    /// When the settings cannot be used, or the pod cannot be read.
    pub fn open(plan: ApiPlan) -> Result<(ApiSource, Snapshot), StartError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(1)
            .build()
            .map_err(StartError::Thread)?;
        let contacts = Contacts::default();
        let start_problem = plan.files.as_ref().map(|(files, _)| files.start_problem().clone()).unwrap_or_default();
        let manifest = plan.files.as_ref().map(|(files, _)| files.manifest());
        let (send_start, start) = mpsc::channel();
        let contacts_of_thread = contacts.clone();
        let (served, served_of_thread) = unbounded_channel();
        let serve = move || {
            runtime.block_on(async {
                // `open` waits for this.
                let StartedTasks { follow, snapshot, conditions } =
                    match begin(plan, served_of_thread, contacts_of_thread).await {
                        Ok(tasks) => tasks,
                        Err(error) => return drop(send_start.send(Err(error))),
                    };
                let (publish, updates) = watch::channel(snapshot.clone());
                drop(send_start.send(Ok((updates, snapshot, conditions))));
                follow.publish(publish).await;
            });
        };
        thread::Builder::new().name("api".into()).spawn(serve).map_err(StartError::Thread)?;
        let gone = || StartError::Thread(io::Error::other("the thread of the API source has ended"));
        let (updates, snapshot, conditions) = start.recv().map_err(|_| gone())??;
        Ok((ApiSource { updates, served, contacts, conditions, start_problem, manifest }, snapshot))
    }

    /// Waits for a snapshot that differs in the pod or its objects. Cancel-safe.
    ///
    /// Trouble with the server is logged, and the last snapshot stays in use; it never ends the wait.
    pub async fn changed(&mut self) -> Snapshot {
        // The publishing thread outlives `self`, unless it panics; then there is never another snapshot.
        if self.updates.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        self.updates.borrow_and_update().clone()
    }

    /// Sets the volumes that podfs serves. Waits a moment for the thread, and not for the server. Returns the snapshot in which
    /// objects of these volumes are unknown until the server has answered; none if the thread does not answer.
    pub(super) fn want(&self, volumes: Vec<Volume>) -> Option<Snapshot> {
        let (answer, answered) = mpsc::channel();
        self.served.send(VolumesToFollow { volumes, answer }).ok()?;
        answered.recv_timeout(TIMEOUT).ok()
    }

    /// Sets the present condition of a volume, for events of the pod.
    pub fn set_condition(&self, volume: &str, condition: Condition) {
        if let Some(conditions) = &self.conditions {
            conditions.set(volume, condition);
        }
    }

    /// Why a podfs that started now would refuse the manifest files.
    pub(super) fn start_problem(&self) -> Option<String> {
        self.start_problem.sentence()
    }

    /// The pod that a podfs that started now would read from the manifest files.
    pub(super) fn manifest(&self) -> Option<Arc<Pod>> {
        self.manifest.as_ref()?.pod()
    }

    /// The state of the requests to the server.
    pub fn contacts(&self) -> Contacts {
        self.contacts.clone()
    }
}

async fn begin(
    plan: ApiPlan,
    served: UnboundedReceiver<VolumesToFollow>,
    contacts: Contacts,
) -> Result<StartedTasks, StartError> {
    let client = ApiClient::open(plan.access).await?;
    let pod = match &plan.pod {
        Some(name) => Some(start::pod(&client, name, plan.node.as_deref()).await?),
        None => None,
    };
    let mut follow = Follow::new(client.clone(), plan.files, plan.volumes, served, plan.tokens, contacts);
    if let Some((pod, follower)) = pod {
        follow = follow.with_pod(pod, follower);
    }
    let snapshot = follow.first_snapshot().await;
    let conditions = snapshot.pod.as_ref().map(|pod| {
        let (conditions, post) = events::post(client, pod.identity.clone(), pod.facts.node_name.clone());
        tokio::spawn(post);
        conditions
    });
    Ok(StartedTasks { follow, snapshot, conditions })
}
