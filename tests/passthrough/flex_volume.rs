//! flexVolume volumes, with a driver that is a shell script.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use rustix::fs::{Mode, OFlags, openat};
use serde_json::json;

use crate::common::*;

const VOLUMES: &str = "[{name: data, flexVolume: {driver: acme/disk, fsType: ext4, secretRef: {name: key}, \
                       options: {source: SOURCE}}}, {name: config, configMap: {name: app}}]";

/// The driver. It writes each call to the file `calls`, and bind-mounts the directory in the option `source`. Files in
/// the driver's directory control it: `capabilities` has its capabilities, and `COMMAND.do` is a script that the
/// command COMMAND runs first.
const DRIVER: &str = r#"#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
command=$1; shift
echo "$command $*" >> "$here/calls"
success() { echo "{\"status\": \"Success\"$1}"; exit 0; }
failure() { echo "{\"status\": \"Failure\", \"message\": \"$1\"}"; exit 1; }
source_of() { expr "$1" : '.*"source":"\([^"]*\)"'; }
[ -e "$here/$command.do" ] && . "$here/$command.do"
case "$command" in
init) success ", \"capabilities\": $(cat "$here/capabilities")" ;;
getvolumename) success ', "volumeName": "disk-7"' ;;
attach) success ', "device": "/dev/acme7"' ;;
waitforattach) success ', "device": "/dev/acme7"' ;;
isattached) success ', "attached": true' ;;
mountdevice) mount --bind "$(source_of "$3")" "$1" && success || failure "mount" ;;
mount)
  [ "$(cat "$here/capabilities")" = '{"attach": false}' ] || { echo '{"status": "Not supported"}'; exit 1; }
  mount --bind "$(source_of "$2")" "$1" && success || failure "mount" ;;
unmount | unmountdevice) umount "$1" && success || failure "umount" ;;
detach) success ;;
*) echo '{"status": "Not supported"}'; exit 1 ;;
esac
"#;

/// Scripts with which a command of the driver kills the supervisor, which is its parent, once: before and after the
/// command's work.
const KILL_BEFORE: &str = r#"rm "$here/$command.do"; kill -9 $PPID; exit 1"#;
const KILL_AFTER: &str =
    r#"mv "$here/$command.do" "$here/done"; sh "$0" "$command" "$@"; rm "$here/done"; kill -9 $PPID; exit 0"#;

pub struct Rig {
    pub fixture: Fixture,
    source: PathBuf,
}

impl Rig {
    pub fn new(capabilities: &str) -> Rig {
        let fixture = Fixture::new("");
        let source = fixture.path("source");
        fixture.write("pod.yaml", &pod(&VOLUMES.replace("SOURCE", &source.display().to_string())));
        fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
        fixture.write("objects/key.json", &secret("key", &[("password", "hunter2")]));
        fs::create_dir(&source).expect("a directory");
        fs::write(source.join("file"), "1").expect("written");
        let rig = Rig { fixture, source };
        rig.put("capabilities", capabilities);
        rig.install();
        rig
    }

    pub fn driver(&self) -> PathBuf {
        self.fixture.path("drivers/acme~disk")
    }

    /// Writes a file in the driver's directory.
    pub fn put(&self, name: &str, text: &str) {
        fs::create_dir_all(self.driver()).expect("a directory");
        fs::write(self.driver().join(name), text).expect("written");
    }

    fn install(&self) {
        self.put("disk.new", DRIVER);
        let path = self.driver().join("disk.new");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        fs::rename(path, self.driver().join("disk")).expect("installed");
    }

    pub fn start(&self) -> Running {
        let mut command = self.fixture.command();
        command.arg("--flexvolume-dir").arg(self.fixture.path("drivers"));
        self.fixture.start_command(command)
    }

    pub fn run(&self) -> Running {
        let mut running = self.start();
        running.wait_ready();
        running
    }

