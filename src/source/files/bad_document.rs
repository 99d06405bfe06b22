//! Documents of files that podfs cannot use, beside others that it can.

use std::sync::Arc;

use crate::manifest::objects::{ObjectKey, ObjectKind};
use crate::manifest::pod::DEFAULT_NAMESPACE;
use crate::manifest::{Document, ManifestError};

/// The good documents of a file, and the bad ones.
pub(crate) struct ParsedFile<C> {
    /// The good documents, and earlier ones that stay in use in place of bad ones.
    pub(crate) contents: C,
    /// The bad documents.
    pub(crate) bad: Vec<BadDocument>,
}

/// A document that podfs cannot use.
#[derive(Clone)]
pub(crate) struct BadDocument {
    /// What is wrong with it.
    pub(crate) error: Arc<ManifestError>,
    /// What it describes, as far as podfs can read that.
    pub(crate) subject: Subject,
    /// Whether podfs goes on with an earlier document in its place.
    pub(crate) has_earlier_content: bool,
}

impl BadDocument {
    /// A bad document that describes `subject`, with no earlier document in its place.
    pub(crate) fn new(subject: Subject, error: ManifestError) -> BadDocument {
        BadDocument { error: Arc::new(error), subject, has_earlier_content: false }
    }

    /// Whether podfs has never read what the document describes, although volumes or pods may need it.
    pub(crate) fn is_unread(&self) -> bool {
        !self.has_earlier_content && self.subject != Subject::Other
    }
}

/// A document that does not go together with others, or with an earlier one.
pub(crate) struct CombinationProblem {
    pub(crate) error: Arc<ManifestError>,
    /// Which content podfs uses, unless the error says it.
    pub(crate) until_then: &'static str,
    /// The object whose description a podfs that starts now could not choose.
    pub(crate) object: Option<ObjectKey>,
}

/// What a document describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// Perhaps a pod or an object that volumes show: podfs cannot read its kind or its name.
    Unknown,
    /// The pod with this namespace and name, such as `default/web`.
    Pod(String),
    /// The object with this key.
    Object(ObjectKey),
    /// An object that no volume shows.
    Other,
}

impl Subject {
    /// The subject of a document whose fields may be invalid.
    pub(crate) fn of(document: &Document) -> Subject {
        let Some(name) = document.name() else { return Subject::Unknown };
        let namespace = document.namespace().unwrap_or(DEFAULT_NAMESPACE);
        if document.kind == "Pod" {
            return Subject::Pod(format!("{namespace}/{name}"));
        }
        if let Some(kind) = ObjectKind::parse(&document.kind) {
            let namespace = if kind.is_of_cluster() { String::new() } else { namespace.to_owned() };
            return Subject::Object(ObjectKey { kind, namespace, name: name.to_owned() });
        }
        // A kind with other letters than a known one may be that kind.
        match ObjectKind::names().chain(["Pod".to_owned()]).any(|kind| kind.eq_ignore_ascii_case(&document.kind)) {
            true => Subject::Unknown,
            false => Subject::Other,
        }
    }
}
