//! Local PersistentVolumes on block devices: podfs formats, checks, mounts once, shares and grows their file systems, also when
//! its processes are killed.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::claims::{claim, volume};
use crate::common::loop_device::LoopDevice;
use crate::common::node::Node;
use crate::common::tracer::killed_at;
use crate::common::*;

pub const DATA: &str = "[{name: data, persistentVolumeClaim: {claimName: data}}]";

/// A pod with the claim `data`, which is bound to the PersistentVolume `pv-1` on a device.
pub fn fixture(device: &LoopDevice, local: &str, spec: &str) -> Fixture {
    let fixture = Fixture::new(&pod(DATA));
    fixture.write("objects/claim.yaml", &claim("data", ""));
    write_volume(&fixture, device, local, spec);
    fixture
}

/// Writes the manifest of `pv-1`, with further fields of its `local` source and of its spec.
fn write_volume(fixture: &Fixture, device: &LoopDevice, local: &str, spec: &str) {
    let manifest = volume("data", &format!("local: {{path: {}{local}}}{spec}", device.text()));
    fixture.write("objects/volume.yaml", &manifest);
}

/// The path at which podfs mounts the device for all pods of the node.
pub fn global_mount(fixture: &Fixture) -> PathBuf {
    fixture.path("root/plugins/kubernetes.io/local-volume/mounts/pv-1")
}

/// The file that exists while podfs formats the device.
pub fn marker(fixture: &Fixture) -> PathBuf {
    fixture.path("root/plugins/podfs/formatting/pv-1")
}

#[track_caller]
pub fn stop(mut running: Running) {
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
}

#[track_caller]
pub fn assert_refused(fixture: &Fixture, sentence: &str) {
    let running = fixture.start();
    running.wait_log(sentence);
    stop(running);
    fixture.assert_nothing_left();
}

/// Installs a script with the name of a program, and puts its directory at the beginning of the command's PATH. In the script,
/// `real` is the path of the real program, and `here` the directory of the fixture.
fn wrap(fixture: &Fixture, command: &mut Command, name: &str, script: &str) {
    let directory = fixture.path("bin");
    fs::create_dir_all(&directory).expect("a directory");
    let program = directory.join(name);
    let real = format!("/usr/sbin/{name}");
    let here = fixture.path("");
    let text = format!("#!/bin/sh\nhere={}\nreal={real}\n{script}\n", here.display());
    fs::write(&program, text).expect("a script");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("a program");
    let path = format!("{}:{}", directory.display(), std::env::var("PATH").unwrap_or_default());
    command.env("PATH", path);
}

#[test]
fn lp_05_a_blank_device_is_formatted_once_and_keeps_its_data() {
    for (local, kind) in [("", "ext4"), (", fsType: xfs", "xfs")] {
        let device = LoopDevice::new(512);
        let fixture = fixture(&device, local, "");
        fixture.write("pod.yaml", &pod(DATA).replace("spec:\n", "spec:\n  securityContext: {fsGroup: 4711}\n"));
        let running = fixture.run();
        assert!(running.log().contains(&format!("was blank and has a new file system ({kind})")), "{}", running.log());
        let data = running.volume("data");
        assert_eq!(fs::metadata(&data).expect("the root of the volume").gid(), 4711);
        fs::write(data.join("file"), "1").expect("written");
        assert!(global_mount(&fixture).join("file").exists(), "the device is mounted at the kubelet's path");
        stop(running);
        fixture.assert_nothing_left();
        let running = fixture.run();
        assert_eq!(running.log().matches("was blank").count(), 1, "{}", running.log());
        assert_eq!(fs::read_to_string(running.volume("data").join("file")).expect("kept"), "1");
        stop(running);
        fixture.assert_nothing_left();
    }
}

