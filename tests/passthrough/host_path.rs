//! hostPath volumes: podfs finds, checks and creates the source, and serves it through FUSE or bind-mounts it.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::outcome::finish;
use crate::common::*;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::signal::Signal;
use tempfile::TempDir;

/// A pod with these volumes and annotations.
fn annotated(annotations: &str, volumes: &str) -> String {
    pod(volumes).replace("labels: {app: web}", &format!("annotations: {{{annotations}}}"))
}

/// A pod with one volume `host`, and the volume's source: the directory `source` of the fixture.
fn fixture(annotations: &str, kind: &str) -> (Fixture, PathBuf) {
    let fixture = Fixture::new("");
    let source = fixture.path("source");
    fs::create_dir(&source).expect("a directory");
    fixture.write("pod.yaml", &annotated(annotations, &format!("[{}]", host("host", &source, kind))));
    (fixture, source)
}

fn host(name: &str, path: &Path, kind: &str) -> String {
    format!("{{name: {name}, hostPath: {{path: {}, type: '{kind}'}}}}", path.display())
}

const BIND: &str = "podfs.io/host-path.host: bind";

fn mode(running: &Running, name: &str) -> String {
    let volumes = running.json()["volumes"].as_array().expect("volumes");
    let volume = volumes.iter().find(|volume| volume["name"] == name).expect("a volume of this name");
    volume["mode"].as_str().expect("a mode").to_owned()
}

#[track_caller]
fn assert_stops_clean(mut running: Running, fixture: &Fixture) {
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn a_directory_is_shown_at_the_kubelets_path_and_changes_go_both_ways() {
    // FU-11, HP-10
    let (fixture, source) = fixture("", "Directory");
    fs::write(source.join("from-host"), "1").expect("written");
    let running = fixture.run();
    let volume = running.volume("host");
    assert!(volume.ends_with("volumes/kubernetes.io~host-path/host"), "{}", volume.display());
    assert!(["passthrough", "read-write"].contains(&mode(&running, "host").as_str()));
    assert_eq!(fs::read_to_string(volume.join("from-host")).expect("shown"), "1");
    fs::write(volume.join("from-pod"), "2").expect("written");
    assert_eq!(fs::read_to_string(source.join("from-pod")).expect("there"), "2");
    assert_stops_clean(running, &fixture);
    assert!(source.join("from-host").exists() && source.join("from-pod").exists());
}

#[test]
fn a_file_is_shown_as_a_file() {
    for annotations in ["", BIND] {
        let (fixture, source) = fixture(annotations, "FileOrCreate");
        fs::remove_dir(&source).expect("removed");
        let running = fixture.run();
        let volume = running.volume("host");
        assert!(fs::symlink_metadata(&volume).expect("shown").is_file());
        fs::write(&volume, "from the pod").expect("written");
        assert_eq!(fs::read_to_string(&source).expect("there"), "from the pod");
        assert_stops_clean(running, &fixture);
        assert_eq!(fs::read_to_string(&source).expect("it stays"), "from the pod");
    }
}

#[test]
fn the_types_with_or_create_make_a_missing_source() {
    // HP-02, HP-03
    let fixture = Fixture::new("");
    let (directory, file) = (fixture.path("made/deep"), fixture.path("file"));
    let volumes = [host("a", &directory, "DirectoryOrCreate"), host("b", &file, "FileOrCreate")];
    let annotations = "podfs.io/host-path.a: bind, podfs.io/host-path.b: bind";
    fixture.write("pod.yaml", &annotated(annotations, &format!("[{}]", volumes.join(", "))));
    let mut command = fixture.command();
    // SAFETY: the call is async-signal-safe.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut command, || {
            libc::umask(0o022);
            Ok(())
        });
    }
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let mode_and_owner = |path: &Path| {
        let metadata = fs::metadata(path).expect("created");
        (metadata.mode() & 0o7777, metadata.uid(), metadata.gid())
    };
    assert_eq!((mode_and_owner(&directory), mode_and_owner(&file)), ((0o755, 0, 0), (0o644, 0, 0)));
    assert_stops_clean(running, &fixture);
    assert!(directory.exists() && file.exists(), "podfs does not remove the sources that it has created");
}

