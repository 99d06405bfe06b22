//! The settings of a node: `/etc/podfs/podfs.toml`, the environment, and flags that override them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::builds::Builds;
use crate::common::outcome::{Outcome, finish};
use crate::common::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// The keys that podfs names when none is similar to the unknown one.
const KEYS: &str = "root-dir, run-dir, kubeconfig, in-cluster, node-name, csi, nri, nri-pods, nri-index, kubelet-root, csi-allow, csi-read-as, discover, release-when-gone, report-volumes-in-use, register-csi-drivers, server-memory-max, keep-old-generations, flexvolume-dir, sub-path, io-uring, log, log-format";

/// A file of settings, in a directory of its own.
struct Settings {
    directory: TempDir,
}

impl Settings {
    fn new(text: impl AsRef<[u8]>) -> Self {
        let settings = Self { directory: TempDir::with_prefix("podfs-test-").expect("a directory") };
        fs::write(settings.path(), text).expect("written");
        settings
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("podfs.toml")
    }

    /// `podfs` with this file.
    fn podfs(&self, arguments: &[&str]) -> Command {
        let mut command = podfs(arguments);
        command.arg("--config").arg(self.path());
        command
    }

    /// Checks that commands that read the file refuse it with one sentence that has all of `parts`.
    #[track_caller]
    fn refused(&self, parts: &[&str]) {
        for command in ["status", "config"] {
            let outcome = finish(&mut self.podfs(&[command]));
            outcome.says(2, &[parts, &[&self.path().display().to_string()]].concat());
            assert_eq!(outcome.stderr.lines().count(), 1, "it is one sentence: {}", outcome.stderr);
            assert_eq!(outcome.stdout, "");
        }
    }
}

/// `podfs` without the settings of the machine that runs the tests.
fn podfs(arguments: &[&str]) -> Command {
    let mut command = Command::new(PODFS);
    command.args(arguments).env_remove("RUST_LOG").env("PODFS_CONFIG", "/dev/null");
    command
}

/// The run directory that `podfs status` looks at, where no pod is served.
#[track_caller]
fn run_directory(command: &mut Command) -> String {
    let Outcome { code, stderr, .. } = finish(command);
    assert_eq!(code, Some(0), "{stderr}");
    let directory =
        stderr.trim_end().strip_prefix("podfs: no pod is served here (").and_then(|end| end.strip_suffix(')'));
    directory.unwrap_or_else(|| panic!("podfs names no directory: {stderr}")).to_owned()
}

/// The standard output of `podfs config`, which must succeed.
#[track_caller]
fn config(command: &mut Command) -> String {
    let Outcome { code, stdout, stderr } = finish(command);
    assert_eq!(code, Some(0), "{stderr}");
    stdout
}

#[test]
fn a_flag_wins_over_the_environment_that_over_the_file_that_over_the_default() {
    let settings = Settings::new("# A comment.\nrun-dir = \"/nowhere/file\"\n");
    assert_eq!(run_directory(&mut podfs(&["status"])), "/run/podfs");
    assert_eq!(run_directory(&mut settings.podfs(&["status"])), "/nowhere/file");
    assert_eq!(run_directory(podfs(&["status"]).env("PODFS_CONFIG", settings.path())), "/nowhere/file");
    let variable = |command: &mut Command| run_directory(command.env("PODFS_RUN_DIR", "/nowhere/variable"));
    assert_eq!(variable(&mut settings.podfs(&["status"])), "/nowhere/variable");
    assert_eq!(variable(&mut settings.podfs(&["status", "--run-dir", "/nowhere/flag"])), "/nowhere/flag");
    assert_eq!(run_directory(settings.podfs(&["status"]).env("PODFS_RUN_DIR", "")), "/nowhere/file");
}

