//! Commands of one version about pods of the other: push, upgrade, trace, cleanup.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::common::outcome::{Outcome, finish};
use crate::common::*;
use crate::previous::First;

const UID: &str = "d7b2f3a1-55c0-4d3e-8a51-3c9c1d0b2e77";

/// A pod whose objects an agent pushes.
const PUSHED: &str = "[{name: config, configMap: {name: app}}, \
    {name: access, projected: {sources: [{serviceAccountToken: {path: token}}]}}]";

fn with_uid(volumes: &str) -> String {
    pod(volumes).replace("name: web, labels", &format!("name: web, uid: {UID}, labels"))
}

/// Runs a command of the podfs at a path about the pods of a fixture.
fn operate(podfs: &Path, fixture: &Fixture, command: &str, arguments: &[&str]) -> Outcome {
    let mut operator = Command::new(podfs);
    finish(operator.arg(command).arg("--run-dir").arg(fixture.path("run")).args(arguments))
}

#[test]
fn each_version_pushes_objects_to_pods_of_the_other() {
    for first in First::BOTH {
        let fixture = Fixture::new(&with_uid(PUSHED));
        let builds = first.builds(&fixture);
        let mut command = fixture.command_of(&builds.program());
        command.arg("--push");
        let mut running = fixture.start_command(command);
        let socket = fixture.path(&format!("run/{UID}/control.sock"));
        eventually("podfs listens", || UnixStream::connect(&socket).is_ok());
        let push = |value: &str| {
            let token = json!({
                "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
                "spec": {"audiences": [], "expirationSeconds": 3600}, "status": {"token": value},
            });
            fixture.write("pushed.yaml", &format!("{}\n---\n{token}", config_map("app", &[("a", value)])));
            let file = fixture.path("pushed.yaml");
            let arguments = ["--pod", UID, "-f", file.to_str().expect("text")];
            operate(&builds.other_program(), &fixture, "push", &arguments).says(0, &["has 1 object and 1 token now"]);
        };
        push("1");
        running.wait_ready();
        for value in ["2", "3"] {
            push(value);
            wait_content(&running.volume("config").join("a"), value);
            wait_content(&running.volume("access").join("token"), value);
        }
        assert!(running.stop().success());
        fixture.assert_nothing_left();
    }
}

#[test]
fn each_version_upgrades_pods_of_the_other_and_shows_them() {
    for first in First::BOTH {
        let fixture =
            Fixture::new(&with_uid("[{name: config, configMap: {name: app}}, {name: scratch, emptyDir: {}}]"));
        fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
        let mut builds = first.builds(&fixture);
        let mut running = builds.run(&fixture);
        builds.put_other();
        // The commands are of the version that the pod does not have yet.
        let podfs = builds.program();
        let status = operate(&podfs, &fixture, "status", &[]);
        assert_eq!(status.code, Some(0), "{}{}", status.stdout, status.stderr);
        let metrics = operate(&podfs, &fixture, "metrics", &["--all"]);
        assert!(metrics.code == Some(0) && metrics.stdout.contains(UID), "{}{}", metrics.stdout, metrics.stderr);
        let kept = operate(&podfs, &fixture, "cleanup", &["--root-dir", fixture.path("root").to_str().expect("text")]);
        assert_eq!(kept.code, Some(0), "{}", kept.stderr);
        assert_eq!(fs::read_to_string(running.volume("config").join("a")).expect("it is served on"), "1");
        let upgraded = operate(&podfs, &fixture, "upgrade", &["--all"]);
        let line = format!("done, podfs {} serves it", builds.version());
        assert!(upgraded.stdout.contains(&line), "{}{}", upgraded.stdout, upgraded.stderr);
        assert!(running.stop().success());
        fixture.assert_nothing_left();
    }
}

#[test]
fn each_version_cleans_up_after_the_other_and_keeps_the_content_of_empty_dirs() {
    for first in First::BOTH {
        let fixture = Fixture::new(&with_uid(
            "[{name: config, configMap: {name: app}}, {name: scratch, emptyDir: {}}, \
             {name: device, hostPath: {path: /dev/null}}]",
        ));
        fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
        let mut builds = first.builds(&fixture);
        let mut running = builds.run(&fixture);
        let file = running.volume("scratch").join("file");
        fs::write(&file, "data").expect("written");
        fixture.kill_both(&mut running);
        let root = fixture.path("root");
        let outcome =
            operate(&builds.other_program(), &fixture, "cleanup", &["--root-dir", root.to_str().expect("text")]);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        assert_eq!(fixture.mounts(), Vec::<std::path::PathBuf>::new());
        builds.put_other();
        let mut next = builds.run(&fixture);
        assert_eq!(fs::read_to_string(&file).expect("the content is kept"), "data");
        assert!(next.stop().success());
        fixture.assert_nothing_left();
    }
}
