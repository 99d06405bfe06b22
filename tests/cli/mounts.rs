//! `podfs mounts`: preparing the mounts of a container, and removing them.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use podfs_fuse::mount::table::mounts_at;
use serde_json::Value;

use crate::common::namespace::mount_tmpfs;
use crate::common::outcome::{Outcome, finish};
use crate::common::passthrough::disk_directory;
use crate::common::stoppable::Stoppable;
use crate::common::*;
use tempfile::TempDir;

const UID: &str = "0b5b0a3e-4f7e-4a06-a3ba-6a0f5d7a2c11";

/// A pod with a ConfigMap, an emptyDir and a directory of the host, and a container that mounts parts of each.
/// Fields are dropped in this order.
struct Mounted {
    running: Running,
    fixture: Fixture,
    host: TempDir,
}

/// The container's `volumeMounts`.
const MOUNTS: &str = "
    - {name: config, mountPath: /etc/app}
    - {name: config, mountPath: /etc/app.conf, subPath: a}
    - {name: scratch, mountPath: /logs, subPathExpr: logs/$(POD)}
    - {name: host, mountPath: /data, subPath: new/deep, readOnly: true}
    - {name: host, mountPath: /data/all, mountPropagation: HostToContainer}";

impl Mounted {
    fn new(mounts: &str) -> Mounted {
        Self::with(mounts, "")
    }

    /// As [`Self::new`], with these further fields in the pod's spec.
    fn with(mounts: &str, spec: &str) -> Mounted {
        let host = disk_directory();
        let fixture = Fixture::new(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}}}\nspec:\n  containers:\n  - name: web\n    \
             volumeMounts:{mounts}\n  volumes:\n  - {{name: config, configMap: {{name: app}}}}\n  \
             - {{name: scratch, emptyDir: {{}}}}\n  - {{name: host, hostPath: {{path: {}}}}}\n{spec}",
            host.path().display()
        ));
        write(&fixture, &[("a", "1"), ("b", "1")]);
        let running = fixture.run();
        Mounted { running, fixture, host }
    }

    fn mounts(&self, arguments: &[&str]) -> Outcome {
        finish(self.fixture.operator("mounts").args(["--pod", UID]).args(arguments))
    }

    fn prepare(&self, arguments: &[&str]) -> Outcome {
        let environment = self.fixture.path("web.env");
        fs::write(&environment, "# the container's\n\nPOD=web-0\nPATH=/bin\n").expect("written");
        let environment = ["--env", environment.to_str().expect("text")];
        self.mounts(&[&["prepare", "--container", "web"], &environment[..], arguments].concat())
    }

    /// Prepares the container's mounts. Returns the source of each mount, in the order of the manifest.
    #[track_caller]
    fn prepared(&self) -> Vec<PathBuf> {
        let outcome = self.prepare(&["--pod-ip", "198.51.100.7", "--output", "json"]);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        let mounts: Vec<Value> = serde_json::from_str(&outcome.stdout).expect("JSON");
        mounts.iter().map(|mount| mount["source"]["hostPath"].as_str().expect("a path").into()).collect()
    }

    fn pod_directory(&self) -> PathBuf {
        self.fixture.path("root").canonicalize().expect("a real path").join("pods").join(UID)
    }

    #[track_caller]
    fn stop(mut self) {
        self.running.signal(Signal::SIGTERM);
        assert!(self.running.wait().success(), "{}", self.running.log());
        self.fixture.assert_nothing_left();
    }
}

fn write(fixture: &Fixture, data: &[(&str, &str)]) {
    fixture.write("objects/app.json", &config_map("app", data));
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("a status").mode() & 0o7777
}

/// The numbers of the mounts at a path.
fn mount_ids(path: &Path) -> Vec<u64> {
    mounts_at(path).expect("a mount table").iter().map(|mounted| mounted.id).collect()
}

