//! Mounts of containers: podfs clones a live part through a mount namespace (before Linux 6.15); subPaths of every kind of
//! volume.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use super::{assert_stops_clean, host};
use crate::common::outcome::{Outcome, finish};
use crate::common::watch::Watcher;
use crate::common::*;

const UID: &str = "3f0c2b51-6f0c-4f7e-8b59-0d5a3c1e7a61";

/// A pod with a container that has these `mounts` of the volumes `config`, `host` and `scratch`; and the source directory of
/// the volume `host`.
fn fixture(annotations: &str, mounts: &str) -> (Fixture, PathBuf) {
    let fixture = Fixture::new("");
    let source = fixture.path("source");
    fs::create_dir(&source).expect("a directory");
    let volumes = host("host", &source, "Directory");
    fixture.write(
        "pod.yaml",
        &format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: web, uid: {UID}, annotations: {{{annotations}}}}}, spec: {{\
             containers: [{{name: web, volumeMounts: [{mounts}]}}], volumes: [{volumes}, {{name: scratch, emptyDir: {{}}}}, \
             {{name: config, configMap: {{name: app, items: [{{key: a, path: app.conf}}, {{key: a, path: conf.d/a}}, \
             {{key: b, path: conf.d/b}}], optional: true}}}}]}}}}"
        ),
    );
    write(&fixture, &[("a", "1"), ("b", "1")]);
    (fixture, source)
}

fn write(fixture: &Fixture, data: &[(&str, &str)]) {
    fixture.write("objects/app.json", &config_map("app", data));
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn prepare(fixture: &Fixture) -> Outcome {
    finish(fixture.operator("mounts").args(["prepare", "--pod", UID, "--container", "web"]))
}

/// The sources of the container's mounts, in the order of their paths in the container.
#[track_caller]
fn prepared(fixture: &Fixture) -> Vec<PathBuf> {
    let outcome = prepare(fixture);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let mounts: Vec<Value> = serde_json::from_str(&outcome.stdout).expect("JSON");
    let mut mounts: Vec<_> =
        mounts.iter().map(|mount| ["destination", "source"].map(|key| mount[key].as_str())).collect();
    mounts.sort();
    mounts.into_iter().map(|[_, source]| source.expect("a path").into()).collect()
}

#[test]
#[ignore = "runs in the guest"]
fn live_parts_change_in_place_and_their_watchers_get_events() {
    let parts = "{name: config, mountPath: /a, subPath: app.conf}, {name: config, mountPath: /b, subPath: conf.d}";
    let (fixture, _) = fixture("podfs.io/sub-path.config: live", parts);
    let running = fixture.run();
    let sources = prepared(&fixture);
    let (file, directory) = (&sources[0], &sources[1]);
    assert_eq!(
        (read(file), read(&directory.join("a")), read(&directory.join("b"))),
        ("1".into(), "1".into(), "1".into())
    );
    let (open, inode) = (File::open(file).expect("a file"), fs::metadata(file).expect("a file").ino());
    let watcher = Watcher::on("file", file);
    write(&fixture, &[("a", "22"), ("b", "1")]);
    let mut events = Vec::new();
    eventually("the watcher has got the last event of the change", || {
        events.extend(watcher.events());
        events.contains(&"file ATTRIB".to_owned())
    });
    for event in ["file MODIFY", "file CLOSE_WRITE"] {
        assert!(events.iter().any(|received| received == event), "{event}: {events:?}");
    }
    assert_eq!((read(file), fs::metadata(file).expect("a file").ino()), ("22".to_owned(), inode));
    let mut bytes = [0; 4];
    assert_eq!(open.read_at(&mut bytes, 0).expect("an open file can be read"), 2);
    assert_eq!(&bytes[..2], b"22");
    wait_content(&directory.join("a"), "22");
    let refused = fs::write(file, "x").expect_err("a part is read-only");
    assert_eq!(refused.raw_os_error(), Some(Errno::EROFS as i32));

    // The successor of the server serves the live parts. (Before Linux 6.9, a request that the killed server had read fails.)
    let first = running.server();
    kill(first, Signal::SIGKILL).expect("there is a server");
    eventually("there is a successor", || matches!(running.servers()[..], [server] if server != first));
    fixture.remove("objects/app.json");
    eventually("keys vanish from the directory", || fs::read_dir(directory).expect("a listing").count() == 0);
    assert_eq!(read(file), "22", "a file stays as it was");
    write(&fixture, &[("a", "3"), ("b", "3")]);
    wait_content(file, "3");
    wait_content(&directory.join("b"), "3");
    assert_eq!(prepared(&fixture)[..2], sources[..2], "a container that starts again has the same mounts");
    assert_eq!(fs::metadata(file).expect("a file").ino(), inode);
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn parts_of_volumes_are_mounted_until_they_are_released() {
    let parts = "{name: config, mountPath: /a, subPath: app.conf}, {name: scratch, mountPath: /b, subPath: made/deep},
        {name: host, mountPath: /c, subPath: made, readOnly: true}, {name: host, mountPath: /d, subPath: link}";
    let (fixture, source) = fixture("", parts);
    symlink("/etc", source.join("link")).expect("a link");
    let running = fixture.run();
    prepare(&fixture).says(1, &["\"link\" leads out of the volume by a symbolic link"]);
    fs::remove_file(source.join("link")).expect("removed");
    symlink("made", source.join("link")).expect("a link");
    let sources = prepared(&fixture);
    let [file, scratch, read_only, link] = &sources[..4] else { panic!("{sources:?}") };
    assert_eq!(read(file), "1");
    fs::write(scratch.join("f"), "x").expect("written");
    assert_eq!(read(&running.volume("scratch").join("made/deep/f")), "x");
    fs::write(link.join("f"), "y").expect("written");
    assert_eq!((read(&source.join("made/f")), read(&read_only.join("f"))), ("y".to_owned(), "y".to_owned()));
    let refused = fs::write(read_only.join("new"), "x").expect_err("read-only");
    assert_eq!(refused.raw_os_error(), Some(Errno::EROFS as i32));
    write(&fixture, &[("a", "2"), ("b", "2")]);
    wait_content(&running.volume("config").join("app.conf"), "2");
    assert_eq!(read(file), "1", "a running container keeps its version of the file");
    prepared(&fixture);
    assert_eq!(read(file), "2");
    let released = finish(fixture.operator("mounts").args(["release", "--pod", UID]));
    assert_eq!((released.code, released.stderr.as_str()), (Some(0), ""));
    assert!(!file.exists());
    assert_stops_clean(running, &fixture);
}