#[test]
fn a_source_of_the_wrong_type_is_reported_in_the_kubelets_words_and_delays_no_other_volume() {
    // HP-03, HP-04, VM-10
    let fixture = Fixture::new("");
    let base = fixture.path("sources");
    fs::create_dir(&base).expect("a directory");
    fs::write(base.join("file"), "").expect("a file");
    symlink("nowhere", base.join("dangling")).expect("a link");
    symlink("loop", base.join("loop")).expect("a link");
    let failed = "hostPath type check failed: ";
    let rows = [
        ("file", "Directory", failed, " is not a directory"),
        ("file", "DirectoryOrCreate", failed, " is not a directory"),
        ("", "File", failed, " is not a file"),
        ("file", "Socket", failed, " is not a socket file"),
        ("file", "CharDevice", failed, " is not a character device"),
        ("file", "BlockDevice", failed, " is not a block device"),
        ("missing", "Directory", failed, " is not a directory: it does not exist"),
        ("missing", "", "hostPath ", " cannot be used: it does not exist; make it, or give the volume the type"),
        ("no/parent", "FileOrCreate", "cannot make the file ", ": its directory does not exist"),
        ("dangling", "", "hostPath ", " cannot be used: it is a symbolic link that leads to nothing"),
        ("dangling", "DirectoryOrCreate", failed, " is not a directory: it is a symbolic link that leads to nothing"),
        ("loop", "", "hostPath ", " cannot be used: its symbolic links lead in a circle"),
        ("file/below", "", "hostPath ", " cannot be used: a part of the path is not a directory"),
    ];
    let path = |name: &str| if name.is_empty() { base.clone() } else { base.join(name) };
    let volumes =
        rows.iter().enumerate().map(|(index, (name, kind, ..))| host(&format!("v{index}"), &path(name), kind));
    let volumes: Vec<_> = volumes.chain(["{name: config, configMap: {name: app}}".to_owned()]).collect();
    fixture.write("pod.yaml", &pod(&format!("[{}]", volumes.join(", "))));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let mut running = fixture.start();
    for (index, (name, _, before, after)) in rows.iter().enumerate() {
        let reason = format!("{before}{}{after}", path(name).display());
        running.wait_log(&format!("MountVolume.SetUp failed for volume \"v{index}\" : {reason}"));
    }
    eventually("the other volume is up", || fixture.mounts().len() == 1);
    assert!(!running.is_ready());
    assert!(!base.join("missing").exists() && !base.join("nowhere").exists(), "HP-01: nothing was made");
    assert_stops_clean(running, &fixture);
}

#[test]
fn a_volume_comes_up_when_its_source_appears() {
    let (fixture, source) = fixture(BIND, "Directory");
    fs::remove_dir(&source).expect("removed");
    let mut running = fixture.start();
    running.wait_log("is not a directory: it does not exist");
    assert!(!running.is_ready());
    fs::create_dir(&source).expect("a directory");
    running.wait_ready();
    assert_eq!(fixture.mounts(), [running.volume("host")]);
    assert_stops_clean(running, &fixture);
}

#[test]
fn a_socket_works_through_its_volume() {
    let (fixture, source) = fixture("", "Socket");
    fs::remove_dir(&source).expect("removed");
    let listener = UnixListener::bind(&source).expect("a socket");
    let running = fixture.run();
    assert_eq!(mode(&running, "host"), "bind");
    let volume = running.volume("host");
    assert!(fs::symlink_metadata(&volume).expect("shown").file_type().is_socket());
    let mut client = UnixStream::connect(&volume).expect("connected through the volume");
    client.write_all(b"hello").expect("sent");
    drop(client);
    let mut received = String::new();
    listener.accept().expect("a client").0.read_to_string(&mut received).expect("received");
    assert_eq!(received, "hello");
    assert_stops_clean(running, &fixture);
    assert!(source.exists());
}

#[test]
fn a_socket_met_through_fuse_is_warned_of_once_with_the_way_out() {
    let (fixture, source) = fixture("", "Directory");
    let running = fixture.run();
    // A directory that has a socket before gets a bind mount.
    let _listeners = ["first", "second"].map(|name| UnixListener::bind(source.join(name)).expect("a socket"));
    let volume = running.volume("host");
    // A socket that the pod itself creates in the volume works, and podfs does not warn of it. The path of a socket
    // must be short, so it goes through `/proc/self/fd`.
    let directory = fs::File::open(&volume).expect("the volume");
    let own = PathBuf::from(format!("/proc/self/fd/{}/own", directory.as_raw_fd()));
    let _own = UnixListener::bind(&own).expect("a socket");
    UnixStream::connect(&own).expect("connected through the volume");
    let advice = "to reach it, give the pod the annotation podfs.io/host-path.host: bind";
    assert!(!running.log().contains(advice), "{}", running.log());
    for name in ["first", "second"] {
        assert!(fs::symlink_metadata(volume.join(name)).expect("the volume shows it").file_type().is_socket());
    }
    running.wait_log(advice);
    assert_eq!(running.log().matches(advice).count(), 1, "{}", running.log());
    assert_stops_clean(running, &fixture);
}