#[test]
fn a_container_has_every_source_until_it_is_released() {
    // SP-01, SP-02, SP-09, MT-08
    let pod = Mounted::new(MOUNTS);
    fs::set_permissions(pod.host.path(), fs::Permissions::from_mode(0o2750)).expect("a mode");
    let sources = pod.prepared();
    let [config, key, logs, data, host, hosts, log] = sources.as_slice() else { panic!("{sources:?}") };
    assert_eq!((read(&config.join("a")), read(key)), ("1".to_owned(), "1".to_owned()));
    let directory = pod.pod_directory();
    assert_eq!(*key, directory.join("volume-subpaths/config/web/1"));
    fs::write(logs.join("line"), "hello").expect("written");
    assert_eq!(read(&pod.running.volume("scratch").join("logs/web-0/line")), "hello");
    let made = pod.host.path().join("new/deep");
    assert_eq!((mode(&pod.host.path().join("new")), mode(&made), mode(data)), (0o2750, 0o2750, 0o2750));
    let refused = fs::write(data.join("x"), "x").expect_err("the mount itself is read-only, whatever the runtime does");
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    fs::write(host.join("new/deep/x"), "x").expect("written");
    assert_eq!(read(&data.join("x")), "x");
    assert!(read(hosts).contains("\n198.51.100.7\tweb\n"));
    assert_eq!((mode(hosts), mode(log), mode(log.parent().expect("a directory"))), (0o644, 0o666, 0o750));
    assert_eq!(log.parent(), Some(directory.join("containers/web").as_path()));
    let name = log.file_name().expect("a name").to_str().expect("text");
    assert!(name.len() == 8 && name.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}");

    let released = pod.mounts(&["release", "--container", "web"]);
    assert_eq!((released.code, released.stderr.as_str()), (Some(0), ""));
    assert!(!directory.join("volume-subpaths").exists() && !directory.join("containers").exists());
    assert!(hosts.exists(), "other containers of the pod have it");
    assert_eq!(pod.mounts(&["release"]).code, Some(0));
    assert!(!hosts.exists());
    assert_eq!(read(&made.join("x")), "x");
    assert_eq!(pod.mounts(&["release"]).code, Some(0), "there is nothing left to release");
    pod.stop();
}

#[test]
fn mounts_that_are_not_released_go_with_the_pod() {
    // SP-09
    let pod = Mounted::new(MOUNTS);
    let sources = pod.prepared();
    fs::write(sources.last().expect("a log"), "why the container ended").expect("written");
    fs::write(&sources[5], "edited").expect("written");
    pod.stop();
}

#[test]
fn sp_09_only_the_subpath_mounts_of_podfs_are_removed_after_any_foreign_changes() {
    // The kubelet's rows of CleanSubPaths (4.2). Files that podfs has not made stay, where the kubelet removes some.
    let pod = Mounted::new(MOUNTS);
    let top = pod.pod_directory().join("volume-subpaths");
    let release = || pod.mounts(&["release"]);
    assert_eq!(release().code, Some(0), "there is nothing");
    let nothing: fn(&Path) = |_| ();
    let unmounted: fn(&Path) = |top| nix::mount::umount(&top.join("config/web/1")).expect("unmounted");
    let removed: fn(&Path) = |top| {
        nix::mount::umount(&top.join("scratch/web/2")).expect("unmounted");
        fs::remove_dir(top.join("scratch/web/2")).expect("removed");
    };
    let covered: fn(&Path) = |top| mount_tmpfs(&top.join("host/web/3"));
    for (row, change) in [
        ("several mounts of several volumes", nothing),
        ("a target that another process has unmounted", unmounted),
        ("a target that another process has removed", removed),
        ("a target on which another process has mounted something", covered),
    ] {
        pod.prepared();
        change(&top);
        let outcome = release();
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{row}");
        assert!(!top.exists(), "{row}");
    }
    for (row, stray) in [
        ("a file beside a target", "config/web/9"),
        ("a file in the place of a container", "config/other"),
        ("a file in the place of a volume", "other"),
    ] {
        pod.prepared();
        fs::write(top.join(stray), "of another").expect("written");
        let outcome = release();
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{row}");
        assert_eq!(pod.fixture.mounts().len(), 3, "{row}: the volumes alone are mounted");
        assert_eq!(read(&top.join(stray)), "of another", "{row}");
        assert!(!top.join("host").exists() && !top.join("config/web/1").exists(), "{row}");
        fs::remove_dir_all(&top).expect("removed");
    }
    pod.stop();
}

