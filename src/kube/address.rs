//! Addresses of objects on the server. podfs reads single objects by their names, so that a node's own credentials
//! suffice: the Node authorizer lets a node `list` and `watch` a ConfigMap or Secret of its pods when a field selector
//! names it. It lets a node only `get` claims, PersistentVolumes and VolumeAttachments.
//! The exceptions are ClusterTrustBundles, which every node may read, and pods: a node may list and watch its own pods.
//! To offer local volumes, podfs needs more than a node may do: it lists and watches all PersistentVolumes.
//! podfs lists namespaces where they choose pods; a node's own credentials do not allow that.

use reqwest::Url;

use crate::manifest::objects::{ObjectKey, ObjectKind};

/// The field by which a selector names one object.
const NAME: &str = "metadata.name";
/// The field with the node of a pod.
const NODE_NAME: &str = "spec.nodeName";

/// A kind of object, as the server's paths spell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resource {
    /// The path of its group and version.
    pub(crate) group: &'static str,
    /// Its `apiVersion`.
    pub(crate) api_version: &'static str,
    /// Its `kind`.
    pub(crate) kind: &'static str,
    /// Its name in URLs.
    pub(crate) plural: &'static str,
}

const fn core(kind: &'static str, plural: &'static str) -> Resource {
    Resource { group: "api/v1", api_version: "v1", kind, plural }
}

const fn of_group(
    group: &'static str,
    api_version: &'static str,
    kind: &'static str,
    plural: &'static str,
) -> Resource {
    Resource { group, api_version, kind, plural }
}

/// The path of the group of storage classes, drivers and attachments.
const STORAGE: &str = "apis/storage.k8s.io/v1";

/// The kinds that are pods, or have templates of pods.
const OF_PODS: [Resource; 8] = [
    Resource::POD,
    core("ReplicationController", "replicationcontrollers"),
    of_group("apis/apps/v1", "apps/v1", "Deployment", "deployments"),
    of_group("apis/apps/v1", "apps/v1", "StatefulSet", "statefulsets"),
    of_group("apis/apps/v1", "apps/v1", "DaemonSet", "daemonsets"),
    of_group("apis/apps/v1", "apps/v1", "ReplicaSet", "replicasets"),
    of_group("apis/batch/v1", "batch/v1", "Job", "jobs"),
    of_group("apis/batch/v1", "batch/v1", "CronJob", "cronjobs"),
];

const fn trust_bundle(group: &'static str, api_version: &'static str) -> Resource {
    Resource { group, api_version, kind: "ClusterTrustBundle", plural: "clustertrustbundles" }
}

const fn certificate_request(group: &'static str, api_version: &'static str) -> Resource {
    Resource { group, api_version, kind: "PodCertificateRequest", plural: "podcertificaterequests" }
}

impl Resource {
    pub(crate) const POD: Resource = core("Pod", "pods");
    pub(crate) const EVENT: Resource = core("Event", "events");
    pub(crate) const CONFIG_MAP: Resource = core("ConfigMap", "configmaps");
    pub(crate) const SECRET: Resource = core("Secret", "secrets");
    pub(crate) const NAMESPACE: Resource = core("Namespace", "namespaces");
    pub(crate) const NODE: Resource = core("Node", "nodes");
    pub(crate) const PERSISTENT_VOLUME: Resource = core("PersistentVolume", "persistentvolumes");
    pub(crate) const PERSISTENT_VOLUME_CLAIM: Resource = core("PersistentVolumeClaim", "persistentvolumeclaims");
    pub(crate) const SERVICE_ACCOUNT: Resource = core("ServiceAccount", "serviceaccounts");

    pub(crate) const CLUSTER_TRUST_BUNDLE: Resource =
        trust_bundle("apis/certificates.k8s.io/v1beta1", "certificates.k8s.io/v1beta1");
    const STABLE_TRUST_BUNDLE: Resource = trust_bundle("apis/certificates.k8s.io/v1", "certificates.k8s.io/v1");

    /// A request for a certificate of a pod (KEP-4317).
    pub(crate) const POD_CERTIFICATE_REQUEST: Resource =
        certificate_request("apis/certificates.k8s.io/v1beta1", "certificates.k8s.io/v1beta1");
    const STABLE_CERTIFICATE_REQUEST: Resource =
        certificate_request("apis/certificates.k8s.io/v1", "certificates.k8s.io/v1");

    pub(crate) const CSI_DRIVER: Resource = of_group(STORAGE, "storage.k8s.io/v1", "CSIDriver", "csidrivers");
    pub(crate) const CSI_NODE: Resource = of_group(STORAGE, "storage.k8s.io/v1", "CSINode", "csinodes");
    pub(crate) const STORAGE_CLASS: Resource = of_group(STORAGE, "storage.k8s.io/v1", "StorageClass", "storageclasses");
    pub(crate) const VOLUME_ATTACHMENT: Resource =
        of_group(STORAGE, "storage.k8s.io/v1", "VolumeAttachment", "volumeattachments");

