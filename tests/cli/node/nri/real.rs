//! Transparent volumes with a real containerd and runc: the content of volumes in containers that are created over CRI,
//! as a kubelet does.

use std::fs;

use nix::sys::signal::Signal;

use super::containerd::{Container, Containerd, Wanted};
use super::replaced::{machine, start};
use super::runtime::Machine;
use crate::common::{config_map, eventually, secret};

pub const CHOSEN: [(&str, &str); 1] = [("podfs.io/volumes", "true")];
pub const CONFIG: Wanted<'static> = ("/config", "volumes/kubernetes.io~configmap/config");
pub const LOGIN: Wanted<'static> = ("/login", "volumes/kubernetes.io~secret/login");
pub const PART: Wanted<'static> = ("/etc/app.conf", "volume-subpaths/config/c/5");

/// Makes the kubelet's volumes of the pod `web`. Their files have the content `of the kubelet`.
pub fn make_kubelets_volumes(machine: &Machine) {
    let pod = machine.root().join("pods/uid-web");
    for (_, volume) in [CONFIG, LOGIN] {
        fs::create_dir_all(pod.join(volume)).expect("a directory");
        for file in ["a.conf", "b", "password"] {
            fs::write(pod.join(volume).join(file), "of the kubelet").expect("written");
        }
    }
    let scratch = pod.join("volumes/kubernetes.io~empty-dir/scratch");
    fs::create_dir_all(&scratch).expect("a directory");
    fs::write(scratch.join("own"), "of the kubelet").expect("written");
    fs::create_dir_all(pod.join("volume-subpaths/config/c")).expect("a directory");
    fs::write(pod.join(PART.1), "of the kubelet").expect("written");
}

/// A container that has podfs's volumes. Creates containers until one has them, because podfs may not know the pod yet
/// when the first one is created.
pub fn run_with_podfs(containerd: &Containerd<'_>, sandbox: &str, mounts: &[Wanted<'_>]) -> Container {
    let (mut attempt, mut running) = (0, None);
    eventually("podfs has the volumes", || {
        let container = containerd.run("web", sandbox, &format!("c{attempt}"), mounts);
        attempt += 1;
        let is_ours = containerd.says(&container, &format!("cat {}/b", CONFIG.0)) != "of the kubelet";
        running = is_ours.then_some(container);
        is_ours
    });
    running.expect("it runs")
}

#[test]
fn containers_show_podfs_volumes_and_follow_them() {
    let machine = machine();
    make_kubelets_volumes(&machine);
    let Some(containerd) = Containerd::start_or_skip(&machine, "containers_show_podfs_volumes_and_follow_them") else {
        return;
    };
    let daemon = start(&machine);
    daemon.wait_log("containerd 1.7");
    let sandbox = containerd.run_pod("web", &CHOSEN);
    eventually("podfs has the volumes", || {
        machine
            .metric(
                "volume_manager_total_volumes{plugin_name=\"kubernetes.io/secret\",state=\"actual_state_of_world\"}",
            )
            .as_deref()
            == Some("1")
    });
    let mounts = [CONFIG, LOGIN, ("/scratch", "volumes/kubernetes.io~empty-dir/scratch")];
    let container = run_with_podfs(&containerd, &sandbox, &mounts);
    let says = |command: &str| containerd.says(&container, command);
    assert_eq!(
        says("cat /config/a.conf; echo; cat /login/password; echo; cat /scratch/own"),
        "first\ns3cr3t\nof the kubelet"
    );
    assert!(says("echo x > /config/new").contains("Read-only"), "it can be read only");
    let part = containerd.run("web", &sandbox, "c", &[CONFIG, PART]);
    assert_eq!(containerd.says(&part, "cat /etc/app.conf"), "first");
    let before = says("readlink /config/..data");
    let watcher = containerd.watch(&container, "config", "/config");
    machine.node.put("app.yaml", &config_map("app", &[("a.conf", "second"), ("b", "other")]));
    eventually("a running container shows the change", || says("cat /config/a.conf") == "second");
    assert_ne!(says("readlink /config/..data"), before, "another generation");
    let events = watcher.events_until_removal("config");
    assert!(
        events.iter().any(|event| event == "config MOVED_TO ..data"),
        "a process inside gets the event: {events:?}"
    );
    machine.node.put("login.yaml", &secret("login", &[("password", "changed")]));
    eventually("of the other volume, too", || says("cat /login/password") == "changed");
    containerd.stop_pod(&sandbox);
    machine.node.remove("web.yaml");
    containerd.remove_pod(&sandbox);
    eventually("nothing of the pod is left", || machine.node.is_clean("uid-web"));
}

