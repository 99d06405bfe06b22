//! Objects of the server in volumes.

use std::fs;

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::api_server::{Answer, ApiRequest, Disturbance, Order};
use crate::common::namespace::mount_tmpfs;
use crate::common::watch::Watcher;
use crate::common::*;
use crate::rig::Rig;

#[test]
fn mg_08_a_change_of_an_object_is_in_the_volume_at_once() {
    let rig = Rig::of_config("1");
    let running = rig.run();
    let file = running.volume("config").join("key");
    assert_eq!(fs::read_to_string(&file).expect("a file"), "1");
    rig.wait_watched("ConfigMap", "app");
    for value in 2..20 {
        rig.put_config(&value.to_string());
        wait_content(&file, &value.to_string());
    }
    assert_eq!(rig.server.lists("configmaps"), 1, "a change needs no other list");
}

#[test]
fn mg_01_there_is_one_watch_however_many_volumes_use_an_object_and_one_connection_for_all() {
    let rig = Rig::new(
        "[{name: a, configMap: {name: app}}, {name: b, configMap: {name: app}}, {name: c, secret: {secretName: s}},
          {name: d, projected: {sources: [{configMap: {name: app}}, {configMap: {name: other}}]}}]",
    );
    rig.put_config("1");
    rig.server.put(&config_map("other", &[("o", "o")]));
    rig.server.put(&secret("s", &[("k", "v")]));
    let running = rig.run();
    rig.wait_watched("ConfigMap", "app");
    rig.wait_watched("ConfigMap", "other");
    rig.wait_watched("Secret", "s");
    rig.put_config("2");
    for volume in ["a", "b", "d"] {
        wait_content(&running.volume(volume).join("key"), "2");
    }
    let requests = rig.server.requests();
    let connections: std::collections::BTreeSet<_> = requests.iter().map(|request| request.connection).collect();
    assert_eq!(connections.len(), 1, "one connection: {requests:?}");
    let watches = requests.iter().filter(|request| request.is("watch", "configmaps")).count();
    assert_eq!(watches, 2, "one watch for each ConfigMap");
    assert!(requests.iter().all(|request| request.version == axum::http::Version::HTTP_2));
}

#[test]
fn mg_02_mg_03_an_immutable_object_is_read_once_and_again_when_it_was_deleted_and_made_again() {
    // CM-12
    let rig = Rig::new("[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: s}}]");
    let put = |kind: &str, name: &str, field: &str, value: &str| {
        rig.server.put(&format!(
            "{{apiVersion: v1, kind: {kind}, metadata: {{name: {name}}}, immutable: true, {field}: {{k: {value}}}}}"
        ));
    };
    let is_read_whole = |request: &ApiRequest| request.plural == "secrets" && !request.wants_metadata();
    let whole = || rig.server.requests().iter().filter(|request| is_read_whole(request)).count();
    let by_metadata = || rig.server.requests().iter().filter(|request| request.wants_metadata()).count();
    put("ConfigMap", "app", "data", "v");
    put("Secret", "s", "stringData", "first");
    let running = rig.run();
    let (config, keys) = (running.volume("config").join("k"), running.volume("keys").join("k"));
    wait_content(&keys, "first");
    wait_content(&config, "v");
    rig.wait_watched("Secret", "s");
    // From now on, podfs requests only its metadata, also from a server that has forgotten its history.
    for _ in 0..2 {
        let before = by_metadata();
        rig.server.crash();
        running.wait_log("is unreachable");
        rig.server.boot();
        rig.server.become_ready();
        eventually("both are followed by their metadata", || by_metadata() >= before + 2);
        rig.wait_watched("Secret", "s");
        rig.wait_watched("ConfigMap", "app");
    }
    assert_eq!(whole(), 1, "{:?}", rig.server.requests());
    // MG-03: the first deletion happens while podfs watches, the second while the server is down.
    rig.server.delete("Secret", "default", "s");
    put("Secret", "s", "stringData", "second");
    wait_content(&keys, "second");
    rig.wait_watched("Secret", "s");
    rig.server.crash();
    rig.server.delete("Secret", "default", "s");
    put("Secret", "s", "stringData", "third");
    rig.server.boot();
    rig.server.become_ready();
    wait_content(&keys, "third");
    assert_eq!(fs::read_to_string(&config).expect("a file"), "v");
}

