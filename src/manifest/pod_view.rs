//! A pod and its objects at one moment, from which podfs makes payloads and mounts.

use super::Tokens;
use super::objects::Objects;
use super::pod::{PodFacts, PodIdentity};
use crate::types::Allocatable;

/// The pod and its objects at one moment. Cheap to clone.
#[derive(Clone)]
pub struct PodView {
    /// The pod's name and namespace. podfs reads no objects of other namespaces.
    pub identity: PodIdentity,
    /// The other facts in the pod manifest that volumes need.
    pub facts: PodFacts,
    /// The objects and credentials that its source has so far.
    pub known: KnownObjects,
    /// The resources of this machine, for pods without a Node object.
    pub machine: Allocatable,
}

/// The objects and credentials of a pod that a source has so far. Cheap to clone.
#[derive(Clone, Default)]
pub struct KnownObjects {
    /// The objects.
    pub objects: Objects,
    /// The tokens of the pod's service account that its volumes ask for.
    pub tokens: Tokens,
    /// Whether an object was requested only seconds ago and is not known yet, so that its absence is no problem yet.
    pub is_settling: bool,
}

impl PodView {
    /// The allocatable resources of the pod's node: those of its object, else those of this machine.
    pub fn allocatable(&self) -> Allocatable {
        let node = self.known.objects.node(self.facts.node_name.as_deref());
        node.map_or(self.machine, |node| node.allocatable(self.machine))
    }
}
