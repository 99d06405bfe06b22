//! `podfs view`: the files that `podfs run` would show, for a user without privileges. They follow their objects, and
//! nothing remains after the end.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use podfs_fuse::mount::table::mounts_at;

use crate::common::caller::Caller;
use crate::common::fuse_user::{USER, as_user, is_mounted, read, wait_read, where_users_may_mount};
use crate::common::outcome::{Outcome, finish};
use crate::common::packages::top;
use crate::common::terminal::{Terminal, with_standard_output};
use crate::common::*;
use crate::render::archives::entries;

const SECRET: &str = "correct horse battery staple";

impl Fixture {
    /// Gives the directory to the user.
    fn of_user(self) -> Self {
        chown(self.path(""), Some(USER.uid), Some(USER.gid)).expect("given away");
        self
    }

    /// `podfs view` as the user.
    fn view(&self, directory: &Path, arguments: &[&str]) -> Command {
        self.view_of(&as_user(USER), directory, arguments)
    }

    fn view_of(&self, prefix: &[String], directory: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(&prefix[0]);
        command.args(&prefix[1..]).arg(PODFS).arg("view").arg("--pod").arg(self.pod());
        command.arg("--objects").arg(self.objects()).args(arguments).arg(directory);
        command.env("PODFS_CONFIG", "/dev/null").env_remove("RUST_LOG").stdin(Stdio::null());
        command
    }

    /// Starts a view, and waits until it is there.
    #[track_caller]
    fn start_view(&self, directory: &Path, arguments: &[&str]) -> Running {
        let before = is_mounted(directory);
        assert!(!before, "there is a view already");
        let running = self.spawn(&mut self.view(directory, arguments));
        wait_mounted(&running, directory);
        running
    }

    fn refuses(&self, mut command: Command) -> Outcome {
        finish(self.mark(&mut command))
    }
}

#[track_caller]
fn wait_mounted(running: &Running, directory: &Path) {
    running.wait_log(&format!("is at {}; Ctrl-C ends this", directory.display()));
    eventually("the view is mounted", || is_mounted(directory));
}

/// A ConfigMap and a Secret.
fn two_volumes() -> Fixture {
    let fixture =
        Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: keys}}]"));
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "alpha"), ("b", "beta")]));
    fixture.write("objects/keys.yaml", &secret("keys", &[("k", SECRET)]));
    fixture.of_user()
}

#[test]
fn a_view_has_every_entry_that_run_mounts() {
    where_users_may_mount(|| {
        let examples = top().join("packaging/examples");
        let fixture = Fixture::new(&fs::read_to_string(examples.join("pod.yaml")).expect("a pod"));
        for name in ["web-config.yaml", "web-secret.yaml"] {
            let object = fs::read_to_string(examples.join("objects").join(name)).expect("an object");
            fixture.write(&format!("objects/{name}"), &object);
        }
        // podfs run accepts only directories that belong to root.
        fs::set_permissions(fixture.path(""), Permissions::from_mode(0o755)).expect("the mode is set");
        let of_user = Fixture::new("").of_user();
        let directory = of_user.path("view");
        let mut viewing = fixture.start_view(&directory, &["--reveal"]);
        let mut running = fixture.run();
        for volume in ["config", "credentials", "about", "everything"] {
            let viewed = USER.run(Path::new("/"), || entries(&directory.join(volume)));
            assert_eq!(viewed, entries(&running.volume(volume)), "{volume}");
        }
        assert!(running.stop().success() && viewing.stop().success());
    });
}

