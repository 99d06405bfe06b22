//! The manifests of packaging/kubernetes and the chart packaging/helm/podfs: each object is valid for the API, the chart
//! renders the plain manifests with its default values, and the CSIDriver fits the driver.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, RoleBinding};
use k8s_openapi::api::storage::v1::CSIDriver;
use serde_json::{Value, json};

use crate::common::chart::{chart, rendered, stdout_with_input, values, yaml};
use crate::common::packages::top;

/// The plain manifests.
fn plain() -> Vec<Value> {
    yaml(&fs::read_to_string(top().join("packaging/kubernetes/podfs.yaml")).expect("manifests"))
}

/// A document as an object of the API. Fails the test if the API does not know a field.
#[track_caller]
fn typed<T: serde::de::DeserializeOwned + serde::Serialize>(value: &Value) -> T {
    let typed: T = serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value}"));
    let known = serde_json::to_value(&typed).expect("JSON");
    let unknown = unknown(value, &known, "");
    assert!(unknown.is_empty(), "the API does not know {unknown:?}");
    typed
}

/// The fields of `value` that are not in `known`, the same object after it was parsed as an object of the API.
fn unknown(value: &Value, known: &Value, at: &str) -> Vec<String> {
    match (value, known) {
        (Value::Object(fields), Value::Object(known)) => fields
            .iter()
            .flat_map(|(field, value)| {
                unknown(value, known.get(field).unwrap_or(&Value::Null), &format!("{at}.{field}"))
            })
            .collect(),
        (Value::Array(values), Value::Array(known)) => {
            values.iter().zip(known).flat_map(|(value, known)| unknown(value, known, &format!("{at}[]"))).collect()
        }
        (Value::Object(_) | Value::Array(_), _) => vec![at.to_owned()],
        (value, Value::Null) if !value.is_null() => vec![at.to_owned()],
        _ => Vec::new(),
    }
}

#[test]
fn each_manifest_is_a_valid_object_and_bindings_name_what_is_there() {
    check(&plain());
}

/// Checks objects of a deployment.
#[track_caller]
fn check(objects: &[Value]) {
    let (mut roles, mut accounts) = (BTreeSet::new(), BTreeSet::new());
    let (mut bindings, mut pods) = (Vec::new(), Vec::new());
    for object in objects {
        match object["kind"].as_str().expect("a kind") {
            "CSIDriver" => drop(typed::<CSIDriver>(object)),
            "Namespace" => drop(typed::<Namespace>(object)),
            "ServiceAccount" => accounts.extend(typed::<ServiceAccount>(object).metadata.name),
            "ClusterRole" => {
                let role: ClusterRole = typed(object);
                roles.extend(role.metadata.name);
            }
            "ClusterRoleBinding" => {
                let ClusterRoleBinding { role_ref, subjects, .. } = typed(object);
                bindings.push((role_ref, subjects));
            }
            "RoleBinding" => {
                let RoleBinding { role_ref, subjects, .. } = typed(object);
                roles.extend(role_ref.name.starts_with("system:openshift:").then(|| role_ref.name.clone()));
                bindings.push((role_ref, subjects));
            }
            "DaemonSet" => pods.push(typed::<DaemonSet>(object)),
            kind => panic!("{kind} has no check here"),
        }
    }
    for (role_ref, subjects) in bindings {
        assert!(roles.contains(&role_ref.name), "{role_ref:?}");
        assert!(subjects.iter().flatten().all(|subject| accounts.contains(&subject.name)), "{subjects:?}");
    }
    let [DaemonSet { spec: set, .. }] = &pods[..] else { panic!("there is one DaemonSet") };
    let labels = set.template.metadata.as_ref().and_then(|metadata| metadata.labels.as_ref());
    assert_eq!(set.selector.match_labels.as_ref(), labels);
    let pod = set.template.spec.as_ref().expect("a pod");
    assert!(pod.service_account_name.as_ref().is_some_and(|account| accounts.contains(account)));
    let mounted = pod.containers.iter().flat_map(|container| container.volume_mounts.iter().flatten());
    let volumes: BTreeSet<&String> = pod.volumes.iter().flatten().map(|volume| &volume.name).collect();
    assert_eq!(mounted.map(|mount| &mount.name).collect::<BTreeSet<_>>(), volumes);
}

#[test]
fn the_csi_driver_object_asks_the_kubelet_for_what_podfs_needs() {
    let drivers = plain().into_iter().filter(|object| object["kind"] == "CSIDriver");
    let drivers: Vec<CSIDriver> = drivers.map(|object| typed(&object)).collect();
    let [CSIDriver { metadata, spec }] = &drivers[..] else { panic!("there is one: {drivers:?}") };
    assert_eq!(metadata.name.as_deref(), Some(podfs::node::publication::DRIVER));
    let label = metadata.labels.iter().flatten().find(|(key, _)| key.starts_with("security.openshift.io/"));
    assert_eq!(label.map(|(_, value)| value.as_str()), Some("restricted"));
    assert_eq!((spec.pod_info_on_mount, spec.attach_required), (Some(true), Some(false)));
    assert_eq!((spec.requires_republish, spec.fs_group_policy.as_deref()), (Some(true), Some("None")));
}

