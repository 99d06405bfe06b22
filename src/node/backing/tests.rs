use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::manifest::objects::{Missing, ObjectKey, parse_object};
use crate::manifest::parse_documents;
use crate::node::sample;

const CLAIM: &str = "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data}, spec: {volumeName: pv-1}}";
const DRIVER: &str =
    "{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {name: d}, spec: {attachRequired: false}}";

/// A PersistentVolume behind the claim.
fn volume(source: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, spec: {{claimRef: {{namespace: default, name: data}}, \
         capacity: {{storage: 1Gi}}, {source}}}}}"
    )
}

fn objects(documents: &[&str]) -> Objects {
    let documents =
        parse_documents(Path::new("objects.yaml"), documents.join("\n---\n").as_bytes()).expect("documents");
    let parse = |document| Arc::new(parse_object(document).expect("an object").expect("a known kind"));
    Objects::collect(documents.into_iter().map(parse)).expect("no duplicates")
}

fn found(documents: &[&str]) -> Option<(String, bool, Option<u64>)> {
    found_among(&objects(documents))
}

fn found_among(objects: &Objects) -> Option<(String, bool, Option<u64>)> {
    let pod = sample::pod(
        "u",
        &["{name: v, persistentVolumeClaim: {claimName: data}}", "{name: e, emptyDir: {}}"],
        &["v", "e"],
    );
    let mut found = backings(&pod.pod, objects);
    assert!(found.len() <= 1, "an emptyDir leads nowhere: {found:?}");
    found.remove("v").map(|backing| (backing.unique_name, backing.attachable, backing.size))
}

#[test]
fn a_claim_has_the_names_of_the_kubelet() {
    const GI: Option<u64> = Some(1 << 30);
    let csi = volume("csi: {driver: d, volumeHandle: h}");
    assert_eq!(
        found(&[CLAIM, &csi]),
        Some(("kubernetes.io/csi/d^h".to_owned(), true, GI)),
        "of a driver without an object"
    );
    assert_eq!(found(&[CLAIM, &csi, DRIVER]), Some(("kubernetes.io/csi/d^h".to_owned(), false, GI)));
    let local = volume("local: {path: /srv}");
    assert_eq!(found(&[CLAIM, &local]), Some(("kubernetes.io/local-volume/pv-1".to_owned(), false, GI)));
    let nfs = volume("nfs: {server: s, path: /x}");
    assert_eq!(found(&[CLAIM, &nfs]), Some(("kubernetes.io/nfs/u-v".to_owned(), false, GI)));
}

#[test]
fn a_volume_with_an_absent_or_unknown_object_has_no_backing() {
    let csi = volume("csi: {driver: d, volumeHandle: h}");
    assert_eq!(found(&[]), None);
    assert_eq!(found(&[CLAIM]), None);
    let driver =
        Missing::Object(ObjectKey { kind: ObjectKind::CsiDriver, namespace: String::new(), name: "d".to_owned() });
    let unknown = objects(&[CLAIM, &csi]).with_absences([(driver, "the server is away".to_owned())]);
    assert_eq!(found_among(&unknown), None, "whether it has to be attached is not known");
}
