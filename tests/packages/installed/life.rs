//! A package's life: installed, upgraded, removed, purged.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::installed::install;
use crate::installed::load::Load;
use crate::installed::machine::{Init, Machine};
use crate::installed::pods::{self, CONFIG, UID, UNIT, manifest, nothing_is_served, processes};
use crate::installed::versions::Versions;

/// All files but those that dpkg and systemd keep for themselves.
fn files(machine: &Machine) -> BTreeSet<String> {
    let find = "find / -xdev ( -path /var/lib/dpkg -o -path /var/log -o -path /var/cache -o -path /root -o -path /tmp \
                -o -path /var/lib/systemd ) -prune -o -print; find /run -maxdepth 2";
    machine.does(&find.replace("( ", "\\( ").replace(" )", " \\)")).lines().map(str::to_owned).collect()
}

/// Checks that after a purge, the files are those that existed `before`.
#[track_caller]
fn nothing_is_left(machine: &Machine, before: &BTreeSet<String>) {
    let after = files(machine);
    let left: Vec<_> = after.difference(before).filter(|path| path.contains("podfs")).collect();
    assert!(left.is_empty(), "left after the purge: {left:?}");
    assert_eq!(machine.run("dpkg --list podfs 2>&1 | grep ^[a-z]i").out, "");
}

/// The first steps of the README, with the package's examples.
#[test]
fn a_fresh_debian_serves_the_examples_and_forgets_podfs_with_the_purge() {
    let test = "a_fresh_debian_serves_the_examples_and_forgets_podfs_with_the_purge";
    let Some(machine) = crate::installed::machine(test, Init::Nothing) else { return };
    let before = files(&machine);
    let said = install(&machine, &Versions::get().first());
    assert!(!said.contains("podfs: "), "there is nothing to say: {said}");
    assert_eq!(machine.does("stat -c %a /run/podfs /var/lib/podfs /etc/podfs/pods"), "700\n750\n700");
    let served = machine.does(
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
    nothing_is_served(&machine);
    machine.does("dpkg --purge podfs");
    nothing_is_left(&machine, &before);
}

#[test]
fn scripts_of_dpkg_and_rpm_are_plain_shell() {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/scripts");
    let all: Vec<_> = scripts.read_dir().expect("scripts").flatten().map(|entry| entry.path()).collect();
    let checked = Command::new("shellcheck").args(["--shell", "sh"]).args(&all).output().expect("shellcheck runs");
    assert!(all.len() == 6 && checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

#[test]
fn rpm_is_understood_as_dpkg_is() {
    let Some(machine) = crate::installed::installed("rpm_is_understood_as_dpkg_is", Init::Nothing) else { return };
    for script in ["rpm-post", "rpm-preun", "rpm-postun"] {
        machine
            .copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/scripts").join(script), &format!("/{script}"));
    }
    let says = |call: &str| machine.does(&format!("sh /{call} 2>&1"));
    machine.does("rmdir /run/podfs");
    assert_eq!(says("rpm-post 1"), "", "a first installation has nothing to upgrade");
    machine.does("[ -d /run/podfs ]");
    assert_eq!(says("rpm-post 2"), "podfs: no pod is served here (/run/podfs)");
    for call in ["rpm-preun 1", "rpm-postun 1", "rpm-preun 0", "rpm-postun 0"] {
        assert_eq!(says(call), "", "{call}");
    }
    machine.does("[ -d /etc/podfs/pods ]");
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

    let said = install(&machine, &versions.second());
    assert!(said.contains("default/web: started, done, podfs "), "{said}");
    let upgraded = processes(&machine);
    assert!(upgraded.0 == supervisor && upgraded.1 != server, "{upgraded:?}");
    // The process runs the installed file, not the deleted one.
    assert_eq!(machine.does(&format!("readlink /proc/{supervisor}/exe")), "/usr/bin/podfs");
    load.goes_on();

    // A package whose podfs cannot go on with what runs: nothing fails, and the pods stay as they are.
    machine.does("cp /usr/bin/podfs /podfs.before");
    let said = install(&machine, &versions.stranger());
    assert!(said.contains("refused: ") && said.contains("speaks another protocol"), "{said}");
    assert!(said.contains("podfs: the earlier podfs still serves these pods"), "{said}");
    assert_eq!(machine.run(&format!("systemctl reload {UNIT}")).code, Some(1));
    assert_eq!(processes(&machine), upgraded, "the same processes serve");
    load.goes_on();

    // And back.
    let said = install(&machine, &versions.first());
    assert!(said.contains("default/web: started, done"), "{said}");
    load.ends_well();
    machine.does(&format!("systemctl stop {UNIT}"));
    nothing_is_served(&machine);
    machine.does("rm /podfs.before; dpkg --purge podfs");
    nothing_is_left(&machine, &before);
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

    let said = machine.does("dpkg --remove podfs 2>&1");
    assert!(said.contains("podfs: the servers of 1 pods continue until you stop them"), "{said}");
    machine.does("systemctl daemon-reload");
    load.goes_on();
    // Without a program there is no other supervisor; the server goes on.
    machine.does(&format!("systemctl kill --signal KILL --kill-whom main {UNIT}"));
    machine.eventually(&format!("[ $(systemctl show -P ActiveState {UNIT}) = failed ]"));
    load.goes_on();
    let said = machine.does("dpkg --purge podfs 2>&1");
    assert!(said.contains("podfs: servers of pods still run"), "{said}");
    machine.does(&format!("[ -e {} ]", manifest("pod.yaml")));
    load.goes_on();

    // Installed again, the pod is taken up where it was left.
    install(&machine, &versions.first());
    machine.does(&format!("systemctl start {UNIT}"));
    processes(&machine);
    load.ends_well();

    // The pod ends after the removal.
    machine.does("dpkg --remove podfs 2>&1");
    machine.does(&format!("systemctl stop {UNIT}"));
    nothing_is_served(&machine);
    machine.does("dpkg --purge podfs 2>&1");
    nothing_is_left(&machine, &before);
}

#[test]
fn a_removal_cleans_up_after_pods_that_are_dead() {
    let Some(machine) = crate::installed::machine("a_removal_cleans_up_after_pods_that_are_dead", Init::Systemd) else {
        return;
    };
    let before = files(&machine);
    install(&machine, &Versions::get().first());
    pods::start(&machine);
    machine.does(&format!("systemctl enable {UNIT} 2>&1; cp -a /etc/podfs/pods/{UID} /root/"));
    // systemd cannot restart it.
    machine.does("rm /usr/bin/podfs");
    machine.does(&format!("systemctl kill --signal KILL {UNIT}"));
    machine.eventually(&format!("[ $(systemctl show -P ActiveState {UNIT}) = failed ]"));
    assert_ne!(machine.run(&format!("ls {CONFIG}")).code, Some(0), "the mount is dead");
    install(&machine, &Versions::get().first());
    let said = machine.does("dpkg --purge podfs 2>&1");
    assert!(said.contains(&format!("unmounted {CONFIG}")), "{said}");
    assert!(!said.contains("served"), "{said}");
    nothing_is_left(&machine, &before);
}
