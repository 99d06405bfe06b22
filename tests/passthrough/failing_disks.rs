//! Volumes on disks that fail or lose power: local PersistentVolumes and emptyDirs. The kernel returns I/O errors for loop devices whose files cannot be read or are
//! on a full file system.

use std::fs::{self, File};
use std::io::Write;

use crate::common::frozen::FreezableDisk;
use crate::common::loop_device::LoopDevice;
use crate::common::*;
use crate::devices::{assert_refused, fixture, is_free, marker, stop};

#[test]
fn lp_05_a_disk_that_cannot_be_read_is_no_blank_one() {
    let device = LoopDevice::new(64);
    device.run("mkfs.ext4", &["-q"]);
    device.break_reads();
    assert_refused(&fixture(&device, "", ""), "cannot be read: ");
    assert!(is_free(device.path()));
}

#[test]
fn lp_05_a_disk_that_fails_while_it_is_formatted_is_not_mounted_before_it_was_formatted_whole() {
    let device = LoopDevice::worn(64, 256);
    let fixture = fixture(&device, "", "");
    let mut running = fixture.start();
    running.wait_log(&format!("cannot format {}: mkfs.ext4 ended with code 1", device.text()));
    assert!(!running.is_ready());
    assert!(is_free(device.path()) && marker(&fixture).exists());
    // The disk works again.
    device.allow(64 << 10);
    running.wait_ready();
    assert!(!marker(&fixture).exists());
    fs::write(running.volume("data").join("file"), "1").expect("written");
    stop(running);
    fixture.assert_nothing_left();
    device.run("e2fsck", &["-n", "-f"]);
}

#[test]
fn a_disk_that_fails_under_a_pod_fails_the_calls_on_its_volume_only() {
    let device = LoopDevice::worn(64, 64 << 10);
    device.run("mkfs.ext4", &["-q"]);
    let fixture = fixture(&device, "", "");
    let volumes = "[{name: data, persistentVolumeClaim: {claimName: data}}, {name: config, configMap: {name: app}}]";
    fixture.write("pod.yaml", &pod(volumes));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let running = fixture.run();
    fs::write(running.volume("data").join("file"), "1").expect("written");
    device.wear_out();
    let mut file = File::create(running.volume("data").join("large")).expect("created");
    let written = file.write_all(&vec![1; 32 << 20]).and_then(|()| file.sync_all());
    let errno = written.expect_err("the disk fails").raw_os_error();
    assert!([libc::EIO, libc::ENOSPC, libc::EROFS].map(Some).contains(&errno), "{errno:?}");
    drop(file);
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&running.volume("config").join("a"), "2");
    stop(running);
    fixture.assert_nothing_left();
    assert!(is_free(device.path()));
}

#[test]
fn ed_05_files_that_a_container_has_synced_survive_a_power_loss() {
    let (device, fixture) = (LoopDevice::new(64), Fixture::new(""));
    let root = fixture.path("root");
    fixture.write("pod.yaml", &pod("[{name: scratch, emptyDir: {}}]"));
    let disk = FreezableDisk::mount(&device, &root);
    let running = fixture.run();
    let mut file = File::create(running.volume("scratch").join("file")).expect("created");
    file.write_all(b"1").and_then(|()| file.sync_all()).expect("written");
    disk.cut_power();
    fixture.kill_all();
    drop((file, running));
    unmount_below(&root);
    drop(disk);
    fs::remove_dir_all(fixture.path("run")).expect("the machine starts without a run directory");

    let disk = FreezableDisk::mount_again(&device, &root);
    let mut running = fixture.run();
    assert_eq!(fs::read_to_string(running.volume("scratch").join("file")).expect("the file"), "1");
    assert!(running.stop().success(), "{}", running.log());
    drop(disk);
}
