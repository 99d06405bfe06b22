use serde_json::json;

use super::*;
use crate::node::sample::{pod, uid};
use crate::node::world::actual::{ObservedVolume, OperationOutcome};

#[test]
fn vm_03_a_volume_that_no_container_uses_is_not_wanted() {
    let mut desired = DesiredWorld::default();
    desired.put(
        pod("u", &["{name: used, emptyDir: {}}", "{name: idle, emptyDir: {}}"], &["used"]),
        &PluginRegistry::built_in(),
        &ActualWorld::default(),
    );
    let wanted: Vec<_> = desired.volumes().map(|(id, _)| id.volume).collect();
    assert_eq!(wanted, ["used"]);
    assert!(desired.pod(&uid("u")).expect("the pod").is_processed());
}

#[test]
fn vm_10_a_volume_without_a_plugin_does_not_affect_the_others() {
    let mut desired = DesiredWorld::default();
    let volumes = ["{name: odd, iscsi: {targetPortal: a, iqn: b, lun: 0}}", "{name: good, emptyDir: {}}"];
    desired.put(pod("u", &volumes, &["odd", "good"]), &PluginRegistry::built_in(), &ActualWorld::default());
    let pod = desired.pod(&uid("u")).expect("the pod");
    assert!(!pod.is_processed() && pod.volumes.contains_key("good"));
    assert_eq!(pod.errors.iter().count(), 1);
}

#[test]
fn a_changed_pod_wants_the_volumes_of_its_new_description() {
    let (mut desired, plugins) = (DesiredWorld::default(), PluginRegistry::built_in());
    let volumes = ["{name: a, emptyDir: {}}", "{name: b, emptyDir: {}}"];
    desired.put(pod("u", &volumes, &["a"]), &plugins, &ActualWorld::default());
    desired.put(pod("u", &volumes, &["b"]), &plugins, &ActualWorld::default());
    assert_eq!(desired.volumes().map(|(id, _)| id.volume).collect::<Vec<_>>(), ["b"]);
    desired.remove(&uid("u"));
    assert_eq!(desired.volumes().count(), 0);
}

#[test]
fn a_volume_whose_definition_changes_while_its_pod_runs_stays_as_it_is() {
    let (mut desired, plugins) = (DesiredWorld::default(), PluginRegistry::built_in());
    desired.put(pod("u", &["{name: a, configMap: {name: x}}"], &["a"]), &plugins, &ActualWorld::default());
    let before = desired.pod(&uid("u")).expect("the pod").volumes["a"].clone();
    desired.put(pod("u", &["{name: a, configMap: {name: other}}"], &["a"]), &plugins, &ActualWorld::default());
    let after = desired.pod(&uid("u")).expect("the pod");
    assert_eq!(after.volumes["a"], before);
    let errors: Vec<_> = after.errors.iter().collect();
    assert!(errors.len() == 1 && errors[0].starts_with("volume \"a\" is described otherwise"), "{errors:?}");
}

fn id(volume: &str) -> VolumeId {
    VolumeId { pod: uid("u"), volume: volume.to_owned() }
}