#[test]
fn an_unchanged_part_keeps_its_mount_and_a_new_file_has_a_new_one() {
    // SP-05, SP-06, SP-10
    let pod = Mounted::new(MOUNTS);
    let sources = pod.prepared();
    let before: Vec<_> = sources.iter().map(|source| mount_ids(source)).collect();
    assert_eq!(pod.prepared()[..6], sources[..6]);
    let again: Vec<_> = sources.iter().map(|source| mount_ids(source)).collect();
    assert_eq!(before, again);
    write(&pod.fixture, &[("a", "2"), ("b", "1")]);
    wait_content(&pod.running.volume("config").join("a"), "2");
    assert_eq!(read(&sources[1]), "1", "a container that runs keeps the file it has");
    pod.prepared();
    assert_eq!(read(&sources[1]), "2");
    let after: Vec<_> = sources.iter().map(|source| mount_ids(source)).collect();
    assert_ne!(before[1], after[1]);
    assert_eq!((&before[2..4], after[1].len()), (&after[2..4], 1));
    pod.stop();
}

#[test]
fn sp_10_a_part_goes_also_when_its_directory_was_removed() {
    let pod = Mounted::new(MOUNTS);
    let sources = pod.prepared();
    fs::remove_dir(pod.running.volume("scratch").join("logs/web-0")).expect("removed");
    let again = pod.prepared();
    assert_eq!(sources[2], again[2]);
    fs::write(again[2].join("line"), "new").expect("the new directory is mounted");
    fs::remove_dir_all(pod.running.volume("scratch").join("logs")).expect("removed");
    pod.stop();
}

#[test]
fn a_container_waits_for_a_missing_key_by_name() {
    // SP-08
    let pod = Mounted::new("\n    - {name: config, mountPath: /c, subPath: late}");
    let refused = pod.prepare(&[]);
    let sentence =
        "failed to prepare subPath for volumeMount \"config\" of container \"web\": the volume has no \"late\" yet";
    refused.says(1, &[sentence]);
    write(&pod.fixture, &[("a", "1"), ("late", "here")]);
    wait_content(&pod.running.volume("config").join("late"), "here");
    assert_eq!(read(&pod.prepared()[0]), "here");
    pod.stop();
}

#[test]
fn sp_07_no_start_fails_while_generations_switch() {
    let pod = Mounted::new("\n    - {name: config, mountPath: /c, subPath: a}");
    std::thread::scope(|scope| {
        let updates = scope.spawn(|| {
            for round in 0..40 {
                write(&pod.fixture, &[("a", &round.to_string())]);
                wait_content(&pod.running.volume("config").join("a"), &round.to_string());
            }
        });
        while !updates.is_finished() {
            let number = read(&pod.prepared()[0]);
            assert!(number.parse::<u32>().is_ok(), "{number:?}");
        }
        updates.join().expect("no panic");
    });
    assert_eq!(read(&pod.prepared()[0]), "39");
    pod.stop();
}

#[test]
fn mt_08_the_hosts_file_is_written_anew_at_each_start() {
    let aliases = "  hostname: front\n  hostAliases: [{ip: 203.0.113.9, hostnames: [db, db.example]}]\n";
    let pod = Mounted::with(" []", aliases);
    let hosts = pod.prepared().remove(0);
    let inode = fs::metadata(&hosts).expect("a status").ino();
    let expected = read(&hosts);
    assert!(expected.starts_with("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n"), "{expected}");
    let end = "\n198.51.100.7\tfront\n\n# Entries added by HostAliases.\n203.0.113.9\tdb\tdb.example\n";
    assert!(expected.ends_with(end), "{expected}");
    for edited in ["short".to_owned(), expected.clone() + "more\n", expected.replace("db", "no")] {
        fs::write(&hosts, edited).expect("written");
        pod.prepared();
        assert_eq!(read(&hosts), expected);
    }
    assert_eq!(fs::metadata(&hosts).expect("a status").ino(), inode, "containers that run have it mounted");
    let of_node = pod.prepare(&["--host-network", "--output", "json"]);
    assert_eq!(of_node.code, Some(0), "{}", of_node.stderr);
    let header = "# Kubernetes-managed hosts file (host network).\n";
    let aliases = "\n# Entries added by HostAliases.\n203.0.113.9\tdb\tdb.example\n";
    assert_eq!(read(&hosts), format!("{header}{}{aliases}", read(Path::new("/etc/hosts"))));
    let none = pod.prepare(&["--output", "json"]);
    assert!(!none.stdout.contains("/etc/hosts"), "a pod without an address has no hosts file: {}", none.stdout);
    pod.stop();
}

