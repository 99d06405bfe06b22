//! The references of pods to objects, and why podfs does not know an object.

use std::collections::BTreeSet;
use std::path::Path;

use tokio::time::Instant;

use crate::manifest::objects::{Missing, ObjectKey};
use crate::manifest::pod::PodUid;
use crate::source::title_of_signer;

/// A reference of a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum WantedObject {
    /// An object.
    Object(ObjectKey),
    /// An object that podfs reads with the token of this pod.
    AsPod(PodUid, ObjectKey),
    /// All ClusterTrustBundles of a signer.
    BundlesOf(String),
    /// The only Node object, for a pod without the name of a node.
    OnlyNode,
}

/// Why podfs does not know an object.
pub(super) struct Absence {
    pub(super) reason: String,
    /// When podfs reports this as a problem; `None` if at once.
    pub(super) settles: Option<Instant>,
}

impl Absence {
    /// The object may be in a file that podfs has never been able to read.
    pub(super) fn in_unread_file(want: &WantedObject, file: &Path) -> Absence {
        let (title, file) = (want.title(), file.display());
        let reason = format!("{title} may be in {file}, which podfs could not read yet; mend or remove this file");
        Absence { reason, settles: None }
    }
}

impl WantedObject {
    /// Its title in the log and in the node's status.
    pub(super) fn title(&self) -> String {
        match self {
            WantedObject::Object(key) => key.to_string(),
            WantedObject::AsPod(uid, key) => format!("{key} as pod {uid}"),
            WantedObject::BundlesOf(signer) => title_of_signer(signer),
            WantedObject::OnlyNode => "Node".to_owned(),
        }
    }

    /// The reference as a push reports it while podfs does not know its object. A push cannot report the only Node, which has no
    /// known name.
    pub(super) fn missing(&self) -> Option<Missing> {
        match self {
            WantedObject::Object(key) | WantedObject::AsPod(_, key) => Some(Missing::Object(key.clone())),
            WantedObject::BundlesOf(signer) => Some(Missing::BundlesOf(signer.clone())),
            WantedObject::OnlyNode => None,
        }
    }

    /// Whether its object is among these references, none of which is [`WantedObject::AsPod`].
    pub(super) fn is_one_of(&self, wants: &BTreeSet<WantedObject>) -> bool {
        match self {
            WantedObject::AsPod(_, key) => wants.contains(&WantedObject::Object(key.clone())),
            want => wants.contains(want),
        }
    }
}
