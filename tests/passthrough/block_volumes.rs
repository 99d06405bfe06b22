//! PersistentVolumes that containers get as block devices (`volumeMode: Block`), and hostPath volumes of type BlockDevice.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

use nix::sys::stat::{major, minor};
use serde_json::{Value, json};

use crate::claims::{claim, volume};
use crate::common::loop_device::LoopDevice;
use crate::common::tracer::killed_at;
use crate::common::*;
use crate::devices::{has_ended, is_free};

const DATA: &str = "[{name: data, persistentVolumeClaim: {claimName: data}}]";

/// A pod whose container has the claim `data` as the device `/dev/xvda`. The claim is bound to the PersistentVolume `pv-1`,
/// whose volume mode is Block.
fn fixture(device: &LoopDevice, volumes: &str) -> Fixture {
    let manifest =
        pod(volumes).replace("image: web}", "image: web, volumeDevices: [{name: data, devicePath: /dev/xvda}]}");
    let fixture = Fixture::new(&manifest);
    fixture.write("objects/claim.yaml", &claim("data", ""));
    fixture.write(
        "objects/volume.yaml",
        &volume("data", &format!("volumeMode: Block, local: {{path: {}}}", device.text())),
    );
    fixture
}

/// The paths of the two links to the device.
fn links(fixture: &Fixture, uid: &str) -> [PathBuf; 2] {
    let plugin = "kubernetes.io~local-volume";
    [
        fixture.path(&format!("root/plugins/{plugin}/volumeDevices/pv-1/{uid}")),
        fixture.path(&format!("root/pods/{uid}/volumeDevices/{plugin}/pv-1")),
    ]
}