#[test]
fn sockets_cross_both_ways_in_a_directory_that_has_one_and_in_those_of_a_kubelet() {
    let reason = |fixture: &Fixture| {
        let status = finish(fixture.operator("status").args(["--output", "json"]));
        let status: serde_json::Value = serde_json::from_str(&status.stdout).expect("JSON");
        let volume = &status["pods"][0]["volumes"][0];
        (volume["mode"].as_str().expect("a mode").to_owned(), volume["modeReason"].as_str().map(str::to_owned))
    };
    let bound = |reason: &str| ("bind".to_owned(), Some(reason.to_owned()));
    let of_kubelet = "the source is a directory in which plugins of a kubelet have sockets";
    for (below, has_socket, expected) in [
        ("any", true, bound("the source had a socket or FIFO at its mount")),
        ("kubelet/plugins_registry", false, bound(of_kubelet)),
        ("kubelet/device-plugins", false, bound(of_kubelet)),
    ] {
        let base = TempDir::with_prefix_in("podfs-s", "/var/tmp").expect("a directory");
        let source = base.path().join(below);
        fs::create_dir_all(&source).expect("a directory");
        let fixture = Fixture::new(&pod(&format!("[{}]", host("host", &source, "Directory"))));
        let old = has_socket.then(|| UnixListener::bind(source.join("old")).expect("a socket"));
        let running = fixture.run();
        assert_eq!(reason(&fixture), expected, "{below}");
        let directory = fs::File::open(running.volume("host")).expect("the volume");
        let of_pod = |name: &str| PathBuf::from(format!("/proc/self/fd/{}/{name}", directory.as_raw_fd()));
        if let Some(old) = old {
            UnixStream::connect(of_pod("old")).expect("the pod reaches the daemon of the host");
            drop(old);
        }
        let _plugin = UnixListener::bind(of_pod("plugin")).expect("a socket");
        UnixStream::connect(source.join("plugin")).expect("the host reaches the plugin in the pod");
        let status = finish(&mut fixture.operator("status"));
        assert!(status.stdout.contains(&format!("bind: {}", expected.1.expect("a reason"))), "{}", status.stdout);
        drop(directory);
        assert_stops_clean(running, &fixture);
    }
    let (fixture, source) = fixture("podfs.io/host-path.host: fuse", "Directory");
    let _socket = UnixListener::bind(source.join("socket")).expect("a socket");
    let running = fixture.run();
    assert_ne!(mode(&running, "host"), "bind", "the annotation overrules");
    assert_stops_clean(running, &fixture);
}

#[test]
fn devices_and_live_directories_are_bound() {
    let run = TempDir::with_prefix_in("podfs-test-", "/run").expect("a directory");
    let volumes = [
        host("device", Path::new("/dev/null"), "CharDevice"),
        host("dev", Path::new("/dev"), "Directory"),
        host("proc", Path::new("/proc/sys"), ""),
        host("sys", Path::new("/sys"), ""),
        host("run", run.path(), ""),
        host("var-run", &Path::new("/var/run").join(run.path().file_name().expect("a name")), "Directory"),
        host("all", Path::new("/"), "Directory"),
    ];
    let fixture = Fixture::new(&pod(&format!("[{}]", volumes.join(", "))));
    let running = fixture.run();
    for name in ["device", "dev", "proc", "sys", "run", "var-run", "all"] {
        assert_eq!(mode(&running, name), "bind", "{name}");
    }
    fs::write(running.volume("device"), "gone").expect("written");
    assert!(running.volume("dev").join("null").metadata().expect("there").file_type().is_char_device());
    assert!(running.volume("proc").join("kernel").is_dir());
    assert!(running.volume("all").join("dev/null").exists(), "HP-09: mounts below the source come along");
    assert_stops_clean(running, &fixture);
}

