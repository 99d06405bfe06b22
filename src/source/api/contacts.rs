//! Contacts: the state of the requests for each object, and what follows from all of them: since when the server cannot be
//! reached, and whether the pod was deleted there. The tasks that follow objects write the table, and `podfs status` reads it;
//! both hold its lock only for moments.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use crate::kube::error::ApiError;

/// The last contact about every object. Cheap to clone.
#[derive(Clone, Default)]
pub struct Contacts(Arc<Mutex<ContactTable>>);

#[derive(Default)]
struct ContactTable {
    objects: BTreeMap<String, Contact>,
    /// When podfs learned that the pod was deleted, if it was.
    pod_deleted: Option<SystemTime>,
}

/// An API server that cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreachable {
    /// Since when it has not answered.
    pub since: SystemTime,
    /// The error of the last attempt.
    pub trouble: String,
}

/// The last contact about one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contact {
    /// The resource version up to which podfs knows all changes, if it knows any.
    pub version: Option<String>,
    /// The state of its follower, in a word.
    pub state: &'static str,
    /// The present error.
    pub trouble: Option<String>,
    /// Whether the server answered the last request, whatever the answer was.
    pub connected: bool,
    /// When the server last answered.
    answered_at: Option<Instant>,
    /// Since when it has not answered; `None` if it answered the last request.
    lost: Option<(Instant, SystemTime)>,
}

impl Contact {
    /// How long ago the server last answered.
    pub fn age(&self) -> Option<Duration> {
        self.answered_at.map(|answered_at| answered_at.elapsed())
    }
}

impl Contacts {
    /// All objects by name, such as `ConfigMap default/app`.
    pub fn all(&self) -> Vec<(String, Contact)> {
        self.lock().objects.iter().map(|(object, contact)| (object.clone(), contact.clone())).collect()
    }

    /// Notes an answer.
    pub(crate) fn answered(&self, object: &str, state: &'static str, version: Option<&str>) {
        let (version, answered_at) = (version.map(str::to_owned), Some(Instant::now()));
        let contact = Contact { version, state, trouble: None, connected: true, answered_at, lost: None };
        self.lock().objects.insert(object.to_owned(), contact);
    }

    /// Notes an error.
    pub(crate) fn trouble(&self, object: &str, state: &'static str, error: &ApiError) {
        let mut table = self.lock();
        let before = table.objects.remove(object);
        let (version, answered_at, lost) =
            before.map_or((None, None, None), |before| (before.version, before.answered_at, before.lost));
        let connected = !error.is_outage();
        let now = || (Instant::now(), SystemTime::now());
        let (answered_at, lost) =
            if connected { (Some(Instant::now()), None) } else { (answered_at, Some(lost.unwrap_or_else(now))) };
        let trouble = Some(error.sentence.clone());
        table.objects.insert(object.to_owned(), Contact { version, state, trouble, connected, answered_at, lost });
    }

    /// Since when the server cannot be reached; `None` if it can. One answer about any object ends the outage, even if podfs
    /// has not yet repeated the requests for other objects.
    pub fn unreachable(&self) -> Option<Unreachable> {
        let table = self.lock();
        let answered_at = table.objects.values().filter_map(|contact| contact.answered_at).max();
        let lost = table.objects.values().filter_map(|contact| contact.lost.map(|(at, since)| (at, since, contact)));
        let (_, since, contact) = lost
            .filter(|(at, ..)| answered_at.is_none_or(|answered_at| *at >= answered_at))
            .min_by_key(|(at, ..)| *at)?;
        Some(Unreachable { since, trouble: contact.trouble.clone().unwrap_or_default() })
    }

    /// When podfs learned that the pod was deleted, if it was.
    pub fn pod_deleted(&self) -> Option<SystemTime> {
        self.lock().pod_deleted
    }

    /// Notes whether the server has the pod.
    pub(super) fn pod_is_there(&self, is_there: bool) {
        let mut table = self.lock();
        table.pod_deleted = if is_there { None } else { table.pod_deleted.or_else(|| Some(SystemTime::now())) };
    }

    /// Forgets an object that podfs no longer follows.
    pub(crate) fn forget(&self, object: &str) {
        self.lock().objects.remove(object);
    }

    fn lock(&self) -> MutexGuard<'_, ContactTable> {
        self.0.lock().expect("no code panics while contacts are locked")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::error::ErrorClass;

    #[test]
    fn an_error_leaves_the_known_version_and_ends_with_an_answer() {
        let contacts = Contacts::default();
        let contact = || contacts.all().pop().expect("one").1;
        contacts.answered("Pod default/web", "watching", Some("7"));
        contacts.trouble("Pod default/web", "waiting", &ApiError::new(ErrorClass::Unreachable, "it is away"));
        let in_trouble = contact();
        assert_eq!((in_trouble.version.as_deref(), in_trouble.trouble.as_deref()), (Some("7"), Some("it is away")));
        assert!(in_trouble.age().is_some() && !in_trouble.connected);
        contacts.trouble("Pod default/web", "waiting", &ApiError::new(ErrorClass::Forbidden, "it refuses"));
        assert!(contact().connected, "it answers");
        contacts.answered("Pod default/web", "watching", Some("8"));
        assert_eq!((contact().version.as_deref(), contact().trouble), (Some("8"), None));
    }

    #[test]
    fn an_outage_begins_with_the_first_object_and_ends_with_any_answer() {
        let contacts = Contacts::default();
        let away = ApiError::new(ErrorClass::Unreachable, "it is away");
        contacts.answered("a", "watching", Some("1"));
        contacts.answered("b", "watching", Some("1"));
        assert_eq!(contacts.unreachable(), None);
        contacts.trouble("a", "waiting", &away);
        let first = contacts.unreachable().expect("it is away");
        contacts.trouble("b", "waiting", &away);
        contacts.trouble("a", "waiting", &ApiError::new(ErrorClass::Unreachable, "it is still away"));
        let later = contacts.unreachable().expect("it is away");
        assert_eq!((later.since, later.trouble.as_str()), (first.since, "it is still away"));
        contacts.trouble("b", "waiting", &ApiError::new(ErrorClass::Forbidden, "it refuses"));
        assert_eq!(contacts.unreachable(), None, "it answers");
        contacts.trouble("b", "waiting", &away);
        assert!(contacts.unreachable().is_some_and(|last| last.since >= later.since));
    }

    #[test]
    fn a_pod_is_deleted_once() {
        let contacts = Contacts::default();
        assert_eq!(contacts.pod_deleted(), None);
        contacts.pod_is_there(false);
        let deleted = contacts.pod_deleted();
        contacts.pod_is_there(false);
        assert!(deleted.is_some() && contacts.pod_deleted() == deleted);
        contacts.pod_is_there(true);
        assert_eq!(contacts.pod_deleted(), None);
    }
}
