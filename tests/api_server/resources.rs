//! The resources that the server knows, with their names in paths and in objects.

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use k8s_openapi::api::core::v1::{
    ConfigMap, Event, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, Secret, ServiceAccount,
};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, RoleBinding};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, VolumeAttachment};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// A resource in a version of its API.
#[derive(Debug, PartialEq, Eq)]
pub struct Resource {
    /// The API group; that of the core is empty.
    pub group: &'static str,
    pub version: &'static str,
    pub plural: &'static str,
    pub kind: &'static str,
    pub namespaced: bool,
    /// The fields that a field selector can name, besides name and namespace, with their JSON pointers.
    pub fields: &'static [(&'static str, &'static str)],
}

const CERTIFICATES: &str = "certificates.k8s.io";

pub const RESOURCES: [Resource; 22] = [
    core("configmaps", "ConfigMap", true, &[]),
    core("secrets", "Secret", true, &[("type", "/type")]),
    core("pods", "Pod", true, &[("spec.nodeName", "/spec/nodeName"), ("status.phase", "/status/phase")]),
    core("events", "Event", true, &[("involvedObject.uid", "/involvedObject/uid"), ("reason", "/reason")]),
    core("serviceaccounts", "ServiceAccount", true, &[]),
    core("persistentvolumeclaims", "PersistentVolumeClaim", true, &[]),
    core("persistentvolumes", "PersistentVolume", false, &[]),
    core("namespaces", "Namespace", false, &[]),
    core("nodes", "Node", false, &[("spec.unschedulable", "/spec/unschedulable")]),
    bundles("v1beta1"),
    bundles("v1"),
    certificate_requests("v1beta1"),
    certificate_requests("v1"),
    apps("deployments", "Deployment"),
    apps("daemonsets", "DaemonSet"),
    rbac("clusterroles", "ClusterRole", false),
    rbac("clusterrolebindings", "ClusterRoleBinding", false),
    rbac("rolebindings", "RoleBinding", true),
    storage("storageclasses", "StorageClass"),
    storage("csidrivers", "CSIDriver"),
    storage("csinodes", "CSINode"),
    storage("volumeattachments", "VolumeAttachment"),
];

const fn apps(plural: &'static str, kind: &'static str) -> Resource {
    Resource { group: "apps", version: "v1", plural, kind, namespaced: true, fields: &[] }
}

const fn rbac(plural: &'static str, kind: &'static str, namespaced: bool) -> Resource {
    Resource { group: "rbac.authorization.k8s.io", version: "v1", plural, kind, namespaced, fields: &[] }
}

const fn storage(plural: &'static str, kind: &'static str) -> Resource {
    Resource { group: "storage.k8s.io", version: "v1", plural, kind, namespaced: false, fields: &[] }
}

const fn core(
    plural: &'static str,
    kind: &'static str,
    namespaced: bool,
    fields: &'static [(&'static str, &'static str)],
) -> Resource {
    Resource { group: "", version: "v1", plural, kind, namespaced, fields }
}

const fn bundles(version: &'static str) -> Resource {
    let fields = &[("spec.signerName", "/spec/signerName")];
    Resource {
        group: CERTIFICATES,
        version,
        plural: "clustertrustbundles",
        kind: "ClusterTrustBundle",
        namespaced: false,
        fields,
    }
}

const fn certificate_requests(version: &'static str) -> Resource {
    Resource {
        group: CERTIFICATES,
        version,
        plural: "podcertificaterequests",
        kind: "PodCertificateRequest",
        namespaced: true,
        fields: &[("spec.nodeName", "/spec/nodeName")],
    }
}

impl Resource {
    pub fn find(group: &str, version: &str, plural: &str) -> Option<&'static Resource> {
        RESOURCES
            .iter()
            .find(|resource| (resource.group, resource.version, resource.plural) == (group, version, plural))
    }

    /// The resource of an object.
    pub fn of(object: &Value) -> Option<&'static Resource> {
        let (api_version, kind) = (object["apiVersion"].as_str()?, object["kind"].as_str()?);
        RESOURCES.iter().find(|resource| resource.kind == kind && resource.api_version() == api_version)
    }

    pub fn of_kind(kind: &str) -> Option<&'static Resource> {
        RESOURCES.iter().find(|resource| resource.kind == kind)
    }

    /// Panics if an object cannot be parsed as its type: the test has a mistake.
    #[track_caller]
    pub fn check(&self, object: &Value) {
        match self.kind {
            "ConfigMap" => is::<ConfigMap>(object),
            "Secret" => is::<Secret>(object),
            "Pod" => is::<Pod>(object),
            "Event" => is::<Event>(object),
            "ServiceAccount" => is::<ServiceAccount>(object),
            "PersistentVolumeClaim" => is::<PersistentVolumeClaim>(object),
            "PersistentVolume" => is::<PersistentVolume>(object),
            "Node" => is::<Node>(object),
            "PodCertificateRequest" => is::<PodCertificateRequest>(object),
            "CSIDriver" => is::<CSIDriver>(object),
            "CSINode" => is::<CSINode>(object),
            "VolumeAttachment" => is::<VolumeAttachment>(object),
            "DaemonSet" => is::<DaemonSet>(object),
            "ClusterRole" => is::<ClusterRole>(object),
            "ClusterRoleBinding" => is::<ClusterRoleBinding>(object),
            "RoleBinding" => is::<RoleBinding>(object),
            "Namespace" => is::<Namespace>(object),
            _ => {}
        }
    }

    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.to_owned() } else { format!("{}/{}", self.group, self.version) }
    }

    /// The object as this version of the API shows it, or its metadata only.
    pub fn render(&self, object: &Value, metadata_only: bool) -> Value {
        if metadata_only {
            let metadata = &object["metadata"];
            return json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata});
        }
        let mut object = object.clone();
        object["apiVersion"] = self.api_version().into();
        object["kind"] = self.kind.into();
        object
    }
}

#[track_caller]
fn is<T: DeserializeOwned>(object: &Value) {
    if let Err(error) = T::deserialize(object) {
        panic!("{error}: {object}");
    }
}
