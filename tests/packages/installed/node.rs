//! `podfs node` where systemd runs: its unit, the units of its pods, and the example of an agent that uses it.

use crate::installed::agent::{machine, nothing_is_left};
use crate::installed::machine::Machine;
use crate::installed::pods::nothing_is_served;

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
