//! emptyDir volumes: podfs creates them with the pod, limits their size, keeps their content after a crash, and deletes
//! them with the pod.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::locker::Locker;
use crate::common::own_descriptors::with_own_descriptors;
use crate::common::scratch::Scratch;
use crate::common::*;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use nix::sys::statfs::{HUGETLBFS_MAGIC, statfs};

fn fixture(source: &str) -> Fixture {
    Fixture::new(&pod(&format!("[{{name: scratch, emptyDir: {source}}}]")))
}

/// Replaces the pod's containers by these fields of its spec.
fn with_spec(fixture: &Fixture, spec: &str) {
    let manifest = fs::read_to_string(fixture.pod()).expect("a manifest");
    fixture.write("pod.yaml", &manifest.replace("containers: [{name: web, image: web}]", spec));
}

fn mode_and_group(path: &Path) -> (u32, u32) {
    let metadata = fs::metadata(path).expect("a file");
    (metadata.mode() & 0o7777, metadata.gid())
}

/// The directory with the content of the volume `scratch`.
fn content(volume: &Path) -> PathBuf {
    let pod = volume.ancestors().nth(3).expect("the pod's directory");
    pod.join("plugins/kubernetes.io~empty-dir/scratch/content")
}

#[track_caller]
fn assert_stops_clean(mut running: Running, fixture: &Fixture) {
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn it_is_open_to_all_and_gone_with_the_pod() {
    // ED-01, ED-06
    for (source, mode) in [("{}", 0o777), ("{medium: Memory, sizeLimit: 1Mi}", 0o1777), ("{mode: 0700}", 0o700)] {
        let fixture = fixture(source);
        let running = fixture.run();
        let volume = running.volume("scratch");
        assert!(volume.ends_with("volumes/kubernetes.io~empty-dir/scratch"), "{}", volume.display());
        assert_eq!(mode_and_group(&volume), (mode, 0), "{source}");
        assert_eq!(fs::read_dir(&volume).expect("a listing").count(), 0);
        fs::create_dir_all(volume.join("a/b")).expect("directories");
        fs::write(volume.join("a/b/file"), "1").expect("written");
        assert_eq!(fs::read_to_string(content(&volume).join("a/b/file")).expect("kept"), "1");
        assert_stops_clean(running, &fixture);
    }
}

#[test]
fn new_files_get_the_pods_group() {
    // ED-10
    for (source, mode) in [("{}", 0o2777), ("{medium: Memory}", 0o3777)] {
        let fixture = fixture(source);
        with_spec(&fixture, "securityContext: {fsGroup: 4711}\n  containers: []");
        let running = fixture.run();
        let volume = running.volume("scratch");
        assert_eq!(mode_and_group(&volume), (mode, 4711));
        fs::write(volume.join("file"), "").expect("written");
        fs::create_dir(volume.join("dir")).expect("a directory");
        assert_eq!(mode_and_group(&volume.join("file")).1, 4711);
        assert_eq!(mode_and_group(&volume.join("dir")).1, 4711);
        assert_stops_clean(running, &fixture);
    }
}

#[test]
fn the_size_limit_holds_at_once() {
    // ED-02, ED-07
    let one = "containers: [{name: web, resources: {limits: {memory: 1Mi}}}]";
    for (source, spec) in [
        ("{sizeLimit: 1Mi}", "containers: []"),
        ("{medium: Memory, sizeLimit: 1Mi}", "containers: []"),
        ("{medium: Memory}", one),
        ("{medium: Memory, sizeLimit: 1Gi}", one),
    ] {
        let fixture = fixture(source);
        with_spec(&fixture, spec);
        let running = fixture.run();
        let volume = running.volume("scratch");
        with_own_descriptors(|| {
            fs::write(volume.join("fits"), vec![1; 512 << 10]).expect("it fits");
            let error = fs::write(volume.join("more"), vec![1; 2 << 20]).expect_err("it does not fit");
            assert!(matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded), "{source}: {error}");
            fs::remove_file(volume.join("more")).expect("removed");
            fs::write(volume.join("again"), vec![1; 256 << 10]).expect("there is room again");
        });
        assert_stops_clean(running, &fixture);
    }
}

