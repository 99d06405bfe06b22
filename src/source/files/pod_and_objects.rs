//! The pod of one file and the objects of all files, for `podfs run`.

use std::path::Path;
use std::sync::Arc;

use super::AcceptedDocuments;
use super::documents::{FileCombiner, Files};
use super::find::PathRole;
use crate::manifest::objects::{NamedObject, Objects, parse_object};
use crate::manifest::pod::{Pod, from_template, only_pod};
use crate::manifest::{KnownObjects, ManifestError, Origin, check_spelling, parse_documents};
use crate::source::Snapshot;

/// The API server's error for a change of an immutable object, and the advice.
pub(crate) const IMMUTABLE: &str = "field is immutable when `immutable` is set; delete the object and create it again; until then, \
    podfs uses the earlier content";

/// Combines the files into one pod and its objects.
pub(super) struct PodAndObjects {
    accepted: AcceptedDocuments,
    /// The objects of the last snapshot.
    objects: Objects,
    /// Documents that change an immutable object, and the fields that they change.
    refused: Vec<(Origin, &'static str)>,
}

/// The good documents of a file.
pub(super) struct FileDocuments {
    pod: Option<Arc<Pod>>,
    objects: Vec<Arc<NamedObject>>,
}

impl PodAndObjects {
    pub(super) fn new(accepted: AcceptedDocuments) -> Self {
        Self { accepted, objects: Objects::default(), refused: Vec::new() }
    }
}

impl FileCombiner for PodAndObjects {
    type Contents = FileDocuments;
    type Combined = Snapshot;
    const NAMES_COUNT: bool = false;

    fn parse(&self, role: PathRole, file: &Path, bytes: &[u8]) -> Result<FileDocuments, ManifestError> {
        let mut documents = parse_documents(file, bytes)?;
        if role == PathRole::Pod && self.accepted == AcceptedDocuments::Templates {
            documents = documents.into_iter().map(from_template).collect::<Result<_, _>>()?;
        }
        if self.accepted != AcceptedDocuments::KnownPods {
            documents.iter().try_for_each(check_spelling)?;
        }
        let (pod, others) = match role {
            PathRole::Pod => {
                let (pod, others) = only_pod(file, documents)?;
                (Some(pod), others)
            }
            PathRole::Objects => (None, documents),
        };
        let pod = pod.map(Pod::parse).transpose()?.map(Arc::new);
        let objects = others.into_iter().filter_map(|document| parse_object(document).transpose());
        let objects = objects.map(|object| object.map(Arc::new)).collect::<Result<_, _>>()?;
        Ok(FileDocuments { pod, objects })
    }

    /// # Errors
    /// When an object is in two documents.
    fn combine(&mut self, files: Files<'_, FileDocuments>) -> Result<Snapshot, ManifestError> {
        let objects = Objects::collect(files.iter().flat_map(|(_, contents)| &contents.objects).cloned())?;
        let (objects, refused) = objects.keep_immutable(&self.objects);
        let pod = files.iter().find_map(|(_, contents)| contents.pod.clone());
        self.refused = refused;
        self.objects = objects.clone();
        Ok(Snapshot { pod, known: KnownObjects { objects, ..KnownObjects::default() }, noticed_at: None })
    }

    fn problems(&self) -> Vec<ManifestError> {
        self.refused.iter().map(|(origin, field)| ManifestError::invalid(origin, field, IMMUTABLE)).collect()
    }
}
