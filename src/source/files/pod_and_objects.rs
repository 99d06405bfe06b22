//! The pod of one file and the objects of all files, for `podfs run`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use super::AcceptedDocuments;
use super::bad_document::{BadDocument, CombinationProblem, ParsedFile, Subject};
use super::documents::{FileCombiner, Files};
use super::find::PathRole;
use super::needs::needs;
use crate::manifest::objects::{NamedObject, ObjectKey, Objects, parse_object};
use crate::manifest::pod::{Pod, from_template, is_pod_or_template, only_pod};
use crate::manifest::{Document, KnownObjects, ManifestError, check_spelling, read_documents};
use crate::source::Snapshot;

/// The API server's error for a change of an immutable object, and the advice.
pub(crate) const IMMUTABLE: &str = "field is immutable when `immutable` is set; delete the object and create it again; until then, \
    podfs uses the earlier content";

/// Combines the files into one pod and its objects.
pub(super) struct PodAndObjects {
    accepted: AcceptedDocuments,
    /// The pod of the last snapshot.
    pod: Option<Arc<Pod>>,
    /// Whether it is in the manifest now.
    is_pod_good: bool,
    /// The objects of the last snapshot.
    objects: Objects,
    /// Those of them whose present documents are bad.
    outdated: BTreeSet<ObjectKey>,
    problems: Vec<CombinationProblem>,
    has_combined: bool,
}

/// The good documents of a file.
pub(super) struct FileDocuments {
    pod: Option<Arc<Pod>>,
    objects: Vec<Arc<NamedObject>>,
    /// Whether the pod is an earlier one, because its present document is bad.
    is_pod_outdated: bool,
    /// The objects that are earlier ones for this reason.
    outdated: BTreeSet<ObjectKey>,
}

impl PodAndObjects {
    pub(super) fn new(accepted: AcceptedDocuments) -> Self {
        Self {
            accepted,
            pod: None,
            is_pod_good: false,
            objects: Objects::default(),
            outdated: BTreeSet::new(),
            problems: Vec::new(),
            has_combined: false,
        }
    }

    /// The document that counts for a file of this role.
    fn accept(&self, role: PathRole, document: Document) -> Result<Document, ManifestError> {
        let document = match role == PathRole::Pod && self.accepted == AcceptedDocuments::Templates {
            true => from_template(document)?,
            false => document,
        };
        if self.accepted != AcceptedDocuments::KnownPods {
            check_spelling(&document)?;
        }
        Ok(document)
    }

    /// What a document of a file of this role describes.
    fn subject(&self, role: PathRole, document: &Document) -> Subject {
        match Subject::of(document) {
            // The pod is in another file.
            Subject::Pod(_) if role == PathRole::Objects => Subject::Other,
            Subject::Other if role == PathRole::Pod && is_pod_or_template(document) => Subject::Pod(String::new()),
            subject => subject,
        }
    }

    fn is_good(&self, key: &ObjectKey) -> bool {
        self.objects.contains(key) && !self.outdated.contains(key)
    }
}

impl FileCombiner for PodAndObjects {
    type Contents = FileDocuments;
    type Combined = Snapshot;
    const NAMES_COUNT: bool = false;

    fn parse(
        &self,
        role: PathRole,
        file: &Path,
        bytes: &[u8],
        earlier: Option<&FileDocuments>,
    ) -> ParsedFile<FileDocuments> {
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for document in read_documents(file, bytes) {
            let subject = document.as_ref().map_or(Subject::Unknown, |document| self.subject(role, document));
            match document.and_then(|document| self.accept(role, document)) {
                Ok(document) => good.push(document),
                Err(error) => bad.push(BadDocument::new(subject, error)),
            }
        }
        let mut pod = None;
        if role == PathRole::Pod {
            let may_be_bad = bad.iter().any(|bad| matches!(bad.subject, Subject::Pod(_) | Subject::Unknown));
            let (only, others) = only_pod(file, good);
            good = others;
            match only.map(Pod::parse) {
                Ok(Ok(only)) => pod = Some(Arc::new(only)),
                Ok(Err(error)) => bad.push(BadDocument::new(Subject::Pod(String::new()), error)),
                Err(_) if may_be_bad => {}
                // The file may be another one than the user meant, so nothing of it counts.
                Err(error) => {
                    good.clear();
                    bad.push(BadDocument::new(Subject::Unknown, error));
                }
            }
        }
        let mut objects = Vec::new();
        for document in good {
            let subject = Subject::of(&document);
            match parse_object(document) {
                Ok(object) => objects.extend(object.map(Arc::new)),
                Err(error) => bad.push(BadDocument::new(subject, error)),
            }
        }
        let mut contents = FileDocuments { pod, objects, is_pod_outdated: false, outdated: BTreeSet::new() };
        if let Some(earlier) = earlier {
            contents.reuse(earlier);
            bad.iter_mut().for_each(|bad| contents.keep_earlier(earlier, bad));
        }
        ParsedFile { contents, bad }
    }

