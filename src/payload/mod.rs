//! Payloads: the files of a projecting volume at one moment, with modes and owners, assembled in memory.
//!
//! A payload is complete or it does not exist: when one source fails, nothing is assembled, and the problems of all
//! sources are reported together. Bytes are borrowed from the objects where possible.

mod downward;
mod draft;
mod error;
mod object;
mod ownership;
mod path;
mod quote;
mod resource;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

pub use error::{PayloadError, Problem, Warning};
pub use ownership::{Entry, Ownership, fs_group_mode};
pub use path::{InvalidPath, PayloadPath};
pub use resource::{Allocatable, ContainerNotFound};

use crate::manifest::objects::{ObjectKind, Objects};
use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::volume::{DownwardFile, Projection, Source};
use draft::{Claim, Draft};

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
    /// Permission bits, what the fsGroup adds included.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
}

/// A payload, and what the user should hear about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assembled<'a> {
    /// The files.
    pub payload: Payload<'a>,
    /// One for each file that hides another.
    pub warnings: Vec<Warning>,
}

/// Everything a payload is made of.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// The pod's name and namespace. Objects of no other namespace are looked at.
    pub identity: &'a PodIdentity,
    /// The rest of what the pod says.
    pub facts: &'a PodFacts,
    /// The objects known at this moment.
    pub objects: &'a Objects,
    /// What this machine offers to pods, where no Node object says it.
    pub machine: Allocatable,
}

impl<'a> Payload<'a> {
    /// Assembles the files of a volume.
    ///
    /// # Errors
    /// All problems of all sources: objects and keys that are missing, paths that cannot stand side by side, sources
    /// that need an API server.
    pub fn assemble(projection: &'a Projection, inputs: Inputs<'a>) -> Result<Assembled<'a>, PayloadError> {
        let ownership = Ownership::of(inputs.facts);
        let mut assembly = Assembly { projection, inputs, ownership, draft: Draft::default() };
        for source in &projection.sources {
            assembly.add(source);
        }
        let (files, warnings) = assembly.draft.finish()?;
        let payload = Payload { files, directory_mode: ownership.directory_mode(), gid: ownership.gid() };
        Ok(Assembled { payload, warnings })
    }

    /// The names in the volume's root, each with the owner of its link: that of the first file in path order.
    pub fn top_level(&self) -> Vec<(&str, u32)> {
        let mut names: Vec<(&str, u32)> = self.files.iter().map(|(path, file)| (path.top_level(), file.uid)).collect();
        // Paths below one directory are neighbours in the order of paths.
        names.dedup_by_key(|(name, _)| *name);
        names
    }
}

struct Assembly<'a> {
    projection: &'a Projection,
    inputs: Inputs<'a>,
    ownership: Ownership,
    draft: Draft<'a>,
}

impl<'a> Assembly<'a> {
    fn add(&mut self, source: &'a Source) {
        let Inputs { identity, objects, .. } = self.inputs;
        match source {
            Source::ConfigMap(object) => {
                let values = objects.config_map(&identity.namespace, &object.name);
                self.add_object(source, object::files(ObjectKind::ConfigMap, object, values));
            }
            Source::Secret(object) => {
                let values = objects.secret(&identity.namespace, &object.name);
                self.add_object(source, object::files(ObjectKind::Secret, object, values));
            }
            Source::DownwardApi(files) => files.iter().for_each(|file| self.add_downward(source, file)),
            Source::ServiceAccountToken { .. } | Source::ClusterTrustBundle { .. } | Source::PodCertificate { .. } => {
                self.draft.fail([Problem::NeedsApiServer(source.to_string())]);
            }
        }
    }

    fn add_object(&mut self, source: &'a Source, files: Result<Vec<object::ObjectFile<'a>>, Vec<Problem>>) {
        match files {
            Ok(files) => {
                for file in files {
                    let claim = Claim { source, key: Some(file.key) };
                    let content = self.file(Cow::Borrowed(file.content), file.mode, file.user);
                    self.draft.put(file.path, content, claim);
                }
            }
            Err(problems) => self.draft.fail(problems),
        }
    }

    fn add_downward(&mut self, source: &'a Source, file: &'a DownwardFile) {
        let Inputs { identity, facts, objects, machine } = self.inputs;
        let allocatable = objects.node(facts.node_name.as_deref()).map_or(machine, |node| node.allocatable(machine));
        match downward::content(&file.value, identity, facts, allocatable) {
            Ok(content) => {
                let content = self.file(content, file.mode, file.user);
                self.draft.put(file.path.clone(), content, Claim { source, key: None });
            }
            Err(error) => self.draft.fail([Problem::Container(error)]),
        }
    }

    fn file(&self, content: Cow<'a, [u8]>, mode: Option<u16>, user: Option<u32>) -> PayloadFile<'a> {
        let mode = mode.unwrap_or(self.projection.default_mode);
        let (mode, uid) = self.ownership.file(mode, user.or(self.projection.default_user));
        PayloadFile { content, mode, uid }
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