#[test]
fn mounts_below_a_bound_source_are_shown() {
    // HP-09
    let (fixture, source) = fixture(BIND, "Directory");
    let below = source.join("below");
    fs::create_dir(&below).expect("a directory");
    mount(Some("tmpfs"), &below, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a tmpfs");
    fs::write(below.join("file"), "").expect("written");
    let mut running = fixture.run();
    assert!(running.volume("host").join("below/file").exists());
    assert_eq!(running.stop().code(), Some(0));
    assert_eq!(fixture.mounts(), [below], "the user's own mount stays");
}

#[test]
fn annotations_choose_the_server_and_fuse_is_refused_where_it_cannot_work() {
    let (fixture, _) = fixture(BIND, "Directory");
    let running = fixture.run();
    assert_eq!(mode(&running, "host"), "bind");
    assert_stops_clean(running, &fixture);

    let volume = format!("[{}]", host("host", Path::new("/dev/null"), "CharDevice"));
    fixture.write("pod.yaml", &annotated("podfs.io/host-path.host: fuse", &volume));
    let mut running = fixture.start();
    running.wait_log("a socket, FIFO or device cannot be served through FUSE; set the annotation");
    assert!(!running.is_ready());
    assert_stops_clean(running, &fixture);
}

#[test]
fn annotations_that_make_no_sense_are_refused() {
    for (annotation, sentence) in [
        ("podfs.io/host-path.host: both", "podfs.io/host-path.host]: must be fuse or bind"),
        ("podfs.io/cache.host: often", "podfs.io/cache.host]: must be none, auto or always"),
        ("podfs.io/cache.hots: none", "podfs.io/cache.hots]: the pod has no volume \"hots\""),
    ] {
        let (fixture, _) = fixture(annotation, "");
        let outcome = fixture.refused(&mut fixture.command());
        outcome.says(2, &["/pod.yaml: metadata.annotations[", sentence]);
        fixture.assert_nothing_left();
    }
}

#[test]
fn paths_and_types_that_the_kubelet_refuses_are_refused() {
    // HP-06
    for (source, field, sentence) in [
        ("path: /srv/../etc", "path", "invalid HostPath `/srv/../etc`: must not contain '..'"),
        ("path: srv", "path", "must be absolute"),
        ("path: ''", "path", "is required"),
        ("path: /srv, type: Folder", "type", "Folder is an invalid volume type"),
    ] {
        let fixture = Fixture::new(&pod(&format!("[{{name: host, hostPath: {{{source}}}}}]")));
        let outcome = fixture.refused(&mut fixture.command());
        outcome.says(2, &[&format!("spec.volumes[0].hostPath.{field}: volume \"host\": {sentence}")]);
        fixture.assert_nothing_left();
    }
}

#[test]
fn the_pods_group_gets_nothing_of_the_host() {
    // HP-07
    let (fixture, source) = fixture(BIND, "Directory");
    fs::write(source.join("file"), "").expect("written");
    let manifest = fs::read_to_string(fixture.pod()).expect("a manifest");
    fixture.write("pod.yaml", &manifest.replace("spec:\n", "spec:\n  securityContext: {fsGroup: 4711}\n"));
    let running = fixture.run();
    assert_eq!(fs::metadata(source.join("file")).expect("there").gid(), 0);
    assert_stops_clean(running, &fixture);
}

#[test]
fn a_bind_mount_of_a_killed_podfs_stays_also_if_the_root_directory_is_a_link() {
    let (fixture, _) = fixture(BIND, "");
    fs::create_dir(fixture.path("real")).expect("a directory");
    symlink("real", fixture.path("root")).expect("a link");
    let mut killed = fixture.run();
    fixture.kill_all();
    killed.wait();
    let before = fixture.mounts();
    assert_eq!(before.len(), 1);
    let mut running = fixture.run();
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    assert!(!running.log().contains("volume is unmounted; the pod goes on without it"), "{}", running.log());
    assert!(fixture.mounts().is_empty() && fs::read_dir(fixture.path("root")).expect("a listing").next().is_none());
}

#[test]
fn bind_mounts_of_a_killed_podfs_stay_and_are_the_next_ones() {
    // RC-01
    let (fixture, source) = fixture(BIND, "");
    fs::write(source.join("kept"), "content").expect("written");
    let mut killed = fixture.run();
    let inside = fs::File::open(killed.volume("host")).expect("a directory");
    let file = |running: &Running| {
        let path = running.volume("host").join("kept");
        let metadata = fs::metadata(&path).expect("attributes");
        (metadata.dev(), metadata.ino(), fs::read_to_string(&path).expect("content"))
    };
    let before = file(&killed);
    fixture.kill_all();
    killed.wait();
    assert_eq!(fixture.mounts().len(), 1, "the bind mount is still there");
    let running = fixture.run();
    assert_eq!(file(&running), before, "the same device, inode and content");
    fs::write(source.join("file"), "1").expect("written");
    assert_eq!(fs::read_to_string(running.volume("host").join("file")).expect("shown"), "1");
    assert_eq!(fixture.mounts().len(), 1);
    let mount =
        |file: &fs::File| rustix::fs::statx(file, "", rustix::fs::AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::MNT_ID);
    let now = fs::File::open(running.volume("host")).expect("a directory");
    assert_eq!(
        mount(&now).expect("an id").stx_mnt_id,
        mount(&inside).expect("an id").stx_mnt_id,
        "the next podfs uses the same mount"
    );
    drop((inside, now));
    assert_stops_clean(running, &fixture);
}

#[test]
fn a_source_removed_while_mounted_gives_an_error_and_no_hang() {
    let (fixture, source) = fixture("", "Directory");
    fs::write(source.join("file"), "1").expect("written");
    let running = fixture.run();
    let volume = running.volume("host");
    fs::remove_dir_all(&source).expect("removed");
    let error = fs::write(volume.join("new"), "2").expect_err("the directory is gone");
    let errno = error.raw_os_error().map(Errno::from_raw);
    assert!(matches!(errno, Some(Errno::ENOENT | Errno::ESTALE)), "{error}");
    assert_stops_clean(running, &fixture);
}

/// `podfs mount` of this volume at `at`.
fn mount_command(fixture: &Fixture, volume: &str) -> Command {
    fixture.write("volume.yaml", volume);
    let mut command = Command::new(PODFS);
    command.arg("mount").arg("--volume").arg(fixture.path("volume.yaml")).arg(fixture.path("at")).stdin(Stdio::null());
    command
}

#[test]
fn podfs_mount_shows_a_directory_or_file_of_the_host() {
    for (source, cache, shown, content) in [("directory", "none", "at/a", "1"), ("file", "always", "at", "2")] {
        let fixture = Fixture::new("");
        fs::create_dir(fixture.path("directory")).expect("a directory");
        fs::write(fixture.path("directory/a"), "1").expect("written");
        fs::write(fixture.path("file"), "2").expect("written");
        let source = fixture.path(source);
        let mut command = mount_command(&fixture, &host("host", &source, ""));
        let mut running = fixture.spawn(command.args(["--cache", cache]));
        running.wait_log("is ready");
        assert_eq!(fs::read_to_string(fixture.path(shown)).expect("shown"), content);
        running.signal(Signal::SIGINT);
        assert_eq!(running.wait().code(), Some(0), "{}", running.log());
        assert!(!fixture.path("at").exists(), "podfs removes the mount point that it has created");
        assert!(source.exists());
    }
}

#[test]
fn podfs_mount_refuses_a_cache_where_there_is_no_choice() {
    let fixture = Fixture::new("");
    let mut command = mount_command(&fixture, "{name: config, configMap: {name: app, optional: true}}");
    let outcome = fixture.refused(command.args(["--cache", "none"]));
    outcome.says(2, &["--cache is for directories of the host; configMap volumes are cached for ever"]);
}

#[test]
fn a_volume_names_its_taken_mount_point_and_waits() {
    let (fixture, _) = fixture(BIND, "");
    let running = fixture.run();
    let mount_point = running.volume("host");
    assert_stops_clean(running, &fixture);
    fs::create_dir_all(&mount_point).expect("a directory");
    fs::write(mount_point.join("foreign"), "").expect("a file");
    let mut running = fixture.start();
    running.wait_log("is not empty; a volume would hide its content");
    fs::remove_file(mount_point.join("foreign")).expect("removed");
    running.wait_ready();
    assert_eq!(running.stop().code(), Some(0));
    let metadata = fs::metadata(&mount_point).expect("podfs does not remove an existing mount point");
    assert_eq!(metadata.permissions().mode() & 0o777, 0o755);
}
