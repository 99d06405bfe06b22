//! The requests for objects to the API server: one task follows each object, however many pods refer to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::runtime::Handle;
use tracing::debug;

use super::journal::SharedJournal;
use super::object::WholeObject;
use super::readers::{PodReader, PodReaders};
use super::wanted::{Absence, WantedObject};
use crate::kube::client::ApiClient;
use crate::kube::error::{ApiError, ErrorClass};
use crate::kube::settings::SettingsError;
use crate::manifest::objects::ObjectKey;
use crate::manifest::tokens::Token;
use crate::source::{
    AbortOnDrop, Contacts, IssuedCredentials, ObjectRequest, ObjectUpdate, ObjectWatcher, SignerWatcher,
};

/// The API server at which podfs follows objects.
pub(super) struct ObjectServer {
    client: ApiClient,
    contacts: Contacts,
    /// The readers of the objects of CSI volumes, if podfs reads them with the tokens of the pods.
    readers: Option<PodReaders>,
    journal: SharedJournal,
    runtime: Handle,
    /// The id of the next task.
    next_id: AtomicU64,
}

/// An object that a task follows, and the last answer.
pub(super) struct FollowedObject {
    /// Distinguishes tasks for the same object: a cancelled task may still send an answer.
    id: u64,
    /// The objects, once podfs knows them.
    known: Option<Vec<Arc<WholeObject>>>,
    request: ObjectRequest,
    /// Whether the server has answered since the last request, even with an error.
    is_answered: bool,
    /// Whether the object has its final state, such as a bound claim. The task has ended, or only looks whether the
    /// volume grows.
    is_settled: bool,
    _task: AbortOnDrop,
}

impl ObjectServer {
    /// Without requests. Must be called inside of a tokio runtime.
    pub(super) fn new(client: ApiClient, contacts: Contacts, readers: Option<PodReaders>) -> ObjectServer {
        let (runtime, next_id) = (Handle::current(), AtomicU64::new(0));
        ObjectServer { client, contacts, readers, journal: SharedJournal::new(), runtime, next_id }
    }

    pub(super) fn readers(&self) -> Option<&PodReaders> {
        self.readers.as_ref()
    }

    /// Starts a task that follows an object, or the bundles of a signer, and sends `observer` its messages. Keeps the objects of
    /// `before` until an answer comes.
    pub(super) fn request(
        &self,
        want: &WantedObject,
        observer: AnswerObserver,
        before: Option<FollowedObject>,
    ) -> Option<FollowedObject> {
        debug!("podfs requests {}", want.title());
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let answers = FeedAnswers { observer, id };
        let (client, contacts) = (self.client.clone(), self.contacts.clone());
        let task = match want {
            WantedObject::Object(key) => {
                AbortOnDrop::spawn_on(&self.runtime, follow_object(ObjectWatcher::new(client, key, contacts), answers))
            }
            WantedObject::AsPod(uid, key) => {
                let reader = self.readers.as_ref()?.of(uid);
                AbortOnDrop::spawn_on(&self.runtime, follow_as_pod(reader, key.clone(), answers))
            }
            WantedObject::BundlesOf(signer) => AbortOnDrop::spawn_on(
                &self.runtime,
                follow_signer(SignerWatcher::new(client, signer, contacts), answers),
            ),
            WantedObject::OnlyNode => return None,
        };
        let known = before.and_then(|before| before.known);
        Some(FollowedObject {
            id,
            known,
            request: ObjectRequest::new(),
            is_answered: false,
            is_settled: false,
            _task: task,
        })
    }

    /// Logs an update.
    pub(super) fn note<T>(&self, title: &str, update: &ObjectUpdate<T>) {
        self.journal.note(title, update);
    }

    /// Logs an update of a token.
    pub(super) fn note_token(&self, title: &str, update: &ObjectUpdate<Token>) {
        self.journal.note_token(title, update);
    }

    /// Forgets a token that no pod has any more.
    pub(super) fn forget_token(&self, title: &str) {
        self.journal.forget(title);
    }

    /// Forgets a reference that no pod has any more.
    pub(super) fn forget(&self, want: &WantedObject) {
        let title = want.title();
        debug!("podfs no longer follows {title}");
        self.journal.forget(&title);
        self.contacts.forget(&title);
    }

    /// The tokens of a pod. Requests none yet.
    pub(super) fn tokens(&self) -> IssuedCredentials {
        // Tokens of different pods can have the same title, so they have no place in the contacts of the node.
        IssuedCredentials::new(self.client.clone(), Contacts::default())
    }
}

impl FollowedObject {
    /// Whether this is the task with that number.
    pub(super) fn has_id(&self, id: u64) -> bool {
        self.id == id
    }

    /// The objects; none if podfs does not know them.
    pub(super) fn objects(&self) -> &[Arc<WholeObject>] {
        self.known.as_deref().unwrap_or_default()
    }

    pub(super) fn is_answered(&self) -> bool {
        self.is_answered
    }

    pub(super) fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Why podfs does not know the object, if it does not.
    pub(super) fn absence(&self, want: &WantedObject) -> Option<Absence> {
        let is_unknown = self.known.is_none();
        is_unknown.then(|| Absence { reason: self.request.why(&want.title()), settles: self.request.settles() })
    }

    /// Takes a message of the task. Returns whether followers have to be notified.
    pub(super) fn take(&mut self, message: TaskMessage) -> bool {
        let update = match message {
            TaskMessage::Update(update) => update,
            TaskMessage::Settled => {
                self.is_settled = true;
                return false;
            }
        };
        let (had_trouble, was_answered) = (self.request.trouble.take().is_some(), self.is_answered);
        match update {
            ObjectUpdate::Is(objects) => {
                self.is_answered = true;
                !self.replace(&objects) || !was_answered
            }
            ObjectUpdate::Absent => {
                self.is_answered = true;
                !self.replace(&[]) || !was_answered
            }
            ObjectUpdate::Alive => self.known.is_none() && had_trouble,
            ObjectUpdate::Failure(error) => {
                self.is_answered = true;
                self.request.trouble = Some(error);
                self.known.is_none() || !was_answered
            }
        }
    }