#[test]
fn mt_08_the_message_of_the_last_start_stays() {
    let pod = Mounted::new(" []");
    let logs: Vec<_> = (0..3).map(|_| pod.prepared().pop().expect("a log")).collect();
    let exist: Vec<_> = logs.iter().map(|log| log.exists()).collect();
    assert_eq!(exist, [false, true, true]);
    pod.stop();
}

#[test]
fn impossible_mounts_are_refused_with_one_sentence() {
    // SP-03
    let links = Mounted::new(
        "
    - {name: host, mountPath: /out, subPath: out}",
    );
    symlink("/etc", links.host.path().join("out")).expect("a link");
    let sentence = "\"out\" leads out of the volume by a symbolic link; use a link that stays in it";
    links
        .prepare(&[])
        .says(1, &["failed to prepare subPath for volumeMount \"host\" of container \"web\": ", sentence]);
    let log = links.running.log();
    assert!(log.contains("subPath \"out\" of volume \"host\" for container \"web\""), "{log}");
    fs::remove_file(links.host.path().join("out")).expect("removed");
    symlink("inside", links.host.path().join("out")).expect("a link");
    fs::create_dir(links.host.path().join("inside")).expect("a directory");
    assert!(links.prepared()[0].is_dir());

    links
        .mounts(&["prepare", "--container", "other"])
        .says(1, &["pod default/web has no container \"other\"; its containers are web"]);
    links.mounts(&["prepare", "--container", "../web"]).says(1, &["\"../web\" is no container"]);
    links.mounts(&["release", "--container", "../web"]).says(1, &["\"../web\" is no container"]);
    links.mounts(&["prepare"]).says(2, &["prepare is for one container; name it with --container"]);
    links.fixture.write("bad.env", "A=1\nsecret\n");
    let bad = links.fixture.path("bad.env");
    let refused = links.mounts(&["prepare", "--container", "web", "--env", bad.to_str().expect("text")]);
    refused.says(2, &["bad.env: entry 2 is no variable; write NAME=VALUE in UTF-8"]);
    assert!(!refused.stderr.contains("secret"));
    let other = finish(links.fixture.operator("mounts").args(["prepare", "--pod", "nobody", "--container", "web"]));
    other.says(1, &["nobody"]);
    links.stop();
}

#[test]
fn a_directory_that_cannot_be_made_is_reported_without_paths_of_the_node() {
    // SP-02: the cause is in the log alone.
    let pod = Mounted::new("\n    - {name: host, mountPath: /a, subPath: file/new}\n    - {name: host, mountPath: /b}");
    fs::write(pod.host.path().join("file"), "").expect("written");
    let refused = pod.prepare(&[]);
    refused.says(1, &["volumeMount \"host\" of container \"web\": \"file/new\" leads through a file"]);
    assert!(!refused.stderr.contains(pod.host.path().to_str().expect("text")), "{}", refused.stderr);
    pod.stop();
}

#[test]
fn the_next_supervisor_keeps_the_mounts_of_containers() {
    let pod = Mounted::new(MOUNTS);
    let sources = pod.prepared();
    let Mounted { mut running, fixture, host } = pod;
    let before: Vec<_> = sources[..4].iter().map(|source| mount_ids(source)).collect();
    fixture.kill_supervisor(&mut running);
    assert_eq!(read(&sources[1]), "1", "containers that run go on");
    let pod = Mounted { running: fixture.run(), fixture, host };
    let after: Vec<_> = sources[..4].iter().map(|source| mount_ids(source)).collect();
    assert_eq!(before, after);
    assert_eq!(pod.prepared()[..6], sources[..6]);
    let again: Vec<_> = sources[..4].iter().map(|source| mount_ids(source)).collect();
    assert_eq!(before, again, "a container that starts again has the same mounts");
    pod.stop();
}