/// The output of `podfs mounts prepare` in this format.
fn prepare(fixture: &Fixture, running: &Running, format: &str) -> String {
    let mut command = fixture.operator("mounts");
    command.args(["prepare", "--container", "web", "--output", format, "--pod", &running.uid()]);
    let output = command.output().expect("podfs runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_block_volume_is_linked_where_the_kubelet_links_it_and_handed_to_runtimes() {
    for (volumes, docker, oci) in
        [(DATA, "rwm", "rwm"), ("[{name: data, persistentVolumeClaim: {claimName: data, readOnly: true}}]", "r", "r")]
    {
        let device = LoopDevice::new(8);
        let fixture = fixture(&device, volumes);
        let mut running = fixture.run();
        let links = links(&fixture, &running.uid());
        for link in &links {
            assert_eq!(fs::read_link(link).expect("a link"), device.path());
        }
        let number = fs::metadata(device.path()).expect("the device").rdev();
        let json: Value = serde_json::from_str(&prepare(&fixture, &running, "oci")).expect("JSON");
        let node = json!({"path": "/dev/xvda", "type": "b", "major": major(number), "minor": minor(number)});
        assert_eq!(json["linux"]["devices"], json!([node]));
        assert_eq!(json["linux"]["resources"]["devices"][0]["access"], oci);
        let line = format!("--device={}:/dev/xvda:{docker}", links[1].display());
        for format in ["docker", "podman"] {
            assert!(prepare(&fixture, &running, format).lines().any(|printed| printed == line), "{line}");
        }
        let json: Value = serde_json::from_str(&prepare(&fixture, &running, "cri")).expect("JSON");
        assert_eq!(json["devices"][0]["permissions"], if docker == "r" { "r" } else { "mrw" });
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        fixture.assert_nothing_left();
    }
}

#[test]
fn a_block_device_is_handed_over_as_long_as_it_is_the_same_disk() {
    let device = LoopDevice::new(8);
    let fixture = fixture(&device, DATA);
    let mut killed = fixture.run();
    fixture.kill_both(&mut killed);
    let record = fixture.path("root/plugins/kubernetes.io~local-volume/volumeDevices/pv-1/.device");
    let before = fs::read_to_string(&record).expect("the record of the disk");
    stop(fixture.run());
    fixture.assert_nothing_left();
    let mut killed = fixture.run();
    fixture.kill_both(&mut killed);
    // Another sequence number of the disk means that the disk was unplugged and that another disk has got its device number.
    let of_other_disk = before.replace("\"sequence\":", "\"sequence\":9");
    assert_ne!(of_other_disk, before);
    fs::write(&record, of_other_disk).expect("written");
    let mut next = fixture.start();
    next.wait_log("is another disk than the one");
    assert!(!next.is_ready());
    stop(next);
    fixture.assert_nothing_left();
}

/// Kills podfs, replaces the disk of the volume by another disk with the same device number, and starts podfs again. Asserts
/// that podfs does not use the other disk.
fn assert_no_other_disk_is_handed_over(device: &LoopDevice, fixture: &Fixture, path: impl Fn(&Running) -> PathBuf) {
    let mut killed = fixture.run();
    let path = path(&killed);
    let number = fs::metadata(device.path()).expect("the device").rdev();
    assert_eq!(fs::metadata(&path).expect("the device").rdev(), number);
    fixture.kill_both(&mut killed);
    device.exchange(8);
    assert_eq!(fs::metadata(device.path()).expect("the other device").rdev(), number, "the same device number");
    let mut next = fixture.start();
    next.wait_log("is another disk than the one");
    assert!(!next.is_ready());
    stop(next);
    fixture.assert_nothing_left();
    // A pod that starts after the cleanup uses the other disk.
    stop(fixture.run());
    fixture.assert_nothing_left();
}

#[test]
fn no_other_disk_takes_the_place_of_a_block_volume_while_podfs_is_away() {
    let device = LoopDevice::new(8);
    let fixture = fixture(&device, DATA);
    assert_no_other_disk_is_handed_over(&device, &fixture, |running| links(&fixture, &running.uid())[1].clone());
}

#[test]
fn no_other_disk_takes_the_place_of_a_host_path_while_podfs_is_away() {
    let device = LoopDevice::new(8);
    let volumes = format!("[{{name: data, hostPath: {{path: {}, type: BlockDevice}}}}]", device.text());
    let fixture = Fixture::new(&pod(&volumes));
    assert_no_other_disk_is_handed_over(&device, &fixture, |running| running.volume("data"));
    // The same must hold if only the supervisor was killed, so that the volume is still mounted.
    let mut killed = fixture.run();
    let path = killed.volume("data");
    fixture.kill_supervisor(&mut killed);
    device.exchange(16);
    let next = fixture.start();
    next.wait_log("is another disk than the one");
    eventually("the volume does not show the other disk", || {
        fs::metadata(&path).map_or(true, |file| !file.file_type().is_block_device())
    });
    stop(next);
    fixture.assert_nothing_left();
}

#[test]
fn links_of_killed_processes_are_cleaned_up() {
    let device = LoopDevice::new(8);
    let fixture = fixture(&device, DATA);
    let mut killed = fixture.run();
    fixture.kill_both(&mut killed);
    fixture.cleanup(&[]);
    fixture.assert_nothing_left();
}

/// The number of system calls between the kills of two rounds.
const STRIDE: usize = 41;

#[test]
fn at_whichever_step_podfs_is_killed_a_block_volume_is_whole_for_the_next_one_and_goes_with_its_pod() {
    for kills in 0.. {
        let device = LoopDevice::new(8);
        device.write(b"of the pod", 0);
        let fixture = fixture(&device, DATA);
        let manifest = fs::read_to_string(fixture.path("objects/volume.yaml")).expect("a manifest");
        fixture.remove("objects/volume.yaml");
        let mut running = fixture.start();
        running.wait_log("persistentvolumes \"pv-1\" not found");
        let pid = running.pid();
        let pods = fixture.path("root/pods");
        let uid = || fs::read_dir(&pods).ok()?.flatten().next()?.file_name().into_string().ok();
        let leads_to_device = |link: &PathBuf| fs::read_link(link).is_ok_and(|path| path == device.path());
        let is_linked = || uid().is_some_and(|uid| links(&fixture, &uid).iter().all(leads_to_device));
        // The kill comes while the supervisor makes the links, or later, while it ends.
        let ((), killed) = killed_at(pid, kills * STRIDE, || {
            fixture.write("objects/volume.yaml", &manifest);
            eventually("the device is linked, or podfs is killed", || is_linked() || has_ended(pid));
            if !has_ended(pid) {
                running.signal(nix::sys::signal::Signal::SIGTERM);
                eventually("podfs has ended", || has_ended(pid));
            }
        });
        running.was_reaped();
        fixture.kill_all();
        if killed && kills % 2 == 0 {
            let next = fixture.run();
            assert!(is_linked());
            stop(next);
        } else if killed {
            fixture.cleanup(&[]);
        }
        // A supervisor that is killed between its last two steps leaves an empty run directory.
        let _ = fs::remove_dir(fixture.path("run"));
        fixture.assert_nothing_left();
        assert!(is_free(device.path()) && device.head().starts_with(b"of the pod"), "kill {kills}");
        if !killed {
            assert!(kills > 3, "too few kills: {kills}");
            break;
        }
    }
}

#[test]
fn a_block_volume_without_a_device_waits_and_says_why() {
    let device = LoopDevice::new(8);
    let fixture = fixture(&device, DATA);
    let block = |path: &str| {
        fixture.write("objects/volume.yaml", &volume("data", &format!("volumeMode: Block, local: {{path: {path}}}")));
    };
    block("/tmp");
    let mut running = fixture.start();
    running.wait_log("block device /tmp cannot be used: it is no block device");
    block("/dev/nowhere");
    running.wait_log("block volume /dev/nowhere cannot be used: it does not exist");
    block(device.text());
    running.wait_ready();
    stop(running);
    fixture.assert_nothing_left();
}

#[test]
fn hp_04_a_host_path_of_type_block_device_is_shown_as_the_device() {
    let device = LoopDevice::new(8);
    let volumes = format!("[{{name: data, hostPath: {{path: {}, type: BlockDevice}}}}]", device.text());
    let fixture = Fixture::new(&pod(&volumes));
    let running = fixture.run();
    let volume = fs::metadata(running.volume("data")).expect("the device");
    assert!(volume.file_type().is_block_device());
    assert_eq!(volume.rdev(), fs::metadata(device.path()).expect("the device").rdev());
    fs::write(running.volume("data"), b"written through the volume").expect("written");
    assert!(device.head().starts_with(b"written through the volume"));
    stop(running);
    fixture.assert_nothing_left();
}

#[test]
fn a_device_that_a_pod_sees_keeps_its_number_when_it_is_taken_from_the_node() {
    let mut device = LoopDevice::new(8);
    let volumes = format!("[{{name: data, hostPath: {{path: {}, type: BlockDevice}}}}]", device.text());
    let fixture = Fixture::new(&pod(&volumes));
    let running = fixture.run();
    device.write(b"of the pod", 0);
    device.detach();
    // The kernel gives a new loop device the first free number. The pod's device is still in use, so its number is not free.
    let others = [(); 3].map(|()| LoopDevice::new(8));
    assert!(others.iter().all(|other| other.path() != device.path()), "another device has the pod's number");
    assert!(device.head().starts_with(b"of the pod"));
    stop(running);
    fixture.assert_nothing_left();
}

#[track_caller]
fn stop(mut running: Running) {
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
}
