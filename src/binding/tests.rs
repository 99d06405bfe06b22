//! Claims as manifests have them, and what `resolve` returns for each.

use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::manifest::objects::parse_object;
use crate::manifest::parse_documents;

const CLAIM: &str = "{metadata: {name: data, uid: c-1}, spec: {volumeName: pv-1}, status: {phase: Bound}}";
const VOLUME: &str =
    "{metadata: {name: pv-1}, spec: {claimRef: {namespace: default, name: data, uid: c-1}, local: {path: /srv}}}";

fn objects(documents: &[(&str, &str)]) -> Objects {
    let text: Vec<_> = documents
        .iter()
        .map(|(kind, body)| format!("{{apiVersion: v1, kind: {kind}, {}", body.trim_start().trim_start_matches('{')))
        .collect();
    let documents = parse_documents(Path::new("objects.yaml"), text.join("\n---\n").as_bytes()).expect("documents");
    let parse = |document| Arc::new(parse_object(document).expect("an object").expect("a known kind"));
    Objects::collect(documents.into_iter().map(parse)).expect("no duplicates")
}

fn claim(reference: ClaimReference) -> Claim {
    Claim { reference, read_only: false, usage: ClaimUsage::default() }
}

fn named() -> Claim {
    claim(ClaimReference::Named("data".to_owned()))
}

fn try_resolve(claim: &Claim, documents: &[(&str, &str)]) -> Result<BoundVolume, String> {
    let (pod, facts) = (PodIdentity::placeholder(), PodFacts::placeholder());
    resolve("vol", claim, &pod, &facts, &objects(documents)).map_err(|error| error.to_string())
}

fn pair(claim: &str, volume: &str) -> Result<BoundVolume, String> {
    try_resolve(&named(), &[("PersistentVolumeClaim", claim), ("PersistentVolume", volume)])
}

#[test]
fn a_bound_claim_leads_to_its_volume() {
    let bound = pair(CLAIM, VOLUME).expect("bound");
    assert_eq!(
        (bound.name.as_str(), &bound.source),
        ("pv-1", &BoundSource::Local(Local { path: "/srv".to_owned(), ..Local::default() }))
    );
    assert_eq!((bound.read_only, bound.exclusive, bound.gid), (false, false, None));
    let read_only = Claim { read_only: true, ..named() };
    let bound = try_resolve(&read_only, &[("PersistentVolumeClaim", CLAIM), ("PersistentVolume", VOLUME)]);
    assert!(bound.expect("bound").read_only);
}

#[test]
fn pv_01_each_obstacle_has_the_kubelets_text() {
    let prefix = "error processing PVC default/data: ";
    let missing = try_resolve(&named(), &[]).expect_err("no claim");
    assert_eq!(
        missing,
        format!("{prefix}failed to fetch PVC from API server: persistentvolumeclaims \"data\" not found")
    );
    let with = |from: &str, to: &str| (CLAIM.replace(from, to), VOLUME.replace(from, to));
    let rows = [
        ((CLAIM.replace("uid: c-1", "uid: c-1, deletionTimestamp: x"), VOLUME.into()), "PVC is being deleted"),
        ((CLAIM.replace("Bound", "Pending"), VOLUME.into()), "PVC is not bound"),
        ((CLAIM.replace("volumeName: pv-1", ""), VOLUME.into()), "PVC has empty pvc.Spec.VolumeName"),
        ((CLAIM.replace("volumeName: pv-1", "").replace("phase: Bound", ""), VOLUME.into()), "PVC is not bound"),
        (
            (CLAIM.replace("pv-1", "pv-2"), VOLUME.into()),
            "failed to fetch PV pv-2 from API server: persistentvolumes \"pv-2\" not found",
        ),
        (
            with("claimRef: {namespace: default, name: data, uid: c-1}, ", ""),
            "found PV object pv-1 but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim",
        ),
        (
            (CLAIM.into(), VOLUME.replace("c-1", "c-0")),
            "found PV object pv-1 but its pv.Spec.ClaimRef.UID c-0 does not point to claim.UID c-1",
        ),
        (
            (CLAIM.into(), VOLUME.replace("name: data, uid: c-1", "name: other")),
            "found PV object pv-1 but its pv.Spec.ClaimRef default/other does not point to the claim",
        ),
    ];
    for ((claim, volume), text) in rows {
        assert_eq!(pair(&claim, &volume), Err(format!("{prefix}{text}")), "{claim} {volume}");
    }
}

