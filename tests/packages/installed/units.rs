//! The units of the package under systemd.

use std::fs;
use std::io::{Write, stderr};
use std::os::unix::fs::MetadataExt;

use nix::sys::stat::{major, minor};

use crate::common::eventually;
use crate::common::loop_device::LoopDevice;
use crate::installed::installed;
use crate::installed::load::Load;
use crate::installed::machine::{Init, Machine};
use crate::installed::pods::{self, CONFIG, HOST, UID, UNIT, assert_nothing_served, manifest, processes, write_config};

/// The journal of the pod's unit.
fn journal(machine: &Machine) -> String {
    machine.output_of(&format!("journalctl --no-pager --output cat --unit {UNIT}"))
}

#[track_caller]
fn property(machine: &Machine, unit: &str, name: &str) -> String {
    machine.output_of(&format!("systemctl show --property {name} --value {unit}"))
}

#[test]
fn a_pod_is_started_ready_refreshed_and_stopped_as_a_unit() {
    let Some(machine) = installed("a_pod_is_started_ready_refreshed_and_stopped_as_a_unit", Init::Systemd) else {
        return;
    };
    pods::start(&machine);
    // `systemctl start` has waited until the unit was ready.
    assert_eq!(machine.output_of(&format!("cat {CONFIG}/a")), "1");
    assert_eq!(property(&machine, UNIT, "StatusText"), "4 of 4 volumes are up");
    let (supervisor, server) = processes(&machine);
    let namespace = |pid: u32| machine.output_of(&format!("readlink /proc/{pid}/ns/mnt"));
    assert_eq!(namespace(supervisor), namespace(1), "the unit's mounts are visible outside of the unit");
    let cgroup = machine.output_of(&format!("cat /proc/{server}/cgroup"));
    assert_eq!(cgroup.lines().last(), Some(&*format!("0::/podfs.slice/{UNIT}/podfs-{UID}")));
    // In the volumes, containers may do what the sandbox of the unit forbids to the unit's own processes.
    machine.output_of(&format!(
        "cd {HOST} && mknod null c 1 3 && mknod loop b 7 0 && mkfifo fifo && install -m 6755 /bin/true true &&
         chown 1000:1000 true && [ $(stat -c %u true) = 1000 ]"
    ));
    write_config(&machine, "2");
    machine.eventually(&format!("[ $(cat {CONFIG}/a) = 2 ]"));
    let log = journal(&machine);
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "the unit allows all that podfs needs:\n{log}");
    machine.output_of(&format!("systemctl stop {UNIT}"));
    assert_eq!(property(&machine, UNIT, "ActiveState"), "inactive");
    assert_nothing_served(&machine);
}

#[test]
fn a_unit_without_manifests_fails_once_with_a_sentence() {
    let Some(machine) = installed("a_unit_without_manifests_fails_once_with_a_sentence", Init::Systemd) else {
        return;
    };
    let outcome = machine.run(&format!("systemctl start {UNIT}"));
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert_eq!(property(&machine, UNIT, "ActiveState"), "failed");
    let sentence = format!("podfs: {}: there is no such file or directory", manifest("pod.yaml"));
    assert!(journal(&machine).contains(&sentence), "{}", journal(&machine));
    assert_eq!(property(&machine, UNIT, "NRestarts"), "0");

    // Manifests of another pod.
    pods::write_manifests(&machine);
    machine.output_of(&format!("sed -i s/{UID}/0f-other/ {}", manifest("pod.yaml")));
    assert_eq!(machine.run(&format!("systemctl start {UNIT}")).code, Some(1));
    let sentence = format!("podfs: pod default/web has the uid 0f-other, and not {UID} as asked for");
    assert!(journal(&machine).contains(&sentence), "{}", journal(&machine));
    assert_eq!(property(&machine, UNIT, "NRestarts"), "0");
    assert_nothing_served(&machine);
}

#[test]
fn a_restart_a_crash_and_a_reload_fail_no_call() {
    let test = "a_restart_a_crash_and_a_reload_fail_no_call";
    let Some(machine) = installed(test, Init::Systemd) else { return };
    pods::start(&machine);
    let mut load = Load::start(&machine);
    let before = processes(&machine);

    machine.output_of(&format!("systemctl restart {UNIT}"));
    let restarted = processes(&machine);
    assert!(restarted.0 != before.0 && restarted.1 == before.1, "another supervisor, the same server: {restarted:?}");
    load.wait_for_rounds();

    machine.output_of(&format!("systemctl kill --signal KILL --kill-whom main {UNIT}"));
    let restarts = || property(&machine, UNIT, "NRestarts") == "1" && property(&machine, UNIT, "SubState") == "running";
    eventually("systemd has restarted the supervisor", restarts);
    let crashed = processes(&machine);
    assert!(crashed.0 != restarted.0 && crashed.1 == before.1, "another supervisor, the same server: {crashed:?}");
    load.wait_for_rounds();

    machine.output_of(&format!("systemctl reload {UNIT}"));
    let reloaded = processes(&machine);
    assert!(reloaded.0 == crashed.0 && reloaded.1 != before.1, "the same supervisor, another server: {reloaded:?}");
    load.wait_for_rounds();

    machine.output_of(&format!("systemctl daemon-reload && systemctl restart {UNIT}"));
    assert_eq!(processes(&machine).1, reloaded.1, "the server of the reload is adopted, too");
    load.end();
    machine.output_of(&format!("systemctl stop {UNIT}"));
    assert_nothing_served(&machine);
}

