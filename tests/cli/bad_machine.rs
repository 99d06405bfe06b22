//! Machines and directories where podfs cannot mount: it reports that by exit code and error, and leaves nothing behind.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::builds::{Builds, VERSION};
use crate::common::outcome::Outcome;
use crate::common::*;
use nix::mount::{MsFlags, mount};
use nix::sys::resource::{Resource, setrlimit};

/// A pod with the uid `u1` and the volume `config`, whose ConfigMap is there.
fn fixture() -> Fixture {
    let fixture = Fixture::new(&config_pod().replace("name: web, labels", "name: web, uid: u1, labels"));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture
}

/// The path at which podfs mounts the volume of [`fixture`].
fn mount_point(fixture: &Fixture) -> PathBuf {
    fixture.path("root/pods/u1/volumes/kubernetes.io~configmap/config")
}

/// Runs podfs. Checks that podfs refuses with one sentence that has all of `parts`, and that it removes its run directory.
#[track_caller]
fn assert_refuses(fixture: &Fixture, command: &mut Command, code: i32, parts: &[&str]) -> Outcome {
    let outcome = fixture.refused(command);
    outcome.says(code, parts);
    assert!(!fixture.path("run").exists(), "the run directory stays behind");
    outcome
}

#[test]
fn directories_that_others_can_change_are_refused() {
    for name in ["run", "root"] {
        let fixture = fixture();
        let directory = fixture.path(name);
        fs::create_dir(&directory).expect("a directory");
        fs::set_permissions(&directory, Permissions::from_mode(0o777)).expect("its mode");
        let sentence = format!("{name} can be written to by other users (mode 0777)");
        fixture.refused(&mut fixture.command()).says(2, &[&sentence, "take that right away"]);
        fs::set_permissions(&directory, Permissions::from_mode(0o755)).expect("its mode");
        chown(&directory, Some(65534), None).expect("its owner");
        let sentence = format!("{name} belongs to uid 65534");
        fixture.refused(&mut fixture.command()).says(2, &[&sentence, "give it to root"]);
        chown(&directory, Some(0), None).expect("its owner");
        let mut running = fixture.run();
        assert_eq!(running.stop().code(), Some(0));
    }
}

#[test]
fn too_few_open_files_are_refused_with_the_limit() {
    const LIMIT: u64 = 40;
    let fixture = fixture();
    let mut command = fixture.command();
    // SAFETY: setrlimit is async-signal-safe.
    unsafe { command.pre_exec(|| Ok(setrlimit(Resource::RLIMIT_NOFILE, LIMIT, LIMIT)?)) };
    assert_refuses(&fixture, &mut command, 3, &["no more than 40 files open", "at least 128", "ulimit -n"]);
}