#[test]
fn the_pods_of_a_node_share_one_mount_and_the_last_one_unmounts_it() {
    let device = LoopDevice::new(64);
    let fixture = fixture(&device, "", ", mountOptions: [noatime, nosuid]");
    let first = fixture.run();
    fs::write(first.volume("data").join("file"), "1").expect("written");
    fixture.write("pod.yaml", &pod(DATA).replace("name: web,", "name: db,"));
    let second = fixture.run();
    assert_eq!(fs::read_to_string(second.volume("data").join("file")).expect("shared"), "1");
    let global_mounts = || fixture.mounts().into_iter().filter(|path| path.ends_with("mounts/pv-1")).count();
    assert_eq!(global_mounts(), 1);
    let table = fs::read_to_string("/proc/self/mountinfo").expect("a table");
    let line_of = |path: &Path| table.lines().find(|line| line.contains(&path.display().to_string())).expect("mounted");
    let line = line_of(&global_mount(&fixture));
    assert!(line.contains("noatime") && line.contains("nosuid"), "{line}");
    let line = line_of(&first.volume("data"));
    assert!(line.contains("nosuid"), "the volume of a pod has the restrictions of its source: {line}");
    stop(first);
    assert_eq!(global_mounts(), 1);
    assert_eq!(fs::read_to_string(second.volume("data").join("file")).expect("still there"), "1");
    stop(second);
    assert_eq!((fixture.mounts(), fixture.processes()), (vec![], vec![]));
    // The first pod has made the root directory, so the second one does not remove it.
    assert!(!fixture.path("root/plugins").exists());
    assert!(is_free(device.path()));
}

#[test]
fn a_device_that_is_not_blank_is_never_formatted() {
    let mut table = vec![0; 512];
    table[446..462].copy_from_slice(&[0, 1, 1, 0, 0x83, 1, 1, 1, 0, 8, 0, 0, 0, 8, 0, 0]);
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    let device_with = |bytes: &[u8], offset: u64| {
        let device = LoopDevice::new(64);
        device.write(bytes, offset);
        device
    };
    let swap = LoopDevice::new(64);
    swap.run("mkswap", &[]);
    for (device, sentence) in [
        (device_with(&table, 0), "has a partition table (dos), and podfs formats blank devices only"),
        (swap, "holds swap, which is no file system"),
        (
            device_with(b"a database that writes to the device", 8192),
            "has no signature of a file system but is not blank",
        ),
        (device_with(b"a copy at the end", (64 << 20) - 4096), "has no signature of a file system but is not blank"),
    ] {
        let before = device.head();
        let fixture = fixture(&device, "", "");
        assert_refused(&fixture, sentence);
        assert!(device.head() == before, "nothing was written: {sentence}");
    }
}

#[test]
fn a_file_system_that_is_another_or_damaged_is_reported_and_not_mounted() {
    let device = LoopDevice::new(64);
    device.run("mkfs.ext4", &["-q"]);
    assert_refused(
        &fixture(&device, ", fsType: xfs", ""),
        "failed to mount the volume as \"xfs\", it already contains ext4",
    );
    let options = fixture(&device, "", ", mountOptions: [wombat]");
    assert_refused(&options, "ext4 does not take the mount option \"wombat\"");
    let options = fixture(&device, "", ", mountOptions: [data=wombat]");
    assert_refused(&options, "ext4 does not take the mount option \"data=wombat\"");
    device.run("debugfs", &["-w", "-R", "clri <2>"]);
    assert_refused(&fixture(&device, "", ""), "'fsck' found errors on device");
    let device = LoopDevice::new(320);
    device.run("mkfs.xfs", &["-q"]);
    // The root directory of an xfs is among the first inodes, in the block at this offset. fsck does not check xfs.
    device.write(&[0xa5; 4096], 16 * 4096);
    let before = device.head();
    assert_refused(&fixture(&device, "", ""), "its xfs file system is damaged");
    // The kernel may have written to the superblock when it tried to mount the file system.
    assert!(device.head()[4096..16 * 4096 + 4096] == before[4096..16 * 4096 + 4096], "nothing was written");
}