#[test]
fn the_settings_in_effect_are_shown_with_their_origin() {
    let settings = Settings::new("root-dir = '/srv/podfs'\n\nin-cluster = true\n");
    let path = settings.path();
    let shown = config(settings.podfs(&["config"]).env("PODFS_LOG_FORMAT", "json"));
    for line in [
        format!("root-dir = \"/srv/podfs\" # {}:1", path.display()),
        "run-dir = \"/run/podfs\" # the default".to_owned(),
        "# kubeconfig is not set".to_owned(),
        format!("in-cluster = true # {}:3", path.display()),
        "log-format = \"json\" # PODFS_LOG_FORMAT".to_owned(),
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line:?} is not in:\n{shown}");
    }
    // The output is a valid configuration.
    let again = config(&mut Settings::new(&shown).podfs(&["config"]));
    let values = |text: &str| -> Vec<String> {
        text.lines().map(|line| line.split('#').next().unwrap_or_default().trim().to_owned()).collect()
    };
    assert_eq!(values(&again), values(&shown));
}

#[test]
fn a_setting_that_another_one_excludes_is_not_shown_as_one_in_effect() {
    let settings = Settings::new("in-cluster = true\n");
    let shown = config(settings.podfs(&["config"]).env("PODFS_KUBECONFIG", "/etc/podfs/kubeconfig"));
    for line in [
        "kubeconfig = \"/etc/podfs/kubeconfig\" # PODFS_KUBECONFIG",
        "# in-cluster is excluded by a setting of higher precedence",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line:?} is not in:\n{shown}");
    }
    let again = config(&mut Settings::new(&shown).podfs(&["config"]));
    assert!(again.contains("kubeconfig = \"/etc/podfs/kubeconfig\" # "), "{again}");
    // podfs refuses a file with both.
    let both = Settings::new("kubeconfig = '/etc/podfs/kubeconfig'\nin-cluster = true\n");
    finish(&mut both.podfs(&["config"])).says(2, &["in-cluster", "kubeconfig"]);
}

#[test]
fn the_installed_file_describes_every_setting_and_sets_none() {
    let installed = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/podfs.toml")).expect("a file");
    let example = config(&mut podfs(&["config", "--example"]));
    assert_eq!(installed, example, "podfs config --example >packaging/podfs.toml writes it");
    assert!(installed.lines().all(|line| line.is_empty() || line.starts_with('#')));
    let defaults = config(&mut podfs(&["config"]));
    assert_eq!(config(&mut Settings::new(&installed).podfs(&["config"])), defaults);
    // Without the `#`, the line of each setting sets it.
    let lines = installed.lines().filter_map(|line| line.strip_prefix('#')).filter(|line| !line.starts_with(' '));
    let lines: Vec<_> = lines.collect();
    assert_eq!(lines.len(), KEYS.split(", ").count());
    for (line, key) in lines.iter().zip(KEYS.split(", ")) {
        let value = line.strip_prefix(key).and_then(|value| value.strip_prefix(" = ")).expect("a setting");
        match value {
            "\"FILE\"" | "\"NAME\"" | "\"QUANTITY\"" | "\"SOCKET\"" | "\"LIST\"" | "\"CLASS=DIR\"" => {
                assert!(defaults.contains(&format!("# {key} is not set\n")))
            }
            _ => {
                let shown = config(&mut Settings::new(line).podfs(&["config"]));
                assert_eq!(shown.replacen("podfs.toml:1", "", 1).lines().count(), defaults.lines().count());
                assert!(defaults.contains(&format!("{key} = {value} # the default\n")), "{line}");
                assert!(shown.contains(&format!("{key} = {value} # /")), "{shown}");
            }
        }
    }
}

#[test]
fn help_shows_the_values_that_apply_without_a_flag() {
    let settings = Settings::new("run-dir = \"/nowhere\"\n");
    let help = config(&mut settings.podfs(&["cleanup", "--help"]));
    assert!(help.contains("[env: PODFS_RUN_DIR]\n          [default: /nowhere]"), "{help}");
    assert!(help.contains("[default: /var/lib/podfs]"), "{help}");
}

#[test]
fn a_typo_is_reported_with_its_line_and_the_nearest_key() {
    let settings = Settings::new("# A comment.\n\nrun-dir = \"/run/podfs\"\n\n\n\nroot-dri = \"/\"\n");
    settings.refused(&["/podfs.toml:7: unknown key \"root-dri\"; did you mean \"root-dir\"?"]);
    Settings::new("root_dir = \"/\"\n")
        .refused(&["/podfs.toml:1: unknown key \"root_dir\"; did you mean \"root-dir\"?"]);
    Settings::new("log-fromat = \"json\"\n").refused(&["did you mean \"log-format\"?"]);
    Settings::new("[run]\nrun-dir = \"/\"\n")
        .refused(&["/podfs.toml:1: unknown key \"run\"; did you mean \"run-dir\"?"]);
    Settings::new("xyz = 1\n").refused(&["/podfs.toml:1: unknown key \"xyz\"; the keys are ", KEYS]);
}