#[test]
fn podfs_cleanup_removes_the_mounts_of_a_killed_pod() {
    let pod = Mounted::new(MOUNTS);
    let sources = pod.prepared();
    let Mounted { mut running, fixture, .. } = pod;
    fs::write(sources.last().expect("a log"), "why the container ended").expect("written");
    // The content of the emptyDir is for the next podfs of the pod.
    fs::remove_dir_all(running.volume("scratch").join("logs")).expect("removed");
    fixture.kill_both(&mut running);
    let outcome = fixture.cleanup(&[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(fixture.mounts(), Vec::<PathBuf>::new(), "{}", outcome.stdout);
    let directory = fixture.path(&format!("root/pods/{UID}"));
    for name in ["volume-subpaths", "containers", "etc-hosts"] {
        assert!(!directory.join(name).exists(), "{name} stays: {}", outcome.stdout);
    }
}

#[test]
fn a_volume_that_does_not_answer_delays_no_container_that_does_not_mount_a_part_of_it() {
    let fixture = Fixture::new("");
    let source = fixture.path("source");
    fs::create_dir(&source).expect("a directory");
    fixture.write(
        "pod.yaml",
        &format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}}}\nspec:\n  containers:\n  \
             - {{name: web, volumeMounts: [{{name: host, mountPath: /a, subPath: part}}]}}\n  \
             - {{name: side, volumeMounts: [{{name: config, mountPath: /a, subPath: a}}, {{name: host, mountPath: /b}}]}}\n  \
             volumes:\n  - {{name: config, configMap: {{name: app}}}}\n  - {{name: host, hostPath: {{path: {}}}}}\n",
            source.display()
        ),
    );
    write(&fixture, &[("a", "1")]);
    let silent = Stoppable::over(&source);
    let mut running = fixture.run();
    let prepare =
        |container: &str| finish(fixture.operator("mounts").args(["prepare", "--pod", UID, "--container", container]));
    silent.signal(Signal::SIGSTOP);
    prepare("web").says(1, &["a volume does not answer"]);
    let side = prepare("side");
    assert_eq!(side.code, Some(0), "{}", side.stderr);
    running.wait_log(r#"volume "host" is busy; container "side" gets what podfs has mounted before"#);
    let mut release = fixture.operator("mounts");
    let released = finish(release.args(["release", "--pod", UID, "--container", "side"]));
    assert_eq!(released.code, Some(0), "{}", released.stderr);
    silent.signal(Signal::SIGCONT);
    eventually("the volume answers", || prepare("web").code == Some(0));
    assert!(source.join("part").is_dir());
    assert!(running.stop().success(), "{}", running.log());
    drop(silent);
    unmount_below(&source);
    fixture.assert_nothing_left();
}

#[test]
fn a_part_that_a_program_of_the_node_uses_goes_at_release() {
    let pod = Mounted::new(MOUNTS);
    let sources = pod.prepared();
    let mut user = std::process::Command::new("sleep").arg("1000").current_dir(&sources[2]).spawn().expect("a program");
    let released = pod.mounts(&["release"]);
    let is_gone = !sources[2].exists();
    user.kill().expect("killed");
    user.wait().expect("a child");
    assert_eq!((released.code, is_gone), (Some(0), true), "{}", released.stderr);
    pod.stop();
}

#[test]
fn images_are_passed_on_to_runtimes_that_mount_them() {
    let mounts = "
    - {name: app, mountPath: /app, readOnly: true}
    - {name: config, mountPath: /etc/app}";
    let fixture = Fixture::new(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}}}\nspec:\n  containers:\n  - name: web\n    \
         volumeMounts:{mounts}\n  volumes:\n  - {{name: config, configMap: {{name: app}}}}\n  \
         - {{name: app, image: {{reference: \"registry.example/app:1\"}}}}\n"
    ));
    write(&fixture, &[("a", "1")]);
    let mut running = fixture.run();
    let prepare = |output: &str| {
        finish(fixture.operator("mounts").args(["prepare", "--pod", UID, "--container", "web", "--output", output]))
    };
    let cri: Vec<Value> = serde_json::from_str(&prepare("cri").stdout).expect("JSON");
    assert_eq!(cri[0]["image"]["image"], "registry.example/app:1", "{cri:?}");
    let podman = prepare("podman").stdout;
    assert!(podman.contains("--mount=type=image,source=registry.example/app:1,target=/app"), "{podman}");
    for output in ["oci", "docker"] {
        prepare(output).says(1, &["app", "an image"]);
    }
    running.signal(Signal::SIGTERM);
    assert!(running.wait().success(), "{}", running.log());
    fixture.assert_nothing_left();
}