#[test]
fn pv_02_a_claim_that_waits_for_its_pods_is_still_usable() {
    let metadata = "uid: c-1, deletionTimestamp: x, finalizers: [kubernetes.io/pvc-protection]";
    pair(&CLAIM.replace("uid: c-1", metadata), VOLUME).expect("protected");
}

#[test]
fn pv_02_an_ephemeral_volume_needs_a_claim_made_for_its_pod() {
    let made_for = |owner: &str| {
        let metadata =
            format!("{{metadata: {{name: podfs-vol, ownerReferences: [{owner}]}}, spec: {{volumeName: pv-1}}}}");
        let volume = VOLUME.replace("name: data, uid: c-1", "name: podfs-vol");
        let documents = [("PersistentVolumeClaim", metadata.as_str()), ("PersistentVolume", volume.as_str())];
        try_resolve(&claim(ClaimReference::OfPod), &documents)
    };
    let uid = PodIdentity::placeholder().uid;
    made_for("{kind: Pod, name: podfs, controller: true}").expect("by name");
    made_for(&format!("{{kind: Pod, name: podfs, uid: {uid}, controller: true}}")).expect("by uid");
    for owner in ["", "{kind: Pod, name: podfs}", "{kind: Pod, name: podfs, uid: other, controller: true}"] {
        let text = "PVC default/podfs-vol was not created for pod default/podfs (pod is not owner)";
        assert_eq!(made_for(owner), Err(text.to_owned()), "{owner}");
    }
}

#[test]
fn without_status_and_uids_both_sides_have_to_name_each_other() {
    let claim = "{metadata: {name: data}, spec: {volumeName: pv-1}}";
    pair(claim, VOLUME).expect("one uid is missing");
    pair(claim, &VOLUME.replace(", uid: c-1", "")).expect("both are missing");
    pair(claim, &VOLUME.replace("namespace: default, name", "name")).expect("the default namespace");
    assert!(pair(claim, &VOLUME.replace("namespace: default", "namespace: shop")).is_err());
}

#[test]
fn pv_06_the_volume_mode_has_to_match_the_containers() {
    let used = |mode: &str, mounted, device| {
        let volume = VOLUME.replace("spec: {", &format!("spec: {{volumeMode: {mode}, "));
        let claim = Claim { usage: ClaimUsage { mounted, device }, ..named() };
        try_resolve(&claim, &[("PersistentVolumeClaim", CLAIM), ("PersistentVolume", &volume)]).map(|bound| bound.name)
    };
    assert_eq!(used("Filesystem", true, false), Ok("pv-1".to_owned()));
    assert_eq!(
        used("Block", true, false),
        Err("volume vol has volumeMode Block, but is specified in volumeMounts".to_owned())
    );
    assert_eq!(
        used("Filesystem", false, true),
        Err("volume vol has volumeMode Filesystem, but is specified in volumeDevices".to_owned())
    );
    assert_eq!(used("Block", false, true), Ok("pv-1".to_owned()));
    assert_eq!(
        used("Block", false, false),
        Err("volume vol has volumeMode Block, and no container has it in volumeDevices; add it there, or remove the volume".to_owned())
    );
}

#[test]
fn a_volume_podfs_cannot_serve_is_named_with_its_kind() {
    let newer = VOLUME.replace("local: {path: /srv}", "ofALaterApi: {some: [thing]}");
    assert_eq!(
        pair(CLAIM, &newer),
        Err("PersistentVolume \"pv-1\" is of kind ofALaterApi; supported are hostPath, local, nfs, flexVolume and csi"
            .to_owned())
    );
    let up = VOLUME.replace("local: {path: /srv}", "hostPath: {path: /srv/../etc}");
    assert_eq!(
        pair(CLAIM, &up),
        Err("PersistentVolume \"pv-1\" cannot be used: path: invalid HostPath `/srv/../etc`: must not contain '..'"
            .to_owned())
    );
}