#[test]
fn a_view_follows_its_files_and_switches_all_files_of_a_volume_at_once() {
    where_users_may_mount(|| {
        let fixture = two_volumes();
        let directory = fixture.path("view");
        let mut viewing = fixture.start_view(&directory, &[]);
        let config = directory.join("config");
        assert_eq!(
            (read(&config.join("a")).as_deref(), read(&config.join("b")).as_deref()),
            (Some("alpha"), Some("beta"))
        );
        let generation = || USER.run(Path::new("/"), || fs::read_link(config.join("..data")).expect("a link"));
        let number = |path: &str| USER.run(Path::new("/"), || fs::metadata(config.join(path)).expect(path).ino());
        let link = |path: &str| USER.run(Path::new("/"), || fs::symlink_metadata(config.join(path)).expect(path).ino());
        let (first, file, first_link) = (generation(), number("a"), link("a"));
        assert_eq!((number("a"), generation()), (file, first.clone()), "nothing changes by itself");
        // A reader keeps an open file, and the path of the generation to which it has resolved `..data`.
        let (opened, old) = USER
            .run(Path::new("/"), || (fs::File::open(config.join("a")).expect("a file"), config.join(&first).join("a")));
        fixture.write("objects/app.yaml", &config_map("app", &[("a", "new"), ("c", "gamma")]));
        wait_read(&config.join("a"), "new");
        assert_eq!((read(&config.join("b")), read(&config.join("c")).as_deref()), (None, Some("gamma")));
        assert_ne!((generation(), number("a")), (first, file));
        assert_eq!(link("a"), first_link, "the link means the same as before");
        assert_eq!(std::io::read_to_string(opened).expect("an open file goes on"), "alpha");
        assert_eq!(
            read(&old).as_deref(),
            Some("alpha"),
            "one generation is kept for readers that have resolved ..data"
        );
        let listed = USER.run(Path::new("/"), || fs::read_dir(&config).expect("a listing").count());
        assert_eq!(listed, 4, "..data, its directory and two keys");
        // A view is read-only, and other users have no access to it.
        let refused = USER.run(Path::new("/"), || fs::write(config.join("a"), "x").expect_err("read-only"));
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        let other = Caller::new(1234);
        assert!(other.run(Path::new("/"), || fs::read_dir(&directory).is_err()) && fs::read_dir(&directory).is_err());
        assert!(viewing.stop().success());
    });
}

#[test]
fn a_read_never_fails_and_is_never_torn_while_a_volume_changes() {
    where_users_may_mount(|| {
        let fixture = two_volumes();
        let (directory, content) = (fixture.path("view"), |word: &str| word.repeat(3000));
        let put = |word: &str| {
            fixture.write("objects/app.yaml", &config_map("app", &[("a", &content(word)), ("b", &content(word))]));
        };
        put("0");
        let mut viewing = fixture.start_view(&directory, &[]);
        for round in 1..20 {
            let word = (round % 10).to_string();
            put(&word);
            let file = directory.join("config/a");
            eventually("the change is visible", || {
                let text = read(&file).expect("a read never fails");
                assert!(text.len() == 3000 && text == content(&text[..1]), "it is one content");
                text == content(&word)
            });
        }
        assert!(viewing.stop().success());
    });
}

#[test]
fn ctrl_c_sigterm_and_fusermount3_end_a_view_and_nothing_is_left() {
    where_users_may_mount(|| {
        let fixture = two_volumes();
        let directory = fixture.path("view");
        for end in ["SIGINT", "SIGTERM", "SIGHUP", "fusermount3"] {
            let mut viewing = fixture.start_view(&directory, &[]);
            // A process whose working directory is in the view does not prevent the unmount by podfs.
            let inside = directory.join("config");
            let mut prefix = as_user(USER);
            prefix.extend(["sh", "-c", "cd \"$0\" && echo inside && exec sleep 60"].map(str::to_owned));
            let mut sleeper = Command::new(&prefix[0]);
            let is_busy = end != "fusermount3";
            let mut sleeper = sleeper.args(&prefix[1..]).arg(&inside).stdout(Stdio::piped()).spawn().expect("a shell");
            let mut line = [0; 7];
            std::io::Read::read_exact(sleeper.stdout.as_mut().expect("it is piped"), &mut line).expect("it is inside");
            if !is_busy {
                sleeper.kill().expect("killed");
                sleeper.wait().expect("ended");
            }
            match end {
                "SIGINT" => viewing.signal(Signal::SIGINT),
                "SIGTERM" => viewing.signal(Signal::SIGTERM),
                "SIGHUP" => viewing.signal(Signal::SIGHUP),
                _ => {
                    let unmounter = as_user(USER);
                    let mut command = Command::new(&unmounter[0]);
                    let outcome = finish(command.args(&unmounter[1..]).args(["fusermount3", "-u"]).arg(&directory));
                    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
                }
            }
            let status = viewing.wait();
            let _ = sleeper.kill();
            let _ = sleeper.wait();
            assert!(status.success(), "{end}: {}", viewing.log());
            assert!(!is_mounted(&directory) && !directory.exists(), "{end}");
        }
        // podfs does not remove a directory that the user has made.
        fs::create_dir(&directory).expect("a directory");
        chown(&directory, Some(USER.uid), Some(USER.gid)).expect("given away");
        let mut viewing = fixture.start_view(&directory, &[]);
        assert!(viewing.stop().success() && directory.is_dir() && !is_mounted(&directory));
    });
}

