//! The pod itself, as the server has it.

use std::fs;

use nix::sys::signal::Signal;

use crate::api_server::Order;
use crate::common::outcome::finish;
use crate::common::*;
use crate::rig::Rig;

const LABELS: &str = "[{name: info, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}]";

#[test]
fn a_pod_of_the_server_is_served_below_its_uid_and_followed() {
    let rig = Rig::new(LABELS);
    let running = rig.run();
    let volume = running.volume("info");
    assert!(volume.starts_with(rig.fixture.path(&format!("root/pods/{}", rig.uid))));
    wait_content(&volume.join("labels"), "app=\"web\"");
    rig.wait_watched("Pod", "web");
    rig.put_pod(LABELS, "{app: other}");
    wait_content(&volume.join("labels"), "app=\"other\"");
}

#[test]
fn a_pod_that_is_deleted_and_made_again_is_another_pod() {
    let rig = Rig::new(LABELS);
    let running = rig.run();
    rig.wait_watched("Pod", "web");
    rig.server.delete("Pod", "default", "web");
    running.wait_log("the pod is gone from the API server");
    let status = rig.status();
    assert_eq!(status["state"], "podDeleted", "{status}");
    assert!(status["reason"].as_str().is_some_and(|reason| reason.contains("until podfs is stopped")), "{status}");
    assert!(status["stateSince"].as_str().is_some_and(|since| since.ends_with('Z')), "{status}");
    rig.fixture.status(&[]).says(1, &["pod default/web is deleted, and still served"]);
    rig.server.put(
        "{apiVersion: v1, kind: Pod, metadata: {name: web, uid: another, labels: {app: another}}, spec: {nodeName: n1}}",
    );
    rig.server.bookmark();
    let version = || rig.object("Pod default/web").expect("an object")["resourceVersion"].clone();
    eventually("podfs has the new version", || version().as_str() == Some(&*rig.server.version().to_string()));
    assert_eq!(fs::read_to_string(running.volume("info").join("labels")).expect("a file"), "app=\"web\"");
    assert!(!running.log().contains("now describes"), "{}", running.log());
}

#[test]
fn podfs_waits_for_its_pod_while_the_server_is_unreachable() {
    let rig = Rig::of_config("1");
    rig.server.connections(Order::Refuse);
    let mut running = rig.start();
    running.wait_log("podfs waits for pod default/web");
    rig.server.connections(Order::Serve);
    running.wait_ready();
    wait_content(&running.volume("config").join("key"), "1");
}

#[test]
fn a_supervisor_that_follows_another_finds_the_pod_at_the_server_again() {
    let rig = Rig::of_config("1");
    let mut running = rig.run();
    let file = running.volume("config").join("key");
    running.signal(Signal::SIGKILL);
    running.wait();
    rig.put_config("2");
    let running = rig.run();
    wait_content(&file, "2");
    running.wait_log("serving 1 volume(s) of pod default/web");
}

#[test]
fn a_volume_alone_may_be_of_a_pod_of_the_server() {
    let rig = Rig::of_config("1");
    let directory = rig.fixture.path("mount");
    rig.fixture.write("volume.yaml", "{name: config, configMap: {name: app}}");
    let mut command = std::process::Command::new(PODFS);
    command.arg("mount").arg("--volume").arg(rig.fixture.path("volume.yaml"));
    command.arg("--pod-name").arg("default/web").arg("--kubeconfig").arg(&rig.kubeconfig).arg(&directory);
    let _running = rig.fixture.spawn(&mut command);
    wait_content(&directory.join("key"), "1");
    rig.wait_watched("ConfigMap", "app");
    rig.put_config("2");
    wait_content(&directory.join("key"), "2");
}

#[test]
fn another_version_of_podfs_continues_with_the_same_server() {
    let rig = Rig::of_config("1");
    let running = rig.run();
    let file = running.volume("config").join("key");
    let outcome = finish(rig.fixture.operator("upgrade").args(["--pod", &rig.uid]));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    rig.put_config("2");
    wait_content(&file, "2");
    assert_eq!(running.log().matches("pod default/web is ready").count(), 2, "{}", running.log());
}

#[test]
fn a_pod_of_the_server_is_rendered() {
    let rig = Rig::new(
        "[{name: config, configMap: {name: app}}, {name: info, downwardAPI: {items: [
        {path: labels, fieldRef: {fieldPath: metadata.labels}}]}}]",
    );
    let render = || {
        let mut command = std::process::Command::new(PODFS);
        command.args(["render", "--pod-name", "default/web", "--kubeconfig"]).arg(&rig.kubeconfig);
        finish(command.env("PODFS_CONFIG", "/dev/null"))
    };
    let outcome = render();
    outcome.says(1, &["MountVolume.SetUp failed for volume \"config\" : configmap \"app\" not found"]);
    assert!(outcome.stdout.contains("| app=\"web\"\n"), "{}", outcome.stdout);
    rig.put_config("one");
    let outcome = render();
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert!(outcome.stdout.contains("| one\n"), "{}", outcome.stdout);
    assert!(rig.server.objects("Event").is_empty(), "a rendering makes no event of the pod");
}
