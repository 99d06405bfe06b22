//! Contacts: for each object that is asked for, what is known of the talk with the server about it. The tasks that
//! follow objects write it, `podfs status` reads it; it is locked for moments.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::error::{ApiError, Class};

/// What is known of every object. Cheap to clone.
#[derive(Clone, Default)]
pub struct Contacts(Arc<Mutex<BTreeMap<String, Contact>>>);

/// What is known of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contact {
    /// Up to which resource version everything is known, if anything is.
    pub version: Option<String>,
    /// What is done about it, in a word.
    pub doing: &'static str,
    /// What is wrong at this moment.
    pub trouble: Option<String>,
    /// Whether the server answered when it was asked last, whatever it answered.
    pub connected: bool,
    /// When the server last answered.
    heard: Option<Instant>,
}

impl Contact {
    /// How long ago the server last answered.
    pub fn age(&self) -> Option<Duration> {
        self.heard.map(|heard| heard.elapsed())
    }
}

impl Contacts {
    /// All objects by name, such as `ConfigMap default/app`.
    pub fn all(&self) -> Vec<(String, Contact)> {
        self.lock().iter().map(|(object, contact)| (object.clone(), contact.clone())).collect()
    }

    /// The server has answered.
    pub(super) fn heard(&self, object: &str, doing: &'static str, version: Option<&str>) {
        let (version, heard) = (version.map(str::to_owned), Some(Instant::now()));
        let contact = Contact { version, doing, trouble: None, connected: true, heard };
        self.lock().insert(object.to_owned(), contact);
    }

    /// Something is wrong.
    pub(super) fn trouble(&self, object: &str, doing: &'static str, error: &ApiError) {
        let mut all = self.lock();
        let before = all.remove(object);
        let (version, heard) = before.map_or((None, None), |before| (before.version, before.heard));
        let connected = !matches!(error.class, Class::Unreachable | Class::Untrusted);
        let trouble = Some(error.sentence.clone());
        all.insert(object.to_owned(), Contact { version, doing, trouble, connected, heard });
    }

    /// Nobody asks for it any more.
    pub(super) fn forget(&self, object: &str) {
        self.lock().remove(object);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Contact>> {
        self.0.lock().expect("nobody panics while contacts are locked")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_leaves_what_was_known_and_ends_with_an_answer() {
        let contacts = Contacts::default();
        let contact = || contacts.all().pop().expect("one").1;
        contacts.heard("Pod default/web", "watching", Some("7"));
        contacts.trouble("Pod default/web", "waiting", &ApiError::new(Class::Unreachable, "it is away"));
        let in_trouble = contact();
        assert_eq!((in_trouble.version.as_deref(), in_trouble.trouble.as_deref()), (Some("7"), Some("it is away")));
        assert!(in_trouble.age().is_some() && !in_trouble.connected);
        contacts.trouble("Pod default/web", "waiting", &ApiError::new(Class::Forbidden, "it refuses"));
        assert!(contact().connected, "it answers");
        contacts.heard("Pod default/web", "watching", Some("8"));
        assert_eq!((contact().version.as_deref(), contact().trouble), (Some("8"), None));
    }
}
