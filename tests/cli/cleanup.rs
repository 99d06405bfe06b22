//! `podfs cleanup` removes the remains of dead podfs processes, and nothing else.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::namespace::{bind, mount_tmpfs};
use crate::common::outcome::finish;
use crate::common::stopped::Stopped;
use crate::common::*;
use nix::mount::{MntFlags, umount2};
use tempfile::TempDir;

/// A pod with a volume of each sort that leaves a mount when podfs is killed: a FUSE mount and a bind mount.
fn fixture() -> Fixture {
    let fixture =
        Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: device, hostPath: {path: /dev/null}}]"));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture
}

fn empty_dir_fixture() -> Fixture {
    Fixture::new(&pod("[{name: scratch, emptyDir: {}}]"))
}

/// All paths of podfs's directories that are not inside a mount, and the mount points.
fn everything(fixture: &Fixture) -> (Vec<String>, Vec<std::path::PathBuf>) {
    let mounts = fixture.mounts();
    let mut paths = Vec::new();
    let mut directories = vec![fixture.path("root"), fixture.path("run")];
    while let Some(directory) = directories.pop() {
        paths.push(directory.display().to_string());
        if !mounts.contains(&directory) {
            directories.extend(fs::read_dir(&directory).into_iter().flatten().flatten().map(|entry| entry.path()));
        }
    }
    // A supervisor writes its counters from time to time, to a file that it then renames.
    paths.retain(|path| !path.ends_with("/counts.json.new"));
    paths.sort();
    (paths, mounts)
}