#[test]
fn vm_11_a_volume_that_was_mounted_stays_when_the_manifest_loses_it_or_its_use() {
    let (mut desired, plugins, mut actual) =
        (DesiredWorld::default(), PluginRegistry::built_in(), ActualWorld::default());
    let all = ["{name: gone, emptyDir: {}}", "{name: idle, emptyDir: {}}", "{name: never, configMap: {name: typo}}"];
    desired.put(pod("u", &all, &["gone", "idle", "never"]), &plugins, &actual);
    for mounted in ["gone", "idle"] {
        actual.report(&id(mounted), true, ObservedVolume::default(), None);
    }
    actual.mounted(&id("never"), OperationOutcome::Uncertain, None);
    let rest = ["{name: idle, emptyDir: {}}", "{name: new, emptyDir: {}}"];
    for _ in 0..2 {
        desired.put(pod("u", &rest, &["new"]), &plugins, &actual);
        let wanted = desired.pod(&uid("u")).expect("the pod");
        assert!(wanted.is_processed(), "{:?}", wanted.errors);
        let DesiredPod { pod, volumes, notes, .. } = wanted;
        assert_eq!(volumes.keys().collect::<Vec<_>>(), ["gone", "idle", "new"]);
        let notes: Vec<_> = notes.iter().collect();
        assert_eq!(
            notes,
            [
                "volume \"idle\" is used by no container of the manifest any more, and stays until the pod is released",
                "volume \"gone\" is no longer in the manifest, and stays until the pod is released",
            ]
        );
        let names: Vec<_> = pod.pod.volumes.iter().map(|volume| volume.name.as_str()).collect();
        assert_eq!(names, ["idle", "new", "gone"]);
        assert_eq!(pod.manifest["spec"]["volumes"][2], json!({"name": "gone", "emptyDir": {}}));
    }
    // The next daemon has the manifest of the checkpoint, and the names of the volumes that were mounted.
    let (mut next, mut found) = (DesiredWorld::default(), ActualWorld::default());
    ["gone", "idle"].iter().for_each(|name| found.reconstruct(id(name)));
    let checkpoint = desired.pod(&uid("u")).expect("the pod").pod.clone();
    for pod in [checkpoint, pod("u", &rest, &["new"])] {
        next.put(pod, &plugins, &found);
        assert_eq!(next.volumes().map(|(id, _)| id.volume).collect::<Vec<_>>(), ["gone", "idle", "new"]);
    }
    // A manifest without volumes.
    desired.put(pod("u", &[], &[]), &plugins, &actual);
    let volumes = &desired.pod(&uid("u")).expect("the pod").pod.manifest["spec"]["volumes"];
    assert_eq!(volumes.as_array().map(Vec::len), Some(2), "{volumes}");
    desired.remove(&uid("u"));
    desired.put(pod("u", &rest, &["new"]), &plugins, &actual);
    assert_eq!(desired.volumes().map(|(id, _)| id.volume).collect::<Vec<_>>(), ["new"], "it was released");
}

#[test]
fn a_volume_that_a_kubelet_has_unpublished_is_not_wanted_any_more() {
    let (mut desired, plugins, mut actual) =
        (DesiredWorld::default(), PluginRegistry::built_in(), ActualWorld::default());
    let of_kubelet =
        |volumes: &[&str], used: &[&str]| NodePod { origin: PodOrigin::Kubelet, ..pod("u", volumes, used) };
    desired.put(of_kubelet(&["{name: a, emptyDir: {}}"], &["a"]), &plugins, &actual);
    actual.report(&id("a"), true, ObservedVolume::default(), None);
    desired.put(of_kubelet(&["{name: b, emptyDir: {}}"], &["b"]), &plugins, &actual);
    assert_eq!(desired.volumes().map(|(id, _)| id.volume).collect::<Vec<_>>(), ["b"]);
}

