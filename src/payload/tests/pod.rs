//! Files that depend on the pod itself: its facts, modes and owners.

use super::*;

#[test]
fn ex_01_the_item_beats_the_volume_and_both_beat_root() {
    let items = "items: [{key: foo, path: foo, user: 0}, {key: bar, path: bar}]";
    let source = format!("configMap: {{name: o, defaultUser: 7, {items}}}");
    assert_eq!(files(&source, &foo_bar()), lines(&["bar=bar@0644:7", "foo=foo@0644"]));
    // Containers that all run as one user do not change the owner of objects' files.
    let pod = pod("configMap: {name: o}", "securityContext: {runAsUser: 1000}, containers: [{name: c}]");
    assert_eq!(pod.facts.fs_user, Some(1000));
    assert_eq!(assembled(&pod, &foo_bar()).expect("assembled").0, ["bar=bar@0644", "foo=foo@0644"]);
}

#[test]
fn fg_01_fg_06_se_04_the_group_gets_what_it_needs() {
    let items = "items: [{key: foo, path: d/foo, mode: 0400}, {key: bar, path: bar}]";
    let source = format!("secret: {{secretName: o, defaultMode: 0600, {items}}}");
    let pod = pod(&source, "securityContext: {fsGroup: 1001}, containers: []");
    assert_eq!(assembled(&pod, &foo_bar()).expect("assembled").0, ["bar=bar@0640", "d/foo=foo@0440"]);
    let (objects, tokens) = (foo_bar(), Tokens::default());
    let view = view(&pod, &objects, &tokens);
    let payload = payload(&pod, &view).expect("assembled").payload;
    assert_eq!((payload.directory_mode, payload.gid), (0o2755, 1001));
}

#[test]
fn aw_05_aw_22_each_top_level_name_has_one_owner_that_of_its_first_file() {
    let items = "items: [{key: foo, path: d/z, user: 7}, {key: foo, path: d/a/b, user: 8}, {key: bar, path: d-e}, \
                 {key: bar, path: f, user: 9}]";
    let pod = pod(&format!("configMap: {{name: o, {items}}}"), "containers: []");
    let (objects, tokens) = (foo_bar(), Tokens::default());
    let view = view(&pod, &objects, &tokens);
    let payload = payload(&pod, &view).expect("assembled").payload;
    assert_eq!(payload.top_level(), [("d-e", 0), ("d", 8), ("f", 9)]);
}

#[test]
fn da_01_da_12_downward_files_of_a_pod() {
    let source = "downwardAPI: {items: [\
        {path: name, fieldRef: {fieldPath: metadata.name}}, \
        {path: namespace, mode: 0400, fieldRef: {fieldPath: metadata.namespace}}, \
        {path: these/are/my/labels, fieldRef: {fieldPath: metadata.labels}}, \
        {path: cpu, resourceFieldRef: {containerName: c, resource: limits.cpu, divisor: 1m}}]}";
    let pod = pod(source, "containers: [{name: c, resources: {limits: {cpu: 0.25}}}]");
    assert_eq!(
        assembled(&pod, &Objects::default()).expect("assembled").0,
        ["cpu=250@0644", "name=web@0644", "namespace=shop@0400", "these/are/my/labels=a=\"1\"@0644"]
    );
}

#[test]
fn da_09_the_pods_node_says_what_an_unlimited_container_can_use() {
    let source = "downwardAPI: {items: [\
        {path: cpu, resourceFieldRef: {containerName: c, resource: limits.cpu, divisor: 1m}}, \
        {path: memory, resourceFieldRef: {containerName: c, resource: limits.memory, divisor: 1Gi}}]}";
    let node = objects("{apiVersion: v1, kind: Node, metadata: {name: n1}, status: {allocatable: {cpu: 3500m}}}");
    let scheduled = |name: &str| pod(source, &format!("nodeName: {name}, containers: [{{name: c}}]"));
    let shown = |pod: &Pod, objects: &Objects| assembled(pod, objects).expect("assembled").0;
    assert_eq!(shown(&scheduled("n1"), &node), ["cpu=3500@0644", "memory=4@0644"]);
    assert_eq!(shown(&scheduled("n2"), &node), ["cpu=2000@0644", "memory=4@0644"]);
    assert_eq!(shown(&scheduled("''"), &node), ["cpu=3500@0644", "memory=4@0644"]);
    assert_eq!(shown(&scheduled("n1"), &Objects::default()), ["cpu=2000@0644", "memory=4@0644"]);
}
