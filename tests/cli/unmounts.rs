//! Volumes of `podfs run` that another process unmounts or mounts over.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::common::namespace::mount_tmpfs;
use crate::common::passthrough::disk_directory;
use crate::common::set_on_drop::SetOnDrop;
use crate::common::*;
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

/// A pod with volumes of every kind of mount.
struct Rig {
    fixture: Fixture,
    source: TempDir,
}

impl Rig {
    fn new() -> Self {
        let source = disk_directory();
        let path = source.path().display().to_string();
        fs::create_dir(source.path().join("bound")).expect("a directory");
        fs::write(source.path().join("file"), "kept").expect("written");
        fs::write(source.path().join("bound/inside"), "kept").expect("written");
        let volumes = format!(
            "[{{name: config, configMap: {{name: app}}}}, {{name: host, hostPath: {{path: {path}, type: Directory}}}},
              {{name: single, hostPath: {{path: {path}/file, type: File}}}},
              {{name: bound, hostPath: {{path: {path}/bound, type: Directory}}}},
              {{name: data, persistentVolumeClaim: {{claimName: data, readOnly: true}}}},
              {{name: scratch, emptyDir: {{}}}}, {{name: memory, emptyDir: {{medium: Memory}}}}]"
        );
        let pod = pod(&volumes).replace("name: web,", "name: web, annotations: {podfs.io/host-path.bound: bind},");
        let rig = Self { fixture: Fixture::new(&pod), source };
        rig.fixture.write(
            "objects/claim.yaml",
            "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data, uid: c-1}, \
             spec: {volumeName: pv-1}, status: {phase: Bound}}",
        );
        rig.fixture.write(
            "objects/volume.yaml",
            &format!(
                "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, spec: {{ \
                 claimRef: {{namespace: default, name: data, uid: c-1}}, hostPath: {{path: {path}}}}}}}"
            ),
        );
        rig.put("1");
        rig
    }

    fn put(&self, content: &str) {
        self.fixture.write("objects/app.json", &config_map("app", &[("a", content)]));
    }

    /// The volume of this name in the status.
    fn status(&self, name: &str) -> Value {
        let mut pods = self.fixture.pods();
        let volumes = pods[0]["volumes"].as_array_mut().expect("volumes");
        volumes.iter().find(|volume| volume["name"] == name).expect("the volume").clone()
    }
}

/// A pod with a configMap volume, which shows the file `a` of content 1.
fn small() -> Fixture {
    let fixture = Fixture::new(&config_pod());
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture
}

fn unmount(path: &Path, flags: MntFlags) {
    // podfs still has a new mount open for a moment.
    eventually("the volume is not busy", || match umount2(path, flags) {
        Err(Errno::EBUSY) => false,
        outcome => {
            outcome.expect("unmounted");
            true
        }
    });
}

fn is_mounted(path: &Path) -> bool {
    podfs_fuse::mount::table::mounts_at(path).expect("a table").len() == 1
}

#[track_caller]
fn wait_mounted(path: &Path) {
    eventually("the volume is mounted again", || is_mounted(path));
}

fn device(path: &Path) -> u64 {
    fs::metadata(path).expect("there").dev()
}