    /// The calls of the driver, in order: commands with their arguments.
    fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.driver().join("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }

    pub fn commands(&self) -> Vec<String> {
        self.calls().iter().map(|call| call.split(' ').next().unwrap_or_default().to_owned()).collect()
    }

    #[track_caller]
    pub fn assert_stops_clean(&self, mut running: Running) {
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        self.assert_only_the_drivers_directory_is_left();
    }

    /// Asserts that nothing of the pod is left. The directories of the driver may stay.
    #[track_caller]
    pub fn assert_only_the_drivers_directory_is_left(&self) {
        let root = self.fixture.path("root");
        assert!(!root.join("pods").exists(), "something of the pod is left");
        let mounts = root.join("plugins/kubernetes.io/flexvolume/acme/disk/mounts");
        assert_eq!(mounts.read_dir().into_iter().flatten().count(), 0, "something of the volume is left");
        let _ = fs::remove_dir_all(root.join("plugins"));
        let _ = fs::remove_dir(root);
        self.fixture.assert_nothing_left();
    }
}

#[test]
fn fx_01_a_driver_mounts_a_volume_for_a_pod_and_podfs_serves_it() {
    let rig = Rig::new(r#"{"attach": false}"#);
    let running = rig.run();
    let volume = running.volume("data");
    assert!(volume.ends_with("volumes/acme~disk/data"), "{}", volume.display());
    assert_eq!(fs::read_to_string(volume.join("file")).expect("shown"), "1");
    fs::write(volume.join("new"), "").expect("written");
    assert!(rig.source.join("new").exists());
    let mode = &running.json()["volumes"][0]["mode"];
    assert!(mode == "passthrough" || mode == "read-write", "{mode}");
    assert_eq!(rig.commands(), ["init", "mount"]);
    let call = rig.calls().pop().expect("mount");
    for part in [
        r#""kubernetes.io/fsType":"ext4""#,
        r#""kubernetes.io/readwrite":"rw""#,
        r#""kubernetes.io/pvOrVolumeName":"data""#,
        r#""kubernetes.io/pod.name":"web""#,
        r#""kubernetes.io/pod.namespace":"default""#,
        r#""kubernetes.io/serviceAccount.name":"default""#,
        r#""kubernetes.io/secret/password":"aHVudGVyMg==""#,
    ] {
        assert!(call.contains(part), "{part}: {call}");
    }
    assert!(!running.log().contains("hunter2") && !running.log().contains("aHVudGVyMg"), "{}", running.log());
    rig.assert_stops_clean(running);
    assert_eq!(rig.commands(), ["init", "mount", "unmount"]);
    assert!(rig.source.join("file").exists());
}

#[test]
fn fx_01_a_volume_that_is_attached_is_mounted_once_for_the_node() {
    let rig = Rig::new("{}");
    let running = rig.run();
    assert_eq!(fs::read_to_string(running.volume("data").join("file")).expect("shown"), "1");
    let setup = ["init", "getvolumename", "attach", "waitforattach", "isattached", "mountdevice", "mount"];
    assert_eq!(rig.commands(), setup);
    let secret = rig.calls().iter().any(|call| !call.starts_with("mount ") && call.contains("secret"));
    assert!(!secret, "only mount gets secrets");
    rig.assert_stops_clean(running);
    assert_eq!(rig.commands()[setup.len()..], ["unmountdevice", "detach"]);
    let node = rustix::system::uname().nodename().to_string_lossy().into_owned();
    assert_eq!(rig.calls().pop(), Some(format!("detach disk-7 {node}")));
}

#[test]
fn fx_01_volumes_of_the_same_name_in_two_pods_are_two_volumes() {
    for getvolumename in
        [r#"success ", \"volumeName\": \"$(source_of "$1")\""; "#, r#"echo '{"status": "Not supported"}'; exit 1"#]
    {
        let rig = Rig::new("{}");
        rig.put("getvolumename.do", getvolumename);
        let other = rig.fixture.path("other");
        fs::create_dir(&other).expect("a directory");
        fs::write(other.join("file"), "2").expect("written");
        let running = rig.run();
        let manifest = pod(&VOLUMES.replace("SOURCE", &other.display().to_string()));
        rig.fixture.write("pod.yaml", &manifest.replacen("name: web", "name: other", 1));
        let running_other = rig.run();
        assert_eq!(fs::read_to_string(running_other.volume("data").join("file")).expect("shown"), "2");
        assert_eq!(fs::read_to_string(running.volume("data").join("file")).expect("shown"), "1");
        // The first pod has made the directories of all pods, and removes them at its end.
        let mut second = running_other;
        assert_eq!(second.stop().code(), Some(0), "{}", second.log());
        assert_eq!(fs::read_to_string(running.volume("data").join("file")).expect("shown"), "1");
        rig.assert_stops_clean(running);
        assert_eq!(rig.commands().iter().filter(|command| *command == "detach").count(), 2);
    }
}

#[test]
fn fx_02_a_volume_that_a_driver_has_mounted_before_it_failed_is_unmounted() {
    let rig = Rig::new(r#"{"attach": false}"#);
    rig.put("mount.do", r#"mount --bind "$(source_of "$2")" "$1"; failure late"#);
    let running = rig.start();
    running.wait_log("reason: late");
    rig.assert_stops_clean(running);
    assert_eq!(rig.commands().last().map(String::as_str), Some("unmount"));
}

#[test]
fn fx_03_podfs_unmounts_the_volumes_of_a_driver_that_is_not_installed_any_more() {
    for capabilities in [r#"{"attach": false}"#, "{}"] {
        let rig = Rig::new(capabilities);
        let mut running = rig.run();
        fs::remove_file(rig.driver().join("disk")).expect("removed");
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        let is_attached = running.log().contains("may still be attached to node");
        assert_eq!(is_attached, capabilities == "{}", "{}", running.log());
        rig.assert_only_the_drivers_directory_is_left();
    }
}

#[test]
fn fx_03_a_driver_may_be_installed_later_and_the_volume_waits_by_its_name() {
    let rig = Rig::new(r#"{"attach": false}"#);
    fs::remove_file(rig.driver().join("disk")).expect("removed");
    let mut running = rig.start();
    running.wait_log("FlexVolume driver acme/disk is not installed on this node: there is no ");
    eventually("the other volume is up", || rig.fixture.mounts().len() == 1);
    assert!(!running.is_ready());
    rig.install();
    running.wait_ready();
    rig.assert_stops_clean(running);
}

#[test]
fn fx_02_failures_of_a_driver_are_reported_and_delay_no_other_volume() {
    for (script, sentence) in [
        ("echo certainly; exit 0", "mount ended with code 0, and its output of 10 bytes is no JSON object"),
        ("failure 'no such disk'", "mount failed, status: \"Failure\", reason: no such disk"),
        ("echo '{\"status\": \"Not supported\"}'; exit 1", " mounts nothing"),
    ] {
        let rig = Rig::new(r#"{"attach": false}"#);
        rig.put("mount.do", script);
        let mut running = rig.start();
        running.wait_log(sentence);
        eventually("the other volume is up", || rig.fixture.mounts().len() == 1);
        assert!(!running.is_ready());
        fs::remove_file(rig.driver().join("mount.do")).expect("removed");
        running.wait_ready();
        rig.assert_stops_clean(running);
        assert_eq!(rig.commands().iter().filter(|command| *command == "unmount").count(), 1);
    }
}

#[test]
fn fx_02_a_driver_that_hangs_delays_no_other_volume() {
    let rig = Rig::new(r#"{"attach": false}"#);
    // It hangs longer than podfs and the test, but not longer than its own directory exists.
    rig.put("mount.do", r#"while [ -e "$here" ]; do sleep 0.2; done"#);
    let mut running = rig.start();
    eventually("the driver hangs", || rig.commands().iter().any(|command| command == "mount"));
    eventually("the other volume is up", || rig.fixture.mounts().len() == 1);
    rig.fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&rig.fixture.mounts()[0].join("a"), "2");
    assert!(!running.is_ready());
    rig.fixture.kill_both(&mut running);
    fs::remove_file(rig.driver().join("mount.do")).expect("removed");
    let running = rig.run();
    assert_eq!(fs::read_to_string(running.volume("data").join("file")).expect("shown"), "1");
    rig.assert_stops_clean(running);
}

#[test]
fn a_pod_that_ends_while_a_driver_hangs_serves_its_other_volumes_until_they_are_unmounted() {
    let rig = Rig::new(r#"{"attach": false}"#);
    let volumes = VOLUMES.replace("{name: config, configMap: {name: app}}", "{name: scratch, emptyDir: {}}");
    rig.fixture.write("pod.yaml", &pod(&volumes.replace("SOURCE", &rig.source.display().to_string())));
    rig.put("mount.do", r#"while [ -e "$here/mount.do" ]; do sleep 0.2; done"#);
    let mut running = rig.start();
    eventually("the driver hangs", || rig.commands().iter().any(|command| command == "mount"));
    eventually("the other volume is up", || rig.fixture.mounts().len() == 1);
    let scratch = rig.fixture.mounts().remove(0);
    fs::write(scratch.join("file"), "1").expect("written");
    let directory = File::open(&scratch).expect("a directory");
    running.signal(Signal::SIGTERM);
    let read = || openat(&directory, "file", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    eventually("the volume ends", || read().is_err());
    assert!(!rig.fixture.mounts().contains(&scratch), "a call failed while the volume was mounted:\n{}", running.log());
    fs::remove_file(rig.driver().join("mount.do")).expect("removed");
    // The supervisor ends without the driver's answer if that takes longer than two seconds.
    running.wait();
    let running = rig.run();
    rig.assert_stops_clean(running);
}

#[test]
fn fx_04_the_next_podfs_unmounts_the_volumes_of_a_killed_one() {
    for capabilities in [r#"{"attach": false}"#, "{}"] {
        let rig = Rig::new(capabilities);
        let mut running = rig.run();
        rig.fixture.kill_both(&mut running);
        let running = rig.run();
        assert_eq!(fs::read_to_string(running.volume("data").join("file")).expect("shown"), "1");
        let mounting = if capabilities == "{}" { "mountdevice" } else { "mount" };
        let times = rig.commands().iter().filter(|command| *command == mounting).count();
        assert_eq!(times, 1, "the driver is not called again: {:?}", rig.commands());
        rig.assert_stops_clean(running);
    }
}

#[test]
fn fx_04_a_podfs_that_is_killed_between_two_calls_leaves_nothing() {
    for command in ["init", "attach", "waitforattach", "mountdevice", "mount"] {
        let rig = Rig::new(if command == "mount" { r#"{"attach": false}"# } else { "{}" });
        for kill in [KILL_BEFORE, KILL_AFTER] {
            rig.put(&format!("{command}.do"), kill);
            let mut running = rig.start();
            eventually("the supervisor is killed", || !rig.driver().join(format!("{command}.do")).exists());
            running.wait();
            let running = rig.run();
            assert_eq!(
                fs::read_to_string(running.volume("data").join("file")).expect("shown"),
                "1",
                "killed at {command}"
            );
            rig.assert_stops_clean(running);
        }
    }
}

#[test]
fn fx_04_a_podfs_that_is_killed_between_two_calls_of_an_unmount_is_finished_by_the_next_one_or_by_cleanup() {
    for command in ["unmountdevice", "detach", "unmount"] {
        let rig = Rig::new(if command == "unmount" { r#"{"attach": false}"# } else { "{}" });
        for (kill, is_cleaned_up) in
            [KILL_BEFORE, KILL_AFTER].into_iter().flat_map(|kill| [(kill, false), (kill, true)])
        {
            let mut running = rig.run();
            rig.put(&format!("{command}.do"), kill);
            running.signal(nix::sys::signal::Signal::SIGTERM);
            eventually("the supervisor is killed", || !rig.driver().join(format!("{command}.do")).exists());
            running.wait();
            rig.fixture.kill_all();
            if is_cleaned_up {
                let outcome = rig.fixture.cleanup(&[]);
                assert_eq!(outcome.code, Some(0), "{command}: {} {}", outcome.stdout, outcome.stderr);
                let pods = rig.fixture.path("root/pods");
                assert!(!pods.exists(), "killed at {command}, {kill}: {} {}", outcome.stdout, outcome.stderr);
                rig.assert_only_the_drivers_directory_is_left();
            } else {
                let next = rig.run();
                let shown = fs::read_to_string(next.volume("data").join("file"));
                assert!(shown.is_ok_and(|text| text == "1"), "killed at {command}, {kill}: {:?}", rig.commands());
                rig.assert_stops_clean(next);
            }
        }
        assert_eq!(
            fs::read_to_string(rig.source.join("file")).expect("a file"),
            "1",
            "nothing of the source is deleted"
        );
    }
}

#[test]
fn fx_04_cleanup_calls_the_driver_for_a_pod_whose_podfs_is_gone() {
    let rig = Rig::new("{}");
    let mut running = rig.run();
    rig.fixture.kill_both(&mut running);
    let outcome = rig.fixture.cleanup(&[]);
    assert_eq!(outcome.code, Some(0), "{} {}", outcome.stdout, outcome.stderr);
    assert_eq!(rig.commands()[rig.commands().len() - 2..], ["unmountdevice", "detach"]);
    rig.assert_only_the_drivers_directory_is_left();
}

#[test]
fn fx_04_a_driver_that_cannot_unmount_is_called_again() {
    let rig = Rig::new(r#"{"attach": false}"#);
    let mut running = rig.run();
    rig.put("unmount.do", "failure busy");
    running.signal(nix::sys::signal::Signal::SIGTERM);
    running.wait_log("reason: busy; the driver is called again");
    fs::remove_file(rig.driver().join("unmount.do")).expect("removed");
    assert_eq!(running.wait().code(), Some(0), "{}", running.log());
    rig.assert_only_the_drivers_directory_is_left();
}

#[test]
fn fx_01_pv_07_a_persistent_volume_of_a_driver_is_shown_by_its_name_and_its_claim_makes_it_read_only() {
    for is_read_only in [true, false] {
        let rig = Rig::new(r#"{"attach": false}"#);
        let volumes = format!(
            "[{{name: data, persistentVolumeClaim: {{claimName: data, readOnly: {is_read_only}}}}}, \
             {{name: config, configMap: {{name: app}}}}]"
        );
        rig.fixture.write("pod.yaml", &pod(&volumes));
        let claim = "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data}, spec: {volumeName: pv-1}}";
        let volume = format!(
            "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, spec: {{claimRef: {{namespace: default, \
             name: data}}, flexVolume: {{driver: acme/disk, readOnly: true, options: {{source: {}}}}}}}}}",
            rig.source.display()
        );
        rig.fixture.write("objects/claim.yaml", &format!("{claim}\n---\n{volume}"));
        let running = rig.run();
        let volume = running.volume("data");
        assert!(volume.ends_with(Path::new("volumes/acme~disk/pv-1")), "{}", volume.display());
        let written = fs::write(volume.join("file"), "2").map_err(|refused| refused.raw_os_error());
        assert_eq!(written, if is_read_only { Err(Some(libc::EROFS)) } else { Ok(()) });
        let option = format!(r#""kubernetes.io/readwrite":"{}""#, if is_read_only { "ro" } else { "rw" });
        assert!(rig.calls()[1].contains(&option), "{:?}", rig.calls());
        rig.assert_stops_clean(running);
    }
}

#[test]
fn a_supervisor_sleeps_while_a_volume_that_is_to_be_mounted_again_waits_for_its_driver() {
    let rig = Rig::new(r#"{"attach": false}"#);
    rig.put("mount.do", r#"touch "$here/waits"; while [ ! -e "$here/go" ]; do sleep 0.05; done"#);
    let mut running = rig.start();
    eventually("the driver waits", || rig.driver().join("waits").exists());
    control::ask(&rig.fixture.run_files(), &json!({"remount": {"volumes": ["data"]}}));
    let stat = format!("/proc/{}/stat", running.pid());
    eventually("the supervisor sleeps", || {
        let stat = fs::read_to_string(&stat).expect("it runs");
        stat.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with('S'))
    });
    rig.put("go", "");
    running.wait_ready();
    rig.assert_stops_clean(running);
}

#[test]
fn fx_01_a_volume_is_detached_once_if_the_driver_has_attached_it_and_not_otherwise() {
    // (the command that fails, how often the driver is called to detach)
    for (failing, detached) in [("mountdevice", 1), ("attach", 0)] {
        let rig = Rig::new("{}");
        rig.put(&format!("{failing}.do"), "failure broken");
        let mut running = rig.start();
        eventually("the driver fails", || rig.commands().iter().any(|command| command == failing));
        running.wait_log("broken");
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        let count = rig.commands().iter().filter(|command| *command == "detach").count();
        assert_eq!(count, detached, "{failing}: {:?}", rig.calls());
        rig.assert_only_the_drivers_directory_is_left();
    }
}