#[test]
fn containers_start_with_the_kubelets_volumes_when_podfs_is_dead_and_when_it_stands_still() {
    let machine = machine();
    make_kubelets_volumes(&machine);
    let test = "containers_start_with_the_kubelets_volumes_when_podfs_is_dead_and_when_it_stands_still";
    let Some(containerd) = Containerd::start_or_skip(&machine, test) else { return };
    let sandbox = containerd.run_pod("web", &CHOSEN);
    let without = containerd.run("web", &sandbox, "without", &[CONFIG]);
    assert_eq!(containerd.says(&without, "cat /config/b"), "of the kubelet");
    let mut daemon = start(&machine);
    daemon.wait_log("containerd 1.7");
    let with = run_with_podfs(&containerd, &sandbox, &[CONFIG]);
    daemon.signal(Signal::SIGSTOP);
    let slow = containerd.run("web", &sandbox, "slow", &[CONFIG]);
    assert_eq!(containerd.says(&slow, "cat /config/b"), "of the kubelet", "the runtime waits for two seconds");
    daemon.signal(Signal::SIGCONT);
    daemon.wait_log("podfs connects again");
    let again = run_again(&containerd, &sandbox);
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    let dead = containerd.run("web", &sandbox, "dead", &[CONFIG]);
    assert_eq!(containerd.says(&dead, "cat /config/b"), "of the kubelet");
    for container in [&with, &again] {
        assert_eq!(containerd.says(container, "cat /config/b"), "other", "running containers keep their volumes");
    }
}

/// Another container with podfs's volumes, after podfs was disconnected.
fn run_again(containerd: &Containerd<'_>, sandbox: &str) -> Container {
    let (mut attempt, mut running) = (0, None);
    eventually("podfs is a plugin again", || {
        let container = containerd.run("web", sandbox, &format!("again{attempt}"), &[CONFIG]);
        attempt += 1;
        let is_ours = containerd.says(&container, "cat /config/b") == "other";
        running = is_ours.then_some(container);
        is_ours
    });
    running.expect("it runs")
}

#[test]
fn restarts_of_podfs_and_of_containerd_leave_containers_as_they_are() {
    let machine = machine();
    make_kubelets_volumes(&machine);
    let test = "restarts_of_podfs_and_of_containerd_leave_containers_as_they_are";
    let Some(mut containerd) = Containerd::start_or_skip(&machine, test) else { return };
    let mut daemon = start(&machine);
    daemon.wait_log("containerd 1.7");
    let sandbox = containerd.run_pod("web", &CHOSEN);
    let container = run_with_podfs(&containerd, &sandbox, &[CONFIG]);
    let counted = |source: &str| machine.metric(&format!("podfs_nri_containers{{source=\"{source}\"}}"));
    let before = counted("podfs");
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    let _daemon = start(&machine);
    eventually("the runtime has listed its containers", || counted("podfs") == before);
    containerd.kill();
    eventually("podfs has seen it", || machine.metric("podfs_nri_connected").as_deref() == Some("0"));
    containerd.boot();
    eventually("podfs is connected", || machine.metric("podfs_nri_connected").as_deref() == Some("1"));
    assert_eq!(counted("podfs"), before);
    machine.node.put("app.yaml", &config_map("app", &[("a.conf", "second"), ("b", "other")]));
    eventually("the container shows the change", || containerd.says(&container, "cat /config/a.conf") == "second");
    run_again(&containerd, &sandbox);
}