#[test]
fn a_volume_of_each_kind_is_mounted_again_where_it_was() {
    let rig = Rig::new();
    let mut running = rig.fixture.run();
    let names = ["config", "host", "single", "bound", "data", "scratch", "memory"];
    let options = |path: &Path| podfs_fuse::mount::table::mounts_at(path).expect("a table")[0].read_only;
    for name in names {
        let volume = running.volume(name);
        let before = (device(&volume), options(&volume));
        unmount(&volume, MntFlags::empty());
        wait_mounted(&volume);
        let error = format!("another process unmounted {}; podfs mounted it again", volume.display());
        eventually("the status says so", || rig.status(name)["lastError"] == error.as_str());
        assert_eq!((device(&volume), options(&volume)), before, "{name}: it is the file system that it was");
        assert_eq!(rig.status(name)["state"], "live", "{name}");
        let line = format!("volume {name:?} is not at its path: another process unmounted {}", volume.display());
        assert_eq!(running.log().matches(&line).count(), 1, "{}", running.log());
    }
    rig.put("2");
    wait_content(&running.volume("config").join("a"), "2");
    for name in ["scratch", "memory", "host"] {
        fs::write(running.volume(name).join("new"), "written").expect("written");
    }
    assert_eq!(fs::read_to_string(rig.source.path().join("new")).expect("in the source"), "written");
    assert_eq!(fs::read_to_string(running.volume("single")).expect("read"), "kept");
    assert_eq!(fs::read_to_string(running.volume("bound").join("inside")).expect("read"), "kept");
    assert!(rig.fixture.status(&[]).stdout.contains("last error: another process unmounted"));
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    rig.fixture.assert_nothing_left();
}

#[test]
fn programs_that_use_a_volume_see_the_same_files_before_and_after() {
    let rig = Rig::new();
    let running = rig.fixture.run();
    let (config, scratch) = (running.volume("config"), running.volume("scratch"));
    let held = File::open(&config).expect("opened");
    let held_path = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&held)));
    let mut open = OpenOptions::new().read(true).append(true).create(true).open(scratch.join("log")).expect("opened");
    for volume in [&config, &scratch] {
        unmount(volume, MntFlags::MNT_DETACH);
        wait_mounted(volume);
    }
    rig.put("2");
    for volume in [&config, &held_path] {
        wait_content(&volume.join("a"), "2");
    }
    open.write_all(b"line").expect("written");
    assert_eq!(fs::read_to_string(scratch.join("log")).expect("read"), "line");
}

#[test]
fn an_unmount_while_the_volume_is_used_fails_no_call_on_open_files() {
    let rig = Rig::new();
    let running = rig.fixture.run();
    let scratch = running.volume("scratch");
    let file = File::options().read(true).write(true).create_new(true).open(scratch.join("busy")).expect("opened");
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let set_over = SetOnDrop(&over);
        let load = scope.spawn(|| {
            let mut calls = 0_u64;
            while !over.load(Ordering::Relaxed) {
                file.write_all_at(&calls.to_ne_bytes(), 0).expect("written");
                let mut bytes = [0; 8];
                file.read_exact_at(&mut bytes, 0).expect("read");
                assert_eq!(u64::from_ne_bytes(bytes), calls);
                file.metadata().expect("looked at");
                calls += 1;
            }
            calls
        });
        for _ in 0..3 {
            unmount(&scratch, MntFlags::MNT_DETACH);
            wait_mounted(&scratch);
        }
        drop(set_over);
        assert!(load.join().expect("no call failed") > 0);
    });
    assert!(scratch.join("busy").exists());
}

#[test]
fn a_removed_mount_point_is_made_again() {
    let fixture = small();
    let mut running = fixture.run();
    let volume = running.volume("config");
    unmount(&volume, MntFlags::empty());
    fs::remove_dir_all(volume.parent().expect("a directory")).expect("removed");
    wait_mounted(&volume);
    wait_content(&volume.join("a"), "1");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn volumes_whose_whole_directory_is_unmounted_are_mounted_again() {
    let fixture = Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: more, configMap: {name: app}}]"));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let root = fixture.path("root");
    fs::create_dir(&root).expect("a directory");
    mount_tmpfs(&root);
    let mut running = fixture.run();
    let volumes = ["config", "more"].map(|name| running.volume(name));
    unmount(&root, MntFlags::MNT_DETACH);
    for volume in &volumes {
        wait_mounted(volume);
        wait_content(&volume.join("a"), "1");
    }
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    assert_eq!(fixture.mounts(), Vec::<PathBuf>::new());
}

