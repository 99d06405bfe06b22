//! Payloads: the files of a projection at one moment, with modes and owners, assembled in memory.
//!
//! A payload is complete or it does not exist: when one source fails, podfs assembles nothing, and reports the problems of all
//! sources together. Bytes are borrowed from the objects where possible.

mod credential;
mod downward;
mod draft;
mod error;
mod object;
mod ownership;
mod quote;
mod resource;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

pub use error::{PayloadError, Problem, Warning};
pub use ownership::{OwnedEntry, Ownership, fs_group_mode};
pub use resource::ContainerNotFound;

use crate::manifest::objects::{ObjectKind, Values};
use crate::manifest::{KnownObjects, PodView};
use crate::types::PayloadPath;
use crate::volume::{CertificateFiles, DownwardFile, DownwardValue, ObjectSource, Projection, ProjectionSource};
use draft::{Draft, FileOrigin};

/// The files of one generation of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload<'a> {
    /// The files; no path lies below another.
    pub files: BTreeMap<PayloadPath, PayloadFile<'a>>,
    /// Mode of the generation's directories.
    pub directory_mode: u16,
    /// Group of files, directories and links.
    pub gid: u32,
}

/// A file of a payload. Its group is the payload's.
#[derive(Clone, PartialEq, Eq)]
pub struct PayloadFile<'a> {
    /// The bytes.
    pub content: Cow<'a, [u8]>,
    /// Permission bits, including those that the fsGroup adds.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Whether the bytes are those of a Secret or a token.
    pub is_secret: bool,
}

/// A payload, and warnings for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssembledPayload<'a> {
    /// The files.
    pub payload: Payload<'a>,
    /// A warning for each file that hides another one, and for each mode that was hardly meant.
    pub warnings: Vec<Warning>,
}

impl<'a> Payload<'a> {
    /// Assembles the files of a volume.
    ///
    /// # Errors
    /// All problems of all sources: objects, keys, containers and tokens that are missing, and paths that would have to be
    /// both a file and a directory.
    pub fn assemble(projection: &'a Projection, pod: &'a PodView) -> Result<AssembledPayload<'a>, PayloadError> {
        let ownership = Ownership::of(&pod.facts);
        let mut assembly = Assembly { projection, pod, ownership, draft: Draft::default() };
        for source in &projection.sources {
            assembly.add(source);
        }
        let (files, mut warnings) = assembly.draft.finish()?;
        warnings.extend(decimal_modes(projection));
        let payload = Payload { files, directory_mode: ownership.directory_mode(), gid: ownership.gid() };
        Ok(AssembledPayload { payload, warnings })
    }

    /// The names in the volume's root, each with the owner of its link: that of the first file in path order.
    pub fn top_level(&self) -> Vec<(&str, u32)> {
        let mut names: Vec<(&str, u32)> = self.files.iter().map(|(path, file)| (path.top_level(), file.uid)).collect();
        // Paths below one directory are neighbours in the order of paths.
        names.dedup_by_key(|(name, _)| *name);
        names
    }
}

/// Modes that a user has written in octal without the leading 0. As decimal numbers they are 0620, 0670, 0674 and 0764, which nobody
/// means. Other octal modes, such as 644, are above 0777 as decimal numbers, and podfs refuses them.
const DECIMAL_MODES: [u16; 4] = [400, 440, 444, 500];

/// A warning for each mode of a volume that was written in decimal by mistake.
fn decimal_modes(projection: &Projection) -> impl Iterator<Item = Warning> {
    let of_files = projection.sources.iter().flat_map(|source| match source {
        ProjectionSource::ConfigMap(object) | ProjectionSource::Secret(object) => {
            object.items.iter().map(|item| (&item.path, item.mode)).collect()
        }
        ProjectionSource::DownwardApi(files) => files.iter().map(|file| (&file.path, file.mode)).collect(),
        _ => Vec::new(),
    });
    let of_files = of_files.filter_map(|(path, mode)| Some((format!("mode of {:?}", path.as_str()), mode?)));
    let all = [("defaultMode".to_owned(), projection.default_mode)].into_iter().chain(of_files);
    all.filter(|(_, mode)| DECIMAL_MODES.contains(mode)).map(|(field, mode)| Warning::DecimalMode { field, mode })
}

struct Assembly<'a> {
    projection: &'a Projection,
    pod: &'a PodView,
    ownership: Ownership,
    draft: Draft<'a>,
}