#[test]
fn content_survives_a_podfs_that_was_killed() {
    // ED-05, RC-05
    for source in ["{}", "{medium: Memory}"] {
        let fixture = fixture(source);
        let mut killed = fixture.run();
        let volume = killed.volume("scratch");
        fs::write(volume.join("file"), "1").expect("written");
        fixture.kill_all();
        killed.wait();
        let next = fixture.run();
        assert_eq!(next.volume("scratch"), volume);
        assert_eq!(fs::read_to_string(volume.join("file")).expect("kept"), "1", "{source}");
        assert_stops_clean(next, &fixture);
    }
}

#[test]
fn the_kernel_keeps_locks_on_new_content_and_the_source_has_those_on_content_that_was_there() {
    // After podfs was killed, containers may still have files of the content open through its mount, and hold locks
    // there. So the next podfs must take locks on this content at the source.
    const LOCK: &str = "lock f flock exclusive";
    let fixture = fixture("{}");
    let mut killed = fixture.run();
    let volume = killed.volume("scratch");
    let (file, source) = (volume.join("file"), content(&volume).join("file"));
    let (mut through_volume, mut at_source) = (Locker::with(&file), Locker::with(&source));
    through_volume.does(LOCK);
    at_source.does(LOCK);
    through_volume.dies();
    at_source.dies();
    fixture.kill_all();
    killed.wait();
    let next = fixture.run();
    assert_eq!(next.volume("scratch"), volume);
    let (mut through_volume, mut at_source) = (Locker::with(&file), Locker::with(&source));
    through_volume.does(LOCK);
    at_source.is_refused(LOCK);
    drop((through_volume, at_source));
    assert_stops_clean(next, &fixture);
}

#[test]
fn content_is_deleted_by_whichever_podfs_has_it_last() {
    // ED-05, RC-01: the next podfs adopts the volume, and has to delete its content.
    for source in ["{}", "{medium: Memory}"] {
        let fixture = fixture(source);
        let mut killed = fixture.run();
        let volume = killed.volume("scratch");
        fs::write(volume.join("file"), "1").expect("written");
        killed.signal(Signal::SIGKILL);
        killed.wait();
        assert_eq!(fs::read_to_string(volume.join("file")).expect("served"), "1", "{source}");
        assert!(content(&volume).join("file").exists());
        let next = fixture.run();
        assert_eq!(fs::read_to_string(volume.join("file")).expect("kept"), "1", "{source}");
        assert_stops_clean(next, &fixture);
    }
}

#[test]
fn content_that_is_gone_is_made_anew() {
    // ED-05: also when a server still serves the deleted directory.
    for server_too in [true, false] {
        let fixture = fixture("{}");
        let mut killed = fixture.run();
        let volume = killed.volume("scratch");
        if server_too {
            fixture.kill_both(&mut killed);
        } else {
            fixture.kill_supervisor(&mut killed);
        }
        fs::remove_dir_all(content(&volume)).expect("removed");
        let next = fixture.run();
        eventually("podfs makes the content again", || next.log().contains("is gone; podfs makes it anew"));
        eventually("the volume can be used", || fs::write(volume.join("file"), "1").is_ok());
        assert_eq!(fs::read_to_string(content(&volume).join("file")).expect("the content"), "1");
        assert_eq!(mode_and_group(&volume), (0o777, 0));
        assert_stops_clean(next, &fixture);
    }
}

