//! PersistentVolumes, with the fields that local volumes of a node need. podfs leaves a volume alone that it cannot
//! parse.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use uuid::Uuid;

use super::identity::DiskIdentity;
use crate::manifest::objects::VolumeMode;
use crate::types::parse_record;

/// The annotation with the component that has made a PersistentVolume. The controller of PersistentVolumes leaves the
/// deletion to that component.
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// The annotation with the file system or disk of a PersistentVolume, as JSON.
const IDENTITY: &str = "local.podfs.io/identity";
/// The label of a node that the affinity of PersistentVolumes names.
pub(super) const HOSTNAME: &str = "kubernetes.io/hostname";

/// A node, as PersistentVolumes name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeNames {
    /// The name of the Node object.
    pub(super) name: String,
    /// Its label `kubernetes.io/hostname`.
    pub(super) hostname: String,
}

/// The reclaim policy of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reclaim {
    Delete,
    Retain,
}

/// The phase of a PersistentVolume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No claim has it, or the controller has not seen it yet.
    Free,
    /// Its claim was deleted.
    Released,
    /// Anything else: bound, or failed.
    Other,
}

/// A PersistentVolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocalVolume {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) version: String,
    pub(super) phase: Phase,
    /// Whether it names a claim.
    pub(super) claimed: bool,
    /// The uid of its claim.
    pub(super) claim: Option<String>,
    pub(super) reclaim: Option<Reclaim>,
    pub(super) class: String,
    pub(super) mode: VolumeMode,
    /// Its path on the node.
    pub(super) path: Option<PathBuf>,
    /// The identity of its file system or disk, if podfs has offered it on this node.
    pub(super) own: Option<DiskIdentity>,
    /// Whether it can be used on this node.
    pub(super) is_here: bool,
    /// Whether it is being deleted.
    pub(super) deleting: bool,
}

/// The content of a new PersistentVolume.
pub(super) struct Offer<'a> {
    pub(super) class: &'a str,
    pub(super) path: &'a Path,
    pub(super) mode: VolumeMode,
    /// In bytes.
    pub(super) capacity: u64,
    pub(super) identity: &'a DiskIdentity,
    pub(super) reclaim: Reclaim,
    pub(super) mount_options: &'a [String],
}

/// The name of the PersistentVolume of an entry: always the same for one entry.
pub(super) fn name(node: &str, class: &str, path: &Path) -> String {
    let text = format!("{node}\0{class}\0{}", path.display());
    let (number, _) = Uuid::new_v5(&Uuid::NAMESPACE_OID, text.as_bytes()).as_u64_pair();
    format!("local-pv-{number:016x}")
}

fn provisioner(node: &str) -> String {
    format!("local.podfs.io/{node}")
}

impl LocalVolume {
    /// Parses an object of the API server; `None` if it lacks what the server always sets.
    pub(super) fn parse(object: &Value, node: &NodeNames) -> Option<LocalVolume> {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
        let annotation = |key: &str| object["metadata"]["annotations"][key].as_str();
        let is_own = annotation(PROVISIONED_BY) == Some(provisioner(&node.name).as_str());
        let identity = annotation(IDENTITY).and_then(|text| parse_record(text.as_bytes()).ok());
        let local = text("/spec/local/path");
        let phase = match text("/status/phase") {
            None | Some("" | "Pending" | "Available") => Phase::Free,
            Some("Released") => Phase::Released,
            Some(_) => Phase::Other,
        };
        Some(LocalVolume {
            name: text("/metadata/name")?.to_owned(),
            uid: text("/metadata/uid")?.to_owned(),
            version: text("/metadata/resourceVersion")?.to_owned(),
            phase,
            claimed: object["spec"]["claimRef"].is_object(),
            claim: text("/spec/claimRef/uid").filter(|uid| !uid.is_empty()).map(str::to_owned),
            reclaim: match text("/spec/persistentVolumeReclaimPolicy") {
                Some("Delete") => Some(Reclaim::Delete),
                Some("Retain") => Some(Reclaim::Retain),
                _ => None,
            },
            class: text("/spec/storageClassName").unwrap_or_default().to_owned(),
            mode: match text("/spec/volumeMode") {
                Some("Block") => VolumeMode::Block,
                _ => VolumeMode::Filesystem,
            },
            path: local.or(text("/spec/hostPath/path")).map(|path| Path::new(path).components().collect()),
            own: identity.filter(|_| is_own && local.is_some()),
            deleting: text("/metadata/deletionTimestamp").is_some(),
            is_here: is_here(&object["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"], node),
        })
    }

    /// Whether its path is the entry, or below it.
    pub(super) fn names(&self, entry: &Path) -> bool {
        self.is_here && self.path.as_ref().is_some_and(|path| path.starts_with(entry))
    }
}