#[test]
fn an_immutable_object_that_was_deleted_may_be_another_one_later() {
    let rig = Rig::new("[{name: config, configMap: {name: app, optional: true}}]");
    rig.server.put("{apiVersion: v1, kind: ConfigMap, metadata: {name: app}, immutable: true, data: {key: '1'}}");
    let running = rig.run();
    let file = running.volume("config").join("key");
    wait_content(&file, "1");
    rig.server.connections(Order::Break);
    rig.wait_watched("ConfigMap", "app");
    rig.server.delete("ConfigMap", "default", "app");
    eventually("the file is gone", || !file.exists());
    for value in ["2", "3"] {
        rig.put_config(value);
        wait_content(&file, value);
    }
}

#[test]
fn a_volume_that_stays_unmounted_has_an_event_and_another_when_it_is_back() {
    let rig = Rig::new("[{name: config, configMap: {name: app}}]");
    rig.put_config("1");
    let running = rig.run();
    let volume = running.volume("config");
    umount2(&volume, MntFlags::empty()).expect("unmounted");
    mount_tmpfs(&volume);
    let has = |reason: &str, message: &str| {
        let events = rig.server.objects("Event");
        events.iter().any(|event| {
            event["reason"] == reason && event["message"].as_str().is_some_and(|text| text.contains(message))
        })
    };
    eventually("its error has an event", || has("FailedMount", "another process unmounted"));
    umount2(&volume, MntFlags::empty()).expect("unmounted");
    eventually("its success has an event", || has("SuccessfulMountVolume", "config"));
    wait_content(&volume.join("key"), "1");
}

