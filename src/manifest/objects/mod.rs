//! The objects of volumes: ConfigMaps and Secrets, claims and the PersistentVolumes they are bound to, ClusterTrustBundles, and
//! Nodes with their allocatable resources.
//!
//! Objects are parsed once, when their document is read; after that every key is a valid file name and every value
//! is plain bytes. `Debug` and errors name kinds, names and keys, and never show values.

mod absence;
mod csi;
mod metadata;
mod node;
mod parse;
mod storage;
mod trust;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use super::{ManifestError, Origin};

pub use absence::Missing;
pub use csi::{CsiDriver, CsiTokenRequest, DriverFsGroupPolicy, VolumeAttachment};
pub use node::NodeFacts;
pub use parse::parse_object;
pub use storage::{ClaimKey, Controller, PersistentSource, PersistentVolume, PersistentVolumeClaim, VolumeMode};
pub use trust::ClusterTrustBundle;

/// The objects known at one moment, by kind, namespace and name. Cheap to clone.
#[derive(Clone, Default, PartialEq)]
pub struct Objects {
    by_key: Arc<BTreeMap<ObjectKey, Arc<NamedObject>>>,
    /// The reasons why other objects are not known.
    absent: Arc<BTreeMap<Missing, String>>,
}

impl Objects {
    /// Collects objects, whatever their origin.
    ///
    /// # Errors
    /// Two objects of the same kind, namespace and name; the error names both origins.
    pub fn collect(objects: impl IntoIterator<Item = Arc<NamedObject>>) -> Result<Objects, ManifestError> {
        let (objects, duplicates) = Objects::collect_first(objects);
        match duplicates.into_iter().next() {
            None => Ok(objects),
            Some((_, error)) => Err(error),
        }
    }

    /// Collects objects, whatever their origin. Of two objects with the same kind, namespace and name, the first one counts; the
    /// second result names both origins.
    pub fn collect_first(
        objects: impl IntoIterator<Item = Arc<NamedObject>>,
    ) -> (Objects, Vec<(ObjectKey, ManifestError)>) {
        let mut by_key: BTreeMap<ObjectKey, Arc<NamedObject>> = BTreeMap::new();
        let mut duplicates = Vec::new();
        for object in objects {
            match by_key.entry(object.key.clone()) {
                Entry::Vacant(entry) => drop(entry.insert(object)),
                Entry::Occupied(first) => {
                    let error = ManifestError::duplicate(&object.key, &first.get().origin, &object.origin);
                    duplicates.push((object.key.clone(), error));
                }
            }
        }
        (Objects { by_key: Arc::new(by_key), absent: Arc::default() }, duplicates)
    }

    /// The same objects, but those with the given keys as in `before`, if they are there.
    pub fn keep(mut self, keys: &BTreeSet<ObjectKey>, before: &Objects) -> Objects {
        let kept: Vec<_> = keys.iter().filter_map(|key| before.by_key.get(key)).cloned().collect();
        if !kept.is_empty() {
            let by_key = Arc::make_mut(&mut self.by_key);
            by_key.extend(kept.into_iter().map(|object| (object.key.clone(), object)));
        }
        self
    }

