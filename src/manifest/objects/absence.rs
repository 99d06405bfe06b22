//! Why podfs does not have an object that may exist.

use std::sync::Arc;

use super::{ObjectKey, ObjectKind, Objects};

/// An object, or objects, of which the source does not know whether they exist.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Missing {
    /// The object with this key.
    Object(ObjectKey),
    /// All ClusterTrustBundles of the signer of this name.
    BundlesOf(String),
}

impl Objects {
    /// The same objects, with the reasons why others are unknown: the source has not answered about them yet, or the API server
    /// forbids to read them. An object that does not exist has no reason.
    pub fn with_absences(self, reasons: impl IntoIterator<Item = (Missing, String)>) -> Objects {
        Objects { absent: Arc::new(reasons.into_iter().collect()), ..self }
    }

    /// Why it is not known whether there is such an object. The namespace is empty for kinds that have none.
    pub fn why_absent(&self, kind: ObjectKind, namespace: &str, name: &str) -> Option<&str> {
        let key = ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() };
        match self.by_key.contains_key(&key) {
            true => None,
            false => self.absent.get(&Missing::Object(key)).map(String::as_str),
        }
    }

    /// Why it is not known which ClusterTrustBundles the signer has.
    pub fn why_no_bundles_of(&self, signer: &str) -> Option<&str> {
        self.absent.get(&Missing::BundlesOf(signer.to_owned())).map(String::as_str)
    }
}