#[test]
fn after_a_sigkill_the_next_view_cleans_up() {
    where_users_may_mount(|| {
        let fixture = two_volumes();
        let directory = fixture.path("view");
        let mut viewing = fixture.start_view(&directory, &[]);
        viewing.signal(Signal::SIGKILL);
        assert_eq!(viewing.wait().signal(), Some(libc::SIGKILL));
        assert!(is_mounted(&directory));
        let again = fixture.spawn(&mut fixture.view(&directory, &[]));
        again.wait_log_times("Ctrl-C ends this", 2);
        assert_eq!(mounts_at(&directory).expect("a mount table").len(), 1);
        assert_eq!(read(&directory.join("config/a")).as_deref(), Some("alpha"));
        let mut again = again;
        assert!(again.stop().success() && !is_mounted(&directory));
    });
}

#[test]
fn two_views_live_side_by_side_and_a_directory_has_one() {
    where_users_may_mount(|| {
        let fixture = two_volumes();
        let (one, two) = (fixture.path("one"), fixture.path("two"));
        let mut first = fixture.start_view(&one, &[]);
        let mut second = fixture.start_view(&two, &["--reveal"]);
        assert_eq!(read(&one.join("keys/k")).as_deref(), Some(""));
        assert_eq!(read(&two.join("keys/k")).as_deref(), Some(SECRET));
        fixture.refuses(fixture.view(&one, &[])).says(2, &["/one: podfs view shows a pod there already; end it with"]);
        assert!(first.stop().success());
        assert_eq!(read(&two.join("config/a")).as_deref(), Some("alpha"));
        assert!(second.stop().success());
    });
}

#[test]
fn without_reveal_no_byte_of_a_secret_is_anywhere() {
    where_users_may_mount(|| {
        let fixture = two_volumes();
        let directory = fixture.path("view");
        let mut command = fixture.view(&directory, &["--log", "trace"]);
        // The limit allows core dumps, but a view makes none.
        let unlimited = libc::RLIM_INFINITY;
        // SAFETY: setrlimit is async-signal-safe.
        unsafe {
            command.pre_exec(move || Ok(setrlimit(Resource::RLIMIT_CORE, unlimited, unlimited)?));
        }
        command.current_dir(fixture.path(""));
        let mut viewing = fixture.spawn(&mut command);
        wait_mounted(&viewing, &directory);
        viewing.wait_log("1 secret file is empty here; --reveal shows its content");
        let file = directory.join("keys/k");
        let size = || USER.run(Path::new("/"), || fs::metadata(&file).expect("a file").len());
        assert_eq!((read(&file).as_deref(), size()), (Some(""), 0));
        fixture.write("objects/keys.yaml", &secret("keys", &[("k", SECRET), ("l", SECRET)]));
        wait_read(&directory.join("keys/l"), "");
        let of_process = |name: &str| fs::read(format!("/proc/{}/{name}", viewing.pid())).expect(name);
        let mut all = [of_process("cmdline"), of_process("environ")].concat();
        viewing.signal(Signal::SIGABRT);
        let status = viewing.wait();
        assert!(status.signal() == Some(libc::SIGABRT) && !status.core_dumped(), "{status:?}");
        for name in ["log", "out"] {
            all.extend(fs::read(fixture.path(name)).expect(name));
        }
        let all = String::from_utf8_lossy(&all).into_owned();
        assert_eq!(all.matches("--reveal").count(), 1, "{all}");
        assert!(all.contains("Ctrl-C") && !all.contains(SECRET), "{all}");
        assert!(
            fs::read_dir(fixture.path(""))
                .expect("a listing")
                .all(|entry| { !entry.expect("an entry").file_name().to_string_lossy().contains("core") })
        );
    });
}

