//! The tests in the guest. The guest has one disk, which each test formats or clears.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::Command;

use nix::mount::{MsFlags, mount, umount};

use crate::common::*;

/// The RAM disk behind the device of device mapper: 16 MiB, in sectors of 512 bytes.
const MEMORY: &str = "/dev/ram0";
const SECTORS: u64 = 16 << 11;
/// The sectors at the beginning and at the end that can be read when the middle cannot: podfs looks there for the
/// signature of a file system.
const HEAD: u64 = 1 << 11;
const TAIL: u64 = 128;

const NAME: &str = "failing";
/// The first device of device mapper; without udev, it has no name.
const PATH: &str = "/dev/dm-0";

/// The disk: a device of device mapper, whose table says where reads and writes fail.
struct Disk;

impl Disk {
    /// A working disk with zeros only.
    fn new() -> Disk {
        let mut memory = File::options().write(true).open(MEMORY).expect("the memory");
        memory.write_all(&vec![0; 16 << 20]).and_then(|()| memory.sync_all()).expect("zeros");
        run("dmsetup", &["--noudevsync", "create", NAME, "--table", &linear(0, SECTORS)]);
        Disk
    }

    /// A working disk with an ext4 file system that has the file `file`.
    fn formatted() -> Disk {
        let disk = Disk::new();
        run("mkfs.ext4", &["-q", PATH]);
        let mount_point = tempfile::tempdir().expect("a directory");
        let none = None::<&str>;
        mount(Some(PATH), mount_point.path(), Some("ext4"), MsFlags::empty(), none).expect("mounted");
        fs::write(mount_point.path().join("file"), content()).expect("written");
        umount(mount_point.path()).expect("unmounted");
        disk
    }

    /// Makes each read and write succeed.
    fn works(&self) {
        self.load(&linear(0, SECTORS));
    }

    /// Makes each read and write fail.
    fn fails(&self) {
        self.load(&format!("0 {SECTORS} error"));
    }

    /// Makes each read and write of the middle fail.
    fn fails_in_the_middle(&self) {
        let (middle, end) = (SECTORS - HEAD - TAIL, SECTORS - TAIL);
        self.load(&format!("{}\n{HEAD} {middle} error\n{}", linear(0, HEAD), linear(end, TAIL)));
    }

    /// Makes each write fail.
    fn takes_no_writes(&self) {
        self.load(&format!("0 {SECTORS} flakey {MEMORY} 0 0 600 1 error_writes"));
    }

    fn load(&self, table: &str) {
        run("dmsetup", &["--noudevsync", "suspend", "--nolockfs", "--noflush", NAME]);
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), table).expect("a table");
        run("dmsetup", &["--noudevsync", "load", NAME, file.path().to_str().expect("text")]);
        run("dmsetup", &["--noudevsync", "resume", NAME]);
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("dmsetup").args(["--noudevsync", "remove", "--force", NAME]).output();
    }
}

fn linear(from: u64, sectors: u64) -> String {
    format!("{from} {sectors} linear {MEMORY} {from}")
}

/// 4 MiB: more than the kernel reads ahead after the first page.
fn content() -> Vec<u8> {
    (0..4_u32 << 20).map(|index| (index % 251) as u8).collect()
}

#[track_caller]
fn run(program: &str, arguments: &[&str]) {
    let outcome = Command::new(program).args(arguments).output().expect("a program");
    let text = [outcome.stdout, outcome.stderr].concat();
    assert!(outcome.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&text));
}

/// A pod with a ConfigMap, and with the disk as a local volume.
fn fixture() -> Fixture {
    let volumes = "[{name: data, persistentVolumeClaim: {claimName: data}}, {name: config, configMap: {name: app}}]";
    let fixture = Fixture::new(&pod(volumes));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let claim = "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data}, spec: {volumeName: pv-1}}";
    let volume = format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, \
         spec: {{claimRef: {{namespace: default, name: data}}, local: {{path: {PATH}}}}}}}"
    );
    fixture.write("objects/claim.yaml", &[claim, &volume].join("\n---\n"));
    fixture
}

#[track_caller]
fn assert_whole(running: &Running) {
    assert!(fs::read(running.volume("data").join("file")).expect("read") == content(), "the file is as before");
}

#[track_caller]
fn assert_stops_clean(mut running: Running, fixture: &Fixture) {
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
#[ignore = "runs in the guest"]
fn lp_05_a_disk_that_fails_is_reported_and_has_its_data_when_it_works_again() {
    let disk = Disk::formatted();
    for (fail, sentence) in [
        (Disk::fails as fn(&Disk), "cannot be read: "),
        (Disk::fails_in_the_middle, "has the superblock of a file system, and blkid finds none: "),
    ] {
        fail(&disk);
        let fixture = fixture();
        let mut running = fixture.start();
        running.wait_log(sentence);
        assert!(!running.is_ready());
        disk.works();
        running.wait_ready();
        assert_whole(&running);
        assert_stops_clean(running, &fixture);
    }
}

#[test]
#[ignore = "runs in the guest"]
fn lp_05_a_disk_that_takes_no_writes_is_not_mounted_before_it_was_formatted_whole() {
    let disk = Disk::new();
    disk.takes_no_writes();
    let fixture = fixture();
    let mut running = fixture.start();
    running.wait_log(&format!("cannot format {PATH}: mkfs.ext4 ended with code 1"));
    assert!(!running.is_ready());
    disk.works();
    running.wait_ready();
    fs::write(running.volume("data").join("file"), content()).expect("written");
    assert_whole(&running);
    assert_stops_clean(running, &fixture);
    run("e2fsck", &["-n", "-f", PATH]);
}

#[test]
#[ignore = "runs in the guest"]
fn a_disk_that_fails_under_a_pod_fails_its_reads_with_eio_and_nothing_else() {
    let disk = Disk::formatted();
    let fixture = fixture();
    let running = fixture.run();
    let file = File::open(running.volume("data").join("file")).expect("opened");
    disk.fails();
    let error = file.read_exact_at(&mut [0; 4096], 2 << 20).expect_err("the disk fails");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&running.volume("config").join("a"), "2");
    disk.works();
    let mut bytes = [0; 4096];
    file.read_exact_at(&mut bytes, 2 << 20).expect("the disk works again");
    assert!(bytes[..] == content()[2 << 20..][..4096]);
    drop(file);
    assert_stops_clean(running, &fixture);
}