#[test]
fn a_value_of_the_wrong_type_is_reported_with_the_expected_one() {
    for wrong in ["7", "true", "[\"/srv\"]", "{ a = 1 }", "2026-11-21", "1.5"] {
        let settings = Settings::new(format!("\nroot-dir = {wrong}\n"));
        settings.refused(&["/podfs.toml:2: root-dir must be a string in quotes, such as \"/var/lib/podfs\""]);
    }
    Settings::new("in-cluster = \"true\"\n").refused(&[":1: in-cluster must be true or false, without quotes"]);
    Settings::new("in-cluster = 1\n").refused(&[":1: in-cluster must be true or false"]);
    Settings::new("server-memory-max = 67108864\n").refused(&[":1: server-memory-max must be a string in quotes"]);
}

#[test]
fn a_value_is_checked_as_that_of_the_flag() {
    Settings::new("log-format = \"xml\"\n").refused(&[":1: log-format: \"xml\" is none of text, json"]);
    Settings::new("server-memory-max = \"1Ki\"\n").refused(&[":1: server-memory-max: 1Ki is less than a server needs"]);
    Settings::new("log = \"podfs=loud\"\n").refused(&[":1: log: error parsing level filter"]);
    Settings::new("node-name = \"\"\n").refused(&[":1: node-name is empty; give a value, or remove the line"]);
    Settings::new("node-name = \"a\\u0000\"\n").refused(&[":1: node-name has a NUL character; remove it"]);
    Settings::new("root-dir = \"srv\"\n").refused(&[":1: root-dir must be an absolute path; \"srv\" depends on"]);
    let excluding = Settings::new("kubeconfig = \"/k\"\nin-cluster = true\n");
    finish(&mut excluding.podfs(&["run", "--pod", "pod.yaml"]))
        .says(2, &["/podfs.toml:2: in-cluster and kubeconfig (", "/podfs.toml:1) exclude each other; remove one"]);
}

#[test]
fn a_variable_is_checked_as_the_flag_and_named() {
    let run = |name: &str, value: &str| finish(podfs(&["run", "--pod", "pod.yaml"]).env(name, value));
    run("PODFS_LOG_FORMAT", "xml").says(2, &["PODFS_LOG_FORMAT: log-format: \"xml\" is none of text, json"]);
    run("PODFS_IN_CLUSTER", "yes").says(2, &["PODFS_IN_CLUSTER: in-cluster must be true or false"]);
    run("RUST_LOG", "podfs=loud").says(2, &["RUST_LOG: log: error parsing level filter"]);
    // A command without the flag ignores the variable.
    assert_eq!(run_directory(podfs(&["status"]).env("RUST_LOG", "podfs=loud")), "/run/podfs");
}

#[test]
fn a_file_that_is_no_toml_is_reported_with_its_line() {
    Settings::new("run-dir = \"/a\"\nroot-dir /b\n").refused(&["/podfs.toml:2: is not TOML: "]);
    Settings::new("run-dir = \"/a\"\nrun-dir = \"/b\"\n").refused(&["/podfs.toml:2: is not TOML: duplicate key"]);
    Settings::new("run-dir = \"/a\n").refused(&["/podfs.toml:1: is not TOML: "]);
    Settings::new(b"run-dir = \"/\xff\"\n").refused(&["/podfs.toml: the text is not UTF-8 (invalid utf-8 sequence"]);
    Settings::new("#".repeat((1 << 20) + 1)).refused(&["/podfs.toml: has more than 1048576 bytes"]);
}

