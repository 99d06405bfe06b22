//! How long podfs serves the pods of a runtime's sandboxes: restarts of podfs and of the runtime, and pods that end.

use std::fs;

use nix::sys::signal::Signal;
use podfs::node::nri::messages::nri::*;

use super::replaced::{create_with, machine, start};
use super::runtime::{Runtime, container, mount};
use crate::common::{config_map, eventually, wait_content};
use crate::node::csi::kubelet::Kubelet;

const CONFIG: &str = "volumes/kubernetes.io~configmap/config";

#[test]
fn a_pod_is_released_when_its_sandbox_is_removed_and_not_before() {
    let machine = machine();
    let runtime = machine.listen();
    let _daemon = start(&machine);
    let pod = machine.sandbox("web", Some("true"));
    let mut plugin = runtime.begin(Vec::new(), Vec::new());
    plugin.event(Event::RunPodSandbox, &pod, None);
    let one = container(&pod, "c", vec![machine.mount("web", CONFIG, "/config")]);
    let path = std::path::PathBuf::from(&create_with(&mut plugin, &pod, &one, 1)[0].source);
    // The source no longer has the pod, but its containers still run.
    machine.node.remove("web.yaml");
    machine.node.put("db.yaml", &super::replaced::WEB.replace("web", "db"));
    eventually("podfs has read the manifests", || machine.node.volume("db", "config").is_some());
    assert_eq!(fs::read_to_string(path.join("b")).expect("it is served"), "other");
    plugin.event(Event::StopPodSandbox, &pod, None);
    machine.node.put("app.yaml", &config_map("app", &[("a.conf", "second"), ("b", "changed")]));
    wait_content(&path.join("b"), "changed");
    plugin.event(Event::RemovePodSandbox, &pod, None);
    eventually("nothing of the pod is left", || machine.node.is_clean("uid-web"));
}

#[test]
fn another_daemon_continues_and_learns_from_the_runtime_which_containers_have_its_volumes() {
    let machine = machine();
    let runtime = machine.listen();
    let mut daemon = start(&machine);
    let pod = machine.sandbox("web", Some("true"));
    let mut plugin = runtime.begin(Vec::new(), Vec::new());
    plugin.event(Event::RunPodSandbox, &pod, None);
    let mut one = container(&pod, "c", vec![machine.mount("web", CONFIG, "/config")]);
    let replaced = create_with(&mut plugin, &pod, &one, 1);
    let supervisor = machine.node.supervisor("web");
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    // The pod is deleted while no daemon runs; its containers still run.
    machine.node.remove("web.yaml");
    one.mounts = replaced.clone();
    let of_kubelet = container(&pod, "d", vec![machine.mount("web", CONFIG, "/config")]);
    let _daemon = start(&machine);
    let mut plugin = runtime.begin(vec![pod.clone()], vec![one, of_kubelet]);
    for source in ["podfs", "kubelet"] {
        let line = format!("podfs_nri_containers{{source=\"{source}\"}}");
        eventually("the runtime's list is counted", || machine.metric(&line).as_deref() == Some("1"));
    }
    let path = std::path::Path::new(&replaced[0].source);
    machine.node.put("app.yaml", &config_map("app", &[("a.conf", "second"), ("b", "other")]));
    wait_content(&path.join("a.conf"), "second");
    assert_eq!(machine.node.supervisor("web"), supervisor, "the same supervisor serves the pod");
    plugin.event(Event::RemovePodSandbox, &pod, None);
    eventually("nothing of the pod is left", || machine.node.is_clean("uid-web"));
}

#[test]
fn a_runtime_that_comes_back_without_the_sandbox_releases_the_pod() {
    let machine = machine();
    let runtime = machine.listen();
    let _daemon = start(&machine);
    let pod = machine.sandbox("web", Some("true"));
    let mut plugin = runtime.begin(vec![pod.clone()], Vec::new());
    let one = container(&pod, "c", vec![machine.mount("web", CONFIG, "/config")]);
    let path = std::path::PathBuf::from(&create_with(&mut plugin, &pod, &one, 1)[0].source);
    fs::create_dir_all(machine.root().join("pods/uid-web")).expect("the kubelet's directory");
    drop(plugin);
    machine.node.remove("web.yaml");
    machine.node.put("db.yaml", &super::replaced::WEB.replace("web", "db"));
    eventually("podfs has read the manifests", || machine.node.volume("db", "config").is_some());
    assert_eq!(fs::read_to_string(path.join("b")).expect("it is served"), "other");
    let _plugin = runtime.begin(Vec::new(), Vec::new());
    eventually("nothing of the pod is left", || machine.node.is_clean("uid-web"));
}

#[test]
fn a_pod_with_csi_volumes_too_keeps_all_its_volumes_when_another_daemon_starts_while_it_ends() {
    let kubelet = Kubelet::new();
    let node = &kubelet.node;
    fs::create_dir(node.fixture.path("nri")).expect("a directory");
    node.put("app.yaml", &config_map("app", &[("a.conf", "first"), ("b", "other")]));
    node.put("login.yaml", &crate::common::secret("login", &[("password", "s3cr3t")]));
    node.put("web.yaml", super::replaced::WEB);
    let socket = node.fixture.path("nri/nri.sock");
    let start = || {
        let mut command = kubelet.command();
        command.arg("--nri").arg(&socket);
        node.start_command(command)
    };
    let runtime = Runtime::at(&socket);
    let mut daemon = start();
    let mut volume = kubelet.volume("web", "inline", &[("kind", "configMap"), ("name", "app")]);
    // It is a static pod of node n1.
    let name = "web-n1".to_owned();
    volume.request.volume_context.insert("csi.storage.k8s.io/pod.name".to_owned(), name.clone());
    kubelet.published(&volume);
    let pod = PodSandbox {
        id: "sandbox".to_owned(),
        name,
        uid: "uid-web".to_owned(),
        namespace: "default".to_owned(),
        labels: [("podfs.io/volumes".to_owned(), "true".to_owned())].into(),
        ..PodSandbox::default()
    };
    let mut plugin = runtime.begin(vec![pod.clone()], Vec::new());
    let of_kubelet = mount(&kubelet.root().join("pods/uid-web").join(CONFIG), "/config");
    let mut one = container(&pod, "c", vec![of_kubelet]);
    one.mounts = create_with(&mut plugin, &pod, &one, 1);
    let config = std::path::PathBuf::from(&one.mounts[0].source);
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    drop(plugin);
    // The source no longer has the pod, but its containers still run.
    node.remove("web.yaml");
    node.put("db.yaml", &super::replaced::WEB.replace("web", "db"));
    let _daemon = start();
    let mut plugin = runtime.begin(vec![pod.clone()], vec![one]);
    let is_there = |volume: &str| node.volume("db-n1", volume).is_some_and(|volume| volume["mount"] == "mounted");
    eventually("the next daemon works", || is_there("config"));
    node.put("app.yaml", &config_map("app", &[("a.conf", "second"), ("b", "other")]));
    wait_content(&config.join("a.conf"), "second");
    wait_content(&volume.target.join("a.conf"), "second");
    plugin.event(Event::RemovePodSandbox, &pod, None);
    kubelet.end_pod("web", &[volume]);
}