    fn combine(&mut self, files: Files<'_, FileDocuments>) -> Option<Snapshot> {
        let all = files.iter().flat_map(|(_, contents)| &contents.objects).cloned();
        let (objects, duplicates) = Objects::collect_first(all);
        // An object that is described twice stays as it was before.
        let described_twice: BTreeSet<_> = duplicates.iter().map(|(key, _)| key.clone()).collect();
        let (objects, refused) = objects.keep(&described_twice, &self.objects).keep_immutable(&self.objects);
        let immutable = refused.iter().map(|(origin, field)| CombinationProblem {
            error: Arc::new(ManifestError::invalid(origin, field, IMMUTABLE)),
            until_then: "",
            // A podfs that starts has no earlier content that the objects have to go together with.
            object: None,
        });
        let duplicates = duplicates.into_iter().map(|(key, error)| CombinationProblem {
            error: Arc::new(error),
            until_then: match self.objects.contains(&key) {
                true => "podfs uses the earlier content",
                false => "podfs uses the first one",
            },
            object: Some(key),
        });
        self.problems = immutable.chain(duplicates).collect();
        self.outdated = files.iter().flat_map(|(_, file)| file.outdated.iter().cloned()).collect();
        let pod = files.iter().find_map(|(_, file)| Some((file.pod.clone()?, !file.is_pod_outdated)));
        self.is_pod_good = pod.as_ref().is_some_and(|(_, is_good)| *is_good);
        let pod = pod.map(|(pod, _)| pod);
        let is_same_pod = match (&self.pod, &pod) {
            (Some(before), Some(pod)) => Arc::ptr_eq(before, pod),
            (before, pod) => before.is_none() && pod.is_none(),
        };
        let is_same = self.has_combined && is_same_pod && objects.is_same(&self.objects);
        (self.pod, self.objects, self.has_combined) = (pod.clone(), objects.clone(), true);
        let known = KnownObjects { objects, ..KnownObjects::default() };
        (!is_same).then_some(Snapshot { pod, known, noticed_at: None })
    }

    fn problems(&self) -> &[CombinationProblem] {
        &self.problems
    }

    /// Whether the pod needs the document. Without a pod, podfs cannot know.
    fn refuses_to_start(&self, subject: &Subject) -> bool {
        match &self.pod {
            Some(pod) if self.is_pod_good => {
                matches!(subject, Subject::Pod(_)) || needs(pod, subject, &self.objects, |key| self.is_good(key))
            }
            _ => true,
        }
    }
}

impl FileDocuments {
    /// Uses the earlier parsed pod and objects again where they are equal, so that equal contents give no new snapshot.
    fn reuse(&mut self, earlier: &FileDocuments) {
        let of_earlier: BTreeMap<_, _> = earlier.objects.iter().map(|object| (&object.key, object)).collect();
        for object in &mut self.objects {
            if let Some(old) = of_earlier.get(&object.key).filter(|old| ***old == *object) {
                *object = Arc::clone(old);
            }
        }
        if self.pod.is_some() && self.pod == earlier.pod {
            self.pod = earlier.pod.clone();
        }
    }

    /// Keeps what the file described earlier in place of the bad document.
    fn keep_earlier(&mut self, earlier: &FileDocuments, bad: &mut BadDocument) {
        let (keeps_pod, is_kept): (bool, &dyn Fn(&ObjectKey) -> bool) = match &bad.subject {
            Subject::Unknown => (true, &|_| true),
            Subject::Pod(_) => (true, &|_| false),
            Subject::Object(bad) => (false, &move |key| key == bad),
            Subject::Other => return,
        };
        if keeps_pod && self.pod.is_none() && earlier.pod.is_some() {
            (self.pod, self.is_pod_outdated, bad.has_earlier_content) = (earlier.pod.clone(), true, true);
        }
        let is_described: BTreeSet<_> = self.objects.iter().map(|object| object.key.clone()).collect();
        let kept = earlier.objects.iter().filter(|old| is_kept(&old.key) && !is_described.contains(&old.key));
        for old in kept {
            self.objects.push(Arc::clone(old));
            self.outdated.insert(old.key.clone());
            bad.has_earlier_content = true;
        }
        // A second bad document may be the one that an earlier document was kept for.
        bad.has_earlier_content |= self.outdated.iter().any(is_kept) || keeps_pod && self.is_pod_outdated;
    }
}