#[test]
fn a_terminal_shows_the_changed_files() {
    where_users_may_mount(|| {
        let fixture = two_volumes();
        let (directory, terminal) = (fixture.path("view"), Terminal::new(24, 120));
        let mut command = fixture.view(&directory, &[]);
        let mut viewing = fixture.spawn(&mut command);
        wait_mounted(&viewing, &directory);
        fixture.write("objects/app.yaml", &config_map("app", &[("a", "new")]));
        wait_read(&directory.join("config/a"), "new");
        assert!(viewing.stop().success());
        assert_eq!(fs::read_to_string(fixture.path("out")).expect("text"), "", "a file is not for people");

        let mut command = fixture.view(&directory, &[]);
        with_standard_output(fixture.mark(&mut command), &terminal);
        let log = fs::File::create(fixture.path("terminal-log")).expect("a file");
        let mut viewing = command.stderr(log).spawn().expect("podfs starts");
        eventually("the view is there", || is_mounted(&directory));
        wait_read(&directory.join("config/a"), "new");
        fixture.write("objects/app.yaml", &config_map("app", &[("a", "newer"), ("c", "gamma")]));
        terminal.wait_end(&["config/a changes, 5 bytes", "config/c is new, 5 bytes"]);
        fixture.write("objects/keys.yaml", &secret("keys", &[("k", "another secret")]));
        terminal.wait_end(&["keys/k changes, 14 bytes"]);
        fixture.write("objects/app.yaml", &config_map("app", &[("a", "newer")]));
        terminal.wait_end(&["config/c is gone"]);
        fixture.write("pod.yaml", &pod("[{name: config, configMap: {name: app, defaultMode: 0400}}]"));
        terminal.wait_end(&["config/a has other attributes: mode 0400, owner 0, group 0", "keys disappears"]);
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(viewing.id() as i32), Signal::SIGINT).expect("it is there");
        assert!(viewing.wait().expect("a child").success());
        assert!(!terminal.written().contains("another secret"));
    });
}

#[test]
fn a_volume_that_waits_is_reported_and_appears_and_stays() {
    where_users_may_mount(|| {
        let fixture = two_volumes();
        let directory = fixture.path("view");
        fixture.remove("objects/app.yaml");
        let mut viewing = fixture.start_view(&directory, &[]);
        viewing.wait_log("podfs: MountVolume.SetUp failed for volume \"config\" : configmap \"app\" not found\n");
        let listed = || USER.run(Path::new("/"), || fs::read_dir(&directory).expect("a listing").count());
        assert_eq!(listed(), 1, "the other volume is there");
        fixture.write("objects/app.yaml", &config_map("app", &[("a", "alpha")]));
        wait_read(&directory.join("config/a"), "alpha");
        fixture.remove("objects/app.yaml");
        viewing.wait_log_times("configmap \"app\" not found\n", 2);
        assert_eq!((listed(), read(&directory.join("config/a")).as_deref()), (2, Some("alpha")), "it stays as it is");
        assert!(viewing.stop().success());
    });
}

#[test]
fn a_workload_is_shown_and_volumes_of_the_node_are_left_out() {
    where_users_may_mount(|| {
        let template = "{metadata: {labels: {app: web}}, spec: {containers: [{name: a}], volumes: [
        {name: config, configMap: {name: app}}, {name: logs, hostPath: {path: /var/log}}]}}";
        let deployment = format!(
            "{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: web}}, spec: {{template: {template}}}}}"
        );
        let fixture = Fixture::new(&deployment).of_user();
        fixture.write("objects/app.yaml", &config_map("app", &[("a", "alpha")]));
        let directory = fixture.path("view");
        let mut viewing = fixture.start_view(&directory, &[]);
        assert_eq!(read(&directory.join("config/a")).as_deref(), Some("alpha"));
        viewing.wait_log("podfs: volume \"logs\" is left out: /var/log of the node\n");
        assert!(viewing.stop().success());
    });
}

#[test]
fn a_directory_that_cannot_be_used_is_refused_in_one_sentence() {
    where_users_may_mount(|| {
        let fixture = two_volumes();
        let [full, file, missing] = ["full", "file", "missing/view"].map(|name| fixture.path(name));
        fs::create_dir(&full).expect("a directory");
        chown(&full, Some(USER.uid), Some(USER.gid)).expect("given away");
        fs::write(full.join("file"), "").expect("written");
        fs::write(&file, "").expect("written");
        let of_root = fixture.path("of-root");
        fs::create_dir(&of_root).expect("a directory");
        fs::set_permissions(&of_root, Permissions::from_mode(0o777)).expect("the mode is set");
        for (directory, sentence) in [
            (full, "/full: is not empty; remove it, or give another directory"),
            (file, "/file: is not a directory"),
            (missing, "/missing/view: cannot be used: No such file or directory"),
            (of_root, "/of-root: belongs to the user with the id 0, and not to you; give a directory of your own"),
        ] {
            fixture.refuses(fixture.view(&directory, &[])).says(2, &[sentence]);
            assert!(!is_mounted(&directory));
        }
        // podfs leaves nothing behind when it cannot mount.
        let view = fixture.path("view");
        let mut command = fixture.view(&view, &[]);
        command.env("PATH", fixture.path("objects"));
        let setpriv = PathBuf::from("/usr/bin/setpriv");
        let mut without = Command::new(setpriv);
        without.args(command.get_args()).env("PATH", fixture.path("objects")).env("PODFS_CONFIG", "/dev/null");
        fixture.refuses(without).says(3, &["there is no program fusermount3", "install the package fuse3"]);
        assert!(!view.exists());
    });
}

