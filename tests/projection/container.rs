//! A volume in a container: it is bind-mounted in the container's mount namespace. The root directory of podfs may be a
//! shared mount.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, umount2};
use podfs_fuse::mount::table::{FS_TYPE, MountTableEntry, mounts};
use tempfile::TempDir;

use crate::common::namespace::{Container, Propagation, bind, change_mount, mount_tmpfs};
use crate::common::tree::{files, parse};
use crate::common::watch::Watcher;
use crate::common::{Fixture, Running, config_map, config_pod, pod, wait_content};

/// A container with a volume, which is bind-mounted at a directory. Outside of the container, this directory is empty.
struct VolumeInContainer {
    container: Container,
    mount_point: TempDir,
}

impl VolumeInContainer {
    fn new(volume: &Path) -> Self {
        let contained =
            Self { container: Container::new(Propagation::Private), mount_point: TempDir::new().expect("a directory") };
        let volume = volume.to_owned();
        contained.run(move |mount_point| bind(&volume, mount_point));
        contained
    }

    /// Calls `act` in the container, with the path of the volume there.
    fn run<T: Send + 'static>(&self, act: impl FnOnce(&Path) -> T + Send + 'static) -> T {
        let mount_point = self.mount_point.path().to_owned();
        self.container.run(move || act(&mount_point))
    }

    fn files(&self) -> crate::common::tree::Files {
        self.run(files)
    }
}

fn write(fixture: &Fixture, data: &[(&str, &str)]) {
    fixture.write("objects/app.yaml", &config_map("app", data));
}

#[test]
fn a_container_sees_content_updates_and_events() {
    // EV-07, EV-08, AW-01, FU-12, with `podfs run`.
    let fixture = Fixture::new(&config_pod());
    write(&fixture, &[("a", "1"), ("b", "1")]);
    let running = fixture.run();
    let volume = running.volume("config");
    let contained = VolumeInContainer::new(&volume);
    assert_eq!(contained.files(), parse("a=1; b=1"));
    let watcher = contained.run(|mount_point| Watcher::on("root", mount_point));
    write(&fixture, &[("a", "2"), ("c", "2")]);
    let events = contained.run(move |_| watcher.events_until_removal("root"));
    assert_eq!(contained.files(), parse("a=2; c=2"));
    let moved = events.iter().filter(|event| *event == "root MOVED_TO ..data").count();
    assert_eq!(moved, 1, "{events:?}");
    assert!(events.contains(&"root CREATE c".to_owned()), "{events:?}");
}

#[test]
fn a_container_cannot_write() {
    // MT-03, FU-13: the bind mount is read-only as the volume.
    let fixture = Fixture::new(&config_pod());
    write(&fixture, &[("a", "1")]);
    let running = fixture.run();
    let contained = VolumeInContainer::new(&running.volume("config"));
    let refused = contained.run(|mount_point| {
        let results = [
            fs::write(mount_point.join("a"), "2"),
            File::create_new(mount_point.join("new")).map(drop),
            fs::remove_file(mount_point.join("a")),
            fs::create_dir(mount_point.join("new")),
            symlink("a", mount_point.join("new")),
        ];
        results.map(|result| result.expect_err("the volume is read-only").raw_os_error())
    });
    assert_eq!(refused, [Some(libc::EROFS); 5]);
    assert_eq!(contained.files(), parse("a=1"));
}

#[test]
fn a_script_runs_from_the_volume() {
    // CM-03: init scripts and probes are often kept in a configMap with mode 0755.
    let volumes = "[{name: config, configMap: {name: app, defaultMode: 0755}}]";
    let fixture = Fixture::new(&pod(volumes));
    write(&fixture, &[("run.sh", "#!/bin/sh\necho \"one $1\"\nexit 7\n")]);
    let running = fixture.run();
    let contained = VolumeInContainer::new(&running.volume("config"));
    let run = |mount_point: &Path| {
        let output = Command::new(mount_point.join("run.sh")).arg("argument").output().expect("the script runs");
        (output.status.code(), String::from_utf8(output.stdout).expect("text"))
    };
    assert_eq!(contained.run(run), (Some(7), "one argument\n".to_owned()));
    write(&fixture, &[("run.sh", "#!/bin/sh\necho two\n")]);
    contained.run(|mount_point| wait_content(&mount_point.join("run.sh"), "#!/bin/sh\necho two\n"));
    assert_eq!(contained.run(run), (Some(0), "two\n".to_owned()));
}