    /// The pods, or the workloads, of this `apiVersion` and kind.
    pub(crate) fn of_pods(api_version: &str, kind: &str) -> Option<Resource> {
        OF_PODS.into_iter().find(|resource| resource.api_version == api_version && resource.kind == kind)
    }

    /// The same resource in another version of its group, where servers may have only one of two.
    pub(crate) fn other_version(self) -> Option<Resource> {
        match self {
            Self::CLUSTER_TRUST_BUNDLE => Some(Self::STABLE_TRUST_BUNDLE),
            Self::STABLE_TRUST_BUNDLE => Some(Self::CLUSTER_TRUST_BUNDLE),
            Self::POD_CERTIFICATE_REQUEST => Some(Self::STABLE_CERTIFICATE_REQUEST),
            Self::STABLE_CERTIFICATE_REQUEST => Some(Self::POD_CERTIFICATE_REQUEST),
            _ => None,
        }
    }

    /// Whether a node may watch these objects.
    pub(crate) fn can_be_watched(self) -> bool {
        ![Self::PERSISTENT_VOLUME, Self::PERSISTENT_VOLUME_CLAIM, Self::VOLUME_ATTACHMENT].contains(&self)
    }

    /// The resource of objects of this kind.
    pub(crate) fn of(kind: ObjectKind) -> Resource {
        match kind {
            ObjectKind::ConfigMap => Self::CONFIG_MAP,
            ObjectKind::Secret => Self::SECRET,
            ObjectKind::Node => Self::NODE,
            ObjectKind::PersistentVolume => Self::PERSISTENT_VOLUME,
            ObjectKind::PersistentVolumeClaim => Self::PERSISTENT_VOLUME_CLAIM,
            ObjectKind::ClusterTrustBundle => Self::CLUSTER_TRUST_BUNDLE,
            ObjectKind::CsiDriver => Self::CSI_DRIVER,
            ObjectKind::VolumeAttachment => Self::VOLUME_ATTACHMENT,
        }
    }
}

/// Which changes a watch sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchStart<'a> {
    /// The changes after this version.
    Version(&'a str),
    /// First all objects, and then each change. A bookmark separates the two.
    Beginning,
    /// The same, without the bookmark. Every server supports this.
    Now,
}

/// How much of each object the server sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ObjectPart {
    /// The whole object.
    #[default]
    Whole,
    /// Its metadata.
    Metadata,
}

impl ObjectPart {
    /// The media type for a list of objects. A server that cannot send only metadata sends whole objects.
    pub(crate) fn accept_list(self) -> &'static str {
        match self {
            ObjectPart::Whole => "application/json",
            ObjectPart::Metadata => "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json",
        }
    }

    /// The media type for a single object.
    pub(crate) fn accept(self) -> &'static str {
        match self {
            ObjectPart::Whole => "application/json",
            ObjectPart::Metadata => "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json",
        }
    }
}

/// A set of objects to list and watch: those of a resource in a namespace, or in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Collection {
    pub(crate) resource: Resource,
    pub(crate) namespace: Option<String>,
    /// Only objects with this value in this field.
    pub(crate) field: Option<(&'static str, String)>,
    /// Only objects whose labels match this selector.
    pub(crate) labels: Option<String>,
}

impl Collection {
    /// The one object of this name, whether it exists or not.
    pub(crate) fn only(resource: Resource, namespace: Option<&str>, name: &str) -> Collection {
        let field = Some((NAME, name.to_owned()));
        Collection { resource, namespace: namespace.map(str::to_owned), field, labels: None }
    }

    /// The one object of this key.
    pub(crate) fn of(key: &ObjectKey) -> Collection {
        let namespace = (!key.namespace.is_empty()).then_some(key.namespace.as_str());
        Self::only(Resource::of(key.kind), namespace, &key.name)
    }

    /// The pods of a node, in all namespaces.
    pub(crate) fn of_node(node: &str) -> Collection {
        let field = Some((NODE_NAME, node.to_owned()));
        Collection { resource: Resource::POD, namespace: None, field, labels: None }
    }

    /// All objects of a resource, of all namespaces.
    pub(crate) fn all(resource: Resource) -> Collection {
        Collection { resource, namespace: None, field: None, labels: None }
    }

    /// The namespaces whose labels this selects.
    pub(crate) fn of_namespaces(labels: String) -> Collection {
        Collection { resource: Resource::NAMESPACE, namespace: None, field: None, labels: Some(labels) }
    }

    /// The ClusterTrustBundles of a signer.
    pub(crate) fn of_signer(signer: &str) -> Collection {
        let field = Some(("spec.signerName", signer.to_owned()));
        Collection { resource: Resource::CLUSTER_TRUST_BUNDLE, namespace: None, field, labels: None }
    }

    /// Whether the collection has at most one object.
    pub(crate) fn is_single(&self) -> bool {
        matches!(self.field, Some((NAME, _)))
    }

    /// Whether a watch can replace the list: for one object, and for objects of which some are of use before all are
    /// known.
    pub(crate) fn needs_no_list(&self) -> bool {
        self.is_single() || self.resource.kind == Resource::CLUSTER_TRUST_BUNDLE.kind
    }

