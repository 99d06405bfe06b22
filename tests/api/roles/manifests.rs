//! Every file with roles: names are distinct, bindings name what is there, and no account reads Secrets of the whole cluster or
//! requests tokens there, except the one mode that needs both.

use std::collections::BTreeMap;
use std::fs;

use serde_json::{Value, json};

use super::{Permissions, objects_of, permissions_of_role};
use crate::common::chart::rendered;
use crate::common::packages::top;

/// The one file whose account reads the Secrets of all namespaces: that of the volume manager of a node.
const READS_ALL_SECRETS: &str = "examples/rbac/node.yaml";

/// The name of each shipped file with its objects. The chart counts once for each way in which values change its roles.
fn shipped() -> Vec<(String, Vec<Value>)> {
    let directory = fs::read_dir(top().join("packaging/examples/rbac")).expect("examples");
    let mut names: Vec<String> = directory
        .map(|entry| format!("examples/rbac/{}", entry.expect("an entry").file_name().to_str().expect("text")))
        .chain(["kubernetes/podfs.yaml".to_owned()])
        .collect();
    names.sort();
    let mut files: Vec<_> = names.into_iter().map(|name| (name.clone(), objects_of(&name))).collect();
    assert!(files.iter().any(|(name, _)| name == READS_ALL_SECRETS), "the exception is of a file that is there");
    let namespaces = json!({"secrets": ["shop"], "tokens": ["shop"]});
    for values in [
        json!({}),
        json!({"csiDriver": {"readAs": "pod"}}),
        json!({"nri": {"enabled": true}, "namespaces": namespaces}),
        json!({"nri": {"enabled": true}, "csiDriver": {"readAs": "pod"}}),
        json!({"kubeconfig": "/etc/kubernetes/kubelet.conf"}),
    ] {
        files.push((format!("helm {values}"), rendered(&values)));
    }
    files
}

fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

#[test]
fn no_two_files_have_an_object_of_the_same_name() {
    let mut owners: BTreeMap<String, String> = BTreeMap::new();
    for (file, objects) in shipped() {
        // The chart and the plain manifests are the same deployment.
        let file = if file.starts_with("helm ") { "kubernetes/podfs.yaml".to_owned() } else { file };
        for object in objects {
            let name = format!(
                "{} {}/{}",
                text(&object, "/kind"),
                text(&object, "/metadata/namespace"),
                text(&object, "/metadata/name")
            );
            let owner = owners.entry(name.clone()).or_insert_with(|| file.clone());
            assert_eq!(*owner, file, "{name} is in both files: who applies one replaces the rights of the other");
        }
    }
}

#[test]
fn no_account_reads_secrets_or_requests_tokens_in_the_whole_cluster_except_that_of_the_volume_manager() {
    for (file, objects) in shipped() {
        let roles: BTreeMap<&str, Permissions> = objects
            .iter()
            .filter(|object| text(object, "/kind") == "ClusterRole")
            .map(|role| (text(role, "/metadata/name"), permissions_of_role(role)))
            .collect();
        let bindings = objects.iter().filter(|object| text(object, "/kind") == "ClusterRoleBinding");
        let mut is_exception_used = false;
        for binding in bindings {
            let role = text(binding, "/roleRef/name");
            let permissions = roles.get(role).unwrap_or_else(|| panic!("{file}: no role {role} in the same file"));
            let reaches = |permission: &String| {
                ["secrets", "serviceaccounts/token", "*"].iter().any(|resource| permission.ends_with(resource))
            };
            let wide: Vec<_> = permissions.iter().filter(|permission| reaches(permission)).collect();
            is_exception_used |= !wide.is_empty();
            assert!(wide.is_empty() || file == READS_ALL_SECRETS, "{file}: {role} gives {wide:?} in all namespaces");
        }
        assert_eq!(is_exception_used, file == READS_ALL_SECRETS, "{file}");
    }
}

#[test]
fn with_the_kubeconfig_of_the_node_the_chart_gives_podfs_no_rights() {
    let objects = rendered(&json!({"kubeconfig": "/etc/kubernetes/kubelet.conf"}));
    let kinds: Vec<&str> = objects.iter().map(|object| text(object, "/kind")).collect();
    assert_eq!(kinds.iter().filter(|kind| kind.contains("Role")).count(), 0, "{kinds:?}");
    let arguments = Value::from(objects).to_string();
    assert!(arguments.contains("\"--kubeconfig=/etc/kubernetes/kubelet.conf\"") && !arguments.contains("--in-cluster"));
}
