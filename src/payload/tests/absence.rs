//! An object of unknown state is not the same as a missing one.

use super::*;
use crate::manifest::objects::{Missing, ObjectKey};

const REASON: &str = "not heard of yet";

fn unknown(kind: ObjectKind, namespace: &str, name: &str) -> Objects {
    let key = ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() };
    foo_bar().with_absences([(Missing::Object(key), REASON.to_owned())])
}

#[test]
fn cm_06_mg_07_a_volume_waits_for_an_optional_object_until_it_is_known_to_be_absent() {
    for (kind, source) in [
        (ObjectKind::ConfigMap, "configMap: {name: later, optional: true}"),
        (ObjectKind::Secret, "secret: {secretName: later, optional: true}"),
    ] {
        assert_eq!(files(source, &unknown(kind, "shop", "later")), Err(REASON.to_owned()));
        assert_eq!(files(source, &foo_bar()), lines(&[]));
    }
    // An object that is there is used, even if its absence is recorded, too.
    assert!(files("configMap: {name: o}", &unknown(ObjectKind::ConfigMap, "shop", "o")).is_ok());
}

#[test]
fn cb_01_a_volume_waits_for_its_bundles() {
    let named = "projected: {sources: [{clusterTrustBundle: {path: ca, name: later, optional: true}}]}";
    assert_eq!(files(named, &unknown(ObjectKind::ClusterTrustBundle, "", "later")), Err(REASON.to_owned()));
    let signed = "projected: {sources: [{clusterTrustBundle: \
                  {path: ca, signerName: x/y, labelSelector: {}, optional: true}}]}";
    let objects = foo_bar().with_absences([(Missing::BundlesOf("x/y".to_owned()), REASON.to_owned())]);
    assert_eq!(files(signed, &objects), Err(REASON.to_owned()));
}

#[test]
fn da_09_a_container_without_a_limit_waits_for_its_node() {
    let source = "downwardAPI: {items: [\
        {path: cpu, resourceFieldRef: {containerName: c, resource: limits.cpu, divisor: 1m}}]}";
    let objects = unknown(ObjectKind::Node, "", "n1");
    let of = |spec: &str| assembled(&pod(source, spec), &objects).map(|(files, _)| files);
    assert_eq!(of("nodeName: n1, containers: [{name: c}]"), Err(REASON.to_owned()));
    assert_eq!(of("nodeName: n2, containers: [{name: c}]"), lines(&["cpu=2000@0644"]));
    let limited = "nodeName: n1, containers: [{name: c, resources: {limits: {cpu: 1}}}]";
    assert_eq!(of(limited), lines(&["cpu=1000@0644"]));
}