/// Whether one of the terms may match this node. Each term may, unless it certainly names other nodes.
fn is_here(terms: &Value, node: &NodeNames) -> bool {
    let Some(terms) = terms.as_array() else { return true };
    let names_others = |requirement: &Value, key: &str, own: &str| {
        let values = requirement["values"].as_array();
        requirement["key"] == key
            && requirement["operator"] == "In"
            && values.is_some_and(|values| !values.iter().any(|value| value == own))
    };
    let is_elsewhere = |term: &Value| {
        let each = |list: &str| term[list].as_array().cloned().unwrap_or_default();
        each("matchExpressions").iter().any(|one| names_others(one, HOSTNAME, &node.hostname))
            || each("matchFields").iter().any(|one| names_others(one, "metadata.name", &node.name))
    };
    !terms.iter().all(is_elsewhere)
}

impl Offer<'_> {
    /// The PersistentVolume for the API server.
    pub(super) fn object(&self, node: &NodeNames) -> Value {
        let (mode, is_mounted) = match self.mode {
            VolumeMode::Filesystem => ("Filesystem", true),
            VolumeMode::Block => ("Block", false),
        };
        let identity = serde_json::to_string(self.identity).unwrap_or_default();
        let mut object = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {
                "name": name(&node.name, self.class, self.path),
                "labels": {HOSTNAME: node.hostname},
                "annotations": {PROVISIONED_BY: provisioner(&node.name), IDENTITY: identity},
            },
            "spec": {
                "capacity": {"storage": quantity(self.capacity)},
                "accessModes": ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": match self.reclaim {
                    Reclaim::Delete => "Delete",
                    Reclaim::Retain => "Retain",
                },
                "storageClassName": self.class,
                "volumeMode": mode,
                "local": {"path": self.path.to_string_lossy()},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": [node.hostname]}]},
                ]}},
            },
        });
        if is_mounted && !self.mount_options.is_empty() {
            object["spec"]["mountOptions"] = json!(self.mount_options);
        }
        object
    }
}

/// A size that is easy to read and never more than there is: whole GiB from 10 GiB on, whole MiB from 10 MiB on.
fn quantity(bytes: u64) -> String {
    let units = [("Gi", 30), ("Mi", 20)];
    let unit = units.into_iter().find(|(_, shift)| bytes >> shift >= 10);
    unit.map_or_else(|| bytes.to_string(), |(unit, shift)| format!("{}{unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::local_volumes::record::ErasureRecord;
    use crate::types::golden::golden;

    fn node() -> NodeNames {
        NodeNames { name: "n1".to_owned(), hostname: "host-1".to_owned() }
    }

    #[test]
    fn a_name_is_stable_and_depends_on_node_class_and_path() {
        let path = Path::new("/mnt/fast/a");
        let first = name("n1", "fast", path);
        assert_eq!(first, name("n1", "fast", path));
        assert_eq!(first.len(), "local-pv-".len() + 16);
        for other in [name("n2", "fast", path), name("n1", "slow", path), name("n1", "fast", Path::new("/mnt/fast/b"))]
        {
            assert_ne!(first, other);
        }
    }

    #[test]
    fn sizes_are_rounded_down() {
        for (bytes, text) in
            [(1023, "1023"), (10 << 20, "10Mi"), ((10 << 30) - 1, "10239Mi"), ((100 << 30) + 5, "100Gi")]
        {
            assert_eq!(quantity(bytes), text);
        }
    }

    #[test]
    fn a_volume_that_names_other_nodes_is_elsewhere_and_every_doubtful_one_is_here() {
        let term = |key: &str, operator: &str, value: &str| json!({"matchExpressions": [{"key": key, "operator": operator, "values": [value]}]});
        assert!(!is_here(&json!([term(HOSTNAME, "In", "host-2")]), &node()));
        assert!(is_here(&json!([term(HOSTNAME, "In", "host-2"), term(HOSTNAME, "In", "host-1")]), &node()));
        for terms in [json!(null), json!([term("zone", "In", "a")]), json!([term(HOSTNAME, "NotIn", "host-2")])] {
            assert!(is_here(&terms, &node()), "{terms}");
        }
        let field = json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]);
        assert!(!is_here(&field, &node()));
    }

    #[test]
    fn a_disk_whose_identity_only_another_version_can_use_is_not_erased() {
        let volume = |identity: &str| {
            let annotations = json!({PROVISIONED_BY: provisioner("n1"), IDENTITY: identity});
            let object = json!({
                "metadata": {"name": "pv", "uid": "u1", "resourceVersion": "1", "annotations": annotations},
                "spec": {
                    "local": {"path": "/disks/a"}, "claimRef": {"uid": "c1"}, "persistentVolumeReclaimPolicy": "Delete",
                },
                "status": {"phase": "Released"},
            });
            LocalVolume::parse(&object, &node()).expect("a volume")
        };
        let recorded = golden!("disk-identity.jsonl").lines().next().expect("a line");
        assert!(ErasureRecord::of(&volume(recorded)).is_some());
        for unknown in [recorded.replacen('{', r#"{"version":2,"#, 1), recorded.replace("boot", "epoch")] {
            assert!(ErasureRecord::of(&volume(&unknown)).is_none(), "{unknown}");
        }
    }
}
