//! ClusterTrustBundles of signers: podfs follows all bundles of a signer, and volumes select some of them by labels. So one
//! watch for a signer suffices, however many volumes there are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::contacts::Contacts;
use super::object_request::ObjectRequest;
use super::single::{AbortOnDrop, ObjectUpdate, ServedObject, note};
use crate::kube::address::Collection;
use crate::kube::client::ApiClient;
use crate::kube::error::{ApiError, ErrorClass};
use crate::kube::follower::{Follower, FollowerEvent};
use crate::manifest::ManifestError;
use crate::manifest::objects::{Missing, NamedObject};

const QUEUE_LENGTH: usize = 16;

/// The bundles of one signer, by name.
pub(crate) type Bundles<T = NamedObject> = BTreeMap<String, Arc<T>>;

/// The signers whose bundles podfs follows.
pub(super) struct Signers {
    client: ApiClient,
    contacts: Contacts,
    signers: BTreeMap<String, Signer>,
    sender: Sender<(String, ObjectUpdate<Bundles>)>,
    updates: Receiver<(String, ObjectUpdate<Bundles>)>,
}

struct Signer {
    bundles: Option<Arc<Bundles>>,
    request: ObjectRequest,
    _task: AbortOnDrop,
}

impl Signers {
    /// No signers.
    pub(super) fn new(client: ApiClient, contacts: Contacts) -> Signers {
        let (sender, updates) = channel(QUEUE_LENGTH);
        Signers { client, contacts, signers: BTreeMap::new(), sender, updates }
    }

    /// Follows the bundles of these signers, and of no others. Returns the titles of signers that it followed until now.
    pub(super) fn want(&mut self, signers: &BTreeSet<&str>) -> Vec<String> {
        let is_unwanted = |signer: &&String| !signers.contains(signer.as_str());
        let forgotten: Vec<String> =
            self.signers.keys().filter(is_unwanted).map(|name| title_of_signer(name)).collect();
        self.signers.retain(|signer, _| !is_unwanted(&signer));
        forgotten.iter().for_each(|title| self.contacts.forget(title));
        for signer in signers {
            if self.signers.contains_key(*signer) {
                continue;
            }
            let task = follow(self.client.clone(), (*signer).to_owned(), self.contacts.clone(), self.sender.clone());
            let followed = Signer { bundles: None, request: ObjectRequest::new(), _task: AbortOnDrop::spawn(task) };
            self.signers.insert((*signer).to_owned(), followed);
        }
        forgotten
    }

    /// Whether podfs follows the bundles of this signer. A task that has ended may have sent an update before.
    pub(super) fn is_wanted(&self, signer: &str) -> bool {
        self.signers.contains_key(signer)
    }

    /// Waits for the next update. Cancel-safe.
    pub(super) async fn next(&mut self) -> (String, ObjectUpdate<Bundles>) {
        self.updates.recv().await.expect("`self.sender` keeps the channel open")
    }

    /// Takes an update of a signer. Returns whether the bundles have changed.
    pub(super) fn take(&mut self, signer: &str, update: ObjectUpdate<Bundles>) -> bool {
        let Some(followed) = self.signers.get_mut(signer) else { return false };
        let unknown = followed.bundles.is_none();
        match update {
            ObjectUpdate::Is(bundles) => {
                followed.request.trouble = None;
                let same = followed.bundles.as_ref() == Some(&bundles);
                followed.bundles = Some(bundles);
                !same
            }
            ObjectUpdate::Absent | ObjectUpdate::Alive => {
                followed.request.trouble = None;
                false
            }
            ObjectUpdate::Failure(error) => {
                followed.request.trouble = Some(error);
                unknown
            }
        }
    }

    /// Whether there is an answer for each signer.
    pub(super) fn are_answered(&self) -> bool {
        self.signers.values().all(|signer| signer.bundles.is_some() || signer.request.trouble.is_some())
    }

    /// The requests for signers whose bundles are not known yet.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = &ObjectRequest> {
        self.signers.values().filter(|signer| signer.bundles.is_none()).map(|signer| &signer.request)
    }

    /// The bundles of all signers.
    pub(super) fn bundles(&self) -> impl Iterator<Item = &Arc<NamedObject>> {
        self.signers.values().flat_map(|signer| signer.bundles.iter().flat_map(|bundles| bundles.values()))
    }

    /// For each signer whose bundles are unknown, the reason.
    pub(super) fn absences(&self) -> impl Iterator<Item = (Missing, String)> {
        let unknown = self.signers.iter().filter(|(_, signer)| signer.bundles.is_none());
        unknown.map(|(name, signer)| (Missing::BundlesOf(name.clone()), signer.request.why(&title_of_signer(name))))
    }
}

/// The name of a signer's bundles in the log and in `podfs status`.
pub(crate) fn title_of_signer(signer: &str) -> String {
    format!("ClusterTrustBundles of {signer}")
}

/// Sends the bundles of a signer, until the receiver is dropped.
async fn follow(
    client: ApiClient,
    signer: String,
    contacts: Contacts,
    sender: Sender<(String, ObjectUpdate<Bundles>)>,
) {
    let mut watcher = SignerWatcher::new(client, &signer, contacts);
    loop {
        let update = watcher.next().await;
        if sender.send((signer.clone(), update)).await.is_err() {
            return;
        }
    }
}

/// Follows the bundles of a signer.
pub(crate) struct SignerWatcher<T> {
    follower: Follower,
    title: String,
    contacts: Contacts,
    bundles: Bundles<T>,
}

impl<T: ServedObject> SignerWatcher<T> {
    pub(crate) fn new(client: ApiClient, signer: &str, contacts: Contacts) -> SignerWatcher<T> {
        let follower = Follower::new(client, Collection::of_signer(signer));
        SignerWatcher { follower, title: title_of_signer(signer), contacts, bundles: Bundles::new() }
    }

    /// Waits for a change, and returns all bundles of the signer. Not cancel-safe: received changes would be lost.
    pub(crate) async fn next(&mut self) -> ObjectUpdate<Bundles<T>> {
        let update = match change(&mut self.bundles, self.follower.next().await, &self.title) {
            Ok(update) => update,
            Err(error) => ObjectUpdate::Failure(ApiError::new(ErrorClass::Refused, error.to_string())),
        };
        note(&self.contacts, &self.title, self.follower.state_name(), self.follower.version(), &update);
        update
    }
}

/// Applies a change of a signer's bundles. If a bundle cannot be parsed, the known bundles stay.
fn change<T: ServedObject>(
    bundles: &mut Bundles<T>,
    event: FollowerEvent,
    title: &str,
) -> Result<ObjectUpdate<Bundles<T>>, ManifestError> {
    let named = |bundle: Value| {
        let bundle = T::parse(bundle, title)?;
        Ok::<_, ManifestError>((bundle.named().key.name.clone(), Arc::new(bundle)))
    };
    match event {
        FollowerEvent::Listed(all) => *bundles = all.into_iter().map(named).collect::<Result<_, _>>()?,
        FollowerEvent::Put(bundle) => {
            let (name, bundle) = named(bundle)?;
            bundles.insert(name, bundle);
        }
        FollowerEvent::Deleted(bundle) => {
            let name = bundle.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
            bundles.remove(name);
        }
        FollowerEvent::Alive => return Ok(ObjectUpdate::Alive),
        FollowerEvent::Failure(error) => return Ok(ObjectUpdate::Failure(error)),
    }
    Ok(ObjectUpdate::Is(Arc::new(bundles.clone())))
}