    /// Undoes what the API server would refuse: a change of an object that was `immutable` in `before`. Such an
    /// object stays as it is until it was deleted. The second result has the documents and the fields whose change is refused.
    pub fn keep_immutable(mut self, before: &Objects) -> (Objects, Vec<(Origin, &'static str)>) {
        let changed = |object: &Arc<NamedObject>| {
            let old = before.by_key.get(&object.key)?;
            Some((Arc::clone(old), (object.origin.clone(), object.refused_change(old)?)))
        };
        let refused: Vec<_> = self.by_key.values().filter_map(changed).collect();
        if refused.is_empty() {
            return (self, Vec::new());
        }
        let by_key = Arc::make_mut(&mut self.by_key);
        let refused = refused.into_iter().map(|(old, refused)| {
            by_key.insert(old.key.clone(), old);
            refused
        });
        let refused = refused.collect();
        (self, refused)
    }

    /// The same objects, and those of `others` that are not among them.
    pub fn with(mut self, others: impl IntoIterator<Item = Arc<NamedObject>>) -> Objects {
        let by_key = Arc::make_mut(&mut self.by_key);
        for other in others {
            by_key.entry(other.key.clone()).or_insert(other);
        }
        self
    }

    /// Whether both have the same parsed objects, not only equal ones.
    pub fn is_same(&self, other: &Objects) -> bool {
        self.by_key.len() == other.by_key.len()
            && self.by_key.values().zip(other.by_key.values()).all(|(object, other)| Arc::ptr_eq(object, other))
    }

    /// Whether the object with this key is among them.
    pub fn contains(&self, key: &ObjectKey) -> bool {
        self.by_key.contains_key(key)
    }

    /// The ConfigMap of that namespace and name.
    pub fn config_map(&self, namespace: &str, name: &str) -> Option<&ConfigMap> {
        match self.content(ObjectKind::ConfigMap, namespace, name)? {
            ObjectContent::ConfigMap(config_map) => Some(config_map),
            _ => None,
        }
    }

    /// The Secret of that namespace and name.
    pub fn secret(&self, namespace: &str, name: &str) -> Option<&Secret> {
        match self.content(ObjectKind::Secret, namespace, name)? {
            ObjectContent::Secret(secret) => Some(secret),
            _ => None,
        }
    }

    /// The PersistentVolumeClaim of that namespace and name.
    pub fn claim(&self, namespace: &str, name: &str) -> Option<&PersistentVolumeClaim> {
        match self.content(ObjectKind::PersistentVolumeClaim, namespace, name)? {
            ObjectContent::PersistentVolumeClaim(claim) => Some(claim),
            _ => None,
        }
    }

    /// The PersistentVolume of that name.
    pub fn persistent_volume(&self, name: &str) -> Option<&PersistentVolume> {
        match self.content(ObjectKind::PersistentVolume, "", name)? {
            ObjectContent::PersistentVolume(volume) => Some(volume),
            _ => None,
        }
    }

    /// The Node of that name. A pod that was not scheduled has no node name; then this is the Node, if there is only one.
    pub fn node(&self, name: Option<&str>) -> Option<&NodeFacts> {
        let mut nodes = self.of_kind(ObjectKind::Node).filter_map(|object| match &object.content {
            ObjectContent::Node(node) => Some((object.key.name.as_str(), node)),
            _ => None,
        });
        match name {
            Some(name) => nodes.find(|(key, _)| *key == name).map(|(_, node)| node),
            None => nodes.next().filter(|_| nodes.next().is_none()).map(|(_, node)| node),
        }
    }

    /// The CSIDriver of that name.
    pub fn csi_driver(&self, name: &str) -> Option<&CsiDriver> {
        match self.content(ObjectKind::CsiDriver, "", name)? {
            ObjectContent::CsiDriver(driver) => Some(driver),
            _ => None,
        }
    }

    /// The VolumeAttachment of that name.
    pub fn volume_attachment(&self, name: &str) -> Option<&VolumeAttachment> {
        match self.content(ObjectKind::VolumeAttachment, "", name)? {
            ObjectContent::VolumeAttachment(attachment) => Some(attachment),
            _ => None,
        }
    }

    /// The ClusterTrustBundle of that name.
    pub fn trust_bundle(&self, name: &str) -> Option<&ClusterTrustBundle> {
        match self.content(ObjectKind::ClusterTrustBundle, "", name)? {
            ObjectContent::ClusterTrustBundle(bundle) => Some(bundle),
            _ => None,
        }
    }

    /// The ClusterTrustBundles of that signer.
    pub fn trust_bundles_of(&self, signer: &str) -> impl Iterator<Item = &ClusterTrustBundle> {
        self.of_kind(ObjectKind::ClusterTrustBundle).filter_map(move |object| match &object.content {
            ObjectContent::ClusterTrustBundle(bundle) if bundle.signer.as_deref() == Some(signer) => Some(bundle),
            _ => None,
        })
    }

    /// The keys of all objects, in order.
    pub fn keys(&self) -> impl Iterator<Item = &ObjectKey> {
        self.by_key.keys()
    }

    fn of_kind(&self, kind: ObjectKind) -> impl Iterator<Item = &Arc<NamedObject>> {
        let first = ObjectKey { kind, namespace: String::new(), name: String::new() };
        self.by_key.range(first..).take_while(move |(key, _)| key.kind == kind).map(|(_, object)| object)
    }

    fn content(&self, kind: ObjectKind, namespace: &str, name: &str) -> Option<&ObjectContent> {
        let key = ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() };
        self.by_key.get(&key).map(|object| &object.content)
    }
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.by_key.values()).finish()
    }
}

/// An object with its key and its origin.
#[derive(PartialEq)]
pub struct NamedObject {
    /// Its kind, namespace and name.
    pub key: ObjectKey,
    /// The document it was read from.
    pub origin: Origin,
    immutable: bool,
    content: ObjectContent,
}

impl NamedObject {
    /// Whether its content stays the same until the object is deleted.
    pub fn is_immutable(&self) -> bool {
        self.immutable
    }

    /// The field whose change the API server would refuse if this object replaced `old`, because `old` is immutable.
    pub fn refused_change(&self, old: &NamedObject) -> Option<&'static str> {
        match old.immutable {
            true if !self.immutable => Some("immutable"),
            true if old.content != self.content => Some("data"),
            _ => None,
        }
    }

    /// Whether volumes show the same content for both objects, whatever their origins.
    pub fn has_same_content(&self, other: &NamedObject) -> bool {
        (&self.key, self.immutable, &self.content) == (&other.key, other.immutable, &other.content)
    }

    /// The claim, if it is one.
    pub fn claim(&self) -> Option<&PersistentVolumeClaim> {
        match &self.content {
            ObjectContent::PersistentVolumeClaim(claim) => Some(claim),
            _ => None,
        }
    }

    /// The VolumeAttachment, if it is one.
    pub fn volume_attachment(&self) -> Option<&VolumeAttachment> {
        match &self.content {
            ObjectContent::VolumeAttachment(attachment) => Some(attachment),
            _ => None,
        }
    }

    /// The PersistentVolume, if it is one.
    pub fn persistent_volume(&self) -> Option<&PersistentVolume> {
        match &self.content {
            ObjectContent::PersistentVolume(volume) => Some(volume),
            _ => None,
        }
    }

    /// The ClusterTrustBundle, if it is one.
    pub fn trust_bundle(&self) -> Option<&ClusterTrustBundle> {
        match &self.content {
            ObjectContent::ClusterTrustBundle(bundle) => Some(bundle),
            _ => None,
        }
    }
}