#[test]
fn a_lock_file_that_is_a_link_or_a_fifo_is_refused_at_once() {
    let fixture = fixture();
    let lock = fixture.path("run/u1/lock");
    fs::create_dir_all(lock.parent().expect("a directory")).expect("a directory");
    let victim = fixture.path("victim");
    fs::write(&victim, "kept").expect("written");
    symlink(&victim, &lock).expect("a link");
    fixture.refused(&mut fixture.command()).says(1, &["cannot lock"]);
    assert_eq!(fs::read_to_string(&victim).expect("read"), "kept");
    fs::remove_file(&lock).expect("removed");
    nix::unistd::mkfifo(&lock, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    fixture.refused(&mut fixture.command()).says(1, &["it is not a regular file"]);
    fs::remove_file(&lock).expect("removed");
    // podfs does not write its counters through a link either.
    symlink(&victim, fixture.path("run/u1/counts.json")).expect("a link");
    symlink(&victim, fixture.path("run/u1/counts.json.new")).expect("a link");
    let mut running = fixture.run();
    assert_eq!(running.stop().code(), Some(0));
    assert_eq!(fs::read_to_string(&victim).expect("read"), "kept");
}

#[test]
fn podfs_without_its_server_program_says_where_it_belongs() {
    let fixture = fixture();
    let podfs = fixture.path("usr/bin/podfs");
    fs::create_dir_all(podfs.parent().expect("a directory")).expect("a directory");
    fs::copy(PODFS, &podfs).expect("copied");
    let (beside, packaged) = (fixture.path("usr/bin/podfs-fuse"), fixture.path("usr/libexec/podfs/podfs-fuse"));
    let mount = || {
        let mut mount = Command::new(&podfs);
        fixture.write("volume.yaml", "name: config\nconfigMap: {name: app}\n");
        mount.args(["mount", "--objects"]).arg(fixture.objects()).arg("--volume").arg(fixture.path("volume.yaml"));
        mount.arg(fixture.path("at"));
        mount
    };
    let sentence = format!("is neither {} nor {}; install it there", beside.display(), packaged.display());
    for mut command in [fixture.command_of(&podfs), mount()] {
        assert_refuses(&fixture, &mut command, 3, &["podfs-fuse, the program that serves volumes, ", &sentence]);
    }

    fs::create_dir_all(packaged.parent().expect("a directory")).expect("a directory");
    fs::copy(PODFS_FUSE, &packaged).expect("copied");
    fs::set_permissions(&packaged, Permissions::from_mode(0o644)).expect("its mode");
    let sentence = format!("{}, the program that serves volumes, cannot be executed: Permission", packaged.display());
    for mut command in [fixture.command_of(&podfs), mount()] {
        assert_refuses(&fixture, &mut command, 3, &[&sentence, "install it anew"]);
    }

    fs::set_permissions(&packaged, Permissions::from_mode(0o755)).expect("its mode");
    let mut running = fixture.start_command(fixture.command_of(&podfs));
    running.wait_ready();
    let program = fs::read_link(format!("/proc/{}/exe", running.server())).expect("a program");
    assert_eq!(program, packaged);
    assert_eq!(running.stop().code(), Some(0));
}

#[test]
fn podfs_with_the_server_program_of_another_version_names_both() {
    let fixture = fixture();
    let builds = Builds::new(&fixture);
    let (version, podfs) = (builds.put_podfs_alone(), builds.program());
    let [first, second] = [
        format!("podfs {version} ({}) does not work with podfs-fuse {VERSION} ", podfs.display()),
        format!("({}); install both programs from one package or one build", builds.server_program().display()),
    ];
    assert_refuses(&fixture, &mut fixture.command_of(&podfs), 1, &[&first, &second]);
}

/// The same command, run through `setpriv` with these arguments.
fn with_privileges(command: &Command, arguments: &[&str]) -> Command {
    let mut wrapped = Command::new("setpriv");
    wrapped.args(arguments).arg(command.get_program()).args(command.get_args());
    wrapped
}

#[test]
fn another_user_than_root_gets_the_advice_to_be_root() {
    let fixture = fixture();
    // The capability lets the user reach the binary, wherever it was built.
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let reach = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"];
    let mut command = with_privileges(&fixture.command(), &[&user[..], &reach].concat());
    let parts = [
        "podfs mounts file systems, so it must run as root",
        "podfs render prints what the volumes",
        "podfs view shows it",
    ];
    assert_refuses(&fixture, &mut command, 3, &parts);
    fixture.assert_nothing_left();
}

#[test]
fn a_dev_fuse_that_is_something_else_is_named() {
    let other = "touch /dev/other; mkfifo /dev/pipe; mknod /dev/null c 1 3; mknod /dev/fuse c 10 229";
    for (file, found) in [
        ("other", "/dev/fuse is a regular file, and not the FUSE device"),
        ("pipe", "/dev/fuse is a FIFO, and not the FUSE device"),
        ("null", "/dev/fuse is the character device 1:3, and not the FUSE device"),
    ] {
        let fixture = fixture();
        let command = fixture.command();
        let mut alone = Command::new("unshare");
        let script = format!("mount -t tmpfs none /dev && ({other}) && mv -f /dev/{file} /dev/fuse && exec \"$@\"");
        alone.args(["--mount", "sh", "-ec", &script, "sh"]).arg(command.get_program()).args(command.get_args());
        assert_refuses(&fixture, &mut alone, 3, &[found, "mknod /dev/fuse c 10 229"]);
        fixture.assert_nothing_left();
    }
}

#[test]
fn the_error_names_the_capability_that_root_lacks() {
    let fixture = fixture();
    let mut command = with_privileges(&fixture.command(), &["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]);
    let parts = ["volume \"config\": ", "run podfs as root with CAP_SYS_ADMIN"];
    assert_refuses(&fixture, &mut command, 3, &parts);
    fixture.assert_nothing_left();
}

#[test]
fn without_the_fuse_device_the_machine_is_to_blame() {
    let fixture = fixture();
    let mut command = fixture.command();
    // SAFETY: both calls are async-signal-safe; the mount namespace belongs to the child alone.
    unsafe { command.pre_exec(hide_devices) };
    assert_refuses(&fixture, &mut command, 3, &["cannot open /dev/fuse", "podfs needs /dev/fuse", "modprobe fuse"]);
    fixture.assert_nothing_left();
}

/// Gives the process a mount namespace with an empty `/dev`.
fn hide_devices() -> io::Result<()> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
    mount(Some("none"), "/dev", Some("tmpfs"), MsFlags::empty(), None::<&str>)?;
    Ok(())
}

#[test]
fn a_file_at_the_mount_point_stays() {
    let fixture = fixture();
    let point = mount_point(&fixture);
    fs::create_dir_all(point.parent().expect("a parent")).expect("directories");
    fs::write(&point, "mine").expect("written");
    let parts = ["volume \"config\": ", "kubernetes.io~configmap/config is not a directory", "remove it"];
    assert_refuses(&fixture, &mut fixture.command(), 1, &parts);
    assert_eq!(fs::read_to_string(&point).expect("kept"), "mine");
}

#[test]
fn a_file_where_a_directory_is_needed_stays() {
    let fixture = fixture();
    fs::create_dir(fixture.path("root")).expect("a directory");
    fs::write(fixture.path("root/pods"), "mine").expect("written");
    let parts = ["volume \"config\": cannot make the directory ", "a file is in the way; remove it"];
    assert_refuses(&fixture, &mut fixture.command(), 1, &parts);
    assert_eq!(fs::read_to_string(fixture.path("root/pods")).expect("kept"), "mine");
}

#[test]
fn a_mount_point_that_is_not_empty_is_not_covered() {
    let fixture = fixture();
    let point = mount_point(&fixture);
    fs::create_dir_all(point.join("inner")).expect("directories");
    let parts = ["volume \"config\": ", "kubernetes.io~configmap/config is not empty", "choose another directory"];
    assert_refuses(&fixture, &mut fixture.command(), 1, &parts);
    assert!(point.join("inner").is_dir());
    assert_eq!(fixture.mounts(), [] as [&Path; 0]);
}

#[test]
fn podfs_does_not_mount_over_a_foreign_mount() {
    let fixture = fixture();
    let point = mount_point(&fixture);
    fs::create_dir_all(&point).expect("directories");
    mount_tmpfs(&point, MsFlags::empty(), "");
    let parts = ["volume \"config\": ", "kubernetes.io~configmap/config is already a mount point", "unmount it"];
    assert_refuses(&fixture, &mut fixture.command(), 1, &parts);
    assert_eq!(fixture.mounts(), [point]);
}

fn mount_tmpfs(at: &Path, flags: MsFlags, options: &str) {
    mount(Some("none"), at, Some("tmpfs"), flags, Some(options)).expect("a tmpfs");
}

/// The fixture's command with `root` or `run` somewhere else.
fn command_with(fixture: &Fixture, flag: &str, directory: &Path) -> Command {
    let mut arguments: Vec<_> = fixture.command().get_args().map(ToOwned::to_owned).collect();
    let flag = arguments.iter().position(|argument| argument == flag).expect("the flag");
    arguments[flag + 1] = directory.into();
    let mut command = Command::new(PODFS);
    command.args(arguments);
    command
}

/// A directory for `--root-dir` or `--run-dir` on a tmpfs with these flags and options.
fn on_tmpfs(fixture: &Fixture, flags: MsFlags, options: &str) -> PathBuf {
    let base = fixture.path("base");
    fs::create_dir(&base).expect("a directory");
    mount_tmpfs(&base, flags, options);
    base.join("made")
}

#[test]
fn a_read_only_file_system_is_named() {
    for (flag, whose) in [("--root-dir", "volume \"config\": "), ("--run-dir", "")] {
        let fixture = fixture();
        let directory = on_tmpfs(&fixture, MsFlags::MS_RDONLY, "");
        let mut command = command_with(&fixture, flag, &directory);
        let parts =
            [whose, "cannot make the directory ", "/base/made/", "choose a directory on a writable file system"];
        assert_refuses(&fixture, &mut command, 1, &parts);
        assert!(!fixture.path("root").exists(), "{flag}");
    }
}

#[test]
fn a_full_file_system_is_named_and_the_made_files_are_removed() {
    for (flag, inodes, whose) in [("--root-dir", 4, "volume \"config\": "), ("--run-dir", 2, "")] {
        let fixture = fixture();
        // The root directory of the tmpfs is one of the inodes.
        let directory = on_tmpfs(&fixture, MsFlags::empty(), &format!("nr_inodes={inodes}"));
        let mut command = command_with(&fixture, flag, &directory);
        let parts =
            [whose, "cannot make the directory ", "/base/made/", "make room on that file system", "No space left"];
        assert_refuses(&fixture, &mut command, 1, &parts);
        assert_eq!(fs::read_dir(fixture.path("base")).expect("a listing").count(), 0, "{flag}");
        assert!(!fixture.path("root").exists(), "{flag}");
    }
}

#[test]
fn one_place_that_is_taken_leaves_nothing_of_the_other_volumes() {
    let names = ["a", "b", "c", "d", "e"];
    let volumes = names.map(|name| format!("{{name: {name}, configMap: {{name: app}}}}")).join(", ");
    let fixture =
        Fixture::new(&pod(&format!("[{volumes}]")).replace("name: web, labels", "name: web, uid: u1, labels"));
    let taken = fixture.path("root/pods/u1/volumes/kubernetes.io~configmap/c");
    fs::create_dir_all(taken.join("inner")).expect("directories");
    assert_refuses(&fixture, &mut fixture.command(), 1, &["volume \"c\": ", "is not empty"]);
    let siblings = fs::read_dir(taken.parent().expect("a parent")).expect("a listing");
    assert_eq!(siblings.count(), 1, "podfs removes the directories that it made beside it");
}

#[test]
fn a_full_standard_output_is_reported_with_the_cause() {
    for arguments in [&["version"][..], &["config"], &["status", "--output", "json", "--run-dir", "/nowhere"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
        let mut command = std::process::Command::new(PODFS);
        let output =
            command.args(arguments).stdout(full).stderr(std::process::Stdio::piped()).output().expect("podfs runs");
        let stderr = String::from_utf8(output.stderr).expect("text");
        assert_eq!(
            stderr, "podfs: cannot write to standard output: No space left on device (os error 28)\n",
            "{arguments:?}"
        );
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    }
}
