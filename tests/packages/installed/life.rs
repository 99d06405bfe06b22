//! Installation, upgrade, removal and purge of the package.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use podfs::supervisor::status::PodState;

use crate::installed::install;
use crate::installed::load::Load;
use crate::installed::machine::{Init, Machine};
use crate::installed::pods::{self, CONFIG, HOST, UID, UNIT, assert_nothing_served, manifest, processes};
use crate::installed::versions::Versions;

/// All files of the machine, except those in the directories that dpkg and systemd use.
fn files(machine: &Machine) -> BTreeSet<String> {
    let find = "find / -xdev ( -path /var/lib/dpkg -o -path /var/log -o -path /var/cache -o -path /root -o -path /tmp \
                -o -path /var/lib/systemd ) -prune -o -print; find /run -maxdepth 2";
    machine.output_of(&find.replace("( ", "\\( ").replace(" )", " \\)")).lines().map(str::to_owned).collect()
}

/// Asserts that a purge has removed all files of podfs, except those that existed `before`.
#[track_caller]
fn assert_nothing_left(machine: &Machine, before: &BTreeSet<String>) {
    let after = files(machine);
    let remaining: Vec<_> = after.difference(before).filter(|path| path.contains("podfs")).collect();
    assert!(remaining.is_empty(), "left after the purge: {remaining:?}");
    assert_eq!(machine.run("dpkg --list podfs 2>&1 | grep ^[a-z]i").out, "");
}