#[test]
fn a_pod_that_waits_for_an_object_can_be_restarted_and_stopped() {
    let test = "a_pod_that_waits_for_an_object_can_be_restarted_and_stopped";
    let Some(machine) = installed(test, Init::Systemd) else { return };
    pods::write_manifests(&machine);
    machine.output_of(&format!("rm {}", manifest("objects/app.json")));
    let waiting = r#"3 of 4 volumes are up; config waits: configmap "app" not found"#;
    machine.output_of(&format!("systemctl start --no-block {UNIT}"));
    eventually("the pod waits", || property(&machine, UNIT, "StatusText") == waiting);
    let before = processes(&machine);
    machine.output_of(&format!("systemctl restart --no-block {UNIT}"));
    eventually("another supervisor is there", || {
        let main = property(&machine, UNIT, "MainPID");
        main != "0" && main != before.0.to_string() && property(&machine, UNIT, "StatusText") == waiting
    });
    assert_eq!(processes(&machine).1, before.1, "the same server");
    assert_eq!(property(&machine, UNIT, "ActiveState"), "activating");
    machine.output_of(&format!("systemctl stop {UNIT}"));
    assert_nothing_served(&machine);
}

#[test]
fn a_limit_of_memory_outlives_a_restart() {
    let test = "a_limit_of_memory_outlives_a_restart";
    let Some(machine) = installed(test, Init::Systemd) else { return };
    if !machine.output_of("cat /sys/fs/cgroup/cgroup.controllers").contains("memory") {
        let _ = writeln!(stderr(), "skipped: {test}: no cgroup of version 2 has the memory controller here");
        return;
    }
    machine.write(&manifest("environment"), "PODFS_SERVER_MEMORY_MAX=64Mi\n");
    pods::start(&machine);
    let limit = format!("/sys/fs/cgroup/podfs.slice/{UNIT}/podfs-{UID}/memory.max");
    assert_eq!(machine.output_of(&format!("cat {limit}")), "67108864");
    let (_, server) = processes(&machine);
    machine.output_of(&format!("systemctl restart {UNIT}"));
    assert_eq!((machine.output_of(&format!("cat {limit}")), processes(&machine).1), ("67108864".to_owned(), server));
}

#[test]
fn a_stop_reaches_a_pod_however_it_is_sent() {
    let Some(machine) = installed("a_stop_reaches_a_pod_however_it_is_sent", Init::Systemd) else { return };
    pods::start(&machine);
    // Every process of the unit gets SIGTERM at the same time. This was no stop of the unit, so systemd restarts it.
    let (supervisor, _) = processes(&machine);
    // systemd sends the signals, but reports a failure if the server's cgroup is removed while systemd lists its
    // processes.
    let outcome = machine.run(&format!("systemctl kill {UNIT}"));
    assert!(outcome.code == Some(0) || outcome.err.contains("No such device"), "{outcome:?}");
    let is_another = || property(&machine, UNIT, "MainPID") != supervisor.to_string();
    eventually("another supervisor serves the pod", || {
        is_another() && property(&machine, UNIT, "SubState") == "running"
    });
    // All processes are killed at once: the next supervisor mounts over the dead mounts.
    machine.output_of(&format!("systemctl kill --signal KILL {UNIT}"));
    machine.eventually(&format!("[ $(cat {CONFIG}/a) = 1 ] && echo new >{HOST}/f"));
    machine.output_of(&format!("systemctl stop {UNIT}"));
    assert_nothing_served(&machine);
    // In a unit with systemd's default settings, all processes get the signal.
    let run = format!("podfs run --pod {} --objects {}", manifest("pod.yaml"), manifest("objects"));
    machine.output_of(&format!("systemd-run --quiet --service-type notify --unit transient {run}"));
    machine.output_of("systemctl stop transient && [ $(systemctl show -P Result transient) = success ]");
    assert_nothing_served(&machine);
}

