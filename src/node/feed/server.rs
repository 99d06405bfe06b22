//! The requests for objects to the API server: one task follows each object, however many pods refer to it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use tokio::runtime::Handle;
use tracing::debug;

use super::journal::SharedJournal;
use super::object::WholeObject;
use super::readers::{PodReader, PodReaders};
use super::registry::{Absence, Registry, Want};
use crate::kube::client::ApiClient;
use crate::kube::error::{ApiError, Class};
use crate::kube::settings::SettingsError;
use crate::manifest::objects::ObjectKey;
use crate::manifest::tokens::Token;
use crate::source::{
    Contacts, IssuedCredentials, ObjectRequest, ObjectTeller, ObjectUpdate, SignerTeller, Task, title_of_signer,
};

/// The API server that objects are followed at.
pub(super) struct ObjectServer {
    client: ApiClient,
    contacts: Contacts,
    /// The readers of the objects of CSI volumes, where the pods read them with their own credentials.
    readers: Option<PodReaders>,
    journal: SharedJournal,
    runtime: Handle,
    questions: AtomicU64,
}

/// A question about an object, with its answer.
pub(super) struct Asked {
    /// Distinguishes questions about the same object: a task that is about to end may still send an answer.
    id: u64,
    /// What there is, once that is known.
    known: Option<Vec<Arc<WholeObject>>>,
    question: ObjectRequest,
    /// Whether anything came since it was asked last, be it an error.
    is_answered: bool,
    /// Whether the task has ended, because the object cannot change any more.
    is_settled: bool,
    _task: Task,
}

impl ObjectServer {
    /// Nothing is asked yet. Inside of a tokio runtime.
    pub(super) fn new(client: ApiClient, contacts: Contacts, readers: Option<PodReaders>) -> ObjectServer {
        let (runtime, questions) = (Handle::current(), AtomicU64::new(0));
        ObjectServer { client, contacts, readers, journal: SharedJournal::new(), runtime, questions }
    }

    pub(super) fn readers(&self) -> Option<&PodReaders> {
        self.readers.as_ref()
    }

    /// Asks about an object, or about the bundles of a signer. What was known before is so until an answer comes.
    pub(super) fn ask(&self, want: &Want, registry: &Weak<Registry>, before: Option<Asked>) -> Option<Asked> {
        debug!("{} is asked for", want.title());
        let id = self.questions.fetch_add(1, Ordering::Relaxed);
        let answers = FeedAnswers { registry: Weak::clone(registry), want: want.clone(), id };
        let (client, contacts) = (self.client.clone(), self.contacts.clone());
        let task = match want {
            Want::Object(key) => {
                Task::spawn_on(&self.runtime, follow_object(ObjectTeller::new(client, key, contacts), answers))
            }
            Want::AsPod(uid, key) => {
                let reader = self.readers.as_ref()?.of(uid);
                Task::spawn_on(&self.runtime, follow_as_pod(reader, key.clone(), answers))
            }
            Want::BundlesOf(signer) => {
                Task::spawn_on(&self.runtime, follow_signer(SignerTeller::new(client, signer, contacts), answers))
            }
            Want::OnlyNode => return None,
        };
        let known = before.and_then(|before| before.known);
        Some(Asked { id, known, question: ObjectRequest::new(), is_answered: false, is_settled: false, _task: task })
    }

    /// Logs what was said.
    pub(super) fn note<T>(&self, title: &str, told: &ObjectUpdate<T>) {
        self.journal.note(title, told);
    }

    /// Logs what was said about a token.
    pub(super) fn note_token(&self, title: &str, told: &ObjectUpdate<Token>) {
        self.journal.note_token(title, told);
    }

    /// No pod has this token any more.
    pub(super) fn forget_token(&self, title: &str) {
        self.journal.forget(title);
    }

    /// Nothing refers to it any more.
    pub(super) fn forget(&self, want: &Want) {
        let title = want.title();
        debug!("{title} is not followed any more");
        self.journal.forget(&title);
        self.contacts.forget(&title);
    }

    /// Tokens of a pod; none is asked for yet.
    pub(super) fn tokens(&self) -> IssuedCredentials {
        // Tokens of several pods go by the same name.
        IssuedCredentials::new(self.client.clone(), Contacts::default())
    }
}

impl Asked {
    /// Whether this is the question of that number.
    pub(super) fn is(&self, id: u64) -> bool {
        self.id == id
    }

    /// What there is, as far as that is known.
    pub(super) fn objects(&self) -> &[Arc<WholeObject>] {
        self.known.as_deref().unwrap_or_default()
    }

    pub(super) fn is_answered(&self) -> bool {
        self.is_answered
    }

    pub(super) fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Why nothing is known.
    pub(super) fn absence(&self, want: &Want) -> Option<Absence> {
        let is_unknown = self.known.is_none();
        is_unknown.then(|| Absence { reason: self.question.why(&want.title()), settles: self.question.settles() })
    }

    /// Takes the answer of a task. Gives whether followers have to be notified.
    pub(super) fn take(&mut self, said: Said) -> bool {
        let told = match said {
            Said::Told(told) => told,
            Said::Settled => {
                self.is_settled = true;
                return false;
            }
        };
        let (had_trouble, was_answered) = (self.question.trouble.take().is_some(), self.is_answered);
        match told {
            ObjectUpdate::Is(objects) => {
                self.is_answered = true;
                !self.replace(&objects) || !was_answered
            }
            ObjectUpdate::Absent => {
                self.is_answered = true;
                !self.replace(&[]) || !was_answered
            }
            ObjectUpdate::Alive => self.known.is_none() && had_trouble,
            ObjectUpdate::Trouble(error) => {
                self.is_answered = true;
                self.question.trouble = Some(error);
                self.known.is_none() || !was_answered
            }
        }
    }