#[test]
fn a_place_where_another_file_system_is_mounted_is_left_alone() {
    let device = LoopDevice::new(64);
    let fixture = fixture(&device, "", "");
    fs::create_dir_all(global_mount(&fixture)).expect("a directory");
    let (none, flags) = (None::<&str>, nix::mount::MsFlags::empty());
    nix::mount::mount(Some("mine"), &global_mount(&fixture), Some("tmpfs"), flags, none).expect("a tmpfs");
    fs::write(global_mount(&fixture).join("file"), "mine").expect("written");
    let running = fixture.start();
    running.wait_log(&format!("and the volume's path leads to {} now", device.text()));
    assert!(is_free(device.path()));
    assert_eq!(device.head(), vec![0; 1 << 20], "the device is not formatted");
    assert_eq!(fs::read_to_string(global_mount(&fixture).join("file")).expect("still there"), "mine");
    nix::mount::umount(&global_mount(&fixture)).expect("unmounted");
    stop(running);
}

#[test]
fn read_only_media_is_shown_read_only_and_never_formatted() {
    let mut device = LoopDevice::new(64);
    device.make_read_only();
    assert_refused(&fixture(&device, "", ""), "as it is in read-only mode; format it, or make it writable");
    let mut device = LoopDevice::new(64);
    device.run("mkfs.ext4", &["-q"]);
    device.make_read_only();
    let fixture = fixture(&device, "", "");
    let running = fixture.run();
    assert!(running.log().contains("is read-only media; its file system is mounted read-only"), "{}", running.log());
    let refused = fs::write(running.volume("data").join("file"), "").expect_err("read-only");
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    stop(running);
    fixture.assert_nothing_left();
}

#[test]
fn a_file_system_grows_with_its_volume_while_a_pod_uses_it() {
    for (local, from) in [("", 64), (", fsType: xfs", 320)] {
        let device = LoopDevice::new(from);
        let capacity = |mib: u64| format!(", capacity: {{storage: {mib}Mi}}");
        let fixture = fixture(&device, local, &capacity(from));
        let running = fixture.run();
        let data = running.volume("data");
        let blocks = || nix::sys::statvfs::statvfs(&data).expect("its size").blocks();
        let before = blocks();
        device.grow(2 * from);
        write_volume(&fixture, &device, local, &capacity(2 * from));
        if local.is_empty() && !may_resize() {
            running.wait_log("cannot grow the file system of");
            assert!(running.log().contains("the volume keeps its size"), "{}", running.log());
        } else {
            eventually("the file system has grown", || blocks() > before + before / 2);
        }
        stop(running);
        fixture.assert_nothing_left();
    }
}

/// Whether the tests have CAP_SYS_RESOURCE, without which ext4 does not grow while it is mounted.
fn may_resize() -> bool {
    let status = fs::read_to_string("/proc/self/status").expect("a status");
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("capabilities");
    u64::from_str_radix(mask.trim(), 16).expect("a mask") & (1 << 24) != 0
}

#[test]
fn the_next_supervisor_waits_for_the_mkfs_of_a_killed_one() {
    let device = LoopDevice::new(64);
    let fixture = fixture(&device, "", "");
    let mut command = fixture.command();
    // The script goes on when the test creates the file `go`; the end of podfs does not end it.
    let script = "echo $$ >$here/started; until [ -e $here/go ]; do :; done; exec $real \"$@\"";
    wrap(&fixture, &mut command, "mkfs.ext4", script);
    let mut killed = fixture.start_command(command);
    eventually("mkfs runs", || fixture.path("started").exists());
    assert!(marker(&fixture).exists());
    fixture.kill_all();
    killed.wait();
    let mut next = fixture.start();
    // The next podfs has a server, but the volume waits for the lock, which mkfs still has.
    eventually("the next podfs serves the pod", || !next.servers().is_empty());
    assert!(!next.is_ready());
    fixture.write("go", "");
    next.wait_ready();
    assert!(
        next.log().contains("was formatted by a podfs that was killed, and its file system is whole"),
        "{}",
        next.log()
    );
    assert!(!marker(&fixture).exists());
    stop(next);
    fixture.assert_nothing_left();
}