    /// The URL of the one object.
    pub(crate) fn object(&self, server: &Url) -> Url {
        let name = self.field.as_ref().map(|(_, name)| name.as_str()).unwrap_or_default();
        path(server, self.resource, self.namespace.as_deref(), &[name])
    }

    /// The URL of the list.
    pub(crate) fn list(&self, server: &Url) -> Url {
        let mut url = path(server, self.resource, self.namespace.as_deref(), &[]);
        if let Some((field, value)) = &self.field {
            url.query_pairs_mut().append_pair("fieldSelector", &format!("{field}={}", escape(value)));
        }
        if let Some(labels) = &self.labels {
            url.query_pairs_mut().append_pair("labelSelector", labels);
        }
        url
    }

    /// The URL of a watch that lasts `seconds`.
    pub(crate) fn watch(&self, server: &Url, since: WatchStart<'_>, seconds: u64) -> Url {
        let mut url = self.list(server);
        let mut query = url.query_pairs_mut();
        query.append_pair("watch", "true").append_pair("allowWatchBookmarks", "true");
        match since {
            WatchStart::Version(version) => drop(query.append_pair("resourceVersion", version)),
            WatchStart::Beginning => {
                query.append_pair("sendInitialEvents", "true").append_pair("resourceVersionMatch", "NotOlderThan");
            }
            WatchStart::Now => {}
        }
        query.append_pair("timeoutSeconds", &seconds.to_string());
        drop(query);
        url
    }

    /// Its name in messages: `configmap default/app`.
    pub(crate) fn title(&self) -> String {
        let name = self.field.as_ref().map(|(_, value)| value.as_str()).unwrap_or_default();
        let kind = self.resource.kind.to_ascii_lowercase();
        match &self.namespace {
            Some(namespace) => format!("{kind} {namespace}/{name}"),
            None if name.is_empty() => self.resource.plural.to_owned(),
            None if self.resource == Resource::POD => format!("pods of node {name}"),
            None => format!("{kind} {name}"),
        }
    }
}

/// The URL at which to create an object, or that of a subresource: `…/serviceaccounts/NAME/token`.
pub(crate) fn path(server: &Url, resource: Resource, namespace: Option<&str>, below: &[&str]) -> Url {
    let mut url = server.clone();
    url.set_query(None);
    if let Ok(mut segments) = url.path_segments_mut() {
        segments.pop_if_empty().extend(resource.group.split('/'));
        if let Some(namespace) = namespace {
            segments.extend(["namespaces", namespace]);
        }
        segments.push(resource.plural).extend(below);
    }
    url
}

/// Escapes the separators of a field selector.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace(',', "\\,").replace('=', "\\=")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(url: &str) -> Url {
        Url::parse(url).expect("a URL")
    }

    #[test]
    fn an_object_is_listed_by_a_field_selector_with_its_name() {
        let collection = Collection::only(Resource::SECRET, Some("shop"), "keys");
        let url = collection.list(&server("https://10.0.0.1:6443"));
        assert_eq!(
            url.as_str(),
            "https://10.0.0.1:6443/api/v1/namespaces/shop/secrets?fieldSelector=metadata.name%3Dkeys"
        );
        assert_eq!(collection.title(), "secret shop/keys");
    }

    #[test]
    fn objects_of_the_cluster_have_no_namespace_in_their_path() {
        let key = ObjectKey { kind: ObjectKind::Node, namespace: String::new(), name: "n1".to_owned() };
        let url = Collection::of(&key).watch(&server("https://h/prefix/"), WatchStart::Version("7"), 300);
        assert_eq!(
            url.as_str(),
            "https://h/prefix/api/v1/nodes?fieldSelector=metadata.name%3Dn1&watch=true&allowWatchBookmarks=true\
             &resourceVersion=7&timeoutSeconds=300"
        );
        let url = Collection::of(&key).watch(&server("https://h"), WatchStart::Beginning, 300);
        let query = "fieldSelector=metadata.name%3Dn1&watch=true&allowWatchBookmarks=true&sendInitialEvents=true\
                     &resourceVersionMatch=NotOlderThan&timeoutSeconds=300";
        assert_eq!(url.query(), Some(query));
    }

    #[test]
    fn the_pods_of_a_node_are_listed_by_its_name_in_all_namespaces() {
        let pods = Collection::of_node("n1");
        assert_eq!(pods.list(&server("https://h")).as_str(), "https://h/api/v1/pods?fieldSelector=spec.nodeName%3Dn1");
        assert_eq!((pods.title().as_str(), pods.is_single()), ("pods of node n1", false));
    }

    #[test]
    fn a_name_cannot_leave_its_place_in_the_address() {
        let url = path(&server("https://h"), Resource::SERVICE_ACCOUNT, Some("a/../b"), &["x?y", "token"]);
        assert_eq!(url.path(), "/api/v1/namespaces/a%2F..%2Fb/serviceaccounts/x%3Fy/token");
        let url = Collection::only(Resource::SECRET, None, "a,spec.x=b").list(&server("https://h"));
        assert_eq!(url.query(), Some("fieldSelector=metadata.name%3Da%5C%2Cspec.x%5C%3Db"));
    }
}
