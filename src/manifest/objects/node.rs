//! Nodes: their allocatable resources, and the labels that decide which volumes may be used on them.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource;
use serde::Deserialize;

use super::ObjectContent;
use super::metadata::{LongMetadata, Parsed, field};
use crate::manifest::{ManifestError, Origin};
use crate::types::Allocatable;
use crate::types::Quantity;

/// The facts of a Node object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    cpu: Option<Quantity>,
    memory: Option<Quantity>,
    ephemeral_storage: Option<Quantity>,
}

impl NodeFacts {
    /// The allocatable resources of the node; those of `machine` where the object has none.
    pub fn allocatable(&self, machine: Allocatable) -> Allocatable {
        let or = |amount: Option<u128>, machine| amount.map_or(machine, |amount| amount.try_into().unwrap_or(u64::MAX));
        Allocatable {
            cpu_milli: or(self.cpu.map(Quantity::milli), machine.cpu_milli),
            memory_bytes: or(self.memory.map(Quantity::units), machine.memory_bytes),
            ephemeral_storage_bytes: or(self.ephemeral_storage.map(Quantity::units), machine.ephemeral_storage_bytes),
        }
    }
}

#[derive(Deserialize)]
pub(super) struct NodeObject {
    #[serde(default)]
    metadata: LongMetadata,
    status: Option<NodeStatus>,
}

#[derive(Deserialize)]
struct NodeStatus {
    allocatable: Option<BTreeMap<String, resource::Quantity>>,
}

pub(super) fn node(object: NodeObject, origin: &Origin) -> Result<Parsed, ManifestError> {
    let allocatable = object.status.and_then(|status| status.allocatable).unwrap_or_default();
    let amount = |resource: &str| {
        let parse = |text: &resource::Quantity| {
            Quantity::parse(&text.0).map_err(|error| {
                ManifestError::invalid(origin, &field("status.allocatable", resource), error.to_string())
            })
        };
        allocatable.get(resource).map(parse).transpose()
    };
    let node = NodeFacts {
        name: object.metadata.name.clone().unwrap_or_default(),
        labels: object.metadata.labels.clone().unwrap_or_default(),
        cpu: amount("cpu")?,
        memory: amount("memory")?,
        ephemeral_storage: amount("ephemeral-storage")?,
    };
    Ok(Parsed { metadata: object.metadata.short(), immutable: false, content: ObjectContent::Node(node) })
}
