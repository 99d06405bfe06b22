//! `podfs node` where systemd runs: its unit, the units of its pods, and the example of an agent that uses it.

use std::io::{Write, stderr};

use crate::installed::agent::{machine, nothing_is_left};
use crate::installed::load::Load;
use crate::installed::machine::{Init, Machine};
use crate::installed::pods::{CONFIG, HOST, SCRATCH, UID, nothing_is_served, write_node_manifests};
use crate::installed::versions::Versions;
use crate::installed::{install, installed};

const UNIT: &str = include_str!("../../../packaging/systemd/podfs-node.service");
const WEB: &str = "6f1c0a54-2f0e-4c6e-9d4e-1b7a5f3c9e01";
const WORKER: &str = "b2a7d1c8-83f5-4f0b-8a36-7c2e94d0f502";

fn property(machine: &Machine, unit: &str, name: &str) -> String {
    machine.does(&format!("systemctl show --value --property {name} {unit}"))
}

/// The process of a pod's unit.
fn supervisor(machine: &Machine, uid: &str) -> String {
    property(machine, &format!("podfs-pod-{uid}.service"), "MainPID").trim().to_owned()
}

#[test]
fn the_unit_serves_static_pods_and_its_end_disturbs_none() {
    let Some(machine) = machine("the_unit_serves_static_pods_and_its_end_disturbs_none") else { return };
    machine.write("/etc/systemd/system/podfs-node.service", UNIT);
    machine.does("mkdir -p -m 0700 /etc/podfs/manifests && systemctl daemon-reload && systemctl start podfs-node");
    machine.does("cp /examples/pods/*.yaml /etc/podfs/manifests/");
    for pod in ["default/web", "default/worker"] {
        machine.does(&format!("podfs node wait {pod}"));
    }
    let (web, worker) = (supervisor(&machine, WEB), supervisor(&machine, WORKER));
    assert!(web != "0" && worker != "0" && web != worker, "each pod has a unit: {web} {worker}");
    let port = format!("cat /var/lib/podfs/pods/{WEB}/volumes/kubernetes.io~configmap/config/port");
    assert_eq!(machine.does(&port), "8080");

    // systemd starts a daemon that was killed again, and it finds its pods.
    let first = property(&machine, "podfs-node", "MainPID");
    machine.does("systemctl kill --kill-whom=main --signal=KILL podfs-node; while systemctl is-active podfs-node; do sleep 0.05; done");
    machine.does("until systemctl is-active podfs-node; do sleep 0.1; done");
    assert_ne!(property(&machine, "podfs-node", "MainPID"), first);
    machine.does("sed -i s/8080/9090/ /etc/podfs/manifests/web-config.yaml");
    machine.does(&format!("until [ $({port}) = 9090 ]; do sleep 0.05; done"));
    // Its stop leaves them alone.
    machine.does("systemctl stop podfs-node");
    assert_eq!(machine.does(&port), "9090");
    assert_eq!((supervisor(&machine, WEB), supervisor(&machine, WORKER)), (web, worker), "they are the same processes");

    machine.does("systemctl start podfs-node && rm /etc/podfs/manifests/*");
    for pod in ["default/web", "default/worker"] {
        machine.does(&format!("until podfs node release {pod}; do sleep 0.1; done; podfs node wait {pod} --unmounted"));
    }
    machine.does("until [ -z \"$(systemctl list-units --no-legend 'podfs-pod-*')\" ]; do sleep 0.1; done");
    machine.does("systemctl stop podfs-node");
    // The directory of all pods, and the daemon's own: its lock, and where it keeps checkpoints, of which none is left.
    machine.does("[ ! -d /var/lib/podfs/pods ] || rmdir /var/lib/podfs/pods");
    machine.does("rm /run/podfs/node.lock && find /run/podfs/node -depth -type d -exec rmdir {} +");
    nothing_is_served(&machine);
}

