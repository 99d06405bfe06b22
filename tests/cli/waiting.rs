//! Missing and invalid objects: their volumes wait or stay as they are, without an effect on other volumes.

use std::fs;
use std::path::PathBuf;

use crate::common::*;

/// A pod with the volume `config` of ConfigMap `app` and a second one.
fn pod_beside(second: &str) -> String {
    pod(&format!("[{{name: config, configMap: {{name: app}}}}, {second}]"))
}

/// The path of a volume of a pod, which may not be mounted yet.
fn path_of(fixture: &Fixture, kind: &str, name: &str) -> PathBuf {
    let pods = fs::read_dir(fixture.path("root/pods")).expect("a directory");
    let pod = pods.map(|entry| entry.expect("an entry").path()).next().expect("a pod");
    pod.join("volumes").join(kind).join(name)
}

/// Starts a pod of which `config` comes up and the second volume waits with this reason.
fn start_with_one_waiting(second: &str, objects: &[&str], reason: &str) -> (Fixture, Running) {
    let fixture = Fixture::new(&pod_beside(second));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture.write("objects/other.yaml", &objects.join("\n---\n"));
    let mut running = fixture.start();
    running.wait_log(&format!(r#"MountVolume.SetUp failed for volume "v" : {reason}"#));
    let config = path_of(&fixture, "kubernetes.io~configmap", "config");
    wait_content(&config.join("a"), "1");
    assert!(!running.is_ready(), "a volume waits");
    assert_eq!(fixture.mounts(), [config], "nothing shows where a volume waits");
    (fixture, running)
}

#[test]
fn a_missing_object_or_key_makes_only_its_volume_wait_until_it_is_there() {
    // CM-04, CM-05, SE-01, FU-09
    let o = |data: &[(&str, &str)]| [config_map("o", data), secret("o", data)].join("\n---\n");
    let (nothing, other_key, complete) = (o(&[]).replace(r#""o""#, r#""x""#), o(&[("b", "1")]), o(&[("k", "2")]));
    for (second, present, reason) in [
        ("{name: v, configMap: {name: o}}", &nothing, r#"configmap "o" not found"#),
        ("{name: v, secret: {secretName: o}}", &nothing, r#"secret "o" not found"#),
        (
            "{name: v, configMap: {name: o, items: [{key: k, path: k}]}}",
            &other_key,
            "configmap references non-existent config key: k",
        ),
        (
            "{name: v, secret: {secretName: o, items: [{key: k, path: k}]}}",
            &other_key,
            "references non-existent secret key: k",
        ),
        ("{name: v, projected: {sources: [{secret: {name: o}}]}}", &nothing, r#"secret "o" not found"#),
    ] {
        let (fixture, mut running) = start_with_one_waiting(second, &[present], reason);
        fixture.write("objects/other.yaml", &complete);
        running.wait_ready();
        assert_eq!(fs::read_to_string(running.volume("v").join("k")).expect(second), "2");
        running.stop();
        fixture.assert_nothing_left();
    }
}

#[test]
fn a_source_that_manifest_files_do_not_give_says_so_and_the_other_volumes_run() {
    for (source, reason) in [
        (
            "serviceAccountToken: {path: token}",
            r#"serviceAccountToken "token" needs an API server that issues it; give podfs --kubeconfig"#,
        ),
        ("clusterTrustBundle: {name: ca, path: ca.pem}", r#"clustertrustbundle "ca" not found"#),
    ] {
        let second = format!("{{name: v, projected: {{sources: [{{{source}}}]}}}}");
        let (fixture, mut running) = start_with_one_waiting(&second, &[], reason);
        fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
        wait_content(&path_of(&fixture, "kubernetes.io~configmap", "config").join("a"), "2");
        assert!(!running.is_ready());
        assert_eq!(running.stop().code(), Some(0));
    }
}

#[test]
fn a_volume_of_a_kind_that_podfs_does_not_serve_waits_and_the_others_run() {
    for (kind, source, instead) in [
        ("ofALaterApi", "ofALaterApi: {some: [thing]}", "supported are configMap, secret"),
        ("rbd", "rbd: {monitors: [a], image: i}", "use a PersistentVolume of the CSI driver rbd.csi.ceph.com"),
    ] {
        let reason = format!("{kind} volumes are not supported by this version; {instead}");
        let (fixture, mut running) = start_with_one_waiting(&format!("{{name: v, {source}}}"), &[], &reason);
        let status = fixture.pods().remove(0);
        assert_eq!(status["state"], "degraded", "{status}");
        let volume = &status["volumes"][1];
        assert_eq!((&volume["kind"], &volume["state"]), (&kind.into(), &"waiting".into()), "{status}");
        assert!(volume["reason"].as_str().is_some_and(|it| it.starts_with(&reason)), "{status}");
        fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
        wait_content(&path_of(&fixture, "kubernetes.io~configmap", "config").join("a"), "2");
        assert!(!running.is_ready());
        assert_eq!(running.log().matches(&reason).count(), 1, "podfs logs it once:\n{}", running.log());
        assert_eq!(running.stop().code(), Some(0));
        fixture.assert_nothing_left();
    }
}

/// A running pod with the volumes `config` (ConfigMap app) and `keys` (Secret tls), each from a file of its own.
fn two_volumes() -> (Fixture, Running) {
    let fixture = Fixture::new(&pod_beside("{name: keys, secret: {secretName: tls}}"));
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "1")]));
    fixture.write("objects/tls.yaml", &secret("tls", &[("key", "1")]));
    let running = fixture.run();
    (fixture, running)
}

#[test]
fn files_stay_when_their_object_is_deleted_and_follow_it_again_when_it_is_back() {
    // CM-08, VM-08, VM-09, VM-10
    let (fixture, running) = two_volumes();
    let (config, keys) = (running.volume("config"), running.volume("keys"));
    let before = generation(&config);
    fixture.remove("objects/app.yaml");
    let problem = r#"MountVolume.SetUp failed for volume "config" : configmap "app" not found"#;
    running.wait_log(problem);
    for content in ["2", "3"] {
        fixture.write("objects/tls.yaml", &secret("tls", &[("key", content)]));
        wait_content(&keys.join("key"), content);
    }
    assert_eq!((generation(&config), fs::read_to_string(config.join("a")).expect("kept")), (before, "1".to_owned()));
    assert_eq!(running.log().matches(problem).count(), 1, "{}", running.log());
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "4")]));
    wait_content(&config.join("a"), "4");
}

