//! `podfs node` on a machine with systemd: its unit, the units of its pods, and the example of an agent that uses it.

use std::io::{Write, stderr};

use crate::installed::agent::{assert_nothing_left, machine};
use crate::installed::load::Load;
use crate::installed::machine::{Init, Machine};
use crate::installed::pods::{CONFIG, HOST, SCRATCH, UID, assert_nothing_served, write_node_manifests};
use crate::installed::versions::Versions;
use crate::installed::{install, installed};

const UNIT: &str = include_str!("../../../packaging/systemd/podfs-node.service");
const WEB: &str = "6f1c0a54-2f0e-4c6e-9d4e-1b7a5f3c9e01";
const WORKER: &str = "b2a7d1c8-83f5-4f0b-8a36-7c2e94d0f502";

fn property(machine: &Machine, unit: &str, name: &str) -> String {
    machine.output_of(&format!("systemctl show --value --property {name} {unit}"))
}

/// The pid of the main process of a pod's unit.
fn supervisor(machine: &Machine, uid: &str) -> String {
    property(machine, &format!("podfs-pod-{uid}.service"), "MainPID").trim().to_owned()
}

#[test]
fn the_unit_serves_static_pods_and_its_end_disturbs_none() {
    let Some(machine) = machine("the_unit_serves_static_pods_and_its_end_disturbs_none") else { return };
    machine.write("/etc/systemd/system/podfs-node.service", UNIT);
    machine.output_of("mkdir -p -m 0700 /etc/podfs/manifests && systemctl daemon-reload && systemctl start podfs-node");
    machine.output_of("cp /examples/pods/*.yaml /etc/podfs/manifests/");
    for pod in ["default/web", "default/worker"] {
        machine.output_of(&format!("podfs node wait {pod}"));
    }
    let (web, worker) = (supervisor(&machine, WEB), supervisor(&machine, WORKER));
    assert!(web != "0" && worker != "0" && web != worker, "each pod has a unit: {web} {worker}");
    let port = format!("cat /var/lib/podfs/pods/{WEB}/volumes/kubernetes.io~configmap/config/port");
    assert_eq!(machine.output_of(&port), "8080");

    // systemd starts the daemon again after a kill, and the new daemon takes over the pods.
    let first = property(&machine, "podfs-node", "MainPID");
    machine.output_of("systemctl kill --kill-whom=main --signal=KILL podfs-node; while systemctl is-active podfs-node; do sleep 0.05; done");
    machine.output_of("until systemctl is-active podfs-node; do sleep 0.1; done");
    assert_ne!(property(&machine, "podfs-node", "MainPID"), first);
    machine.output_of("sed -i s/8080/9090/ /etc/podfs/manifests/web-config.yaml");
    machine.output_of(&format!("until [ $({port}) = 9090 ]; do sleep 0.05; done"));
    // The stop of the daemon does not affect the pods.
    machine.output_of("systemctl stop podfs-node");
    assert_eq!(machine.output_of(&port), "9090");
    assert_eq!((supervisor(&machine, WEB), supervisor(&machine, WORKER)), (web, worker), "they are the same processes");

    machine.output_of("systemctl start podfs-node && rm /etc/podfs/manifests/*");
    for pod in ["default/web", "default/worker"] {
        machine.output_of(&format!(
            "until podfs node release {pod}; do sleep 0.1; done; podfs node wait {pod} --unmounted"
        ));
    }
    machine.output_of("until [ -z \"$(systemctl list-units --no-legend 'podfs-pod-*')\" ]; do sleep 0.1; done");
    machine.output_of("systemctl stop podfs-node");
    // Only the directory of all pods, the daemon's lock and the daemon's empty directories of checkpoints remain:
    // `rmdir` fails if they have files.
    machine.output_of("[ ! -d /var/lib/podfs/pods ] || rmdir /var/lib/podfs/pods");
    machine.output_of("rm /run/podfs/node.lock && find /run/podfs/node -depth -type d -exec rmdir {} +");
    assert_nothing_served(&machine);
}

/// Starts the unit of the installed package with two static pods, and waits for them.
fn start_with_two_pods(machine: &Machine) {
    write_node_manifests(machine);
    machine.output_of("systemctl start podfs-node");
    wait_for_two_pods(machine);
}

fn wait_for_two_pods(machine: &Machine) {
    for pod in ["default/web", "default/other"] {
        machine.output_of(&format!("podfs node wait {pod}"));
    }
}

/// The pid of a pod's server.
fn server(machine: &Machine, uid: &str) -> String {
    // The exit code is 1 if a pod has a problem, but the output is valid.
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
    let output = install(&machine, &Versions::get().second());
    assert!(
        output.contains("default/web: started, done") && output.contains("default/other: started, done"),
        "{output}"
    );
    load.wait_for_rounds();
    let after = [UID, WEB].map(|uid| (supervisor(&machine, uid), server(&machine, uid)));
    for (before, after) in before.iter().zip(&after) {
        assert!(
            before.0 == after.0 && before.1 != after.1,
            "the same supervisor, another server: {before:?} {after:?}"
        );
        assert_eq!(
            machine.output_of(&format!("readlink /proc/{}/exe", after.0)),
            "/usr/libexec/podfs/podfs-supervisor",
            "the supervisor executes the program on disk"
        );
    }
    assert_ne!(property(&machine, "podfs-node", "MainPID"), daemon);
    wait_for_two_pods(&machine);
    // A reload of a pod's unit is an upgrade of the pod.
    let unit = format!("podfs-pod-{UID}.service");
    let stop_post = property(&machine, &unit, "ExecStopPost");
    assert!(stop_post.contains("subtree_control") && stop_post.contains(r"/sys/fs/cgroup\1"), "{stop_post}");
    machine.output_of(&format!("systemctl reload {unit}"));
    assert!(supervisor(&machine, UID) == after[0].0 && server(&machine, UID) != after[0].1);
    load.end();
}