#[test]
fn a_taken_mount_point_is_left_alone_and_reported_until_it_is_free() {
    let rig = Rig::new();
    let mut running = rig.fixture.run();
    let volume = running.volume("config");
    // podfs may notice both only as one change of the mount table. The kernel may give the tmpfs the mount id that the volume
    // had.
    unmount(&volume, MntFlags::empty());
    mount_tmpfs(&volume);
    let reason = format!("another process unmounted {0}, and podfs cannot mount it again yet: {0}", volume.display());
    let is_reported = || rig.status("config")["reason"].as_str().is_some_and(|text| text.starts_with(&reason));
    eventually("the status says so", is_reported);
    assert_eq!(rig.status("config")["state"], "hidden");
    assert_eq!(rig.fixture.pods()[0]["state"], "degraded");
    assert!(rig.fixture.status(&[]).stdout.contains("not at its path: another process unmounted"));
    assert!(!volume.join("a").exists());
    unmount(&volume, MntFlags::empty());
    eventually("it is live", || rig.status("config")["state"] == "live");
    wait_content(&volume.join("a"), "1");
    assert_eq!(running.log().matches(&reason).count(), 1, "{}", running.log());
    // At the end of podfs, another process still uses the mount point.
    unmount(&volume, MntFlags::empty());
    mount_tmpfs(&volume);
    eventually("the status says so", is_reported);
    running.stop();
    assert!(is_mounted(&volume), "what another process mounted stays");
}

#[test]
fn a_volume_below_another_file_system_is_reported_and_visible_again_without_it() {
    let rig = Rig::new();
    let mut running = rig.fixture.run();
    for name in ["config", "host", "bound"] {
        let volume = running.volume(name);
        mount_tmpfs(&volume);
        let reason = format!("another process mounted tmpfs over it at {}; unmount that", volume.display());
        eventually("the status says so", || rig.status(name)["reason"] == reason.as_str());
        assert_eq!(rig.status(name)["state"], "hidden");
        unmount(&volume, MntFlags::empty());
        eventually("it is live", || rig.status(name)["state"] == "live");
    }
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    rig.fixture.assert_nothing_left();
}

#[test]
fn the_next_podfs_mounts_volumes_again_that_were_unmounted_before() {
    let rig = Rig::new();
    let running = rig.fixture.run();
    let names = ["config", "host", "data", "scratch"];
    let volumes = names.map(|name| running.volume(name));
    let devices = volumes.each_ref().map(|volume| device(volume));
    running.signal(Signal::SIGKILL);
    let mut running = running;
    running.wait();
    volumes.iter().for_each(|volume| unmount(volume, MntFlags::empty()));
    let mut next = rig.fixture.run();
    volumes.iter().for_each(|volume| wait_mounted(volume));
    assert_eq!(volumes.each_ref().map(|volume| device(volume)), devices, "they are the file systems that they were");
    let refused = fs::write(volumes[2].join("new"), "").expect_err("a claim for readers only");
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    for volume in &volumes {
        unmount(volume, MntFlags::empty());
        wait_mounted(volume);
    }
    assert_eq!(next.stop().code(), Some(0), "{}", next.log());
    rig.fixture.assert_nothing_left();
}

#[test]
fn a_volume_that_was_unmounted_before_the_stop_stays_unmounted() {
    for _ in 0..5 {
        let fixture = small();
        let mut running = fixture.run();
        unmount(&running.volume("config"), MntFlags::empty());
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        fixture.assert_nothing_left();
    }
}

#[test]
fn a_volume_that_is_unmounted_again_and_again_comes_back_each_time() {
    let fixture = small();
    let mut running = fixture.run();
    let volume = running.volume("config");
    for _ in 0..4 {
        unmount(&volume, MntFlags::empty());
        wait_mounted(&volume);
    }
    let mut content = String::new();
    File::open(volume.join("a")).expect("opened").read_to_string(&mut content).expect("read");
    assert_eq!(content, "1");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}