#[test]
fn vm_10_a_redefined_volume_stays_in_the_manifest_and_holds_back_no_new_volume() {
    let (mut desired, plugins) = (DesiredWorld::default(), PluginRegistry::built_in());
    let annotated = |volumes: &[&str], used: &[&str], annotation: &str| {
        let mut pod = pod("u", volumes, used);
        Arc::make_mut(&mut pod.manifest)["metadata"]["annotations"] = json!({annotation: "none", "x": "y"});
        pod
    };
    let first = ["{name: a, configMap: {name: x}}"];
    desired.put(annotated(&first, &["a"], "podfs.io/sub-path.a"), &plugins, &ActualWorld::default());
    let redefined = ["{name: a, hostPath: {path: /srv}}", "{name: b, emptyDir: {}}"];
    for _ in 0..2 {
        desired.put(annotated(&redefined, &["a", "b"], "podfs.io/cache.a"), &plugins, &ActualWorld::default());
        let DesiredPod { pod, volumes, .. } = desired.pod(&uid("u")).expect("the pod");
        assert_eq!(volumes.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(
            pod.manifest["spec"]["volumes"],
            json!([{"name": "a", "configMap": {"name": "x"}}, {"name": "b", "emptyDir": {}}]),
        );
        assert_eq!(pod.manifest["metadata"]["annotations"], json!({"podfs.io/sub-path.a": "none", "x": "y"}));
        assert_eq!(pod.pod.volumes.iter().collect::<Vec<_>>(), [&volumes["a"].volume, &volumes["b"].volume]);
    }
    desired.put(annotated(&redefined, &["b"], "podfs.io/cache.a"), &plugins, &ActualWorld::default());
    let DesiredPod { pod, .. } = desired.pod(&uid("u")).expect("the pod");
    assert_eq!(pod.manifest["spec"]["volumes"][0]["hostPath"]["path"], "/srv", "no container uses it any more");
}

#[test]
fn a_pod_that_is_renamed_under_its_uid_keeps_its_name() {
    let (mut desired, plugins) = (DesiredWorld::default(), PluginRegistry::built_in());
    let volumes = ["{name: a, emptyDir: {}}", "{name: b, emptyDir: {}}"];
    desired.put(pod("u", &volumes, &["a"]), &plugins, &ActualWorld::default());
    let before = desired.pod(&uid("u")).expect("the pod").pod.pod.identity.clone();
    let mut renamed = pod("u", &volumes, &["a", "b"]);
    Arc::make_mut(&mut renamed.manifest)["metadata"] = json!({"name": "new", "namespace": "shop", "uid": "u"});
    let identity = &mut Arc::make_mut(&mut renamed.pod).identity;
    (identity.name, identity.namespace) = ("new".to_owned(), "shop".to_owned());
    for _ in 0..2 {
        desired.put(renamed.clone(), &plugins, &ActualWorld::default());
        let DesiredPod { pod, volumes, notes, .. } = desired.pod(&uid("u")).expect("the pod");
        assert_eq!((&pod.pod.identity, volumes.len()), (&before, 2));
        assert_eq!(pod.manifest["metadata"], json!({"name": "p-u", "namespace": "default", "uid": "u"}));
        let notes: Vec<_> = notes.iter().collect();
        let sentence = "the pod is described as shop/new now, and stays default/p-u; ";
        assert!(notes.len() == 1 && notes[0].starts_with(sentence), "{notes:?}");
    }
}

#[test]
fn vm_10_a_volume_that_does_not_suit_the_mount_of_its_claim_holds_back_no_new_volume() {
    let (mut desired, plugins) = (DesiredWorld::default(), PluginRegistry::built_in());
    let data = "{name: data, persistentVolumeClaim: {claimName: data}}";
    let same = "{name: same, persistentVolumeClaim: {claimName: data}}";
    let read_only = "{name: ro, persistentVolumeClaim: {claimName: data, readOnly: true}}";
    let all = pod("u", &[data, same, read_only, "{name: new, emptyDir: {}}"], &["data", "same", "ro", "new"]);
    let check = |desired: &DesiredWorld| {
        let DesiredPod { volumes, errors, .. } = desired.pod(&uid("u")).expect("the pod");
        assert_eq!(volumes.keys().collect::<Vec<_>>(), ["data", "new", "same"]);
        let errors: Vec<_> = errors.iter().collect();
        assert!(
            errors.len() == 1 && errors[0].starts_with("volume \"ro\" names the claim of volume \"data\""),
            "{errors:?}"
        );
    };
    desired.put(pod("u", &[data], &["data"]), &plugins, &ActualWorld::default());
    for _ in 0..2 {
        desired.put(all.clone(), &plugins, &ActualWorld::default());
        check(&desired);
    }
    // The next daemon has the manifest of the checkpoint, and the names of the volumes that were mounted.
    let (mut next, mut found) = (DesiredWorld::default(), ActualWorld::default());
    ["data", "same", "new"].iter().for_each(|name| found.reconstruct(id(name)));
    for _ in 0..2 {
        next.put(all.clone(), &plugins, &found);
        check(&next);
    }
    // If all volumes are new, podfs mounts the claim once, read-only.
    let mut started = DesiredWorld::default();
    started.put(all, &plugins, &ActualWorld::default());
    assert_eq!(started.volumes().count(), 4);
}