#[test]
fn rc_05_after_a_reboot_the_pods_of_the_node_are_served_again() {
    let test = "rc_05_after_a_reboot_the_pods_of_the_node_are_served_again";
    let Some(machine) = installed(test, Init::Systemd) else { return };
    start_with_two_pods(&machine);
    machine.output_of(&format!("echo kept >{SCRATCH}/f"));
    let first = supervisor(&machine, UID);
    // As in a shutdown, systemd stops all units, and /run is empty afterwards.
    let stop = "systemctl stop podfs-node 'podfs-pod-*.service' && rm -r /run/podfs";
    machine.output_of(stop);
    assert_eq!(machine.run("grep -e fuse.podfs /proc/self/mountinfo").out, "", "a shutdown unmounts");
    machine.output_of("systemd-tmpfiles --create podfs.conf && systemctl start podfs-node");
    wait_for_two_pods(&machine);
    assert_ne!(supervisor(&machine, UID), first);
    assert_eq!(machine.output_of(&format!("cat {CONFIG}/a && echo new >{HOST}/f && cat /srv/host/f")), "1\nnew");
    assert_eq!(machine.output_of(&format!("cat {SCRATCH}/f")), "kept", "an emptyDir on disk outlives a reboot");
    // Pods that are deleted while the machine is off leave nothing.
    machine.output_of(&format!(
        "{stop}; rm /etc/podfs/manifests/*; systemd-tmpfiles --create podfs.conf && systemctl start podfs-node"
    ));
    machine.output_of("until [ -z \"$(ls -A /var/lib/podfs/pods)\" ]; do sleep 0.1; done");
    machine.output_of("systemctl stop podfs-node && rm /run/podfs/node.lock && ! ls -A /run/podfs/node | grep . && rmdir /var/lib/podfs/pods");
    assert_nothing_served(&machine);
}

#[test]
fn a_limit_of_memory_outlives_a_crash_of_a_pods_supervisor() {
    let test = "a_limit_of_memory_outlives_a_crash_of_a_pods_supervisor";
    let Some(machine) = installed(test, Init::Systemd) else { return };
    if !machine.output_of("cat /sys/fs/cgroup/cgroup.controllers").contains("memory") {
        let _ = writeln!(stderr(), "skipped: {test}: no cgroup of version 2 has the memory controller here");
        return;
    }
    machine.write("/etc/podfs/environment", "PODFS_SERVER_MEMORY_MAX=64Mi\n");
    start_with_two_pods(&machine);
    let unit = format!("podfs-pod-{UID}.service");
    let limit = format!("cat /sys/fs/cgroup/podfs.slice/{unit}/podfs-{UID}/memory.max");
    assert_eq!(machine.output_of(&limit), "67108864");
    let before = (supervisor(&machine, UID), server(&machine, UID));
    machine.output_of(&format!("systemctl kill --signal KILL --kill-whom main {unit}"));
    machine.eventually(&format!(
        "[ $(systemctl show -P MainPID {unit}) != {} ] && [ $(systemctl show -P SubState {unit}) = running ]",
        before.0
    ));
    wait_for_two_pods(&machine);
    assert_eq!((machine.output_of(&limit), server(&machine, UID)), ("67108864".to_owned(), before.1));
}

#[test]
fn a_removal_of_the_package_leaves_the_pods_of_the_node_served() {
    let test = "a_removal_of_the_package_leaves_the_pods_of_the_node_served";
    let Some(machine) = installed(test, Init::Systemd) else { return };
    start_with_two_pods(&machine);
    let before = (supervisor(&machine, UID), supervisor(&machine, WEB));
    let mut load = Load::start(&machine);
    let output = machine.output_of("dpkg --remove podfs 2>&1");
    assert!(output.contains("podfs: the servers of 2 pods continue until you stop them"), "{output}");
    assert_eq!(property(&machine, "podfs-node", "ActiveState"), "inactive");
    load.wait_for_rounds();
    let output = machine.output_of("dpkg --purge podfs 2>&1");
    assert!(output.contains("podfs: servers of pods still run"), "{output}");
    load.wait_for_rounds();
    // After another installation, the daemon takes over the pods.
    install(&machine, &Versions::get().first());
    machine.output_of("systemctl start podfs-node");
    wait_for_two_pods(&machine);
    machine.output_of("until podfs node status; do sleep 0.1; done");
    assert_eq!((supervisor(&machine, UID), supervisor(&machine, WEB)), before, "they are the same processes");
    load.end();
}

#[test]
fn the_example_of_an_agent_uses_the_daemon_as_a_unit() {
    let Some(machine) = machine("the_example_of_an_agent_uses_the_daemon_as_a_unit") else { return };
    let outcome = machine.run("bash /examples/agent.sh");
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    for line in
        ["web: I listen on 9090 now", "worker: my password is the second one now", "agent: all pods have stopped well"]
    {
        assert!(outcome.out.lines().any(|printed| printed == line), "{line:?} is not in: {outcome:?}");
    }
    let journal = machine.output_of("journalctl --no-pager --output cat --unit podfs-example-node");
    assert!(journal.contains("podfs serves this node"), "podfs node ran as a unit: {journal}");
    assert_nothing_left(&machine);
}