/// Starts the unit of the installed package with two static pods, and waits for them.
fn start_with_two_pods(machine: &Machine) {
    write_node_manifests(machine);
    machine.does("systemctl start podfs-node");
    wait_for_two_pods(machine);
}

fn wait_for_two_pods(machine: &Machine) {
    for pod in ["default/web", "default/other"] {
        machine.does(&format!("podfs node wait {pod}"));
    }
}

/// The server of a pod.
fn server(machine: &Machine, uid: &str) -> String {
    // It exits with 1 if a pod is not well.
    let status = machine.run("podfs status --output json");
    let status: serde_json::Value = serde_json::from_str(&status.out).unwrap_or_else(|_| panic!("no JSON: {status:?}"));
    let pods = status["pods"].as_array().expect("pods");
    let pod = pods.iter().find(|pod| pod["uid"] == uid).unwrap_or_else(|| panic!("no pod {uid}: {status}"));
    pod["server"]["pid"].to_string()
}

#[test]
fn an_upgrade_of_the_package_moves_daemon_and_pods_while_volumes_are_used() {
    let test = "an_upgrade_of_the_package_moves_daemon_and_pods_while_volumes_are_used";
    let Some(machine) = installed(test, Init::Systemd) else { return };
    start_with_two_pods(&machine);
    let before = [UID, WEB].map(|uid| (supervisor(&machine, uid), server(&machine, uid)));
    let daemon = property(&machine, "podfs-node", "MainPID");
    let mut load = Load::start(&machine);
    let said = install(&machine, &Versions::get().second());
    assert!(said.contains("default/web: started, done") && said.contains("default/other: started, done"), "{said}");
    load.goes_on();
    let after = [UID, WEB].map(|uid| (supervisor(&machine, uid), server(&machine, uid)));
    for (before, after) in before.iter().zip(&after) {
        assert!(
            before.0 == after.0 && before.1 != after.1,
            "the same supervisor, another server: {before:?} {after:?}"
        );
        assert_eq!(
            machine.does(&format!("readlink /proc/{}/exe", after.0)),
            "/usr/libexec/podfs/podfs-supervisor",
            "it is the program on disk"
        );
    }
    assert_ne!(property(&machine, "podfs-node", "MainPID"), daemon);
    wait_for_two_pods(&machine);
    // A reload of a pod's unit is an upgrade of the pod.
    let unit = format!("podfs-pod-{UID}.service");
    let stop_post = property(&machine, &unit, "ExecStopPost");
    assert!(stop_post.contains("subtree_control") && stop_post.contains(r"/sys/fs/cgroup\1"), "{stop_post}");
    machine.does(&format!("systemctl reload {unit}"));
    assert!(supervisor(&machine, UID) == after[0].0 && server(&machine, UID) != after[0].1);
    load.ends_well();
}

#[test]
fn rc_05_after_a_reboot_the_pods_of_the_node_are_served_again() {
    let test = "rc_05_after_a_reboot_the_pods_of_the_node_are_served_again";
    let Some(machine) = installed(test, Init::Systemd) else { return };
    start_with_two_pods(&machine);
    machine.does(&format!("echo kept >{SCRATCH}/f"));
    let first = supervisor(&machine, UID);
    // As in a shutdown, systemd stops all units, and /run is empty afterwards.
    let stop = "systemctl stop podfs-node 'podfs-pod-*.service' && rm -r /run/podfs";
    machine.does(stop);
    assert_eq!(machine.run("grep -e fuse.podfs /proc/self/mountinfo").out, "", "a shutdown unmounts");
    machine.does("systemd-tmpfiles --create podfs.conf && systemctl start podfs-node");
    wait_for_two_pods(&machine);
    assert_ne!(supervisor(&machine, UID), first);
    assert_eq!(machine.does(&format!("cat {CONFIG}/a && echo new >{HOST}/f && cat /srv/host/f")), "1\nnew");
    assert_eq!(machine.does(&format!("cat {SCRATCH}/f")), "kept", "an emptyDir on disk outlives a reboot");
    // Pods that are deleted while the machine is off leave nothing.
    machine.does(&format!(
        "{stop}; rm /etc/podfs/manifests/*; systemd-tmpfiles --create podfs.conf && systemctl start podfs-node"
    ));
    machine.does("until [ -z \"$(ls -A /var/lib/podfs/pods)\" ]; do sleep 0.1; done");
    machine.does("systemctl stop podfs-node && rm /run/podfs/node.lock && ! ls -A /run/podfs/node | grep . && rmdir /var/lib/podfs/pods");
    nothing_is_served(&machine);
}