#[test]
fn the_chart_gives_the_plain_manifests_with_its_default_values() {
    let mut rendered = rendered(&json!({}));
    let mut plain = plain();
    plain.retain(|object| object["kind"] != "Namespace");
    let name = |object: &Value| format!("{} {}", object["kind"], object["metadata"]["name"]);
    rendered.sort_by_key(name);
    plain.sort_by_key(name);
    assert_eq!(rendered, plain);
}

#[test]
fn each_value_of_the_chart_arrives_in_valid_objects() {
    let image = json!({"image": {"repository": "registry.example/podfs", "tag": "1"}});
    let values = [
        (image, "\"image\":\"registry.example/podfs:1\",\"imagePullPolicy\":\"IfNotPresent\""),
        (json!({}), "\"image\":\"localhost/podfs:0.1.0-1\",\"imagePullPolicy\":\"Never\""),
        (json!({"image": {"pullPolicy": "Always"}}), "\"imagePullPolicy\":\"Always\""),
        (json!({"kubeletRoot": "/data/kubelet"}), "\"--csi=/data/kubelet/plugins/podfs.io/csi.sock\""),
        (json!({"programs": "/opt/podfs"}), "\"--on-host=/opt/podfs\""),
        (json!({"kubeconfig": "/etc/kubernetes/kubelet.conf"}), "\"--kubeconfig=/etc/kubernetes/kubelet.conf\""),
        (json!({"namespaces": {"secrets": ["shop"]}}), "\"name\":\"podfs-secrets\",\"namespace\":\"shop\""),
        (json!({"namespaces": {"tokens": ["shop"]}}), "\"name\":\"podfs-tokens\",\"namespace\":\"shop\""),
        (json!({"nri": {"enabled": true}}), "\"resources\":[\"namespaces\"]"),
        (json!({"allow": ["/srv", "nfs.example"]}), "\"--csi-allow=/srv,nfs.example\""),
        (json!({"nri": {"enabled": true}}), "\"--nri"),
        (json!({"metrics": {"enabled": false}}), "\"--log-format=json\"]"),
        (json!({"csiDriver": {"tokensInSecrets": true}}), "\"serviceAccountTokenInSecrets\":true"),
        (json!({"csiDriver": {"readAs": "pod"}}), "\"tokenRequests\":[{\"audience\":\"\"}]"),
        (json!({"csiDriver": {"readAs": "pod"}}), "\"--csi-read-as=pod\""),
        (json!({"csiDriver": {"readAs": "pod"}}), "\"resources\":[\"pods\"]"),
        (json!({"openshift": {"enabled": true}}), "system:openshift:scc:privileged"),
        (json!({"extraArgs": ["--sub-path=live"]}), "\"--sub-path=live\""),
        (json!({"imagePullSecrets": [{"name": "pull"}]}), "\"imagePullSecrets\":[{\"name\":\"pull\"}]"),
        (json!({"nodeSelector": {"a": "b"}}), "\"nodeSelector\":{\"a\":\"b\"}"),
        (json!({"podAnnotations": {"a": "b"}}), "\"annotations\":{\"a\":\"b\"}"),
        (json!({"log": "debug"}), "\"--log=debug\""),
    ];
    for (values, expected) in values {
        assert_eq!(schema_errors(&values), "", "{values}");
        let rendered = rendered(&values);
        check(&rendered);
        assert!(Value::from(rendered).to_string().contains(expected), "{values}: {expected}");
    }
}

#[test]
fn the_schema_of_the_values_refuses_mistakes() {
    assert_eq!(schema_errors(&json!({})), "", "the defaults are valid");
    for mistake in [
        json!({"kubeletroot": "/x"}),
        json!({"kubeletRoot": "var/lib/kubelet"}),
        json!({"metrics": {"port": "9753"}}),
        json!({"logFormat": "xml"}),
        json!({"allow": "/srv"}),
        json!({"image": {"tag": "a b", "repository": "podfs"}}),
        json!({"nri": {"on": true}}),
        json!({"kubeconfig": "kubelet.conf"}),
        json!({"namespaces": ["shop"]}),
        json!({"namespaces": {"secrets": ["*"]}}),
        json!({"csiDriver": {"readAs": "node"}}),
    ] {
        assert_ne!(schema_errors(&mistake), "", "{mistake}");
    }
}

/// The errors of the schema about values; empty if they are valid. Debian's python3-jsonschema checks them.
fn schema_errors(other: &Value) -> String {
    const CHECK: &str = "import json, sys, jsonschema\n\
        schema = json.load(open(sys.argv[1]))\n\
        jsonschema.Draft7Validator.check_schema(schema)\n\
        print(*(error.message for error in jsonschema.Draft7Validator(schema).iter_errors(json.load(sys.stdin))), sep='\\n', end='')";
    stdout_with_input(Command::new("python3").args(["-c", CHECK]).arg(chart("values.schema.json")), &values(other))
}
