//! A volume of each kind for which podfs sends requests to the API server, and the objects of these volumes.

use std::fs;
use std::path::Path;

use podfs::csi::v1::node_service_capability::rpc::Type;
use podfs::volume::csi::sha256;
use serde_json::{Value, json};

use crate::api_server::ApiServer;
use crate::common::{config_map, secret};
use crate::csi_driver::{CsiDriver, DRIVER};
use crate::rig::NODE;

/// The volumes of a pod. The ConfigMap `late` is missing at first, so that podfs posts an event.
pub const VOLUMES: &str = "[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: tls}}, \
    {name: late, configMap: {name: late}}, \
    {name: data, persistentVolumeClaim: {claimName: data}}, {name: disk, persistentVolumeClaim: {claimName: disk}}, \
    {name: all, projected: {sources: [{serviceAccountToken: {path: token}}, \
        {clusterTrustBundle: {path: ca, name: roots}}, \
        {podCertificate: {signerName: example.com/server, keyType: ED25519, credentialBundlePath: both.pem}}, \
        {downwardAPI: {items: [{path: cpu, \
            resourceFieldRef: {containerName: web, resource: limits.cpu, divisor: 1m}}]}}]}}]";

/// Creates the objects of the volumes. Starts the driver of the volume `disk`, which shows the same directory as `data`; the
/// volume has grown, so podfs calls the driver to grow it on the node.
pub fn put_objects(server: &ApiServer, root: &Path, source: &Path) -> CsiDriver {
    put_payloads(server);
    fs::create_dir(source).expect("a directory");
    let claim = |name: &str, volume: &str| {
        json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}")},
            "spec": {"volumeName": volume, "accessModes": ["ReadWriteOnce"]},
            "status": {"phase": "Bound", "capacity": {"storage": "8Mi"},
                "allocatedResourceStatuses": {"storage": "NodeResizePending"}},
        })
    };
    let volume = |name: &str, claim: &str, source: Value| {
        let mut volume = json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "16Mi"}, "accessModes": ["ReadWriteOnce"],
                "claimRef": {"namespace": "default", "name": claim, "uid": format!("uid-{claim}")},
            },
            "status": {"phase": "Bound"},
        });
        volume["spec"].as_object_mut().expect("fields").extend(source.as_object().expect("a source").clone());
        volume
    };
    let reference = json!({"name": "tls", "namespace": "default"});
    let csi = json!({"driver": DRIVER, "volumeHandle": "h", "nodePublishSecretRef": reference});
    let attachment = format!("csi-{}", sha256(&["h", DRIVER, NODE]));
    for object in [
        claim("data", "pv-data"),
        volume("pv-data", "data", json!({"hostPath": {"path": source}})),
        claim("disk", "pv-disk"),
        volume("pv-disk", "disk", json!({"csi": csi})),
        json!({"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": DRIVER},
            "spec": {"attachRequired": true, "tokenRequests": [{"audience": "vault"}]}}),
        json!({"apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment", "metadata": {"name": attachment},
            "spec": {"attacher": DRIVER, "nodeName": NODE, "source": {"persistentVolumeName": "pv-disk"}},
            "status": {"attached": true}}),
    ] {
        server.put_value(object);
    }
    CsiDriver::start(root, source, &[Type::StageUnstageVolume, Type::ExpandVolume])
}

/// Creates the objects of the volumes whose files podfs makes itself.
pub fn put_payloads(server: &ApiServer) {
    server.put(&config_map("app", &[("key", "1")]));
    server.put(&secret("tls", &[("key", "pem")]));
    server.put("{apiVersion: v1, kind: ServiceAccount, metadata: {name: default, namespace: default}}");
    server.put(&format!(
        "{{apiVersion: v1, kind: Node, metadata: {{name: {NODE}}}, status: {{allocatable: {{cpu: 2, memory: 1Gi}}}}}}"
    ));
    let bundle = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    server.put_value(json!({
        "apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle",
        "metadata": {"name": "roots"}, "spec": {"trustBundle": bundle},
    }));
}

/// Creates the pod `web` of the node, whose container mounts these volumes.
pub fn put_pod(server: &ApiServer, volumes: &str, labels: &Value) {
    let volumes: Value = serde_saphyr::from_str(volumes).expect("volumes");
    let mounts: Vec<Value> = volumes.as_array().expect("volumes").iter().map(|volume| {
        json!({"name": volume["name"], "mountPath": format!("/{}", volume["name"].as_str().expect("a name"))})
    }).collect();
    server.put_value(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web", "namespace": "default", "uid": "uid-web", "labels": labels},
        "spec": {
            "nodeName": NODE, "serviceAccountName": "default",
            "containers": [{"name": "web", "image": "none", "volumeMounts": mounts}], "volumes": volumes,
        },
    }));
}