#[test]
fn nothing_is_deleted_through_a_foreign_mount() {
    // ED-08
    let fixture = fixture("{}");
    let outside = fixture.path("outside");
    fs::create_dir(&outside).expect("a directory");
    fs::write(outside.join("keep"), "").expect("written");
    chown(outside.join("keep"), Some(1000), None).expect("owned");
    let mut running = fixture.run();
    let volume = running.volume("scratch");
    fs::create_dir(volume.join("mnt")).expect("a directory");
    fs::write(volume.join("mine"), "").expect("written");
    let mount_point = content(&volume).join("mnt");
    mount(Some(&outside), &mount_point, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("mounted");
    assert_eq!(running.stop().code(), Some(0));
    assert!(running.log().contains("podfs leaves of its content 1 entry: mnt is a mount point"), "{}", running.log());
    assert!(outside.join("keep").exists());
    assert!(!content(&volume).join("mine").exists());
    umount2(&mount_point, MntFlags::MNT_DETACH).expect("unmounted");
    // The next podfs of the pod begins with an empty volume, and deletes the rest at its end.
    let running = fixture.run();
    assert_eq!(fs::read_dir(running.volume("scratch")).expect("a listing").count(), 0);
    assert_stops_clean(running, &fixture);
    assert!(outside.join("keep").exists());
}

#[test]
fn contradictory_empty_dirs_are_refused() {
    // ED-09
    for (source, sentence) in [
        ("{medium: Tape}", "emptyDir.medium: volume \"scratch\": unknown storage medium \"Tape\""),
        ("{sizeLimit: -1Mi}", "emptyDir.sizeLimit: volume \"scratch\": must not be negative"),
        ("{sizeLimit: lots}", "emptyDir.sizeLimit: volume \"scratch\": \"lots\" is not a quantity"),
        ("{mode: 02777}", "emptyDir.mode: volume \"scratch\": must be a number between 0 and 01777"),
    ] {
        let fixture = fixture(source);
        fixture.refused(&mut fixture.command()).says(2, &[sentence]);
        fixture.assert_nothing_left();
    }
}

#[test]
fn huge_pages_are_bound_in_the_size_the_pod_asks_for() {
    // ED-04
    let fixture = fixture("{medium: HugePages}");
    let running = fixture.start();
    running.wait_log("hugePages storage requested, but there is no resource request for huge pages");
    assert_stops_clean(running, &fixture);
    if !Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").exists() {
        return;
    }
    with_spec(&fixture, "containers: [{name: web, resources: {limits: {hugepages-2Mi: 4Mi}}}]");
    let running = fixture.run();
    assert_eq!(running.json()["volumes"][0]["mode"], "bind");
    let statfs = statfs(&running.volume("scratch")).expect("a file system");
    assert_eq!((statfs.filesystem_type(), statfs.block_size()), (HUGETLBFS_MAGIC, 2 << 20));
    assert_eq!(mode_and_group(&running.volume("scratch")), (0o777, 0));
    assert_stops_clean(running, &fixture);
}

#[test]
fn podfs_mount_keeps_the_content_in_a_private_directory_and_removes_it() {
    let fixture = Fixture::new("");
    fixture.write("volume.yaml", "{name: scratch, emptyDir: {}}");
    let temp = fixture.path("temp");
    fs::create_dir(&temp).expect("a directory");
    let mut command = Command::new(PODFS);
    command.arg("mount").arg("--volume").arg(fixture.path("volume.yaml")).arg(fixture.path("at"));
    let mut running = fixture.spawn(command.env("TMPDIR", &temp).stdin(Stdio::null()));
    running.wait_log("is ready");
    fs::write(fixture.path("at/file"), "1").expect("written");
    let home = fs::read_dir(&temp).expect("a listing").next().expect("a home").expect("an entry").path();
    assert_eq!(mode_and_group(&home).0, 0o700);
    assert!(home.join("content/file").exists());
    running.signal(Signal::SIGINT);
    assert_eq!(running.wait().code(), Some(0), "{}", running.log());
    assert_eq!(fs::read_dir(&temp).expect("a listing").count(), 0);
    assert!(!fixture.path("at").exists());
}

#[test]
fn a_changed_size_limit_of_a_tmpfs_counts_after_all_processes_were_killed() {
    // ED-02, ED-05
    let fixture = fixture("{medium: Memory, sizeLimit: 1Mi}");
    let mut killed = fixture.run();
    fixture.kill_all();
    killed.wait();
    let manifest = fs::read_to_string(fixture.pod()).expect("a manifest");
    fixture.write("pod.yaml", &manifest.replace("sizeLimit: 1Mi", "sizeLimit: 4Mi"));
    let next = fixture.run();
    fs::write(next.volume("scratch").join("file"), vec![1; 2 << 20]).expect("it fits into the new size");
    assert_stops_clean(next, &fixture);
}

#[test]
fn content_for_which_a_full_disk_has_no_room_leaves_nothing() {
    for medium in ["{}", "{medium: Memory}"] {
        let (fixture, small) = (fixture(medium), Scratch::tmpfs("size=1m"));
        fs::write(small.path().join("filler"), vec![1; 2 << 20]).expect_err("the disk is full");
        let mut command = Command::new(PODFS);
        command.arg("run").arg("--pod").arg(fixture.pod()).arg("--objects").arg(fixture.objects());
        command.arg("--root-dir").arg(small.path().join("root")).arg("--run-dir").arg(fixture.path("run"));
        let mut running = fixture.start_command(command);
        running.wait_log("No space left on device");
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        fixture.assert_nothing_left();
        let left = fs::read_dir(small.path()).expect("a listing").map(|entry| entry.expect("an entry").file_name());
        assert_eq!(left.collect::<Vec<_>>(), ["filler"], "{medium}");
    }
}