#[test]
fn files_stay_when_their_manifest_turns_bad_and_the_log_says_why_once() {
    // CM-08, VM-09, VM-10
    let base64 = "{apiVersion: v1, kind: Secret, metadata: {name: tls}, data: {key: 'hunter2!'}}";
    let object = |name, content| match name {
        "app.yaml" => config_map("app", &[("a", content)]),
        _ => secret("tls", &[("key", content)]),
    };
    for (name, other, bad, sentence) in [
        ("app.yaml", "tls.yaml", "data: [", "app.yaml:1:7: unclosed bracket '['"),
        ("app.yaml", "tls.yaml", "data: {a: 1}", "app.yaml: "),
        ("tls.yaml", "app.yaml", base64, "tls.yaml: data.key: is not base64"),
    ] {
        let (fixture, running) = two_volumes();
        let file = |name| match name {
            "app.yaml" => running.volume("config").join("a"),
            _ => running.volume("keys").join("key"),
        };
        fixture.write(&format!("objects/{name}"), bad);
        running.wait_log(sentence);
        for content in ["2", "3"] {
            fixture.write(&format!("objects/{other}"), &object(other, content));
            wait_content(&file(other), content);
        }
        assert_eq!(fs::read_to_string(file(name)).expect("kept"), "1");
        let log = running.log();
        let warnings: Vec<_> = log.lines().filter(|line| line.contains("WARN")).collect();
        assert!(warnings.len() == 1 && warnings[0].contains("podfs uses the earlier content"), "{log}");
        assert!(!log.contains("hunter2"), "{log}");
        fixture.write(&format!("objects/{name}"), &object(name, "4"));
        wait_content(&file(name), "4");
    }
}

#[test]
fn a_refresh_that_cannot_be_assembled_keeps_the_files_until_it_can() {
    // AW-20, VM-09: the new keys cannot stand side by side.
    let fixture = Fixture::new(&pod("[{name: all, projected: {sources: [{configMap: {name: app}},
        {configMap: {name: deep, items: [{key: k, path: a/b}]}}]}}]"));
    fixture.write("objects/app.json", &config_map("app", &[("c", "1")]));
    fixture.write("objects/deep.json", &config_map("deep", &[("k", "1")]));
    let running = fixture.run();
    let volume = running.volume("all");
    fixture.write("objects/app.json", &config_map("app", &[("a", "2"), ("c", "2")]));
    running.wait_log(
        r#"MountVolume.SetUp failed for volume "all" : "a" of key "a" of configMap "app" is a file, and "a/b" of key "k" of configMap "deep" needs a directory in its place"#,
    );
    assert_eq!(fs::read_to_string(volume.join("c")).expect("kept"), "1");
    fixture.write("objects/app.json", &config_map("app", &[("c", "3")]));
    wait_content(&volume.join("c"), "3");
}

#[test]
fn a_pod_manifest_that_turns_bad_or_disappears_changes_nothing() {
    let manifest = |label| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: web, labels: {{a: {label}}}}}, spec: {{containers: [], volumes: \
             [{{name: about, downwardAPI: {{items: [{{path: l, fieldRef: {{fieldPath: \"metadata.labels['a']\"}}}}]}}}}]}}}}"
        )
    };
    let fixture = Fixture::new(&manifest("one"));
    let running = fixture.run();
    let label = running.volume("about").join("l");
    fixture.write("pod.yaml", "kind: [");
    running.wait_log("podfs uses the earlier content");
    assert_eq!(fs::read_to_string(&label).expect("kept"), "one");
    fixture.remove("pod.yaml");
    running.wait_log("has disappeared; the pod it described stays in use");
    assert_eq!(fs::read_to_string(&label).expect("kept"), "one");
    fixture.write("pod.yaml", &manifest("two"));
    wait_content(&label, "two");
}
