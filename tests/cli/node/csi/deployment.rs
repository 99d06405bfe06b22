//! The manifests of packaging/kubernetes: each is a typed object of the API, and the CSIDriver fits the driver.

use std::collections::BTreeSet;
use std::fs;

use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use k8s_openapi::api::storage::v1::CSIDriver;
use podfs::manifest::{Document, parse_documents};

use crate::common::packages::top;

/// All documents, with the files that they stand in.
fn documents() -> Vec<Document> {
    let entries = fs::read_dir(top().join("packaging/kubernetes")).expect("manifests");
    let files = entries.map(|entry| entry.expect("an entry").path());
    files.flat_map(|file| parse_documents(&file, &fs::read(&file).expect("a file")).expect("YAML")).collect()
}

#[test]
fn each_manifest_is_a_valid_object_and_bindings_name_what_is_there() {
    let mut roles = BTreeSet::new();
    let mut accounts = BTreeSet::new();
    let mut bindings = Vec::new();
    for document in documents() {
        match document.kind.as_str() {
            "CSIDriver" => drop(document.into_typed::<CSIDriver>().expect("typed")),
            "Namespace" => drop(document.into_typed::<Namespace>().expect("typed")),
            "ServiceAccount" => {
                accounts.extend(document.into_typed::<ServiceAccount>().expect("typed").metadata.name);
            }
            "ClusterRole" => {
                let role: ClusterRole = document.into_typed().expect("typed");
                let verbs = role.rules.iter().flatten().flat_map(|rule| &rule.verbs);
                assert!(verbs.into_iter().all(|verb| verb == "list" || verb == "watch"), "podfs only reads");
                roles.extend(role.metadata.name);
            }
            "ClusterRoleBinding" => bindings.push(document.into_typed::<ClusterRoleBinding>().expect("typed")),
            other => panic!("a {other} has no check here"),
        }
    }
    for ClusterRoleBinding { role_ref, subjects, .. } in bindings {
        assert!(roles.contains(&role_ref.name) && !role_ref.name.contains("secrets"), "{role_ref:?}");
        assert!(subjects.iter().flatten().all(|subject| accounts.contains(&subject.name)), "{subjects:?}");
    }
}

#[test]
fn the_csi_driver_object_asks_the_kubelet_for_what_podfs_needs() {
    let drivers = documents().into_iter().filter(|document| document.kind == "CSIDriver");
    let drivers: Vec<CSIDriver> = drivers.map(|document| document.into_typed().expect("typed")).collect();
    let [CSIDriver { metadata, spec }] = &drivers[..] else { panic!("there is one: {drivers:?}") };
    assert_eq!(metadata.name.as_deref(), Some(podfs::node::csi::DRIVER));
    let label = metadata.labels.iter().flatten().find(|(key, _)| key.starts_with("security.openshift.io/"));
    assert_eq!(label.map(|(_, value)| value.as_str()), Some("restricted"));
    assert_eq!((spec.pod_info_on_mount, spec.attach_required), (Some(true), Some(false)));
    assert_eq!((spec.requires_republish, spec.fs_group_policy.as_deref()), (Some(true), Some("None")));
}