#[test]
fn a_cleanup_does_not_wait_for_the_mkfs_of_another_pod() {
    let device = LoopDevice::new(64);
    let fixture = fixture(&device, "", "");
    let mut command = fixture.command();
    wrap(
        &fixture,
        &mut command,
        "mkfs.ext4",
        "echo >$here/started; until [ -e $here/go ]; do :; done; exec $real \"$@\"",
    );
    let mut running = fixture.start_command(command);
    eventually("mkfs runs", || fixture.path("started").exists());
    let run_files = fixture.run_files();
    let uid = run_files.file_name().expect("a uid").display();
    let outcome = fixture.cleanup(&[]);
    let sentence = format!("left {}: it is in use by pod {uid}: ", global_mount(&fixture).display());
    assert!(outcome.stdout.contains(&sentence), "{}", outcome.stdout);
    fixture.write("go", "");
    running.wait_ready();
    stop(running);
    fixture.assert_nothing_left();
}

#[test]
fn a_device_of_a_killed_mkfs_is_formatted_again_and_never_mounted() {
    for write in [
        // mkfs has written nothing yet.
        "",
        // mkfs has written tables, but no superblock.
        "for last in \"$@\"; do :; done; yes table | dd of=$last bs=4096 seek=1 count=64 conv=notrunc,fsync 2>/dev/null",
        // mkfs has written a superblock, but not the root directory.
        "for last in \"$@\"; do :; done; $real \"$@\" >/dev/null 2>&1; debugfs -w -R 'clri <2>' $last 2>/dev/null",
    ] {
        let device = LoopDevice::new(64);
        let fixture = fixture(&device, "", "");
        let mut command = fixture.command();
        let script = format!(
            "PATH=$PATH:/usr/sbin\n{write}\necho $$ >$here/.pid; mv $here/.pid $here/started; while :; do :; done"
        );
        wrap(&fixture, &mut command, "mkfs.ext4", &script);
        let mut killed = fixture.start_command(command);
        eventually("mkfs has written", || fixture.path("started").exists());
        let mkfs: i32 = fs::read_to_string(fixture.path("started")).expect("a pid").trim().parse().expect("a number");
        fixture.kill_all();
        killed.wait();
        kill(Pid::from_raw(mkfs), Signal::SIGKILL).expect("mkfs is killed");
        let next = fixture.run();
        fs::write(next.volume("data").join("file"), "1").expect("written");
        assert!(!marker(&fixture).exists());
        stop(next);
        fixture.assert_nothing_left();
        device.run("e2fsck", &["-n", "-f"]);
    }
}