#[test]
fn cm_04_me_02_a_volume_waits_for_a_missing_object_in_the_kubelets_words() {
    let rig = Rig::new("[{name: config, configMap: {name: app}}]");
    let mut running = rig.start();
    running.wait_log(r#"MountVolume.SetUp failed for volume "config" : configmap "app" not found"#);
    eventually("the pod has an event", || !rig.server.objects("Event").is_empty());
    let event = rig.server.objects("Event").remove(0);
    let message = r#"MountVolume.SetUp failed for volume "config" : configmap "app" not found"#;
    assert_eq!((event["reason"].as_str(), event["message"].as_str()), (Some("FailedMount"), Some(message)));
    assert_eq!(event["involvedObject"]["uid"], *rig.uid);
    rig.put_config("1");
    running.wait_ready();
    wait_content(&running.volume("config").join("key"), "1");
    let of_reason = |reason: &str| {
        let events = rig.server.objects("Event");
        events.into_iter().filter(|event| event["reason"] == reason).collect::<Vec<_>>()
    };
    eventually("its success has an event", || of_reason("SuccessfulMountVolume").len() == 1);
    let success = of_reason("SuccessfulMountVolume").remove(0);
    let message = r#"MountVolume.SetUp succeeded for volume "config""#;
    assert_eq!((success["type"].as_str(), success["message"].as_str()), (Some("Normal"), Some(message)));
    assert_eq!(of_reason("FailedMount").len(), 1, "one event for the failure");
}

#[test]
fn a_volume_that_fails_again_and_again_has_one_event_that_counts() {
    let rig = Rig::of_config("1");
    let mut running = rig.run();
    rig.wait_watched("ConfigMap", "app");
    let events = || rig.server.objects("Event");
    let count = |reason: &str| {
        let events = events().into_iter().filter(|event| event["reason"] == reason).collect::<Vec<_>>();
        assert!(events.len() <= 1, "{events:?}");
        events.first().map_or(0, |event| event["count"].as_u64().expect("a count"))
    };
    let fail = |number: u64| {
        rig.server.delete("ConfigMap", "default", "app");
        eventually("the failure is counted", || count("FailedMount") == number);
        rig.put_config(&number.to_string());
        eventually("the success is counted", || count("SuccessfulMountVolume") == number);
    };
    fail(1);
    let first = events();
    fail(2);
    let name = |event: &Value| event["metadata"]["name"].clone();
    assert_eq!(events().iter().map(name).collect::<Vec<_>>(), first.iter().map(name).collect::<Vec<_>>());
    // The next podfs of the pod continues the same events: it reads their counts from the server.
    running.signal(Signal::SIGKILL);
    running.wait();
    let _running = rig.run();
    rig.wait_watched("ConfigMap", "app");
    fail(3);
    assert_eq!(events().len(), 2);
    // After the server has deleted the events, podfs begins new ones.
    for event in events() {
        rig.server.delete("Event", "default", event["metadata"]["name"].as_str().expect("a name"));
    }
    fail(1);
    fail(2);
}

#[test]
fn without_the_right_to_patch_each_failure_has_an_event_of_its_own() {
    let rig = Rig::of_config("1");
    rig.server.fail_always("patch", "events", Answer::Error(403));
    let mut running = rig.run();
    rig.wait_watched("ConfigMap", "app");
    let events = |reason: &str| rig.server.objects("Event").iter().filter(|event| event["reason"] == reason).count();
    let fail = |number: usize| {
        rig.server.delete("ConfigMap", "default", "app");
        eventually("the failure has an event", || events("FailedMount") == number);
        rig.put_config(&number.to_string());
        eventually("the success has an event", || events("SuccessfulMountVolume") == number);
    };
    fail(1);
    fail(2);
    // The next podfs finds the first event of the podfs before it.
    running.signal(Signal::SIGKILL);
    running.wait();
    let _running = rig.run();
    rig.wait_watched("ConfigMap", "app");
    fail(3);
}

#[test]
fn an_event_that_cannot_be_posted_is_posted_later() {
    let rig = Rig::new("[{name: config, configMap: {name: app}}]");
    for answer in [Answer::Error(500), Answer::TooMany(1), Answer::Error(503)] {
        rig.server.fail_only("create", "events", 1, answer);
    }
    let mut running = rig.start();
    eventually("the pod has an event", || rig.server.objects("Event").len() == 1);
    assert_eq!(rig.server.pending_failures(), 0);
    assert_eq!(rig.server.count("create", "events"), 4);
    rig.put_config("1");
    running.wait_ready();
}

#[test]
fn a_volume_of_a_kind_that_podfs_does_not_serve_has_an_event() {
    let rig = Rig::new("[{name: config, configMap: {name: app}}, {name: data, gitRepo: {repository: r}}]");
    rig.put_config("1");
    let running = rig.start();
    eventually("the pod has an event", || rig.server.objects("Event").len() == 1);
    let message = rig.server.objects("Event").remove(0)["message"].as_str().expect("a message").to_owned();
    let expected =
        r#"MountVolume.SetUp failed for volume "data" : gitRepo volumes are not supported by this version; "#;
    assert!(message.starts_with(expected), "{message}");
    assert_eq!(rig.status()["volumes"][0]["state"], "live", "{}", running.log());
}

#[test]
fn cm_07_an_optional_object_comes_and_goes_with_its_files() {
    // CM-06
    let rig = Rig::new("[{name: config, configMap: {name: app, optional: true}}]");
    let running = rig.run();
    let volume = running.volume("config");
    assert!(!volume.join("key").exists());
    rig.put_config("1");
    wait_content(&volume.join("key"), "1");
    rig.server.delete("ConfigMap", "default", "app");
    eventually("the file is gone", || !volume.join("key").exists());
    rig.put_config("2");
    wait_content(&volume.join("key"), "2");
}

#[test]
fn cm_08_a_required_object_that_is_deleted_leaves_its_files_and_is_complained_about() {
    let rig = Rig::of_config("1");
    let running = rig.run();
    rig.wait_watched("ConfigMap", "app");
    rig.server.delete("ConfigMap", "default", "app");
    running.wait_log(r#"MountVolume.SetUp failed for volume "config" : configmap "app" not found"#);
    assert_eq!(fs::read_to_string(running.volume("config").join("key")).expect("a file"), "1");
    assert_eq!(rig.reason("config").as_deref(), Some(r#"configmap "app" not found"#));
    eventually("the pod has an event", || !rig.server.objects("Event").is_empty());
    rig.put_config("2");
    wait_content(&running.volume("config").join("key"), "2");
}

#[test]
fn se_03_an_object_of_the_same_name_in_another_namespace_is_not_used() {
    let rig = Rig::new("[{name: keys, secret: {secretName: s, optional: true}}]");
    rig.server.put("{apiVersion: v1, kind: Secret, metadata: {name: s, namespace: other}, stringData: {k: theirs}}");
    let running = rig.run();
    assert!(!running.volume("keys").join("k").exists());
    rig.server.put(&secret("s", &[("k", "ours")]));
    wait_content(&running.volume("keys").join("k"), "ours");
}

#[test]
fn vm_10_a_volume_that_fails_delays_no_other() {
    let rig = Rig::new("[{name: bad, configMap: {name: missing}}, {name: config, configMap: {name: app}}]");
    rig.put_config("1");
    let running = rig.start();
    running.wait_log(r#"configmap "missing" not found"#);
    let file = rig.fixture.path(&format!("root/pods/{}/volumes/kubernetes.io~configmap/config/key", rig.uid));
    wait_content(&file, "1");
    rig.put_config("2");
    wait_content(&file, "2");
}

#[test]
fn mg_05_changes_sent_twice_or_out_of_order_never_bring_back_an_older_state() {
    let rig = Rig::of_config("0");
    rig.server.change_behaviour(|behaviour| behaviour.disturbance = Disturbance { duplicate: true, outdated: true });
    let running = rig.run();
    let file = running.volume("config").join("key");
    rig.wait_watched("ConfigMap", "app");
    for value in 1..30 {
        rig.put_config(&value.to_string());
        wait_content(&file, &value.to_string());
    }
    // When the volume shows the last change, podfs has handled all earlier ones.
    rig.server.put(&config_map("app", &[("key", "last")]));
    wait_content(&file, "last");
    assert!(!running.log().contains("cannot watch"), "{}", running.log());
}

#[test]
fn a_too_large_object_keeps_the_earlier_content() {
    let rig = Rig::of_config("1");
    let running = rig.run();
    rig.wait_watched("ConfigMap", "app");
    rig.put_config(&"x".repeat((1 << 20) + 1));
    running.wait_log("an object may have at most 1048576");
    assert_eq!(fs::read_to_string(running.volume("config").join("key")).expect("a file"), "1");
    rig.put_config("2");
    wait_content(&running.volume("config").join("key"), "2");
}

#[test]
fn files_win_over_the_server() {
    let rig = Rig::new("[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: s}}]");
    rig.put_config("of the server");
    rig.server.put(&secret("s", &[("k", "of the server")]));
    rig.fixture.write("objects/app.yaml", &config_map("app", &[("key", "of a file")]));
    let mut command = rig.command();
    command.arg("--objects").arg(rig.fixture.objects());
    let mut running = rig.fixture.start_command(command);
    running.wait_ready();
    wait_content(&running.volume("config").join("key"), "of a file");
    wait_content(&running.volume("keys").join("k"), "of the server");
    running.wait_log("podfs takes ConfigMap default/app from the manifest files");
    assert_eq!(rig.server.lists("configmaps"), 0);
    // Without the file, podfs asks the server.
    rig.fixture.remove("objects/app.yaml");
    wait_content(&running.volume("config").join("key"), "of the server");
    rig.fixture.write("objects/app.yaml", &config_map("app", &[("key", "of a file again")]));
    wait_content(&running.volume("config").join("key"), "of a file again");
}

#[test]
fn a_pod_of_a_file_has_its_objects_from_the_server() {
    let rig = Rig::of_config("1");
    let mut command = rig.bare_command();
    command.arg("--pod").arg(rig.fixture.pod()).arg("--kubeconfig").arg(&rig.kubeconfig);
    let mut running = rig.fixture.start_command(command);
    running.wait_ready();
    let file = running.volume("config").join("key");
    wait_content(&file, "1");
    rig.wait_watched("ConfigMap", "app");
    rig.put_config("2");
    wait_content(&file, "2");
    assert_eq!(rig.server.lists("pods"), 0);
}

#[test]
fn a_volume_keeps_following_its_object_after_an_edit_of_the_pods_file_and_after_a_kill() {
    let rig = Rig::new("[{name: config, configMap: {name: app, optional: true}}]");
    rig.put_config("1");
    let start = || {
        let mut command = rig.bare_command();
        command.arg("--pod").arg(rig.fixture.pod()).arg("--kubeconfig").arg(&rig.kubeconfig);
        rig.fixture.start_command(command)
    };
    let mut running = start();
    running.wait_ready();
    let file = running.volume("config").join("key");
    wait_content(&file, "1");
    rig.wait_watched("ConfigMap", "app");
    let watcher = Watcher::on("root", &running.volume("config"));
    // Neither another object nor another kind of volume counts while the pod runs, or after a crash.
    for (round, volume) in ["configMap: {name: other, optional: true}", "emptyDir: {}"].iter().enumerate() {
        let manifest = fs::read_to_string(rig.fixture.pod()).expect("a manifest");
        let edited = manifest.replace("configMap: {name: app, optional: true}", volume);
        let edited = edited.replace("configMap: {name: other, optional: true}", volume);
        assert_ne!(edited, manifest);
        rig.fixture.write("pod.yaml", &edited);
        running.wait_log("the volumes of a pod do not change with its manifest");
        let next = format!("2.{round}");
        rig.put_config(&next);
        wait_content(&file, &next);
        running.signal(Signal::SIGKILL);
        running.wait();
        running = start();
        running.wait_ready();
        running.wait_log("stays as it was mounted");
        let next = format!("3.{round}");
        rig.put_config(&next);
        wait_content(&file, &next);
    }
    let removals: Vec<_> = watcher.events().into_iter().filter(|event| event.starts_with("root DELETE key")).collect();
    assert_eq!(removals, Vec::<String>::new(), "the file was always there");
}

#[test]
fn a_claim_of_the_server_leads_to_its_volume() {
    let rig = Rig::new("[{name: data, persistentVolumeClaim: {claimName: c}}]");
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("file"), "content").expect("written");
    let mut running = rig.start();
    running.wait_log(r#"persistentvolumeclaims "c" not found"#);
    let claim = |status: &str| {
        format!(
            "{{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {{name: c, uid: u}}, spec: {{volumeName: pv}}, \
             status: {{phase: {status}}}}}"
        )
    };
    rig.server.put(&claim("Pending"));
    running.wait_log("PVC is not bound");
    rig.server.put(&format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv}}, spec: {{hostPath: {{path: {}}}, \
         claimRef: {{namespace: default, name: c, uid: u}}}}}}",
        source.path().display()
    ));
    rig.server.put(&claim("Bound"));
    running.wait_ready();
    assert_eq!(fs::read_to_string(running.volume("data").join("file")).expect("a file"), "content");
    let settled = |name: &str| rig.object(name).is_some_and(|object| object["watch"] == "settled");
    eventually("podfs requests neither soon", || {
        settled("PersistentVolumeClaim default/c") && settled("PersistentVolume pv")
    });
}

