//! Volumes on disks that fail or lose power: local PersistentVolumes and emptyDirs. The kernel returns I/O errors for loop devices whose files cannot be read or are
//! on a full file system.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::Stdio;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

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

/// A source on a disk whose reads are about to fail: 300 directories, and a large file that the kernel has not cached.
struct FailingSource {
    at: PathBuf,
    fixture: Fixture,
    device: LoopDevice,
}

impl FailingSource {
    fn new(kind: &str) -> Self {
        let (device, fixture) = (LoopDevice::new(256), Fixture::new(""));
        device.run(&format!("mkfs.{kind}"), &["-q"]);
        let at = fixture.path("disk");
        fs::create_dir(&at).expect("a directory");
        let mounted = || {
            mount(Some(device.path()), &at, Some(kind), MsFlags::empty(), None::<&str>).expect("a file system");
        };
        mounted();
        for number in 0..300 {
            fs::create_dir_all(at.join(format!("source/directory/{number}"))).expect("directories");
            fs::write(at.join(format!("source/directory/{number}/file")), "content").expect("written");
        }
        fs::write(at.join("source/large"), vec![1; 3 << 20]).expect("written");
        // The next mount has nothing in its caches.
        umount2(&at, MntFlags::empty()).expect("unmounted");
        mounted();
        let volumes = format!("[{{name: host, hostPath: {{path: {}}}}}]", at.join("source").display());
        fixture.write("pod.yaml", &pod(&volumes));
        Self { at, fixture, device }
    }

    /// The value of a metric of the volume, with this label.
    fn metric(&self, family: &str, label: &str) -> Option<f64> {
        let output = self.fixture.operator("metrics").arg("--all").output().expect("podfs runs");
        let text = String::from_utf8(output.stdout).expect("text");
        let is_wanted = |line: &&str| line.starts_with(family) && line.contains(label);
        text.lines().find(is_wanted)?.rsplit(' ').next()?.parse().ok()
    }

    fn volume_status(&self) -> serde_json::Value {
        self.fixture.pods()[0]["volumes"][0].clone()
    }
}

impl Drop for FailingSource {
    fn drop(&mut self) {
        let _ = umount2(&self.at, MntFlags::MNT_DETACH);
    }
}

#[test]
fn errors_of_a_source_are_counted_logged_once_and_shown() {
    let source = FailingSource::new("ext4");
    let running = source.fixture.run();
    let host = running.volume("host");
    assert_eq!(fs::read_dir(host.join("directory")).expect("a listing").count(), 300);
    assert_eq!(source.volume_status().get("sourceErrors"), None);
    source.device.break_reads();
    for number in 0..300 {
        if let Err(error) = fs::read_to_string(host.join(format!("directory/{number}/file"))) {
            assert!([libc::EIO, libc::EUCLEAN, libc::EBADMSG].map(Some).contains(&error.raw_os_error()), "{error}");
        }
    }
    running.wait_log("volume \"host\": calls have failed because of its source: ");
    running.wait_log("volume \"host\": the kernel has counted errors of the disk that its source is on: ext4 ");
    let status = source.volume_status();
    let counted = status["sourceErrors"].as_object().expect("errors");
    let (errno, count) = counted.iter().next().expect("an errno");
    assert!(count.as_u64() > Some(0), "{status}");
    let label = format!("errno=\"{errno}\"");
    assert!(source.metric("podfs_volume_source_errors_total", &label) >= count.as_f64());
    eventually("the status has the errors of the disk", || {
        source.volume_status()["diskErrors"]["ext4"].as_u64() > Some(0)
    });
    assert!(source.metric("podfs_volume_disk_errors", "counter=\"ext4\"") > Some(0.0));
    let table = source.fixture.status(&[]).stdout;
    for text in ["its source has errors: calls that failed: ", "errors of the disk: ext4 "] {
        assert!(table.contains(text), "{table}");
    }
    assert_eq!(running.log().matches("calls have failed because of its source").count(), 1);
    stop(running);
}

#[test]
fn errors_of_reads_that_the_kernel_does_itself_are_noticed_on_the_disk() {
    let source = FailingSource::new("btrfs");
    let running = source.fixture.run();
    let large = running.volume("host").join("large");
    let mut file = File::open(&large).expect("open");
    source.device.break_reads();
    let read = std::io::Read::read_to_end(&mut file, &mut Vec::new());
    assert_eq!(read.expect_err("the disk fails").raw_os_error(), Some(libc::EIO));
    running.wait_log("volume \"host\": the kernel has counted errors of the disk that its source is on: btrfs ");
    eventually("the status has the errors of the disk", || {
        source.volume_status()["diskErrors"]["btrfs"].as_u64() > Some(0)
    });
    let status = source.volume_status();
    assert_eq!((status["mode"].as_str(), status.get("sourceErrors")), (Some("passthrough"), None), "no request failed");
    assert!(source.metric("podfs_volume_disk_errors", "counter=\"btrfs\"") > Some(0.0));
    let uid = running.json()["pod"]["uid"].as_str().expect("a uid").to_owned();
    let mut command = source.fixture.operator("trace");
    command.args(["--pod", &uid, "--volume", "host"]).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut trace = command.spawn().expect("podfs runs");
    let mut lines = BufReader::new(trace.stderr.take().expect("a pipe")).lines();
    let is_note = |line: std::io::Result<String>| {
        line.expect("text").contains("the kernel reads and writes the files of this volume by itself")
    };
    assert!(lines.any(is_note));
    let _ = trace.kill();
    let _ = trace.wait();
    drop(file);
    stop(running);
}