    /// Whether the objects were the same before; then those stay.
    fn replace(&mut self, objects: &[Arc<WholeObject>]) -> bool {
        let same = self.known.as_ref().is_some_and(|known| {
            known.len() == objects.len() && known.iter().zip(objects).all(|(one, other)| one.says_the_same_as(other))
        });
        if !same {
            self.known = Some(objects.to_vec());
        }
        same
    }
}

/// A message of a task.
pub(super) enum Said {
    Told(ObjectUpdate<Vec<Arc<WholeObject>>>),
    /// It has ended: the object cannot change any more.
    Settled,
}

/// Where a task sends its messages.
struct FeedAnswers {
    registry: Weak<Registry>,
    want: Want,
    id: u64,
}

impl FeedAnswers {
    /// Whether there still is a registry.
    fn say(&self, said: Said) -> bool {
        let registry = self.registry.upgrade();
        registry.is_some_and(|registry| {
            registry.take(&self.want, self.id, said);
            true
        })
    }
}

async fn follow_object(mut teller: ObjectTeller<WholeObject>, answers: FeedAnswers) {
    while let Some(told) = teller.next().await {
        if !answers.say(Said::Told(map(told, |object| vec![object]))) {
            return;
        }
        // One that may grow goes on.
        if teller.is_settled() && !answers.say(Said::Settled) {
            return;
        }
    }
    answers.say(Said::Settled);
}

async fn follow_as_pod(reader: Arc<PodReader>, key: ObjectKey, answers: FeedAnswers) {
    let tell = |error: &SettingsError| {
        let trouble = ApiError::new(Class::Unauthorized, format!("{key}: {error}"));
        answers.say(Said::Told(ObjectUpdate::Trouble(trouble)));
    };
    let client = reader.client(tell).await;
    // Other pods may read the same object, each with its own outcome.
    follow_object(ObjectTeller::new(client, &key, Contacts::default()), answers).await;
}

async fn follow_signer(mut teller: SignerTeller<WholeObject>, answers: FeedAnswers) {
    while answers.say(Said::Told(map(teller.next().await, |bundles| bundles.values().cloned().collect()))) {}
}

fn map<A, B>(told: ObjectUpdate<A>, to: impl FnOnce(Arc<A>) -> B) -> ObjectUpdate<B> {
    match told {
        ObjectUpdate::Is(object) => ObjectUpdate::Is(Arc::new(to(object))),
        ObjectUpdate::Absent => ObjectUpdate::Absent,
        ObjectUpdate::Alive => ObjectUpdate::Alive,
        ObjectUpdate::Trouble(error) => ObjectUpdate::Trouble(error),
    }
}

impl Want {
    /// What it goes by in the log and in the node's status.
    pub(super) fn title(&self) -> String {
        match self {
            Want::Object(key) => key.to_string(),
            Want::AsPod(uid, key) => format!("{key} as pod {uid}"),
            Want::BundlesOf(signer) => title_of_signer(signer),
            Want::OnlyNode => "Node".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::object::tests::objects;
    use super::*;

    fn asked() -> Asked {
        let task = Task::spawn(async {});
        Asked { id: 0, known: None, question: ObjectRequest::new(), is_answered: false, is_settled: false, _task: task }
    }

    fn config_map(value: &str) -> Said {
        let text = format!("{{apiVersion: v1, kind: ConfigMap, metadata: {{name: app}}, data: {{k: {value:?}}}}}");
        Said::Told(ObjectUpdate::Is(Arc::new(objects(&text))))
    }

    fn trouble(class: Class) -> Said {
        Said::Told(ObjectUpdate::Trouble(ApiError::new(class, "no")))
    }

    #[tokio::test]
    async fn mg_06_an_error_keeps_what_is_known_and_absence_replaces_it() {
        let mut asked = asked();
        assert!(asked.take(config_map("1")));
        let first = Arc::clone(&asked.objects()[0]);
        for class in [Class::Forbidden, Class::Unreachable, Class::Busy, Class::NotFound, Class::Gone] {
            assert!(!asked.take(trouble(class)));
            assert!(Arc::ptr_eq(&first, &asked.objects()[0]));
        }
        assert!(!asked.take(config_map("1")), "the same again is no change");
        assert!(Arc::ptr_eq(&first, &asked.objects()[0]));
        assert!(asked.take(config_map("2")));
        assert!(asked.take(Said::Told(ObjectUpdate::Absent)));
        assert!(asked.objects().is_empty() && asked.absence(&Want::OnlyNode).is_none());
    }

    #[tokio::test]
    async fn mg_07_what_was_never_heard_of_is_unknown_for_a_reason() {
        let mut asked = asked();
        let want = Want::BundlesOf("x/y".to_owned());
        let absence = asked.absence(&want).expect("unknown");
        assert_eq!(absence.reason, "ClusterTrustBundles of x/y: the API server has not answered yet");
        assert!(absence.settles.is_some() && !asked.is_answered());
        assert!(asked.take(trouble(Class::Refused)));
        let absence = asked.absence(&want).expect("unknown");
        assert_eq!((absence.reason.as_str(), absence.settles), ("no", None));
        assert!(asked.is_answered());
    }
}