impl<'a> Assembly<'a> {
    fn add(&mut self, source: &'a ProjectionSource) {
        let PodView { identity, known: KnownObjects { objects, tokens, .. }, .. } = self.pod;
        match source {
            ProjectionSource::ConfigMap(object) => {
                let values = objects.config_map(&identity.namespace, &object.name);
                self.add_object(source, ObjectKind::ConfigMap, object, values);
            }
            ProjectionSource::Secret(object) => {
                let values = objects.secret(&identity.namespace, &object.name);
                self.add_object(source, ObjectKind::Secret, object, values);
            }
            ProjectionSource::DownwardApi(files) => files.iter().for_each(|file| self.add_downward(source, file)),
            ProjectionSource::ServiceAccountToken(file) => {
                let content = credential::token(file, tokens).map(Cow::Borrowed);
                self.add_credential(source, &file.path, file.user, content);
            }
            ProjectionSource::ClusterTrustBundle(file) => {
                let content = credential::trust_bundle(file, objects).map(Cow::Owned);
                self.add_credential(source, &file.path, file.user, content);
            }
            ProjectionSource::PodCertificate(files) => self.add_certificate(source, files),
        }
    }

    fn add_object(
        &mut self,
        source: &'a ProjectionSource,
        kind: ObjectKind,
        object: &'a ObjectSource,
        values: Option<&'a impl Values>,
    ) {
        let PodView { identity, known: KnownObjects { objects, .. }, .. } = self.pod;
        let files = match objects.why_absent(kind, &identity.namespace, &object.name) {
            Some(reason) => Err(vec![Problem::Unknown(reason.to_owned())]),
            None => object::files(kind, object, values),
        };
        match files {
            Ok(files) => {
                for file in files {
                    let origin = FileOrigin { source, key: Some(file.key) };
                    let content = self.file(source, Cow::Borrowed(file.content), file.mode, file.user);
                    self.draft.add_file(file.path, content, origin);
                }
            }
            Err(problems) => self.draft.fail(problems),
        }
    }

    fn add_downward(&mut self, source: &'a ProjectionSource, file: &'a DownwardFile) {
        let PodView { identity, facts, .. } = self.pod;
        if let Some(reason) = self.why_node_unknown(file) {
            return self.draft.fail([Problem::Unknown(reason.to_owned())]);
        }
        match downward::content(&file.value, identity, facts, self.pod.allocatable()) {
            Ok(content) => {
                let content = self.file(source, content, file.mode, file.user);
                self.draft.add_file(file.path.clone(), content, FileOrigin { source, key: None });
            }
            Err(error) => self.draft.fail([Problem::Container(error)]),
        }
    }

    /// Why podfs does not know the value of the pod's node that the file shows. If podfs knows that there is no such Node
    /// object, the file shows the value of this machine instead.
    fn why_node_unknown(&self, file: &DownwardFile) -> Option<&'a str> {
        let PodView { facts, known: KnownObjects { objects, .. }, .. } = self.pod;
        let DownwardValue::Resource(field) = &file.value else { return None };
        let node = facts.node_name.as_deref().filter(|_| field.falls_back_to_node(facts))?;
        objects.why_absent(ObjectKind::Node, "", node)
    }

    /// Adds the key and the chain, which are always in one payload (PC-01).
    fn add_certificate(&mut self, source: &'a ProjectionSource, files: &'a CertificateFiles) {
        match credential::certificate(source, files, &self.pod.known.tokens) {
            Ok(parts) => {
                for (path, content) in parts {
                    self.add_credential(source, path, files.user, Ok(Cow::Borrowed(content)));
                }
            }
            Err(problem) => self.draft.fail([problem]),
        }
    }

    fn add_credential(
        &mut self,
        source: &'a ProjectionSource,
        path: &PayloadPath,
        user: Option<u32>,
        content: Result<Cow<'a, [u8]>, Problem>,
    ) {
        match content {
            Ok(content) => {
                let user = user.or(self.projection.default_user);
                let (mode, uid) = self.ownership.credential(self.projection.default_mode, user);
                let is_secret = source.is_secret();
                self.draft.add_file(
                    path.clone(),
                    PayloadFile { content, mode, uid, is_secret },
                    FileOrigin { source, key: None },
                );
            }
            Err(problem) => self.draft.fail([problem]),
        }
    }

    fn file(
        &self,
        source: &ProjectionSource,
        content: Cow<'a, [u8]>,
        mode: Option<u16>,
        user: Option<u32>,
    ) -> PayloadFile<'a> {
        let mode = mode.unwrap_or(self.projection.default_mode);
        let (mode, uid) = self.ownership.file(mode, user.or(self.projection.default_user));
        PayloadFile { content, mode, uid, is_secret: source.is_secret() }
    }
}

/// Shows the size; the bytes may be secret.
impl fmt::Debug for PayloadFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, mode {:04o}, uid {}", self.content.len(), self.mode, self.uid)
    }
}

#[cfg(test)]
mod tests;