/// This test does the first steps of the README, with the package's examples.
#[test]
fn a_fresh_debian_serves_the_examples_and_forgets_podfs_with_the_purge() {
    let test = "a_fresh_debian_serves_the_examples_and_forgets_podfs_with_the_purge";
    let Some(machine) = crate::installed::machine(test, Init::Nothing) else { return };
    let before = files(&machine);
    let output = install(&machine, &Versions::get().first());
    assert!(!output.contains("podfs: "), "the package's scripts print nothing: {output}");
    assert_eq!(machine.output_of("stat -c %a /run/podfs /var/lib/podfs /etc/podfs/pods"), "700\n750\n700");
    let served = machine.output_of(
        "cd /usr/share/doc/podfs/examples
         mkfifo /tmp/ready
         podfs run --pod pod.yaml --objects objects/ --ready-fd 3 3>/tmp/ready 2>/tmp/log &
         cat /tmp/ready
         head -n 1 /var/lib/podfs/pods/*/volumes/kubernetes.io~configmap/config/web.conf
         podfs status
         kill $!
         wait $!",
    );
    assert!(served.contains("listen 8080") && served.contains("default/web  running"), "{served}");
    assert_nothing_served(&machine);
    machine.output_of("dpkg --purge podfs");
    assert_nothing_left(&machine, &before);
}

#[test]
fn scripts_of_dpkg_and_rpm_are_plain_shell() {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/scripts");
    let paths: Vec<_> = scripts.read_dir().expect("scripts").flatten().map(|entry| entry.path()).collect();
    let output = Command::new("shellcheck").args(["--shell", "sh"]).args(&paths).output().expect("shellcheck runs");
    assert!(paths.len() == 6 && output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn a_removal_counts_the_pods_of_every_state_in_which_a_process_serves_them() {
    let prerm = include_str!("../../../packaging/scripts/prerm");
    let pattern = prerm.split("grep -cE '").nth(1).and_then(|rest| rest.split('\'').next()).expect("a pattern");
    for state in PodState::ALL {
        let line = format!("default/web  {}", state.word());
        let grep = r#"printf '%s\n' "$1" | grep -qE "$2""#;
        let counts = Command::new("sh").args(["-c", grep, "sh", &line, pattern]).status().expect("grep runs").success();
        assert_eq!(counts, state != PodState::Dead, "{line}");
    }
}

#[test]
fn rpm_is_understood_as_dpkg_is() {
    let Some(machine) = crate::installed::installed("rpm_is_understood_as_dpkg_is", Init::Nothing) else { return };
    for script in ["rpm-post", "rpm-preun", "rpm-postun"] {
        machine
            .copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/scripts").join(script), &format!("/{script}"));
    }
    let output_of = |call: &str| machine.output_of(&format!("sh /{call} 2>&1"));
    machine.output_of("rmdir /run/podfs");
    assert_eq!(output_of("rpm-post 1"), "", "a first installation has nothing to upgrade");
    machine.output_of("[ -d /run/podfs ]");
    assert_eq!(output_of("rpm-post 2"), "podfs: no pod is served here (/run/podfs)");
    for call in ["rpm-preun 1", "rpm-postun 1", "rpm-preun 0", "rpm-postun 0"] {
        assert_eq!(output_of(call), "", "{call}");
    }
    machine.output_of("[ -d /etc/podfs/pods ]");
}

#[test]
fn an_upgrade_moves_pods_to_the_new_podfs_while_their_volumes_are_used() {
    let test = "an_upgrade_moves_pods_to_the_new_podfs_while_their_volumes_are_used";
    let Some(machine) = crate::installed::machine(test, Init::Systemd) else { return };
    let versions = Versions::get();
    let before = files(&machine);
    install(&machine, &versions.first());
    pods::start(&machine);
    let (supervisor, server) = processes(&machine);
    let mut load = Load::start(&machine);

    let output = install(&machine, &versions.second());
    assert!(output.contains("default/web: started, done, podfs "), "{output}");
    let upgraded = processes(&machine);
    assert!(upgraded.0 == supervisor && upgraded.1 != server, "{upgraded:?}");
    // The process executes the newly installed file, not the deleted file of the earlier version.
    assert_eq!(machine.output_of(&format!("readlink /proc/{supervisor}/exe")), "/usr/bin/podfs");
    load.wait_for_rounds();

    // The podfs of this package cannot take over the running pods: no call fails, and the earlier podfs still serves
    // them.
    machine.output_of("cp /usr/bin/podfs /podfs.before");
    let output = install(&machine, &versions.stranger());
    assert!(output.contains("refused: ") && output.contains("speaks another protocol"), "{output}");
    assert!(output.contains("podfs: the earlier podfs still serves these pods"), "{output}");
    assert_eq!(machine.run(&format!("systemctl reload {UNIT}")).code, Some(1));
    assert_eq!(processes(&machine), upgraded, "the same processes serve");
    load.wait_for_rounds();

    // A downgrade works as an upgrade.
    let output = install(&machine, &versions.first());
    assert!(output.contains("default/web: started, done"), "{output}");
    load.end();
    machine.output_of(&format!("systemctl stop {UNIT}"));
    assert_nothing_served(&machine);
    machine.output_of("rm /podfs.before; dpkg --purge podfs");
    assert_nothing_left(&machine, &before);
}

#[test]
fn a_removal_leaves_pods_served_and_a_purge_waits_for_their_end() {
    let test = "a_removal_leaves_pods_served_and_a_purge_waits_for_their_end";
    let Some(machine) = crate::installed::machine(test, Init::Systemd) else { return };
    let versions = Versions::get();
    let before = files(&machine);
    install(&machine, &versions.first());
    pods::start(&machine);
    let mut load = Load::start(&machine);

    let output = machine.output_of("dpkg --remove podfs 2>&1");
    assert!(output.contains("podfs: the servers of 1 pods continue until you stop them"), "{output}");
    machine.output_of("systemctl daemon-reload");
    load.wait_for_rounds();
    // Without the program, systemd cannot start another supervisor; the server goes on.
    machine.output_of(&format!("systemctl kill --signal KILL --kill-whom main {UNIT}"));
    machine.eventually(&format!("[ $(systemctl show -P ActiveState {UNIT}) = failed ]"));
    load.wait_for_rounds();
    let output = machine.output_of("dpkg --purge podfs 2>&1");
    assert!(output.contains("podfs: servers of pods still run"), "{output}");
    machine.output_of(&format!("[ -e {} ]", manifest("pod.yaml")));
    load.wait_for_rounds();

    // After another installation, a supervisor takes over the server of the pod.
    install(&machine, &versions.first());
    machine.output_of(&format!("systemctl start {UNIT}"));
    processes(&machine);
    load.end();

    // The pod ends after the removal.
    machine.output_of("dpkg --remove podfs 2>&1");
    machine.output_of(&format!("systemctl stop {UNIT}"));
    assert_nothing_served(&machine);
    machine.output_of("dpkg --purge podfs 2>&1");
    assert_nothing_left(&machine, &before);
}

#[test]
fn a_removal_cleans_up_after_pods_that_are_dead() {
    let Some(machine) = crate::installed::machine("a_removal_cleans_up_after_pods_that_are_dead", Init::Systemd) else {
        return;
    };
    let before = files(&machine);
    install(&machine, &Versions::get().first());
    pods::start(&machine);
    machine.output_of(&format!("systemctl enable {UNIT} 2>&1; cp -a /etc/podfs/pods/{UID} /root/"));
    // Without the program, systemd cannot restart the unit.
    machine.output_of("rm /usr/bin/podfs");
    machine.output_of(&format!("systemctl kill --signal KILL {UNIT}"));
    machine.eventually(&format!("[ $(systemctl show -P ActiveState {UNIT}) = failed ]"));
    assert_ne!(machine.run(&format!("ls {CONFIG}")).code, Some(0), "the mount is dead");
    install(&machine, &Versions::get().first());
    let output = machine.output_of("dpkg --purge podfs 2>&1");
    assert!(output.contains(&format!("unmounted {CONFIG}")), "{output}");
    assert!(!output.contains("served"), "{output}");
    assert_nothing_left(&machine, &before);
}

#[test]
fn a_purge_deletes_nothing_in_directories_of_the_host_that_a_volume_shows() {
    let test = "a_purge_deletes_nothing_in_directories_of_the_host_that_a_volume_shows";
    let Some(machine) = crate::installed::machine(test, Init::Systemd) else { return };
    install(&machine, &Versions::get().first());
    pods::write_manifests(&machine);
    let pod = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}, annotations: {{podfs.io/host-path.host: bind}}}}\n\
         spec:\n  containers: [{{name: web, image: web}}]\n  volumes: [{{name: host, hostPath: {{path: /srv/host}}}}]\n"
    );
    machine.write(&manifest("pod.yaml"), pod);
    machine.output_of(&format!("echo 1 >/srv/host/file; systemctl start {UNIT}; [ -e {HOST}/file ]"));
    machine.output_of("dpkg --remove podfs 2>&1");
    // No process of the pod is left, and the mount is no FUSE mount.
    machine.output_of(&format!("systemctl kill --signal KILL {UNIT}"));
    machine.eventually(&format!("[ $(systemctl show -P ActiveState {UNIT}) = failed ]"));
    let output = machine.output_of("dpkg --purge podfs 2>&1");
    assert!(output.contains("mounts of pods are left"), "{output}");
    assert_eq!(machine.output_of(&format!("cat /srv/host/file {HOST}/file")), "1\n1");
    // After the unmount, the purge can be repeated.
    machine.output_of(&format!("umount {HOST}"));
    install(&machine, &Versions::get().first());
    machine.output_of("dpkg --purge podfs 2>&1");
    assert_eq!(machine.output_of("cat /srv/host/file; ls -d /var/lib/podfs || true"), "1");
}