    /// Replaces the objects, unless they have the same content. Returns whether they do.
    fn replace(&mut self, objects: &[Arc<WholeObject>]) -> bool {
        let same = self.known.as_ref().is_some_and(|known| {
            known.len() == objects.len() && known.iter().zip(objects).all(|(one, other)| one.has_same_content(other))
        });
        if !same {
            self.known = Some(objects.to_vec());
        }
        same
    }
}

/// A message of a task.
pub(super) enum TaskMessage {
    Update(ObjectUpdate<Vec<Arc<WholeObject>>>),
    /// The object has its final state.
    Settled,
}

/// Takes the messages of the task with this number. Returns whether it still needs them.
pub(super) type AnswerObserver = Box<dyn Fn(u64, TaskMessage) -> bool + Send + Sync>;

/// Sends the messages of a task to its observer.
struct FeedAnswers {
    observer: AnswerObserver,
    id: u64,
}

impl FeedAnswers {
    /// Sends a message. Returns whether the observer still needs messages.
    fn send(&self, message: TaskMessage) -> bool {
        (self.observer)(self.id, message)
    }
}

async fn follow_object(mut watcher: ObjectWatcher<WholeObject>, answers: FeedAnswers) {
    while let Some(update) = watcher.next().await {
        if !answers.send(TaskMessage::Update(map(update, |object| vec![object]))) {
            return;
        }
        // The task continues for a bound PersistentVolume and for an attachment, which may still change.
        if watcher.is_settled() && !answers.send(TaskMessage::Settled) {
            return;
        }
    }
    answers.send(TaskMessage::Settled);
}

async fn follow_as_pod(reader: Arc<PodReader>, key: ObjectKey, answers: FeedAnswers) {
    let report = |error: &SettingsError| {
        let trouble = ApiError::new(ErrorClass::Unauthorized, format!("{key}: {error}"));
        answers.send(TaskMessage::Update(ObjectUpdate::Failure(trouble)));
    };
    let client = reader.client(report).await;
    // Other pods may read the same object with other outcomes, so this request has no place in the contacts of the
    // node.
    follow_object(ObjectWatcher::new(client, &key, Contacts::default()), answers).await;
}

async fn follow_signer(mut watcher: SignerWatcher<WholeObject>, answers: FeedAnswers) {
    while answers.send(TaskMessage::Update(map(watcher.next().await, |bundles| bundles.values().cloned().collect()))) {}
}

fn map<A, B>(update: ObjectUpdate<A>, to: impl FnOnce(Arc<A>) -> B) -> ObjectUpdate<B> {
    match update {
        ObjectUpdate::Is(object) => ObjectUpdate::Is(Arc::new(to(object))),
        ObjectUpdate::Absent => ObjectUpdate::Absent,
        ObjectUpdate::Alive => ObjectUpdate::Alive,
        ObjectUpdate::Failure(error) => ObjectUpdate::Failure(error),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::object::tests::objects;
    use super::*;

    /// An object about which the server has not answered.
    pub(in super::super) fn followed() -> FollowedObject {
        let task = AbortOnDrop::spawn(async {});
        FollowedObject {
            id: 0,
            known: None,
            request: ObjectRequest::new(),
            is_answered: false,
            is_settled: false,
            _task: task,
        }
    }

    fn config_map(value: &str) -> TaskMessage {
        let text = format!("{{apiVersion: v1, kind: ConfigMap, metadata: {{name: app}}, data: {{k: {value:?}}}}}");
        TaskMessage::Update(ObjectUpdate::Is(Arc::new(objects(&text))))
    }

    fn trouble(class: ErrorClass) -> TaskMessage {
        TaskMessage::Update(ObjectUpdate::Failure(ApiError::new(class, "no")))
    }

    #[tokio::test]
    async fn mg_06_an_error_keeps_what_is_known_and_absence_replaces_it() {
        let mut followed = followed();
        assert!(followed.take(config_map("1")));
        let first = Arc::clone(&followed.objects()[0]);
        for class in
            [ErrorClass::Forbidden, ErrorClass::Unreachable, ErrorClass::Busy, ErrorClass::NotFound, ErrorClass::Gone]
        {
            assert!(!followed.take(trouble(class)));
            assert!(Arc::ptr_eq(&first, &followed.objects()[0]));
        }
        assert!(!followed.take(config_map("1")), "the same again is no change");
        assert!(Arc::ptr_eq(&first, &followed.objects()[0]));
        assert!(followed.take(config_map("2")));
        assert!(followed.take(TaskMessage::Update(ObjectUpdate::Absent)));
        assert!(followed.objects().is_empty() && followed.absence(&WantedObject::OnlyNode).is_none());
    }

    #[tokio::test]
    async fn mg_07_an_object_without_an_answer_is_unknown_for_a_reason() {
        let mut followed = followed();
        let want = WantedObject::BundlesOf("x/y".to_owned());
        let absence = followed.absence(&want).expect("unknown");
        assert_eq!(absence.reason, "ClusterTrustBundles of x/y: the API server has not answered yet");
        assert!(absence.settles.is_some() && !followed.is_answered());
        assert!(followed.take(trouble(ErrorClass::Refused)));
        let absence = followed.absence(&want).expect("unknown");
        assert_eq!((absence.reason.as_str(), absence.settles), ("no", None));
        assert!(followed.is_answered());
    }
}