/// Shows the key and the origin.
impl fmt::Debug for NamedObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.key, self.origin)
    }
}

#[derive(PartialEq)]
enum ObjectContent {
    ConfigMap(ConfigMap),
    Secret(Secret),
    Node(NodeFacts),
    PersistentVolume(PersistentVolume),
    PersistentVolumeClaim(PersistentVolumeClaim),
    ClusterTrustBundle(ClusterTrustBundle),
    CsiDriver(CsiDriver),
    VolumeAttachment(VolumeAttachment),
}

/// The kind, namespace and name of an object. Reads `ConfigMap default/app`, or `Node worker-1`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    /// Its kind.
    pub kind: ObjectKind,
    /// Its namespace; empty for kinds that have none.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            kind if kind.is_of_cluster() => write!(f, "{} {}", self.kind, self.name),
            _ => write!(f, "{} {}/{}", self.kind, self.namespace, self.name),
        }
    }
}

/// The kinds of objects that volumes depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectKind {
    /// Text and bytes by key.
    ConfigMap,
    /// Secret bytes by key.
    Secret,
    /// A node, with its labels and allocatable resources.
    Node,
    /// Storage of the cluster.
    PersistentVolume,
    /// A user's claim, and the name of its PersistentVolume.
    PersistentVolumeClaim,
    /// Trust anchors of the cluster.
    ClusterTrustBundle,
    /// The options for calls of a CSI driver.
    CsiDriver,
    /// The state of a volume's attachment to a node.
    VolumeAttachment,
}

impl ObjectKind {
    const ALL: [ObjectKind; 8] = [
        ObjectKind::ConfigMap,
        ObjectKind::Secret,
        ObjectKind::Node,
        ObjectKind::PersistentVolume,
        ObjectKind::PersistentVolumeClaim,
        ObjectKind::ClusterTrustBundle,
        ObjectKind::CsiDriver,
        ObjectKind::VolumeAttachment,
    ];

    /// The kind of this name, if volumes show it.
    pub fn parse(name: &str) -> Option<ObjectKind> {
        ObjectKind::ALL.into_iter().find(|kind| kind.to_string() == name)
    }

    /// The names of all kinds.
    pub fn names() -> impl Iterator<Item = String> {
        ObjectKind::ALL.into_iter().map(|kind| kind.to_string())
    }

    /// Whether objects of this kind are in no namespace.
    pub fn is_of_cluster(self) -> bool {
        !matches!(self, ObjectKind::ConfigMap | ObjectKind::Secret | ObjectKind::PersistentVolumeClaim)
    }
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ObjectKind::CsiDriver => f.write_str("CSIDriver"),
            kind => fmt::Debug::fmt(kind, f),
        }
    }
}

/// The data of a ConfigMap. No key is in both maps.
#[derive(PartialEq)]
pub struct ConfigMap {
    /// Text by key.
    pub data: BTreeMap<String, String>,
    /// Bytes by key.
    pub binary_data: BTreeMap<String, Vec<u8>>,
}

/// The data of a Secret, `stringData` included.
#[derive(PartialEq)]
pub struct Secret {
    /// Bytes by key.
    pub data: BTreeMap<String, Vec<u8>>,
}

/// Values by key: the contents of the files of ConfigMaps and Secrets.
pub trait Values {
    /// The value of a key.
    fn value(&self, key: &str) -> Option<&[u8]>;

    /// Every key with its value.
    fn values(&self) -> impl Iterator<Item = (&str, &[u8])>;
}

impl Values for ConfigMap {
    fn value(&self, key: &str) -> Option<&[u8]> {
        let text = self.data.get(key).map(String::as_bytes);
        text.or_else(|| self.binary_data.get(key).map(Vec::as_slice))
    }

    fn values(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let texts = self.data.iter().map(|(key, text)| (key.as_str(), text.as_bytes()));
        let binary = self.binary_data.iter().map(|(key, bytes)| (key.as_str(), bytes.as_slice()));
        texts.chain(binary)
    }
}

impl Values for Secret {
    fn value(&self, key: &str) -> Option<&[u8]> {
        self.data.get(key).map(Vec::as_slice)
    }

    fn values(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.data.iter().map(|(key, bytes)| (key.as_str(), bytes.as_slice()))
    }
}

#[cfg(test)]
mod tests;