#[test]
fn lp_04_a_volume_of_another_node_is_refused() {
    let affinity = "nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: \
                    [{key: kubernetes.io/hostname, operator: In, values: [n-1]}]}]}}";
    let volume = VOLUME.replace("spec: {", &format!("spec: {{{affinity}, "));
    let on = |node: Option<&str>| {
        let node =
            node.map(|name| format!("{{metadata: {{name: {name}, labels: {{kubernetes.io/hostname: {name}}}}}}}"));
        let mut documents = vec![("PersistentVolumeClaim", CLAIM), ("PersistentVolume", volume.as_str())];
        documents.extend(node.as_deref().map(|node| ("Node", node)));
        try_resolve(&named(), &documents)
    };
    on(Some("n-1")).expect("the right node");
    assert_eq!(
        on(Some("n-2")),
        Err("MountVolume.NodeAffinity check failed for volume \"pv-1\" : no matching NodeSelectorTerms".to_owned())
    );
    assert!(on(None).expect("a warning").warnings[0].contains("is not checked: there is no Node object"));
}

#[test]
fn pv_04_pv_05_annotations_and_access_modes_are_passed_on() {
    let metadata = "metadata: {name: pv-1, annotations: {pv.beta.kubernetes.io/gid: '1234'}}";
    let volume = VOLUME.replace("metadata: {name: pv-1}", metadata);
    let volume = volume.replace("spec: {", "spec: {accessModes: [ReadWriteOncePod], ");
    let bound = pair(CLAIM, &volume).expect("bound");
    assert_eq!((bound.gid, bound.exclusive), (Some(1234), true));
    let bound = pair(CLAIM, &volume.replace("1234", "many")).expect("bound");
    assert_eq!(bound.gid, None);
}

#[test]
fn cd_01_the_driver_of_a_google_disk_gets_the_access_mode_that_the_disk_had() {
    for (source, expected) in [
        ("gcePersistentDisk: {pdName: d}", &["ReadWriteOnce"][..]),
        ("csi: {driver: pd.csi.storage.gke.io, volumeHandle: h}", &["ReadOnlyMany", "ReadWriteMany"]),
    ] {
        let volume = VOLUME.replace("local: {path: /srv}", source);
        let volume = volume.replace("spec: {", "spec: {accessModes: [ReadOnlyMany, ReadWriteMany], ");
        assert_eq!(pair(CLAIM, &volume).expect(source).access_modes, expected);
    }
}

#[test]
fn pv_07_the_pods_claim_makes_a_drivers_volume_read_only_and_the_field_of_the_volume_does_not() {
    for source in [
        "csi: {driver: d, volumeHandle: h, readOnly: true}",
        "flexVolume: {driver: d, readOnly: true}",
        "gcePersistentDisk: {pdName: d, readOnly: true}",
    ] {
        let volume = VOLUME.replace("local: {path: /srv}", source);
        assert!(!pair(CLAIM, &volume).expect(source).read_only, "{source}");
        let claim = Claim { read_only: true, ..named() };
        let bound = try_resolve(&claim, &[("PersistentVolumeClaim", CLAIM), ("PersistentVolume", &volume)]);
        assert!(bound.expect(source).read_only, "{source}");
    }
}

#[test]
fn mount_options_are_for_kinds_that_have_them() {
    let with = |options: &str| VOLUME.replace("spec: {", &format!("spec: {{mountOptions: [{options}], "));
    assert!(pair(CLAIM, &with("ro")).expect("bound").read_only);
    let BoundSource::Local(local) = pair(CLAIM, &with("noatime")).expect("bound").source else { panic!("it is local") };
    assert_eq!(local.mount_options, ["noatime"]);
    let host_path = with("ro").replace("local:", "hostPath:");
    assert_eq!(
        pair(CLAIM, &host_path),
        Err("PersistentVolume \"pv-1\" cannot be used: mount options are not supported for this volume type".to_owned())
    );
    let old = "annotations: {volume.beta.kubernetes.io/mount-options: 'ro, rw'}";
    let volume = with("noatime").replace("metadata: {name: pv-1}", &format!("metadata: {{name: pv-1, {old}}}"));
    let bound = pair(CLAIM, &volume).expect("bound");
    assert_eq!((bound.read_only, bound.warnings), (true, vec![]));
}
