//! One object of the server, which a task of its own follows: the task parses each version, and sends it to the task that makes
//! snapshots.

use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;
use tokio::task::AbortHandle;
use tokio::time::sleep;

use super::contacts::Contacts;
use crate::kube::address::{Collection, Resource};
use crate::kube::client::{ApiClient, PARTIAL};
use crate::kube::error::{ApiError, ErrorClass};
use crate::kube::follower::{Follower, FollowerEvent};
use crate::kube::poller::Poller;
use crate::manifest::objects::{NamedObject, ObjectKey, parse_object};
use crate::manifest::pod::Pod;
use crate::manifest::{Document, ManifestError, Origin};

/// An update about an object, from the task that follows it.
#[derive(Debug)]
pub(crate) enum ObjectUpdate<T> {
    /// This is the object now.
    Is(Arc<T>),
    /// There is no such object.
    Absent,
    /// The server answers, and has nothing new.
    Alive,
    /// The last request failed. The known object stays in use.
    Failure(ApiError),
}

/// A task that ends when this value is dropped.
pub(crate) struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl AbortOnDrop {
    pub(crate) fn spawn(future: impl Future<Output = ()> + Send + 'static) -> AbortOnDrop {
        AbortOnDrop(tokio::spawn(future).abort_handle())
    }

    /// Spawns from a thread that does not belong to the runtime.
    pub(crate) fn spawn_on(runtime: &Handle, future: impl Future<Output = ()> + Send + 'static) -> AbortOnDrop {
        AbortOnDrop(runtime.spawn(future).abort_handle())
    }
}

/// The parsed form of an object of the server.
pub(crate) trait ServedObject: Sized + Send + Sync + 'static {
    /// Parses an object of the server. `title` names it in errors.
    ///
    /// # Errors
    /// When the API server would refuse the object, or it is of another kind.
    fn parse(object: Value, title: &str) -> Result<Self, ManifestError>;

    /// The named object in it.
    fn named(&self) -> &NamedObject;
}

impl ServedObject for NamedObject {
    fn parse(object: Value, title: &str) -> Result<NamedObject, ManifestError> {
        let origin = origin(title);
        let unknown = || ManifestError::invalid(&origin, "kind", "is not the kind that podfs requested");
        parse_object(Document::of_server(origin.clone(), object)?)?.ok_or_else(unknown)
    }

    fn named(&self) -> &NamedObject {
        self
    }
}

/// The interval, in seconds, of requests for a bound PersistentVolume or an attachment that is attached. Kubelets ask as often.
const BETWEEN_REQUESTS: std::ops::Range<u64> = 60..90;

/// Follows an object until it has the state that its pod needs: a claim that is bound cannot change any more. From time to time,
/// the watcher gets a bound PersistentVolume and an attachment that is attached: a PersistentVolume may grow, and either may have
/// been repaired for a volume that cannot be mounted.
/// It reads the content of an immutable object once (MG-02); the object's metadata shows when it was deleted and made again.
pub(crate) struct ObjectWatcher<T> {
    feed: ObjectFeed,
    title: String,
    contacts: Contacts,
    is_settled: bool,
    may_change: bool,
    _of: PhantomData<fn() -> T>,
}

impl<T: ServedObject> ObjectWatcher<T> {
    pub(crate) fn new(client: ApiClient, key: &ObjectKey, contacts: Contacts) -> ObjectWatcher<T> {
        let feed = ObjectFeed::new(client, Collection::of(key));
        let (is_settled, may_change) = (false, false);
        ObjectWatcher { feed, title: key.to_string(), contacts, is_settled, may_change, _of: PhantomData }
    }

    /// Waits for the next update; `None` when the object cannot change any more. Not cancel-safe: received changes
    /// would be lost.
    pub(crate) async fn next(&mut self) -> Option<ObjectUpdate<T>> {
        if self.is_settled {
            return if self.may_change { Some(self.next_change().await) } else { None };
        }
        let (event, uid) = self.feed.next().await;
        let update = interpret(event, |object| T::parse(object, &self.title));
        if let (ObjectUpdate::Is(object), Some(uid)) = (&update, uid)
            && object.named().is_immutable()
        {
            self.feed.settle(uid);
        }
        self.is_settled = matches!(&update, ObjectUpdate::Is(object) if is_bound(object.named()));
        self.may_change = matches!(&update, ObjectUpdate::Is(object) if may_change(object.named()));
        let state = if self.is_settled { "settled" } else { self.feed.state_name() };
        note(&self.contacts, &self.title, state, self.feed.version(), &update);
        Some(update)
    }
}