#[test]
fn a_supervisor_that_does_not_answer_is_replaced() {
    let Some(machine) = installed("a_supervisor_that_does_not_answer_is_replaced", Init::Systemd) else { return };
    let drop_in = format!("/etc/systemd/system/{UNIT}.d/watchdog.conf");
    machine.write(&drop_in, "[Service]\nWatchdogSec=3\n");
    machine.output_of("systemctl daemon-reload");
    pods::start(&machine);
    let (supervisor, server) = processes(&machine);
    machine.output_of(&format!("kill -STOP {supervisor}"));
    eventually("systemd has restarted the supervisor", || property(&machine, UNIT, "NRestarts") == "1");
    machine.eventually(&format!("[ $(systemctl show -P SubState {UNIT}) = running ]"));
    assert_eq!(processes(&machine).1, server, "the same server");
}

#[test]
fn settings_of_one_pod_come_from_its_environment_file() {
    let Some(machine) = installed("settings_of_one_pod_come_from_its_environment_file", Init::Systemd) else { return };
    machine.write(&manifest("environment"), "RUST_LOG=debug\n");
    pods::start(&machine);
    assert!(journal(&machine).contains("DEBUG"), "{}", journal(&machine));
}

#[test]
fn metrics_of_all_pods_are_a_unit_that_an_operator_starts() {
    let test = "metrics_of_all_pods_are_a_unit_that_an_operator_starts";
    let Some(machine) = installed(test, Init::Systemd) else { return };
    pods::start(&machine);
    assert_eq!(property(&machine, "podfs-metrics.service", "ActiveState"), "inactive");
    machine.output_of("systemctl enable --now podfs-metrics.service");
    let scrape = "exec 3<>/dev/tcp/127.0.0.1/9753; printf \"GET /metrics HTTP/1.0\\r\\n\\r\\n\" >&3; cat <&3";
    let up = format!("^podfs_up.*{UID}.* 1$");
    assert_ne!(machine.output_of(&format!("bash -c '{scrape}' | grep '{up}'")), "");
    // The removal of the package stops the unit.
    machine.output_of("dpkg --remove podfs");
    assert_eq!(property(&machine, "podfs-metrics.service", "ActiveState"), "inactive");
}

#[test]
fn systemd_finds_nothing_wrong_with_the_units() {
    let Some(machine) = installed("systemd_finds_nothing_wrong_with_the_units", Init::Nothing) else { return };
    let units = machine.output_of("ls /usr/lib/systemd/system/podfs*").replace('@', &format!("@{UID}"));
    assert_eq!(units.lines().count(), 4, "{units}");
    let outcome = machine.run(&format!("systemd-analyze verify --man=no {}", units.replace('\n', " ")));
    assert_eq!((outcome.code, outcome.out.trim(), outcome.err.trim()), (Some(0), "", ""));
    // The README has the exposure levels that systemd computes.
    let readme = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/README.md")).expect("a README");
    for unit in ["podfs@.service", "podfs-node.service", "podfs-metrics.service"] {
        let analysis =
            machine.output_of(&format!("systemd-analyze security --offline=true /usr/lib/systemd/system/{unit}"));
        let exposure = analysis.lines().last().and_then(|line| line.split(": ").nth(1)).expect("a figure");
        let figure = exposure.split_whitespace().next().expect("a figure");
        assert!(readme.contains(&format!("| `{unit}` | {figure} |")), "{unit}: {exposure}");
    }
}

#[test]
fn a_unit_formats_mounts_and_unmounts_the_disk_of_a_claim() {
    let disk = LoopDevice::new(64);
    let Some(machine) = installed("a_unit_formats_mounts_and_unmounts_the_disk_of_a_claim", Init::Systemd) else {
        return;
    };
    let number = fs::metadata(disk.path()).expect("a device").rdev();
    machine.output_of(&format!("mknod /dev/disk b {} {}", major(number), minor(number)));
    pods::write_manifests(&machine);
    let pod = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}}}\nspec:\n  containers: [{{name: web, image: web}}]\n  \
         volumes: [{{name: data, persistentVolumeClaim: {{claimName: data}}}}]\n"
    );
    machine.write(&manifest("pod.yaml"), pod);
    machine.write(
        &manifest("objects/disk.yaml"),
        "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data, uid: c-1}, spec: {volumeName: pv-1}, \
         status: {phase: Bound}}\n---\n\
         {apiVersion: v1, kind: PersistentVolume, metadata: {name: pv-1}, spec: {accessModes: [ReadWriteOnce], \
         claimRef: {namespace: default, name: data, uid: c-1}, local: {path: /dev/disk, fsType: ext4}}}\n",
    );
    machine.output_of(&format!("systemctl start {UNIT}"));
    let volume = format!("/var/lib/podfs/pods/{UID}/volumes/kubernetes.io~local-volume/pv-1");
    machine.output_of(&format!("echo 1 >{volume}/file; blkid --match-token TYPE=ext4 /dev/disk"));
    machine.output_of(&format!("systemctl stop {UNIT}"));
    machine.output_of("mount /dev/disk /mnt; [ \"$(cat /mnt/file)\" = 1 ]; umount /mnt");
}