#[test]
fn a_file_that_cannot_be_read_is_reported() {
    let settings = Settings::new("");
    fs::remove_file(settings.path()).expect("removed");
    settings.refused(&["/podfs.toml: there is no such file; --config and PODFS_CONFIG name the file of settings"]);
    finish(podfs(&["status"]).env("PODFS_CONFIG", settings.path())).says(2, &["/podfs.toml: there is no such file"]);
    fs::create_dir(settings.path()).expect("a directory");
    settings.refused(&["/podfs.toml: is a directory; give a file of settings"]);

    const NOBODY: u32 = 65534;
    let secret = Settings::new("");
    fs::set_permissions(secret.directory.path(), fs::Permissions::from_mode(0o755)).expect("changed");
    fs::set_permissions(secret.path(), fs::Permissions::from_mode(0o600)).expect("changed");
    let program = secret.directory.path().join("podfs");
    fs::copy(PODFS, &program).expect("copied");
    let mut command = Command::new(program);
    command.args(["config", "--config"]).arg(secret.path()).uid(NOBODY).gid(NOBODY);
    finish(&mut command).says(2, &["/podfs.toml: cannot be read: Permission denied"]);
}

#[test]
fn commands_without_settings_work_with_a_bad_file() {
    let bad = Settings::new("root-dri = 1\n");
    for arguments in [&["version"][..], &["completions", "bash"], &["--help"], &["run", "--help"], &["help", "run"]] {
        assert_eq!(finish(podfs(arguments).env("PODFS_CONFIG", bad.path())).code, Some(0), "{arguments:?}");
    }
    let server = ["server", "--pod", "default/web", "--uid", "u", "--profile", "projection"];
    let outcome = finish(podfs(&server).env("PODFS_CONFIG", bad.path()).stdin(std::process::Stdio::null()));
    assert!(outcome.stderr.contains("the control socket fails"), "{}", outcome.stderr);
}

#[test]
fn a_flag_wins_over_a_key_of_the_file_that_it_conflicts_with() {
    let fixture = Fixture::new(&config_pod());
    let settings = Settings::new("kubeconfig = \"/nowhere/kubeconfig\"\nnode-name = \"worker-1\"\n");
    let with_settings = |mut command: Command| {
        command.arg("--config").arg(settings.path());
        command
    };
    fixture.refused(&mut with_settings(fixture.command())).says(2, &["/nowhere/kubeconfig"]);
    let mut pushed = with_settings(fixture.command());
    let mut running = fixture.start_command({
        pushed.arg("--push");
        pushed
    });
    running.wait_log("nothing was pushed");
    assert_eq!(running.stop().code(), Some(0));
    let mut in_cluster = with_settings(fixture.command());
    let outcome = fixture.refused(in_cluster.arg("--in-cluster").env_remove("KUBERNETES_SERVICE_HOST"));
    assert_eq!(outcome.code, Some(2));
    assert!(!outcome.stderr.contains("/nowhere/kubeconfig"), "{}", outcome.stderr);
    // The environment wins as well.
    let outcome = fixture.refused(with_settings(fixture.command()).env("PODFS_IN_CLUSTER", "true"));
    assert!(!outcome.stderr.contains("/nowhere/kubeconfig"), "{}", outcome.stderr);
}

/// The value of an environment variable of a process.
fn variable(process: Pid, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{process}/environ")).expect("an environment");
    let prefix = format!("{name}=");
    let mut variables = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    variables.find_map(|variable| variable.strip_prefix(&prefix).map(str::to_owned))
}

#[test]
fn a_server_gets_only_the_variables_that_it_needs() {
    let fixture = Fixture::new(&config_pod());
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let mut command = fixture.command();
    command.env("AWS_SECRET_ACCESS_KEY", "hunter2").env("RUST_LOG", "info");
    let mut running = fixture.start_command(command);
    running.wait_ready();
    assert_eq!(variable(running.pid(), "AWS_SECRET_ACCESS_KEY").as_deref(), Some("hunter2"));
    assert_eq!(variable(running.server(), "RUST_LOG").as_deref(), Some("info"));
    let environment = fs::read(format!("/proc/{}/environ", running.server())).expect("an environment");
    for variable in environment.split(|byte| *byte == 0).filter(|variable| !variable.is_empty()) {
        let name = String::from_utf8_lossy(variable).split('=').next().unwrap_or_default().to_owned();
        assert!(["RUST_LOG", "RUST_BACKTRACE", "NO_COLOR", "TERM"].contains(&name.as_str()), "{name}");
    }
    assert_eq!(running.stop().code(), Some(0));
}

