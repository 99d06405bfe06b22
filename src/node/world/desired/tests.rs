use serde_json::json;

use super::*;
use crate::node::sample::{pod, uid};

#[test]
fn vm_03_a_volume_that_no_container_uses_is_not_wanted() {
    let mut desired = DesiredWorld::default();
    desired.put(
        pod("u", &["{name: used, emptyDir: {}}", "{name: idle, emptyDir: {}}"], &["used"]),
        &PluginRegistry::built_in(),
    );
    let wanted: Vec<_> = desired.volumes().map(|(id, _)| id.volume).collect();
    assert_eq!(wanted, ["used"]);
    assert!(desired.pod(&uid("u")).expect("the pod").is_processed());
}

#[test]
fn vm_10_a_volume_without_a_plugin_does_not_affect_the_others() {
    let mut desired = DesiredWorld::default();
    let volumes = ["{name: odd, iscsi: {targetPortal: a, iqn: b, lun: 0}}", "{name: good, emptyDir: {}}"];
    desired.put(pod("u", &volumes, &["odd", "good"]), &PluginRegistry::built_in());
    let pod = desired.pod(&uid("u")).expect("the pod");
    assert!(!pod.is_processed() && pod.volumes.contains_key("good"));
    assert_eq!(pod.errors.iter().count(), 1);
}

#[test]
fn a_changed_pod_wants_the_volumes_of_its_new_description() {
    let (mut desired, plugins) = (DesiredWorld::default(), PluginRegistry::built_in());
    let volumes = ["{name: a, emptyDir: {}}", "{name: b, emptyDir: {}}"];
    desired.put(pod("u", &volumes, &["a"]), &plugins);
    desired.put(pod("u", &volumes, &["b"]), &plugins);
    assert_eq!(desired.volumes().map(|(id, _)| id.volume).collect::<Vec<_>>(), ["b"]);
    desired.remove(&uid("u"));
    assert_eq!(desired.volumes().count(), 0);
}

#[test]
fn a_volume_whose_definition_changes_while_its_pod_runs_stays_as_it_is() {
    let (mut desired, plugins) = (DesiredWorld::default(), PluginRegistry::built_in());
    desired.put(pod("u", &["{name: a, configMap: {name: x}}"], &["a"]), &plugins);
    let before = desired.pod(&uid("u")).expect("the pod").volumes["a"].clone();
    desired.put(pod("u", &["{name: a, configMap: {name: other}}"], &["a"]), &plugins);
    let after = desired.pod(&uid("u")).expect("the pod");
    assert_eq!(after.volumes["a"], before);
    let errors: Vec<_> = after.errors.iter().collect();
    assert!(errors.len() == 1 && errors[0].starts_with("volume \"a\" is described otherwise"), "{errors:?}");
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
    desired.put(annotated(&first, &["a"], "podfs.io/sub-path.a"), &plugins);
    let redefined = ["{name: a, hostPath: {path: /srv}}", "{name: b, emptyDir: {}}"];
    for _ in 0..2 {
        desired.put(annotated(&redefined, &["a", "b"], "podfs.io/cache.a"), &plugins);
        let DesiredPod { pod, volumes, .. } = desired.pod(&uid("u")).expect("the pod");
        assert_eq!(volumes.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(
            pod.manifest["spec"]["volumes"],
            json!([{"name": "a", "configMap": {"name": "x"}}, {"name": "b", "emptyDir": {}}]),
        );
        assert_eq!(pod.manifest["metadata"]["annotations"], json!({"podfs.io/sub-path.a": "none", "x": "y"}));
        assert_eq!(pod.pod.volumes.iter().collect::<Vec<_>>(), [&volumes["a"].volume, &volumes["b"].volume]);
    }
    desired.put(annotated(&redefined, &["b"], "podfs.io/cache.a"), &plugins);
    let DesiredPod { pod, .. } = desired.pod(&uid("u")).expect("the pod");
    assert_eq!(pod.manifest["spec"]["volumes"][0]["hostPath"]["path"], "/srv", "no container uses it any more");
}
