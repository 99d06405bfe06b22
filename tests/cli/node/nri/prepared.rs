//! Containers of a real containerd, created over CRI with the mounts of `podfs mounts prepare --output cri`. Here, podfs is the
//! volume manager, and not a plugin of containerd.

use std::fs;

use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use super::containerd::Containerd;
use super::runtime::Machine;
use crate::common::node::Node;
use crate::common::outcome::finish;
use crate::common::{Fixture, config_map, eventually, secret, wait_content};

const UID: &str = "5f0d3b8e-3a65-4f43-9a0f-6d4ef6f0c6a1";
const WEB: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: web, uid: 5f0d3b8e-3a65-4f43-9a0f-6d4ef6f0c6a1, annotations: {podfs.io/sub-path.live: live}}
spec:
  containers:
  - name: c
    volumeMounts:
    - {name: config, mountPath: /config}
    - {name: config, mountPath: /etc/pinned.conf, subPath: setting}
    - {name: keys, mountPath: /keys}
    - {name: scratch, mountPath: /part, subPath: some/part}
    - {name: scratch, mountPath: /look, subPath: some, readOnly: true}
    - {name: live, mountPath: /etc/live.conf, subPath: setting}
  volumes:
  - {name: config, configMap: {name: app}}
  - {name: keys, secret: {secretName: keys}}
  - {name: scratch, emptyDir: {}}
  - {name: live, configMap: {name: other}}
";

#[test]
fn a_container_over_cri_shows_what_podfs_prepares_and_no_call_of_it_fails_when_podfs_is_killed() {
    let machine = Machine { node: Node { fixture: Fixture::new(WEB) } };
    let fixture = &machine.node.fixture;
    fs::create_dir(fixture.path("nri")).expect("a directory");
    fixture.write("objects/app.json", &config_map("app", &[("setting", "1")]));
    fixture.write("objects/other.json", &config_map("other", &[("setting", "1")]));
    fixture.write("objects/keys.json", &secret("keys", &[("password", "opensesame")]));
    let test = "a_container_over_cri_shows_what_podfs_prepares_and_no_call_of_it_fails_when_podfs_is_killed";
    let Some(containerd) = Containerd::start_or_skip(&machine, test) else { return };
    let mut running = fixture.run();
    let mut prepare = fixture.operator("mounts");
    let outcome = finish(prepare.args(["prepare", "--pod", UID, "--container", "c", "--output", "cri"]));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let mounts: Vec<Value> = serde_json::from_str(&outcome.stdout).expect("JSON");
    let sandbox = containerd.run_pod("web", &[]);
    let container = containerd.run_prepared("web", &sandbox, "c", &mounts);
    let says = |command: &str| containerd.says(&container, command);
    assert_eq!(says("cat /config/setting /etc/pinned.conf /etc/live.conf /keys/password"), "111opensesame");
    let writes =
        "for f in /config/setting /etc/pinned.conf /etc/live.conf /keys/password /look/new; do echo x >$f; done";
    assert_eq!(says(writes).matches("Read-only file system").count(), 5);
    assert_eq!(says("echo in >/part/f; cat /look/part/f"), "in");

    // A live part follows its object, and a pinned one does not (SP-05).
    let watcher = containerd.watch(&container, "live", "/etc/live.conf");
    fixture.write("objects/other.json", &config_map("other", &[("setting", "2")]));
    fixture.write("objects/app.json", &config_map("app", &[("setting", "2")]));
    wait_content(&running.volume("config").join("setting"), "2");
    eventually("the live part changes in the running container", || says("cat /etc/live.conf") == "2");
    let mut events = Vec::new();
    eventually("a process inside gets the events", || {
        events.extend(watcher.events());
        ["live MODIFY", "live CLOSE_WRITE"].iter().all(|expected| events.iter().any(|event| event == expected))
    });
    assert_eq!(says("cat /config/setting /etc/pinned.conf"), "21");

    containerd.says(
        &container,
        "while [ ! -e /part/stop ]; do cat /config/setting /etc/pinned.conf /etc/live.conf /keys/password >/part/read && \
         [ \"$(cat /part/read)\" = 212opensesame ] && echo x >>/part/rounds || echo x >>/part/failures; done >/dev/null 2>&1 &",
    );
    let part = running.volume("scratch").join("some/part");
    let rounds = || fs::metadata(part.join("rounds")).map_or(0, |rounds| rounds.len());
    let wait_rounds = |what: &str| {
        let before = rounds();
        eventually(what, || rounds() > before + 10);
    };
    wait_rounds("the container reads");
    kill(running.server(), Signal::SIGKILL).expect("there is a server");
    wait_rounds("it reads with another server");
    fixture.kill_supervisor(&mut running);
    wait_rounds("it reads without a supervisor");
    let running = fixture.run();
    kill(running.server(), Signal::SIGKILL).expect("there is a server");
    wait_rounds("it reads with another supervisor and its next server");
    assert!(!part.join("failures").exists(), "a call failed\n{}", running.log());
    fs::write(part.join("stop"), "").expect("written");
    containerd.stop_pod(&sandbox);
}
