//! A downgrade or a rollback: this podfs finds what another version of podfs has left, and cannot use it. It says so, and changes
//! nothing.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread;

use super::adoption::kill_supervisor;
use crate::common::identity::identity;
use crate::common::outcome::finish;
use crate::common::passthrough::within_timeout;
use crate::common::*;

/// A pod with a projection and an emptyDir.
struct ServedPod {
    fixture: Fixture,
}

impl ServedPod {
    fn new() -> ServedPod {
        let fixture = Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: scratch, emptyDir: {}}]"));
        let pod = ServedPod { fixture };
        pod.write("1");
        pod
    }

    fn write(&self, content: &str) {
        self.fixture.write("objects/app.json", &config_map("app", &[("a", content)]));
    }

    /// The socket of the server, by which the next supervisor finds it.
    fn socket(&self) -> PathBuf {
        self.fixture.run_files().join("server.sock")
    }

    fn lock(&self) -> PathBuf {
        self.fixture.run_files().join("lock")
    }
}

#[test]
fn a_server_with_another_protocol_is_left_alone_until_its_podfs_comes_back() {
    let pod = ServedPod::new();
    let mut running = pod.fixture.run();
    let (config, server) = (running.volume("config"), running.server());
    let before = identity(&config);
    kill_supervisor(&mut running);
    // A server of a later podfs, in the place of the real one.
    let (socket, aside) = (pod.socket(), pod.fixture.path("server.sock"));
    fs::rename(&socket, &aside).expect("the socket exists");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let later_server = thread::spawn(move || {
        let (mut connection, _) = listener.accept()?;
        let refusal = br#"{"Failed":"podfs 9.9.9 speaks another protocol than podfs 0.0.1"}"#;
        connection.write_all(&(refusal.len() as u32).to_ne_bytes())?;
        connection.write_all(refusal)?;
        connection.read_to_end(&mut Vec::new())
    });
    let record = fs::read(pod.fixture.run_files().join("lock")).expect("a record");
    finish(&mut pod.fixture.command()).says(
        1,
        &[
            "cannot take over their server",
            "podfs 9.9.9 speaks another protocol",
            "use the podfs that started the server",
        ],
    );
    within_timeout("podfs closes the connection to the server", move || drop(later_server.join()));
    assert_eq!(fs::read_to_string(config.join("a")).expect("the server serves it still"), "1");
    assert_eq!(identity(&config), before, "the mount is the same");
    assert_eq!(
        without_edition(&fs::read(pod.fixture.run_files().join("lock")).expect("it stays")),
        without_edition(&record)
    );

    fs::rename(&aside, &socket).expect("the podfs of the server comes back");
    let mut running = pod.fixture.run();
    assert_eq!((running.server(), identity(&config)), (server, before), "it takes over the same server");
    pod.write("2");
    wait_content(&config.join("a"), "2");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

/// The paths of a pod's record.
fn without_edition(record: &[u8]) -> serde_json::Value {
    let first = record.split(|byte| *byte == b'\n').next().expect("a line");
    let mut record: serde_json::Value = serde_json::from_slice(first).expect("JSON");
    let fields = record.as_object_mut().expect("an object");
    ["edition", "pid"].into_iter().for_each(|field| drop(fields.remove(field)));
    record
}

#[test]
fn an_upgrade_whose_state_has_another_version_leaves_the_server_for_the_next_start() {
    let pod = ServedPod::new();
    let mut running = pod.fixture.run();
    let (config, server) = (running.volume("config"), running.server());
    let before = identity(&config);
    kill_supervisor(&mut running);
    let record = fs::read(pod.lock()).expect("a record");
    for state in [r#"{"version":2,"connection":900,"before":null}"#, r#"{"client":"a socket"}"#] {
        let sentences =
            ["the state in PODFS_UPGRADE", "use the podfs that wrote it", "the pod is still served: start podfs anew"];
        finish(pod.fixture.command().env("PODFS_UPGRADE", state)).says(1, &sentences);
        assert_eq!(fs::read(pod.lock()).expect("it stays"), record);
        assert_eq!(identity(&config), before, "the mount is the same");
    }
    let mut running = pod.fixture.run();
    assert_eq!((running.server(), identity(&config)), (server, before), "it takes over the same server");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_pod_whose_record_has_another_version_is_neither_served_nor_cleaned_up() {
    let pod = ServedPod::new();
    let mut running = pod.fixture.run();
    let (config, scratch) = (running.volume("config"), running.volume("scratch"));
    fs::write(scratch.join("file"), "data").expect("written");
    pod.fixture.kill_both(&mut running);
    let (mounts, recorded) = (pod.fixture.mounts(), fs::read(pod.lock()).expect("a record"));
    let later =
        String::from_utf8(recorded.clone()).expect("text").replace(r#"{"edition""#, r#"{"version":2,"edition""#);
    fs::write(pod.lock(), &later).expect("written");
    let reason = "it has version 2, and this podfs reads version 1; use the podfs that wrote it";

    finish(&mut pod.fixture.command()).says(1, &["podfs neither serves nor cleans up pod", reason]);
    let uid = pod.fixture.run_files().file_name().expect("a uid").to_str().expect("text").to_owned();
    for options in [&[][..], &["--pod", &uid, "--content"]] {
        let cleanup = pod.fixture.cleanup(options);
        let left = format!("left {}: ", pod.fixture.run_files().display());
        assert!(cleanup.stdout.contains(&left) && cleanup.stdout.contains(reason), "{}", cleanup.stdout);
    }
    let status = pod.fixture.status(&[]);
    assert!(format!("{}{}", status.stdout, status.stderr).contains(reason), "{}{}", status.stdout, status.stderr);
    assert_eq!(fs::read_to_string(pod.lock()).expect("it stays"), later);
    assert_eq!(pod.fixture.mounts(), mounts, "each mount stays, although its server is dead");

    fs::write(pod.lock(), &recorded).expect("the podfs that wrote the record comes back");
    let mut running = pod.fixture.run();
    wait_content(&config.join("a"), "1");
    assert_eq!(fs::read_to_string(scratch.join("file")).expect("it stayed"), "data");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn an_empty_dir_whose_storage_is_unknown_keeps_its_files_until_an_operator_says_where_they_are() {
    let pod = ServedPod::new();
    let mut running = pod.fixture.run();
    let scratch = running.volume("scratch");
    fs::write(scratch.join("file"), "data").expect("written");
    pod.fixture.kill_both(&mut running);
    let uid = pod.fixture.run_files().file_name().expect("a uid").to_owned();
    let home = pod.fixture.path("root/pods").join(uid).join("plugins/kubernetes.io~empty-dir/scratch");
    for word in ["disk-2", ""] {
        fs::write(home.join("ready"), word).expect("written");
        let mut running = pod.fixture.start_command(pod.fixture.command());
        running.wait_log("podfs does not touch the content of");
        running.stop();
        assert_eq!(fs::read_to_string(home.join("content/file")).expect("it stays"), "data", "{word:?}");
        assert_eq!(fs::read_to_string(home.join("ready")).expect("it stays"), word);
    }
    fs::write(home.join("ready"), "disk\n").expect("written");
    let mut running = pod.fixture.run();
    assert_eq!(fs::read_to_string(running.volume("scratch").join("file")).expect("it stayed"), "data");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}
