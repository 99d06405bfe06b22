//! A volume as a container sees it: bind-mounted into a mount namespace of its own, below a root directory
//! that may be shared.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, umount2};
use podfs_fuse::mount::table::{FS_TYPE, mounts};
use tempfile::TempDir;

use crate::common::namespace::{Container, Propagation, bind, change_mount, mount_tmpfs};
use crate::common::tree::{files, parse};
use crate::common::watch::Watcher;
use crate::common::{Fixture, Running, config_map, config_pod, pod, wait_content};

/// A container with a volume at a directory that is empty outside of it.
struct Contained {
    container: Container,
    place: TempDir,
}

impl Contained {
    fn new(volume: &Path) -> Self {
        let contained =
            Self { container: Container::new(Propagation::Private), place: TempDir::new().expect("a directory") };
        let volume = volume.to_owned();
        contained.run(move |place| bind(&volume, place));
        contained
    }

    fn run<T: Send + 'static>(&self, inside: impl FnOnce(&Path) -> T + Send + 'static) -> T {
        let place = self.place.path().to_owned();
        self.container.run(move || inside(&place))
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
    // EV-07, EV-08, AW-01, FU-12: all of it through `podfs run`.
    let fixture = Fixture::new(&config_pod());
    write(&fixture, &[("a", "1"), ("b", "1")]);
    let running = fixture.run();
    let volume = running.volume("config");
    let contained = Contained::new(&volume);
    assert_eq!(contained.files(), parse("a=1; b=1"));
    let watcher = contained.run(|place| Watcher::on("root", place));
    write(&fixture, &[("a", "2"), ("c", "2")]);
    let heard = contained.run(move |_| watcher.heard_until_removal("root"));
    assert_eq!(contained.files(), parse("a=2; c=2"));
    let moved = heard.iter().filter(|event| *event == "root MOVED_TO ..data").count();
    assert_eq!(moved, 1, "{heard:?}");
    assert!(heard.contains(&"root CREATE c".to_owned()), "{heard:?}");
}

#[test]
fn a_container_cannot_write() {
    // MT-03, FU-13: the bind mount inherits that the volume is read-only.
    let fixture = Fixture::new(&config_pod());
    write(&fixture, &[("a", "1")]);
    let running = fixture.run();
    let contained = Contained::new(&running.volume("config"));
    let refused = contained.run(|place| {
        let results = [
            fs::write(place.join("a"), "2"),
            File::create_new(place.join("new")).map(drop),
            fs::remove_file(place.join("a")),
            fs::create_dir(place.join("new")),
            symlink("a", place.join("new")),
        ];
        results.map(|result| result.expect_err("it is read-only").raw_os_error())
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
    let contained = Contained::new(&running.volume("config"));
    let run = |place: &Path| {
        let output = Command::new(place.join("run.sh")).arg("argument").output().expect("it runs");
        (output.status.code(), String::from_utf8(output.stdout).expect("text"))
    };
    assert_eq!(contained.run(run), (Some(7), "one argument\n".to_owned()));
    write(&fixture, &[("run.sh", "#!/bin/sh\necho two\n")]);
    contained.run(|place| wait_content(&place.join("run.sh"), "#!/bin/sh\necho two\n"));
    assert_eq!(contained.run(run), (Some(0), "two\n".to_owned()));
}

#[test]
fn a_program_runs_from_the_volume() {
    // CM-01: binaryData may hold a program; it is mapped, and keeps running over an update.
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
    let mut child = Command::new(volume.join("sleep")).arg("1000").spawn().expect("it runs");
    object("2");
    wait_content(&volume.join("text"), "2");
    let still = child.try_wait().expect("a child");
    child.kill().expect("it is there");
    child.wait().expect("it ends");
    assert_eq!(still, None, "it did not notice");
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
    mounts.filter(|mounted| mounted.fs_type == FS_TYPE && mounted.at.starts_with(directory)).map(|it| it.at).collect()
}

/// A pod whose root directory is a file system that the host shares with its containers, as the
/// kubelet makes its own.
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
    let inside = |container: &Container| {
        let root = root.clone();
        container.run(move || volumes_below(&root))
    };
    assert_eq!(inside(&container), Vec::<PathBuf>::new());
    let mut running = fixture.run();
    let volume = running.volume("config");
    assert_eq!(inside(&container), std::slice::from_ref(&volume));
    let refused = container.run({
        let volume = volume.clone();
        move || (files(&volume), fs::write(volume.join("a"), "2").map_err(|error| error.raw_os_error()))
    });
    assert_eq!(refused, (parse("a=1"), Err(Some(libc::EROFS))), "it came there read-only");
    write(&fixture, &[("a", "2")]);
    container.run(move || wait_content(&volume.join("a"), "2"));
    assert!(running.stop().success());
    assert_eq!(inside(&container), Vec::<PathBuf>::new());
    assert_eq!(fs::read_dir(&root).expect("a directory").count(), 0, "podfs took its directories back");
}

#[test]
fn open_files_of_a_container_do_not_keep_podfs_from_stopping() {
    // FU-10: podfs unmounts lazily; a process inside gets an error in the end, and never hangs.
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