#[test]
fn a_pod_of_which_both_processes_were_killed_leaves_nothing() {
    let fixture = fixture();
    let mut running = fixture.run();
    let volume = running.volume("config");
    fixture.kill_both(&mut running);
    assert_eq!(fixture.mounts().len(), 2);
    let outcome = fixture.cleanup(&[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    fixture.assert_nothing_left();
    let lines: Vec<_> = outcome.stdout.lines().collect();
    assert!(lines.contains(&&*format!("unmounted {}", volume.display())), "{lines:?}");
    assert!(lines.contains(&&*format!("removed {}", volume.display())), "{lines:?}");
    assert!(lines.contains(&&*format!("removed {}", fixture.path("run").display())), "{lines:?}");
    let left = format!("left {}", fixture.path("").display());
    assert!(!lines.iter().any(|line| line.starts_with(&left)), "{lines:?}");
    let again = fixture.cleanup(&[]);
    assert!(!again.stdout.contains(&*fixture.path("root").to_string_lossy()), "{}", again.stdout);
}

#[test]
fn a_dry_run_says_the_same_and_changes_nothing() {
    let fixture = fixture();
    let mut running = fixture.run();
    fixture.kill_both(&mut running);
    let before = everything(&fixture);
    let base = fixture.path("").display().to_string();
    let ours = |text: &str, words: [&str; 3]| -> Vec<String> {
        let plain = |line: &str| line.replace(words[0], "-").replace(words[1], "+").replace(words[2], "=");
        text.lines().filter(|line| line.contains(&base)).map(plain).collect()
    };
    let planned = fixture.cleanup(&["--dry-run"]);
    assert_eq!(everything(&fixture), before);
    let done = fixture.cleanup(&[]);
    let planned = ours(&planned.stdout, ["would unmount", "would remove", "would leave"]);
    assert!(planned.len() > 5, "{planned:?}");
    assert_eq!(planned, ours(&done.stdout, ["unmounted", "removed", "left"]));
    fixture.assert_nothing_left();
}

#[test]
fn a_pod_that_is_served_is_not_touched() {
    let fixture = fixture();
    let mut running = fixture.run();
    let before = everything(&fixture);
    let outcome = fixture.cleanup(&[]);
    assert_eq!(everything(&fixture), before);
    let left = format!("left {}: podfs (pid {}) has the pod", fixture.run_files().display(), running.pid());
    assert!(outcome.stdout.contains(&left), "{}", outcome.stdout);
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&running.volume("config").join("a"), "2");
    assert_eq!(running.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

#[test]
fn the_content_of_an_empty_dir_stays_for_the_next_podfs() {
    let fixture = empty_dir_fixture();
    let mut running = fixture.run();
    fs::write(running.volume("scratch").join("kept"), "1").expect("written");
    fixture.kill_both(&mut running);
    let outcome = fixture.cleanup(&[]);
    assert!(outcome.stdout.contains("it holds the content of an emptyDir"), "{}", outcome.stdout);
    assert_eq!(fixture.mounts(), Vec::<std::path::PathBuf>::new());
    let mut next = fixture.run();
    assert_eq!(fs::read_to_string(next.volume("scratch").join("kept")).expect("it is there"), "1");
    assert_eq!(next.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

/// A pod with emptyDirs on a disk and in memory, and its uid.
fn fixture_with_contents() -> (Fixture, Running, String) {
    let volumes = "[{name: scratch, emptyDir: {}}, {name: secret, emptyDir: {medium: Memory}}, \
                   {name: config, configMap: {name: app}}]";
    let fixture = Fixture::new(&pod(volumes));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let running = fixture.run();
    for volume in ["scratch", "secret"] {
        fs::write(running.volume(volume).join("kept"), "1").expect("written");
    }
    let uid = running.json()["pod"]["uid"].as_str().expect("a uid").to_owned();
    (fixture, running, uid)
}

#[test]
fn the_content_of_a_pod_that_does_not_come_back_is_deleted_on_request() {
    let (fixture, mut running, uid) = fixture_with_contents();
    let of_pod = ["--pod", &uid, "--content"];
    let is_kept = |home: &str| {
        let homes = fixture.path("root/pods").join(&uid).join("plugins/kubernetes.io~empty-dir");
        homes.join(home).join("content/kept").exists()
    };
    let refused = fixture.cleanup(&of_pod);
    refused.says(1, &["podfs leaves a part of pod"]);
    assert!(refused.stdout.contains(&format!("podfs (pid {}) has the pod", running.pid())), "{}", refused.stdout);
    let server = fixture.kill_supervisor(&mut running);
    let refused = fixture.cleanup(&of_pod);
    refused.says(1, &["podfs leaves a part of pod"]);
    assert!(refused.stdout.contains("the pod is still served"), "{}", refused.stdout);
    assert_eq!(fs::read_to_string(running.volume("secret").join("kept")).expect("it is served"), "1");
    fixture.kill_server(server);
    let before = everything(&fixture);
    let planned = fixture.cleanup(&[&of_pod[..], &["--dry-run"]].concat());
    assert_eq!((planned.code, everything(&fixture)), (Some(0), before), "{}", planned.stderr);
    assert!(is_kept("scratch") && is_kept("secret"));
    let done = fixture.cleanup(&of_pod);
    assert_eq!(done.code, Some(0), "{}{}", done.stdout, done.stderr);
    let plain = |text: &str| text.replace("would unmount", "unmounted").replace("would remove", "removed");
    assert_eq!(plain(&planned.stdout), done.stdout);
    fixture.assert_nothing_left();
    fixture.cleanup(&of_pod).says(1, &[&uid, "exists"]);
    for (half, missing) in [(&of_pod[..2], "--content"), (&of_pod[2..], "--pod <UID>")] {
        let refused = fixture.cleanup(half);
        assert_eq!(refused.code, Some(2), "{}", refused.stderr);
        assert!(refused.stderr.contains(missing), "{}", refused.stderr);
    }
}

#[test]
fn the_content_of_a_pod_whose_record_is_lost_is_deleted_on_request() {
    let (fixture, mut running, uid) = fixture_with_contents();
    let config = running.volume("config");
    fixture.kill_both(&mut running);
    fs::remove_dir_all(fixture.path("run")).expect("deleted");
    let done = fixture.cleanup(&["--pod", &uid, "--content"]);
    assert_eq!(done.code, Some(0), "{}{}", done.stdout, done.stderr);
    assert_eq!(fixture.mounts(), Vec::<std::path::PathBuf>::new());
    assert!(!fixture.path("root/pods").join(&uid).join("plugins").exists(), "{}", done.stdout);
    assert!(config.exists(), "no record says that podfs made it");
}

#[test]
fn the_content_of_a_pod_with_another_run_directory_is_not_deleted() {
    let (fixture, mut running, uid) = fixture_with_contents();
    let cleanup = |fixture: &Fixture| {
        let mut command = Command::new(PODFS);
        command.args(["cleanup", "--pod", &uid, "--content", "--run-dir"]).arg(fixture.path("other"));
        finish(command.arg("--root-dir").arg(fixture.path("root")))
    };
    let refused = cleanup(&fixture);
    assert!(refused.stdout.contains("a podfs with another --run-dir serves the pod"), "{}", refused.stdout);
    let server = fixture.kill_supervisor(&mut running);
    let refused = cleanup(&fixture);
    assert!(refused.stdout.contains("a server answers for it"), "{}", refused.stdout);
    assert_eq!(refused.code, Some(1));
    assert_eq!(fs::read_to_string(running.volume("secret").join("kept")).expect("it is served"), "1");
    fixture.kill_server(server);
    assert_eq!(fixture.cleanup(&["--pod", &uid, "--content"]).code, Some(0));
    fixture.assert_nothing_left();
}

#[test]
fn files_of_others_stay() {
    let fixture = fixture();
    let mut running = fixture.run();
    let volume = running.volume("config");
    let beside = volume.parent().expect("a directory").join("foreign");
    let in_run = fixture.run_files().join("foreign");
    fixture.kill_both(&mut running);
    for foreign in [&beside, &in_run] {
        fs::write(foreign, "x").expect("written");
    }
    for (name, content) in [("lost+found", None), ("other", Some("[]"))] {
        fs::create_dir(fixture.path("run").join(name)).expect("a directory");
        if let Some(content) = content {
            fs::write(fixture.path("run").join(name).join("lock"), content).expect("written");
        }
    }
    let outcome = fixture.cleanup(&[]);
    assert!(outcome.stdout.contains(r#"it is not empty, "foreign" is in it"#), "{}", outcome.stdout);
    assert!(outcome.stdout.contains("it holds files that are not podfs'"), "{}", outcome.stdout);
    for foreign in [&beside, &in_run, &fixture.path("run/lost+found"), &fixture.path("run/other/lock")] {
        assert!(foreign.exists(), "{}", foreign.display());
    }
    assert!(!volume.exists() && fixture.mounts().is_empty());
}

#[test]
fn a_mount_inside_a_dead_volume_keeps_it() {
    let fixture = empty_dir_fixture();
    let mut running = fixture.run();
    let volume = running.volume("scratch");
    let inner = volume.join("inner");
    fs::create_dir(&inner).expect("a directory");
    mount_tmpfs(&inner);
    fixture.kill_both(&mut running);
    let outcome = fixture.cleanup(&[]);
    let left = format!("left {}: {} is mounted inside it", volume.display(), inner.display());
    assert!(outcome.stdout.contains(&left), "{}", outcome.stdout);
    assert_eq!(fixture.mounts(), [volume, inner]);
}

#[test]
fn mounts_below_the_source_of_a_bind_mount_go_with_it() {
    let source = TempDir::with_prefix("podfs-test-").expect("a directory");
    let inner = source.path().join("inner");
    fs::create_dir(&inner).expect("a directory");
    mount_tmpfs(&inner);
    let _unmounted = Unmount(&inner);
    fs::write(inner.join("kept"), "1").expect("written");
    let annotated = pod(&format!("[{{name: data, hostPath: {{path: {}}}}}]", source.path().display()))
        .replace("labels: {app: web}", "annotations: {podfs.io/host-path.data: bind}");
    let fixture = Fixture::new(&annotated);
    let mut running = fixture.run();
    assert!(running.volume("data").join("inner/kept").exists());
    fixture.kill_both(&mut running);
    fixture.cleanup(&[]);
    fixture.assert_nothing_left();
    assert!(inner.join("kept").exists());
}

struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        let _ = umount2(self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
fn a_mount_on_a_directory_above_is_not_crossed() {
    let fixture = fixture();
    let mut running = fixture.run();
    let volumes = running.volume("config").parent().and_then(Path::parent).expect("a directory").to_owned();
    fixture.kill_both(&mut running);
    fixture.mounts().iter().rev().for_each(|mount| umount2(mount, MntFlags::MNT_DETACH).expect("unmounted"));
    // The same names, on another file system.
    let other = TempDir::with_prefix("podfs-test-").expect("a directory");
    fs::create_dir_all(other.path().join("kubernetes.io~configmap/config")).expect("directories");
    bind(other.path(), &volumes);
    let outcome = fixture.cleanup(&[]);
    assert!(outcome.stdout.contains("a file system is mounted on it or above it"), "{}", outcome.stdout);
    assert!(other.path().join("kubernetes.io~configmap/config").is_dir());
    umount2(&volumes, MntFlags::MNT_DETACH).expect("unmounted");
    fixture.cleanup(&[]);
    fixture.assert_nothing_left();
}

#[test]
fn a_mount_that_does_not_answer_delays_nothing_and_stays() {
    let fixture = fixture();
    let served = Served::with(&[("a", "1")]);
    let hung = fixture.path("root/hung");
    fs::create_dir_all(&hung).expect("a directory");
    bind(served.path(), &hung);
    let record = serde_json::json!({"pid": 0, "run": [], "directories": [], "mounts": [hung]});
    fs::create_dir_all(fixture.path("run/hung")).expect("a directory");
    fs::write(fixture.path("run/hung/lock"), record.to_string()).expect("written");
    let stopped = Stopped::server(&served);
    let outcome = fixture.cleanup(&[]);
    drop(stopped);
    let left = format!("left {}: the volume does not answer, and its server may still exist", hung.display());
    assert!(outcome.stdout.contains(&left), "{}", outcome.stdout);
    assert_eq!(fs::read_to_string(served.path().join("a")).expect("it is there"), "1");
    assert!(fixture.path("run/hung/lock").exists(), "the next podfs or cleanup has to know of the mount");
}

/// Directories elsewhere, with what a lock file could name: a mount, an empty directory, an empty file, and a directory with
/// the name of a server's cgroup.
struct Elsewhere {
    directory: TempDir,
    uid: String,
}

impl Elsewhere {
    fn new(uid: &str) -> Self {
        let elsewhere =
            Self { directory: TempDir::with_prefix("podfs-test-").expect("a directory"), uid: uid.to_owned() };
        let [mount, empty, file, cgroup] = elsewhere.paths();
        [&mount, &empty, &cgroup].iter().for_each(|path| fs::create_dir(path).expect("a directory"));
        fs::write(file, "").expect("written");
        mount_tmpfs(&mount);
        fs::write(mount.join("kept"), "").expect("written");
        elsewhere
    }

    fn paths(&self) -> [std::path::PathBuf; 4] {
        ["mount", "empty", "file", &format!("podfs-{}", self.uid)].map(|name| self.directory.path().join(name))
    }

    /// Adds these paths to the lock file of the only pod.
    fn plant(&self, fixture: &Fixture) {
        let (lock, mut record) = fixture.lock_record();
        let [mount, empty, file, cgroup] = self.paths();
        for (key, path) in
            [("mounts", &mount), ("directories", &empty), ("directories", &mount), ("files", &file), ("run", &empty)]
        {
            record[key].as_array_mut().expect("a list").push(serde_json::json!(path));
        }
        record["cgroup"] = serde_json::json!(cgroup);
        fs::write(lock, record.to_string()).expect("written");
    }

    #[track_caller]
    fn assert_untouched(&self) {
        let [mount, empty, file, cgroup] = self.paths();
        assert!(mount.join("kept").exists() && empty.is_dir() && file.is_file() && cgroup.is_dir());
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = umount2(&self.paths()[0], MntFlags::MNT_DETACH);
    }
}

#[test]
fn cleanup_touches_nothing_elsewhere_that_a_lock_file_names() {
    let fixture = fixture();
    let mut running = fixture.run();
    let elsewhere = Elsewhere::new(&running.uid());
    fixture.kill_both(&mut running);
    let lock = fixture.run_files().join("lock");
    elsewhere.plant(&fixture);
    let outcome = fixture.cleanup(&[]);
    elsewhere.assert_untouched();
    for path in elsewhere.paths() {
        let left = format!("left {}: it is neither below the root directory nor in", path.display());
        assert!(outcome.stdout.contains(&left), "{}", outcome.stdout);
    }
    assert_eq!(fixture.mounts(), Vec::<std::path::PathBuf>::new());
    assert!(lock.exists(), "a cleanup with another root directory can go on with it");
    // The next podfs of the pod does not touch these paths either.
    let mut next = fixture.run();
    next.wait_log(&format!("names 4 paths such as {}, each of which is neither below", elsewhere.paths()[1].display()));
    assert_eq!(next.log().matches("is neither below").count(), 1, "{}", next.log());
    assert_eq!(next.stop().code(), Some(0));
    elsewhere.assert_untouched();
    fixture.assert_nothing_left();
}

#[test]
fn a_server_of_a_pod_without_a_valid_record_is_ended_once_nothing_of_the_pod_is_mounted() {
    let fixture = fixture();
    let mut running = fixture.run();
    fixture.kill_supervisor(&mut running);
    let lock = fixture.run_files().join("lock");
    fs::write(&lock, "{\"pid\":").expect("written");
    let outcome = fixture.cleanup(&[]);
    assert!(outcome.stdout.contains("the pod is still served"), "{}", outcome.stdout);
    for mount in fixture.mounts() {
        umount2(&mount, MntFlags::MNT_DETACH).expect("unmounted");
    }
    let outcome = fixture.cleanup(&[]);
    assert!(outcome.stdout.contains("ended the server"), "{}", outcome.stdout);
    eventually("the server has ended", || fixture.processes().is_empty());
    let kept = lock.with_file_name("lock.unreadable");
    assert!(outcome.stdout.contains(&format!("left {}: podfs cannot read", kept.display())), "{}", outcome.stdout);
    assert_eq!(fs::read_to_string(kept).expect("it is kept"), "{\"pid\":");
    assert!(!lock.exists());
}

#[test]
fn a_cleanup_with_another_root_directory_leaves_a_pod_that_is_served_alone() {
    let fixture = fixture();
    let mut running = fixture.run();
    let volume = running.volume("config");
    fixture.kill_supervisor(&mut running);
    let outcome = finish_elsewhere(&fixture);
    assert!(outcome.contains("the pod is still served"), "{outcome}");
    wait_content(&volume.join("a"), "1");
}

#[test]
fn a_dead_mount_without_a_record_is_removed_only_below_the_root_directory() {
    let fixture = fixture();
    let mut running = fixture.run();
    let volume = running.volume("config");
    fixture.kill_both(&mut running);
    fs::remove_dir_all(fixture.path("run")).expect("the run directory is lost");
    let elsewhere = finish_elsewhere(&fixture);
    let named = format!("left {0}: no process answers for it; umount -l '{0}' removes it", volume.display());
    assert!(elsewhere.contains(&named), "{elsewhere}");
    assert!(fixture.mounts().contains(&volume));
    let outcome = fixture.cleanup(&[]);
    assert!(outcome.stdout.contains(&format!("unmounted {}", volume.display())), "{}", outcome.stdout);
    assert!(!fixture.mounts().contains(&volume));
}

#[test]
fn control_characters_in_a_path_are_escaped() {
    let fixture = fixture();
    let uid = "c15b9f1e-0a47-5d0c-9b6c-3f1f5f1d7a10";
    let run = fixture.path("run\n\x1b[31m");
    fs::create_dir_all(run.join(uid)).expect("a directory");
    let mut command = Command::new(PODFS);
    command.args(["cleanup", "--run-dir"]).arg(&run).arg("--root-dir").arg(fixture.path("root"));
    let outcome = outcome::finish(&mut command).stdout;
    assert!(outcome.lines().any(|line| line.ends_with(&format!("run\\u000a\\u001b[31m/{uid}"))), "{outcome:?}");
    assert!(!outcome.contains('\x1b'), "{outcome:?}");
}

/// The output of a cleanup with another root directory.
fn finish_elsewhere(fixture: &Fixture) -> String {
    let mut command = fixture.operator("cleanup");
    outcome::finish(command.arg("--root-dir").arg(fixture.path("elsewhere"))).stdout
}

#[test]
fn cleanups_and_a_start_at_the_same_moment_agree() {
    let fixture = fixture();
    let mut killed = fixture.run();
    fixture.kill_both(&mut killed);
    let log = || File::create(fixture.path("cleanups")).expect("a file");
    let start = || {
        let mut command = fixture.operator("cleanup");
        command.arg("--root-dir").arg(fixture.path("root")).stdout(log()).stderr(Stdio::null());
        command.spawn().expect("podfs starts")
    };
    let mut cleanups: Vec<_> = (0..3).map(|_| start()).collect();
    let mut next = fixture.run();
    for cleanup in &mut cleanups {
        assert!(cleanup.wait().expect("it ends").success());
    }
    wait_content(&next.volume("config").join("a"), "1");
    assert_eq!(fixture.pods()[0]["state"], "running");
    assert_eq!(next.stop().code(), Some(0));
    assert_eq!(fixture.mounts(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_server_without_a_supervisor_ends_when_nothing_of_its_pod_is_mounted() {
    let fixture = fixture();
    let mut running = fixture.run();
    let server = fixture.kill_supervisor(&mut running);
    unmount_below(&fixture.path("root"));
    let text = format!("end the server of a pod whose volumes are all unmounted (pid {server})");
    let outcome = fixture.cleanup(&["--dry-run"]);
    assert!(outcome.stdout.contains(&text), "{}", outcome.stdout);
    assert_eq!(fixture.processes().len(), 2, "the server and its keeper");
    assert_eq!(fixture.cleanup(&[]).code, Some(0));
    eventually("both end", || fixture.processes().is_empty());
    fixture.assert_nothing_left();
}

#[test]
fn a_pod_whose_server_continues_without_its_supervisor_is_not_touched() {
    let fixture = fixture();
    let mut running = fixture.run();
    let volume = running.volume("config");
    let server = fixture.kill_supervisor(&mut running);
    let before = everything(&fixture);
    for arguments in [&["--dry-run"][..], &[]] {
        let outcome = fixture.cleanup(arguments);
        assert!(
            outcome.stdout.contains("the pod is still served; podfs run of the pod takes it over"),
            "{}",
            outcome.stdout
        );
        assert_eq!(everything(&fixture), before);
    }
    wait_content(&volume.join("a"), "1");
    let mut next = fixture.run();
    assert_eq!(next.server(), server);
    assert_eq!(next.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

#[test]
fn directories_with_relative_paths_are_removed_after_a_kill() {
    let fixture = fixture();
    let of_podfs = |command: &str| {
        let mut podfs = Command::new(PODFS);
        podfs.arg(command).args(["--root-dir", "objects/../root", "--run-dir", "run"]).current_dir(fixture.path(""));
        podfs
    };
    let run = || {
        let mut command = of_podfs("run");
        command.args(["--pod", "pod.yaml", "--objects", "objects"]);
        let mut running = fixture.start_command(command);
        running.wait_ready();
        running
    };
    let mut killed = run();
    fixture.kill_supervisor(&mut killed);
    let mut next = run();
    assert_eq!(next.stop().code(), Some(0), "{}", next.log());
    fixture.assert_nothing_left();
    let mut killed = run();
    fixture.kill_both(&mut killed);
    let outcome = finish(&mut of_podfs("cleanup"));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    fixture.assert_nothing_left();
}