#[test]
fn a_pod_may_have_more_objects_than_a_connection_has_room_for() {
    const OBJECTS: usize = 120;
    let sources: Vec<_> = (0..OBJECTS)
        .map(|number| format!("{{configMap: {{name: c{number}, items: [{{key: k, path: f{number}}}]}}}}"))
        .collect();
    let rig = Rig::new(&format!("[{{name: all, projected: {{sources: [{}]}}}}]", sources.join(", ")));
    let put = |number: usize, value: &str| rig.server.put(&config_map(&format!("c{number}"), &[("k", value)]));
    (0..OBJECTS).for_each(|number| {
        put(number, "1");
    });
    let running = rig.run();
    (0..OBJECTS).for_each(|number| rig.wait_watched("ConfigMap", &format!("c{number}")));
    (0..OBJECTS).for_each(|number| {
        put(number, "2");
    });
    for number in 0..OBJECTS {
        wait_content(&running.volume("all").join(format!("f{number}")), "2");
    }
}

#[test]
fn cm_05_a_volume_waits_for_a_missing_key_in_the_kubelets_words() {
    let rig = Rig::new("[{name: config, configMap: {name: app, items: [{key: k, path: f}]}}]");
    rig.put_config("1");
    let mut running = rig.start();
    running.wait_log("configmap references non-existent config key: k");
    rig.server.put(&config_map("app", &[("k", "2")]));
    running.wait_ready();
    wait_content(&running.volume("config").join("f"), "2");
}