impl<T: ServedObject> ObjectWatcher<T> {
    /// Whether the object has the state that its pod needs.
    pub(crate) fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Waits for another version of the object that is bound or attached, too. A mounted volume does not depend on the server, so
    /// this function reports no failure.
    async fn next_change(&mut self) -> ObjectUpdate<T> {
        loop {
            sleep(Duration::from_secs(fastrand::u64(BETWEEN_REQUESTS))).await;
            if let (event @ FollowerEvent::Put(_), _) = self.feed.next().await
                && let ObjectUpdate::Is(object) = interpret(event, |object| T::parse(object, &self.title))
                && is_bound(object.named())
            {
                let update = ObjectUpdate::Is(object);
                note(&self.contacts, &self.title, "settled", self.feed.version(), &update);
                return update;
            }
        }
    }
}

/// Follows an object until the receiver is dropped, or until the object cannot change any more.
pub(super) async fn follow_object(
    client: ApiClient,
    key: ObjectKey,
    contacts: Contacts,
    sender: Sender<(ObjectKey, ObjectUpdate<NamedObject>)>,
) {
    let mut watcher = ObjectWatcher::new(client, &key, contacts);
    while let Some(update) = watcher.next().await {
        if sender.send((key.clone(), update)).await.is_err() {
            return;
        }
    }
}

/// The way in which podfs follows an object.
enum ObjectFeed {
    Follower {
        follower: Follower,
        /// The uid of the immutable object, of which only the metadata is watched.
        immutable: Option<String>,
    },
    Poller(Poller),
}

impl ObjectFeed {
    fn new(client: ApiClient, object: Collection) -> ObjectFeed {
        match object.resource.can_be_watched() {
            true => ObjectFeed::Follower { follower: Follower::new(client, object), immutable: None },
            false => ObjectFeed::Poller(Poller::new(client, object)),
        }
    }

    /// Waits for the next event about whole objects. Returns it with the uid of the object.
    async fn next(&mut self) -> (FollowerEvent, Option<String>) {
        let (follower, immutable) = match self {
            ObjectFeed::Follower { follower, immutable } => (follower, immutable),
            ObjectFeed::Poller(poller) => return (poller.next().await, None),
        };
        let event = follower.next().await;
        let object = match &event {
            FollowerEvent::Listed(objects) => objects.last(),
            FollowerEvent::Put(object) | FollowerEvent::Deleted(object) => Some(object),
            FollowerEvent::Alive | FollowerEvent::Failure(_) => None,
        };
        let uid = object.and_then(uid_of).map(str::to_owned);
        match (&event, object.is_some_and(|object| object["kind"] == PARTIAL)) {
            (FollowerEvent::Deleted(_), _) | (FollowerEvent::Listed(_), false) => {
                *immutable = None;
                follower.follow_whole();
                (event, uid)
            }
            // The object was deleted and made again.
            (_, true) if uid != *immutable => {
                *immutable = None;
                follower.list_whole();
                (FollowerEvent::Alive, None)
            }
            (_, true) => (FollowerEvent::Alive, None),
            (_, false) => (event, uid),
        }
    }

    /// Watches only the metadata of the immutable object with this uid.
    fn settle(&mut self, uid: String) {
        if let ObjectFeed::Follower { follower, immutable } = self {
            follower.follow_metadata();
            *immutable = Some(uid);
        }
    }

    fn state_name(&self) -> &'static str {
        match self {
            ObjectFeed::Follower { follower, .. } => follower.state_name(),
            ObjectFeed::Poller(_) => "polling",
        }
    }

    fn version(&self) -> Option<&str> {
        match self {
            ObjectFeed::Follower { follower, .. } => follower.version(),
            ObjectFeed::Poller(poller) => poller.version(),
        }
    }
}

/// Follows the pod with this uid. Ignores another pod of the same name.
pub(super) async fn follow_pod(
    mut follower: Follower,
    uid: String,
    title: String,
    contacts: Contacts,
    sender: Sender<ObjectUpdate<Pod>>,
) {
    loop {
        let event = match follower.next().await {
            FollowerEvent::Listed(pods) => {
                FollowerEvent::Listed(pods.into_iter().filter(|pod| uid_of(pod) == Some(uid.as_str())).collect())
            }
            FollowerEvent::Put(pod) | FollowerEvent::Deleted(pod) if uid_of(&pod) != Some(uid.as_str()) => {
                FollowerEvent::Alive
            }
            event => event,
        };
        let update = interpret(event, |pod| parse_pod(pod, &title));
        note(&contacts, &title, follower.state_name(), follower.version(), &update);
        if sender.send(update).await.is_err() {
            return;
        }
    }
}