#[test]
fn a_marker_of_another_device_lets_no_data_be_formatted_over() {
    let device = LoopDevice::new(64);
    device.run("mkfs.ext4", &["-q"]);
    let fixture = fixture(&device, "", "");
    fs::create_dir_all(marker(&fixture).parent().expect("a directory")).expect("created");
    let text = format!(r#"{{"device": "{}", "size": {}, "kind": "ext4", "uuid": "u-1"}}"#, device.text(), 64 << 20);
    fs::write(marker(&fixture), text).expect("written");
    let before = device.head()[1024 + 0x68..1024 + 0x78].to_vec();
    stop(fixture.run());
    assert_eq!(device.head()[1024 + 0x68..1024 + 0x78], before, "the UUID has not changed");
    assert!(!marker(&fixture).exists());
}

#[test]
fn a_device_that_stays_blank_when_mkfs_fails_is_not_formatted_over_once_it_has_data() {
    let device = LoopDevice::new(64);
    let fixture = fixture(&device, "", "");
    let mut command = fixture.command();
    wrap(&fixture, &mut command, "mkfs.ext4", "exit 1");
    let running = fixture.start_command(command);
    running.wait_log("mkfs.ext4 ended with code 1");
    stop(running);
    assert!(!marker(&fixture).exists());
    device.write(b"a database that writes to the device", 8192);
    let before = device.head();
    assert_refused(&fixture, "has no signature of a file system but is not blank");
    assert!(device.head() == before, "nothing was written");
}

#[test]
fn a_marker_of_another_disk_at_the_same_path_lets_no_data_be_formatted_over() {
    let device = LoopDevice::new(64);
    let fixture = fixture(&device, "", "");
    let mut command = fixture.command();
    // mkfs has written tables, but no superblock.
    let write =
        "for last in \"$@\"; do :; done; yes table | dd of=$last bs=4096 seek=1 count=64 conv=notrunc,fsync; exit 1";
    wrap(&fixture, &mut command, "mkfs.ext4", write);
    let running = fixture.start_command(command);
    running.wait_log("mkfs.ext4 ended with code 1");
    stop(running);
    let of_failed = fs::read_to_string(marker(&fixture)).expect("the format has not ended");
    device.exchange(64);
    device.write(b"a database that writes to the device", 8192);
    let before = device.head();
    // An earlier podfs wrote no identity of the disk.
    let of_earlier =
        format!(r#"{{"device": "{}", "size": {}, "kind": "ext4", "uuid": "u-1"}}"#, device.text(), 64 << 20);
    for (before_it, text) in [of_failed, of_earlier].into_iter().enumerate() {
        fs::create_dir_all(marker(&fixture).parent().expect("a directory")).expect("created");
        fs::write(marker(&fixture), text).expect("written");
        let running = fixture.start();
        let sentence = "podfs cannot tell whether it is the disk at this path that podfs began to format";
        running.wait_log_times(sentence, before_it + 1);
        stop(running);
        assert!(device.head() == before, "nothing was written");
    }
    device.write(&[0; 4096], 8192);
    stop(fixture.run());
    assert!(!marker(&fixture).exists());
}

#[test]
fn a_mount_of_killed_processes_is_taken_up_or_cleaned_up() {
    // RC-05
    let device = LoopDevice::new(64);
    let fixture = fixture(&device, "", "");
    let mut killed = fixture.run();
    fs::write(killed.volume("data").join("file"), "1").expect("written");
    fixture.kill_supervisor(&mut killed);
    let adopting = fixture.run();
    assert_eq!(fs::read_to_string(adopting.volume("data").join("file")).expect("served on"), "1");
    stop(adopting);
    fixture.assert_nothing_left();
    let mut killed = fixture.run();
    fixture.kill_both(&mut killed);
    assert!(fixture.mounts().iter().any(|at| at.ends_with("mounts/pv-1")));
    fixture.cleanup(&[]);
    fixture.assert_nothing_left();
    assert!(is_free(device.path()));
}

#[test]
fn podfs_node_mounts_a_device_once_for_its_pods_and_unmounts_it_after_the_last() {
    let device = LoopDevice::new(64);
    let node = Node::new();
    node.put("claim.yaml", &claim("data", ""));
    node.put("volume.yaml", &volume("data", &format!("local: {{path: {}}}", device.text())));
    let put_pod = |name: &str| {
        let pod = pod(DATA).replace("image: web}", "image: web, volumeMounts: [{name: data, mountPath: /data}]}");
        node.put(&format!("{name}.yaml"), &pod.replace("name: web,", &format!("name: {name},")));
    };
    put_pod("one");
    put_pod("two");
    let _daemon = node.start();
    for pod in ["default/one", "default/two"] {
        node.expect(&["wait", pod]);
    }
    fs::write(node.path("one", "data").join("file"), "1").expect("written");
    assert_eq!(fs::read_to_string(node.path("two", "data").join("file")).expect("shared"), "1");
    for (name, last) in [("one", false), ("two", true)] {
        let pod = format!("default/{name}");
        node.remove(&format!("{name}.yaml"));
        node.expect(&["release", &pod]);
        node.expect(&["wait", "--unmounted", &pod]);
        assert_eq!(is_free(device.path()), last, "{}", node.log());
    }
}

/// The number of system calls between the kills of two rounds.
const STRIDE: usize = 83;

#[test]
fn at_whichever_step_of_a_mount_podfs_is_killed_the_next_one_mounts_a_whole_file_system() {
    for kills in 0.. {
        let device = LoopDevice::new(16);
        let fixture = fixture(&device, "", "");
        let manifest = fs::read_to_string(fixture.path("objects/volume.yaml")).expect("a manifest");
        fixture.remove("objects/volume.yaml");
        let mut running = fixture.start();
        running.wait_log("persistentvolumes \"pv-1\" not found");
        let pid = running.pid();
        let is_mounted = || fixture.mounts().iter().any(|at| at.ends_with("volumes/kubernetes.io~local-volume/pv-1"));
        let ((), killed) = killed_at(pid, kills * STRIDE, || {
            fixture.write("objects/volume.yaml", &manifest);
            eventually("the volume is mounted, or podfs is killed", || is_mounted() || has_ended(pid));
        });
        if !killed {
            assert!(kills > 5, "too few kills: {kills}");
            running.wait_ready();
            stop(running);
            break;
        }
        running.was_reaped();
        fixture.kill_all();
        let next = fixture.run();
        fs::write(next.volume("data").join("file"), "1").expect("written");
        assert!(!marker(&fixture).exists());
        stop(next);
        fixture.assert_nothing_left();
        assert!(is_free(device.path()));
        device.run("e2fsck", &["-n", "-f"]);
    }
}

#[test]
fn at_whichever_step_of_an_unmount_podfs_is_killed_nothing_is_lost_or_left() {
    let device = LoopDevice::new(16);
    device.run("mkfs.ext4", &["-q"]);
    for kills in 0.. {
        let fixture = fixture(&device, "", "");
        let mut running = fixture.run();
        let file = running.volume("data").join("file");
        assert_eq!(file.exists(), kills > 0, "the file of the round before stays");
        fs::write(&file, "1").expect("written");
        let pid = running.pid();
        let ((), killed) = killed_at(pid, kills * STRIDE, || {
            running.signal(Signal::SIGTERM);
            eventually("podfs has ended", || has_ended(pid));
        });
        running.was_reaped();
        fixture.kill_all();
        // In half of the rounds, the next podfs of the pod unmounts the volume; in the others, a cleanup does.
        if killed && kills % 2 == 0 {
            stop(fixture.run());
        } else if killed {
            fixture.cleanup(&[]);
        }
        // A supervisor that is killed between its last two steps leaves an empty run directory, because it has already removed
        // the record that it has made this directory.
        let _ = fs::remove_dir(fixture.path("run"));
        fixture.assert_nothing_left();
        assert!(is_free(device.path()));
        if !killed {
            assert!(kills > 2, "too few kills: {kills}");
            break;
        }
    }
    device.run("e2fsck", &["-n", "-f"]);
}

/// Whether a process has ended. It may still be a zombie.
pub fn has_ended(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with(['Z', 'X']))
}

/// Whether no file system of the device is mounted.
pub fn is_free(device: &Path) -> bool {
    use std::os::unix::fs::OpenOptionsExt;
    fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device).is_ok()
}

#[test]
fn podfs_mount_says_that_a_device_needs_podfs_run() {
    let device = LoopDevice::new(64);
    let fixture = fixture(&device, "", "");
    fixture.write("volume.yaml", "{name: data, persistentVolumeClaim: {claimName: data}}");
    let mut command = Command::new(PODFS);
    command.arg("mount").arg("--volume").arg(fixture.path("volume.yaml")).arg(fixture.path("at"));
    command.arg("--objects").arg(fixture.objects()).stdin(Stdio::null());
    let mut running = fixture.spawn(&mut command);
    running.wait_log("podfs mount has none, so serve the volume with podfs run");
    running.signal(Signal::SIGINT);
    running.wait();
}