#[test]
fn a_pod_keeps_the_settings_that_it_was_started_with() {
    let fixture = Fixture::new(&config_pod());
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let text = format!(
        "root-dir = {:?}\nrun-dir = {:?}\nlog = \"podfs=debug\"\nlog-format = \"json\"\n",
        fixture.path("root"),
        fixture.path("run")
    );
    let settings = Settings::new(&text);
    let mut builds = Builds::new(&fixture);
    let mut command = Command::new(builds.program());
    command.arg("--config").arg(settings.path()).arg("run").arg("--pod").arg(fixture.pod());
    command.arg("--objects").arg(fixture.objects()).env_remove("RUST_LOG");
    let mut running = fixture.start_command(command);
    running.wait_ready();
    assert!(running.volume("config").starts_with(fixture.path("root")));
    assert!(running.log().lines().all(|line| line.starts_with('{')), "{}", running.log());
    assert_eq!(variable(running.server(), "RUST_LOG").as_deref(), Some("podfs=debug"));

    // An upgraded podfs continues with the pod, after the file got other settings or text that is no setting.
    for text in [text.replace("root", "other").replace("/run", "/elsewhere"), "root-dri = 1".to_owned()] {
        fs::write(settings.path(), text).expect("written");
        builds.upgrade(&fixture);
        fixture.write("objects/app.json", &config_map("app", &[("a", builds.last().to_str().expect("text"))]));
        wait_content(&running.volume("config").join("a"), builds.last().to_str().expect("text"));
    }
    assert_eq!(variable(running.server(), "RUST_LOG").as_deref(), Some("podfs=debug"));
    kill(running.server(), Signal::SIGKILL).expect("it is there");
    assert_eq!(
        fs::read_to_string(running.volume("config").join("a")).expect("served"),
        builds.last().to_string_lossy()
    );
    assert!(running.stop().success());
    fixture.assert_nothing_left();
    assert!(!Path::new(&fixture.path("other")).exists());
}

/// `podfs run` of a fixture, with another run directory.
fn run_in(fixture: &Fixture, run_directory: &Path) -> Command {
    let mut command = podfs(&["run", "--pod"]);
    command.arg(fixture.pod()).arg("--objects").arg(fixture.objects());
    command.arg("--root-dir").arg(fixture.path("root")).arg("--run-dir").arg(run_directory);
    command
}

#[test]
fn a_run_directory_may_be_longer_than_the_address_of_a_socket() {
    let fixture = Fixture::new(&config_pod());
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let long = fixture.path("run").join("r".repeat(200));
    let mut running = fixture.start_command(run_in(&fixture, &long));
    running.wait_ready();
    let outcome = finish(podfs(&["status"]).env("PODFS_RUN_DIR", &long));
    assert!(outcome.code == Some(0) && outcome.stdout.starts_with("default/web  running\n"), "{}", outcome.stdout);
    let server = fixture.kill_supervisor(&mut running);
    let mut running = fixture.start_command(run_in(&fixture, &long));
    running.wait_ready();
    assert_eq!(running.server(), server, "it is found by its socket");
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn a_run_directory_that_is_too_long_for_the_kernel_is_reported_before_anything_is_mounted() {
    let fixture = Fixture::new(&config_pod());
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    // A path has 4095 bytes at most.
    let path_of = |length: usize| {
        let mut path = fixture.path("run").into_os_string().into_string().expect("text");
        while path.len() + 201 < length {
            path += &("/".to_owned() + &"r".repeat(199));
        }
        path += &("/".to_owned() + &"r".repeat(length - path.len() - 1));
        assert_eq!(path.len(), length);
        PathBuf::from(path)
    };
    let longest = 4095 - "/c15bdfd1-80e6-5c53-bf5e-e426594a4c7e/control.sock".len();
    for (length, number) in [(longest + 1, "4096"), (5000, "5050")] {
        let outcome = fixture.refused(&mut run_in(&fixture, &path_of(length)));
        outcome.says(2, &[number, "bytes, and Linux takes 4095; choose a shorter --run-dir"]);
        assert_eq!(outcome.stderr.lines().count(), 1, "nothing was begun: {}", outcome.stderr);
        fixture.assert_nothing_left();
    }
    let mut running = fixture.start_command(run_in(&fixture, &path_of(longest)));
    running.wait_ready();
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}