/// The collection of the pod with this name.
pub(super) fn pods(namespace: &str, name: &str) -> Collection {
    Collection::only(Resource::POD, Some(namespace), name)
}

/// Parses a pod of a server.
pub(super) fn parse_pod(pod: Value, title: &str) -> Result<Pod, ManifestError> {
    Pod::parse(Document::of_server(origin(title), pod)?)
}

fn interpret<T>(event: FollowerEvent, parse: impl Fn(Value) -> Result<T, ManifestError>) -> ObjectUpdate<T> {
    let object = match event {
        FollowerEvent::Listed(mut objects) => match objects.pop() {
            Some(object) => object,
            None => return ObjectUpdate::Absent,
        },
        FollowerEvent::Put(object) => object,
        FollowerEvent::Deleted(_) => return ObjectUpdate::Absent,
        FollowerEvent::Alive => return ObjectUpdate::Alive,
        FollowerEvent::Failure(error) => return ObjectUpdate::Failure(error),
    };
    match parse(object) {
        Ok(object) => ObjectUpdate::Is(Arc::new(object)),
        Err(error) => ObjectUpdate::Failure(ApiError::new(ErrorClass::Refused, error.to_string())),
    }
}

/// The origin of an object of a server: no file, but its name.
pub(crate) fn origin(title: &str) -> Origin {
    Origin::file(Path::new(title))
}

fn is_bound(object: &NamedObject) -> bool {
    let claim = object.claim();
    claim.is_some_and(|claim| claim.phase.as_deref() == Some("Bound") && claim.volume.is_some())
        || object.volume_attachment().is_some_and(|attachment| attachment.attached && !attachment.deleting)
        || object.persistent_volume().is_some_and(|volume| volume.claim.is_some())
}

/// Whether a node has work to do when the object changes after it was bound or attached.
fn may_change(object: &NamedObject) -> bool {
    object.persistent_volume().is_some() || object.volume_attachment().is_some()
}

/// Records the state of the requests for the object with this title.
pub(super) fn note<T>(
    contacts: &Contacts,
    title: &str,
    state: &'static str,
    version: Option<&str>,
    update: &ObjectUpdate<T>,
) {
    match update {
        ObjectUpdate::Failure(error) => contacts.trouble(title, state, error),
        ObjectUpdate::Is(_) | ObjectUpdate::Absent | ObjectUpdate::Alive => contacts.answered(title, state, version),
    }
}

fn uid_of(object: &Value) -> Option<&str> {
    object.pointer("/metadata/uid")?.as_str()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn vm_05_what_is_bound_or_attached_is_read_again_unless_it_is_a_claim() {
        let of = |kind: &str, mut body: Value| {
            let version = if kind == "VolumeAttachment" { "storage.k8s.io/v1" } else { "v1" };
            body["apiVersion"] = version.into();
            body["kind"] = kind.into();
            body["metadata"] = json!({"name": "x"});
            let object = NamedObject::parse(body, kind).expect(kind);
            (is_bound(&object), may_change(&object))
        };
        for source in [
            json!({"nfs": {"server": "s", "path": "/x"}}),
            json!({"hostPath": {"path": "/x"}}),
            json!({"local": {"path": "/x"}}),
            json!({"flexVolume": {"driver": "d"}}),
            json!({"csi": {"driver": "d", "volumeHandle": "h"}}),
        ] {
            let mut spec = source;
            spec["claimRef"] = json!({"namespace": "default", "name": "data"});
            assert_eq!(of("PersistentVolume", json!({"spec": spec})), (true, true), "{spec}");
        }
        let attachment = |status: Value| of("VolumeAttachment", json!({"status": status}));
        assert_eq!(attachment(json!({"attached": true})), (true, true));
        assert!(!attachment(json!({"attached": false})).0, "podfs reads it again after seconds");
        let claim = json!({"spec": {"volumeName": "pv"}, "status": {"phase": "Bound"}});
        assert_eq!(of("PersistentVolumeClaim", claim), (true, false));
    }
}
