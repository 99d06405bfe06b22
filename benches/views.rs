//! The cost of `podfs render` and `podfs view`: `cargo bench --bench views`. Needs root and `/dev/fuse`.
//!
//! Measured are `podfs render` of the examples, beside `podfs version`, which starts the same program; `podfs view` of the examples
//! as a user without any right, from its start until the first file can be read; and the time from a change until the view shows
//! it: of a file of manifests, and of an object of the tests' API server on loopback.

#[path = "../tests/api_server/mod.rs"]
mod api_server;
#[path = "../tests/common/mod.rs"]
mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use api_server::{ApiServer, Style, User};
use common::fuse_user::{USER, as_user, where_users_may_mount};
use common::outcome::finish;
use common::packages::top;
use common::{Fixture, PODFS, Running, config_map, pod};

const VIEWS: usize = 31;
const ROUNDS: usize = 101;
const VOLUMES: &str = "[{name: config, configMap: {name: app}}]";
/// How long a change may take at most.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);

fn main() {
    where_users_may_mount(|| {
        render();
        view();
        change_files();
        change_cluster();
    });
}

fn render() {
    let (pod, objects) = examples();
    let mut render = podfs();
    render.arg("render").arg("--pod").arg(pod).arg("--objects").arg(objects);
    let mut version = podfs();
    version.arg("version");
    let (mut ours, mut base) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        ours.push(timed(|| assert_eq!(finish(&mut render).code, Some(0))));
        base.push(timed(|| assert_eq!(finish(&mut version).code, Some(0))));
    }
    println!("render of the examples: {:.2?}; podfs version: {:.2?}", median(ours), median(base));
}

fn view() {
    let (pod, objects) = examples();
    let fixture = Fixture::new("");
    give(&fixture);
    let directory = fixture.path("view");
    let times = (0..VIEWS).map(|_| {
        let mut command = podfs();
        command.arg("view").arg("--pod").arg(&pod).arg("--objects").arg(&objects).arg(&directory);
        let began = Instant::now();
        let mut viewing = fixture.spawn(&mut command);
        let seen = shows(&directory.join("config/motd"), |_| true);
        assert!(viewing.stop().success(), "{}", viewing.log());
        seen - began
    });
    println!("view of the examples, to its first file, {VIEWS} times: median {:.2?}", median(times.collect()));
}

fn change_files() {
    let fixture = Fixture::new(&pod(VOLUMES));
    fixture.write("objects/app.json", &serial(0));
    give(&fixture);
    let mut command = podfs();
    command.arg("view").arg("--pod").arg(fixture.pod()).arg("--objects").arg(fixture.objects());
    let viewing = fixture.spawn(command.arg(fixture.path("view")));
    changes("a file of manifests", viewing, &fixture, |content| fixture.write("objects/app.json", content));
}

fn change_cluster() {
    let (server, fixture) = (ApiServer::start(), Fixture::new(""));
    let jane = User::new("jane", "developers");
    for resource in ["pods", "configmaps"] {
        server.permit(&jane, &["get", "watch"], resource);
    }
    let kubeconfig = server.kubeconfig_of(&jane, Style::Embedded);
    let directory = kubeconfig.parent().expect("a directory");
    fs::set_permissions(directory, Permissions::from_mode(0o755)).expect("the mode is set");
    server.put(&pod(VOLUMES));
    server.put(&serial(0));
    give(&fixture);
    let mut command = podfs();
    command.args(["view", "--pod-name", "default/web", "--kubeconfig"]).arg(&kubeconfig);
    let viewing = fixture.spawn(command.arg(fixture.path("view")));
    changes("an object of the cluster", viewing, &fixture, |content| {
        server.put(content);
    });
}

fn changes(what: &str, mut viewing: Running, fixture: &Fixture, put: impl Fn(&str)) {
    let file = fixture.path("view/config/key");
    shows(&file, |content| content == "0");
    let times = (1..=ROUNDS).map(|number| {
        let began = Instant::now();
        put(&serial(number));
        shows(&file, |content| content == number.to_string()) - began
    });
    println!("view, a change of {what}, {ROUNDS} times: median {:.2?}", median(times.collect()));
    assert!(viewing.stop().success(), "{}", viewing.log());
}

/// Waits until the user reads the expected bytes; returns that moment.
fn shows(file: &Path, is_expected: impl Fn(&str) -> bool + Sync) -> Instant {
    let began = Instant::now();
    USER.run(Path::new("/"), || {
        loop {
            if fs::read_to_string(file).is_ok_and(|content| is_expected(&content)) {
                return Instant::now();
            }
            assert!(began.elapsed() < CHANGE_TIMEOUT, "{} does not change", file.display());
            std::thread::sleep(Duration::from_micros(200));
        }
    })
}

/// podfs, started by the user.
fn podfs() -> Command {
    let prefix = as_user(USER);
    let mut command = Command::new(&prefix[0]);
    command.args(&prefix[1..]).arg(PODFS).env("PODFS_CONFIG", "/dev/null").env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

fn examples() -> (PathBuf, PathBuf) {
    let examples = top().join("packaging/examples");
    (examples.join("pod.yaml"), examples.join("objects"))
}

fn serial(number: usize) -> String {
    config_map("app", &[("key", &number.to_string())])
}

fn give(fixture: &Fixture) {
    chown(fixture.path(""), Some(USER.uid), Some(USER.gid)).expect("given to the user");
}

fn timed(call: impl FnOnce()) -> Duration {
    let began = Instant::now();
    call();
    began.elapsed()
}

fn median(mut samples: Vec<Duration>) -> Duration {
    samples.sort_unstable();
    samples[samples.len() / 2]
}