#[test]
fn a_limit_of_memory_outlives_a_crash_of_a_pods_supervisor() {
    let test = "a_limit_of_memory_outlives_a_crash_of_a_pods_supervisor";
    let Some(machine) = installed(test, Init::Systemd) else { return };
    if !machine.does("cat /sys/fs/cgroup/cgroup.controllers").contains("memory") {
        let _ = writeln!(stderr(), "skipped: {test}: no cgroup of version 2 has the memory controller here");
        return;
    }
    machine.write("/etc/podfs/environment", "PODFS_SERVER_MEMORY_MAX=64Mi\n");
    start_with_two_pods(&machine);
    let unit = format!("podfs-pod-{UID}.service");
    let limit = format!("cat /sys/fs/cgroup/podfs.slice/{unit}/podfs-{UID}/memory.max");
    assert_eq!(machine.does(&limit), "67108864");
    let before = (supervisor(&machine, UID), server(&machine, UID));
    machine.does(&format!("systemctl kill --signal KILL --kill-whom main {unit}"));
    machine.eventually(&format!(
        "[ $(systemctl show -P MainPID {unit}) != {} ] && [ $(systemctl show -P SubState {unit}) = running ]",
        before.0
    ));
    wait_for_two_pods(&machine);
    assert_eq!((machine.does(&limit), server(&machine, UID)), ("67108864".to_owned(), before.1));
}

#[test]
fn a_removal_of_the_package_leaves_the_pods_of_the_node_served() {
    let test = "a_removal_of_the_package_leaves_the_pods_of_the_node_served";
    let Some(machine) = installed(test, Init::Systemd) else { return };
    start_with_two_pods(&machine);
    let before = (supervisor(&machine, UID), supervisor(&machine, WEB));
    let mut load = Load::start(&machine);
    let said = machine.does("dpkg --remove podfs 2>&1");
    assert!(said.contains("podfs: the servers of 2 pods continue until you stop them"), "{said}");
    assert_eq!(property(&machine, "podfs-node", "ActiveState"), "inactive");
    load.goes_on();
    let said = machine.does("dpkg --purge podfs 2>&1");
    assert!(said.contains("podfs: servers of pods still run"), "{said}");
    load.goes_on();
    // Installed again, the daemon finds them.
    install(&machine, &Versions::get().first());
    machine.does("systemctl start podfs-node");
    wait_for_two_pods(&machine);
    machine.does("until podfs node status; do sleep 0.1; done");
    assert_eq!((supervisor(&machine, UID), supervisor(&machine, WEB)), before, "they are the same processes");
    load.ends_well();
}

#[test]
fn the_example_of_an_agent_uses_the_daemon_as_a_unit() {
    let Some(machine) = machine("the_example_of_an_agent_uses_the_daemon_as_a_unit") else { return };
    let said = machine.run("bash /examples/agent.sh");
    assert_eq!(said.code, Some(0), "{said:?}");
    for line in
        ["web: I listen on 9090 now", "worker: my password is the second one now", "agent: all pods have stopped well"]
    {
        assert!(said.out.lines().any(|told| told == line), "{line:?} is not in: {said:?}");
    }
    let journal = machine.does("journalctl --no-pager --output cat --unit podfs-example-node");
    assert!(journal.contains("podfs serves this node"), "podfs node ran as a unit: {journal}");
    nothing_is_left(&machine);
}