/// A prefix that runs a command as the user, in a mount namespace in which the shell command `preparation` was run
/// before.
fn where_mounts_are(preparation: &str) -> Vec<String> {
    let script = format!("{preparation} && exec \"$@\"");
    let unshare = ["unshare", "--mount", "sh", "-ec", &script, "sh"].map(str::to_owned);
    unshare.into_iter().chain(as_user(USER)).collect()
}

#[test]
fn the_error_names_a_missing_or_closed_fuse_device() {
    where_users_may_mount(|| {
        let fixture = two_volumes();
        let dev = fixture.path("dev");
        fs::create_dir(&dev).expect("a directory");
        let at = dev.display();
        let only_null = format!("mount -t tmpfs none {at} && mknod -m 666 {at}/null c 1 3");
        let closed = format!("{only_null} && mknod -m 600 {at}/fuse c 10 229");
        for devices in [only_null, closed] {
            let view = fixture.path("view");
            let preparation = format!("{devices} && mount --rbind {at} /dev");
            let outcome = fixture.refuses(fixture.view_of(&where_mounts_are(&preparation), &view, &[]));
            outcome.says(3, &["/dev/fuse cannot be used (", "load the module (modprobe fuse)"]);
            assert!(!view.exists());
        }
    });
}

#[test]
fn others_may_look_where_the_configuration_of_fuse_lets_them_as_far_as_modes_do() {
    where_users_may_mount(|| {
        let fixture = Fixture::new(&pod(
        "[{name: config, configMap: {name: app, items: [{key: a, path: open}, {key: b, path: closed, mode: 0400}]}}]",
    ))
    .of_user();
        fixture.write("objects/app.yaml", &config_map("app", &[("a", "alpha"), ("b", "beta")]));
        fs::set_permissions(fixture.path(""), Permissions::from_mode(0o755)).expect("the mode is set");
        let view = fixture.path("view");
        let with = |line: &str| {
            fixture.write("fuse.conf", line);
            where_mounts_are(&format!("mount --bind {} /etc/fuse.conf", fixture.path("fuse.conf").display()))
        };
        let outcome = fixture.refuses(fixture.view_of(&with("# nothing\n"), &view, &["--allow-other"]));
        outcome.says(2, &["--allow-other needs the line user_allow_other in /etc/fuse.conf"]);
        assert!(!view.exists());

        let mut viewing = fixture.spawn(&mut fixture.view_of(&with("user_allow_other\n"), &view, &["--allow-other"]));
        viewing.wait_log("Ctrl-C ends this");
        let cat = |user: Caller, file: &str| {
            let mut command = Command::new("nsenter");
            command.arg(format!("--mount=/proc/{}/ns/mnt", viewing.pid())).args(as_user(user));
            finish(command.arg("cat").arg(view.join("config").join(file))).stdout
        };
        for user in [USER, Caller::new(1234)] {
            assert_eq!((cat(user, "open").as_str(), cat(user, "closed").as_str()), ("alpha", ""), "{user:?}");
        }
        assert_eq!(cat(Caller::new(0), "closed"), "beta", "root, as in a container");
        assert!(viewing.stop().success(), "{}", viewing.log());
    });
}

#[test]
fn podfs_mount_without_root_suggests_a_view() {
    where_users_may_mount(|| {
        let fixture = two_volumes();
        fixture.write("volume.yaml", "{name: config, configMap: {name: app}}");
        let prefix = as_user(USER);
        let mut command = Command::new(&prefix[0]);
        command.args(&prefix[1..]).arg(PODFS).args(["mount", "--volume"]).arg(fixture.path("volume.yaml"));
        command.arg(fixture.path("view")).env("PODFS_CONFIG", "/dev/null");
        fixture
            .refuses(command)
            .says(3, &["must run as root; podfs view shows the projected volumes of a pod without root"]);
    });
}