#[test]
fn a_program_runs_from_the_volume() {
    // CM-01: binaryData may contain a program. The kernel maps it, and the program runs on after an update.
    let fixture = Fixture::new(&pod("[{name: config, configMap: {name: app, defaultMode: 0755}}]"));
    let sleep = base64(&fs::read("/bin/sleep").expect("a program"));
    let object = |text: &str| {
        let data = serde_json::json!({"text": text});
        let object = serde_json::json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "app"},
            "data": data, "binaryData": {"sleep": sleep},
        });
        fixture.write("objects/app.yaml", &object.to_string());
    };
    object("1");
    let running = fixture.run();
    let volume = running.volume("config");
    let mut child = Command::new(volume.join("sleep")).arg("1000").spawn().expect("the program starts");
    object("2");
    wait_content(&volume.join("text"), "2");
    let status = child.try_wait().expect("a child");
    child.kill().expect("killed");
    child.wait().expect("the program ends");
    assert_eq!(status, None, "the program runs on");
}

fn base64(bytes: &[u8]) -> String {
    let mut command = Command::new("base64");
    let mut input = tempfile::tempfile().expect("a file");
    std::io::Write::write_all(&mut input, bytes).expect("written");
    std::io::Seek::rewind(&mut input).expect("rewound");
    let output = command.arg("--wrap=0").stdin(input).output().expect("base64 runs");
    String::from_utf8(output.stdout).expect("text")
}

/// The podfs mounts below a directory, in the caller's mount namespace.
fn volumes_below(directory: &Path) -> Vec<PathBuf> {
    let mounts = mounts().expect("a mount table").into_iter();
    let is_volume = |mount: &MountTableEntry| mount.fs_type == FS_TYPE && mount.at.starts_with(directory);
    mounts.filter(is_volume).map(|mount| mount.at).collect()
}

/// A pod whose root directory is a shared mount, as the kubelet makes its root directory, and a container that gets new
/// mounts of the host.
fn shared_root() -> (Fixture, Container) {
    let fixture = Fixture::new(&config_pod());
    write(&fixture, &[("a", "1")]);
    let root = fixture.path("root");
    fs::create_dir(&root).expect("a directory");
    mount_tmpfs(&root);
    change_mount(&root, MsFlags::MS_SHARED | MsFlags::MS_REC);
    (fixture, Container::new(Propagation::FromHost))
}

#[test]
fn a_volume_mounted_later_appears_in_a_container_and_goes_with_podfs() {
    // FU-12: the container is older than the volume.
    let (fixture, container) = shared_root();
    let root = fixture.path("root");
    let volumes_inside = |container: &Container| {
        let root = root.clone();
        container.run(move || volumes_below(&root))
    };
    assert_eq!(volumes_inside(&container), Vec::<PathBuf>::new());
    let mut running = fixture.run();
    let volume = running.volume("config");
    assert_eq!(volumes_inside(&container), std::slice::from_ref(&volume));
    let refused = container.run({
        let volume = volume.clone();
        move || (files(&volume), fs::write(volume.join("a"), "2").map_err(|error| error.raw_os_error()))
    });
    assert_eq!(refused, (parse("a=1"), Err(Some(libc::EROFS))), "the propagated mount is read-only");
    write(&fixture, &[("a", "2")]);
    container.run(move || wait_content(&volume.join("a"), "2"));
    assert!(running.stop().success());
    assert_eq!(volumes_inside(&container), Vec::<PathBuf>::new());
    assert_eq!(fs::read_dir(&root).expect("a directory").count(), 0, "podfs has removed its directories");
}

#[test]
fn open_files_of_a_container_do_not_keep_podfs_from_stopping() {
    // FU-10: podfs unmounts lazily. A process that still uses the volume gets an error afterwards, and never hangs.
    let (fixture, container) = shared_root();
    let mut running: Running = fixture.run();
    let volume = running.volume("config");
    let file =
        container.run(move || std::env::current_dir().and_then(|_| File::open(volume.join("a"))).expect("a file"));
    assert!(running.stop().success());
    let root = fixture.path("root");
    assert_eq!(container.run(move || volumes_below(&root)), Vec::<PathBuf>::new());
    assert_eq!(volumes_below(&fixture.path("root")), Vec::<PathBuf>::new());
    drop(file);
    umount2(&fixture.path("root"), MntFlags::MNT_DETACH).expect("the root directory is free");
}
