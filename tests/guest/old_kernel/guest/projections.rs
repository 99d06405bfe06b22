//! Projections: podfs clones the private mount through a mount namespace (before Linux 6.15), and keeps generations in memory
//! files (memfds) without a seal against execution (before Linux 6.3).

use std::fs;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount, umount};

use super::{assert_stops_clean, mode};
use crate::common::watch::Watcher;
use crate::common::*;

/// A volume of each kind; `all` has the sources of the three others.
const VOLUMES: &str = "[{name: config, configMap: {name: app}},
    {name: keys, secret: {secretName: app, defaultMode: 0400}},
    {name: about, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}},
    {name: all, projected: {sources: [{configMap: {name: app}}, {secret: {name: app}},
      {downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}}]}}]";

fn fixture() -> Fixture {
    let fixture = Fixture::new(&pod(VOLUMES));
    fixture.write("objects/config.json", &config_map("app", &[("a", "1"), ("gone", "x")]));
    fixture.write("objects/keys.json", &secret("app", &[("key", "s3cret")]));
    fixture
}

#[track_caller]
fn assert_files(volume: &Path, expected: &[(&str, &str)]) {
    for (path, content) in expected {
        assert_eq!(fs::read_to_string(volume.join(path)).expect(path), *content, "{path}");
    }
}

#[test]
#[ignore = "runs in the guest"]
fn every_kind_of_projection_comes_up_with_its_content() {
    let fixture = fixture();
    let running = fixture.run();
    assert_files(&running.volume("config"), &[("a", "1"), ("gone", "x")]);
    assert_files(&running.volume("keys"), &[("key", "s3cret")]);
    assert_files(&running.volume("about"), &[("labels", "app=\"web\"")]);
    assert_files(&running.volume("all"), &[("a", "1"), ("key", "s3cret"), ("name", "web")]);
    for name in ["config", "keys", "about", "all"] {
        assert_eq!(mode(&running, name), "zero-message", "{name}");
    }
    assert_eq!(fixture.mounts().len(), 4, "the private mounts are attached nowhere");
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn a_change_is_switched_to_and_raises_the_events_of_a_switch() {
    let fixture = fixture();
    let running = fixture.run();
    let volume = running.volume("config");
    let (before, watcher) = (generation(&volume), Watcher::on("config", &volume));
    // These accesses put the files, and the absence of `new`, into the kernel's caches.
    assert_files(&volume, &[("a", "1"), ("gone", "x")]);
    assert!(!volume.join("new").exists());
    fixture.write("objects/config.json", &config_map("app", &[("a", "2"), ("new", "y")]));
    wait_content(&volume.join("a"), "2");
    assert_ne!(generation(&volume), before);
    wait_content(&volume.join("new"), "y");
    eventually("the removed key is absent", || !volume.join("gone").exists());
    assert_eq!(watcher.switches(), 1);
    wait_content(&running.volume("all").join("a"), "2");
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn no_process_writes_to_a_projection_even_through_a_mount_made_writable() {
    let fixture = fixture();
    let running = fixture.run();
    let volume = running.volume("config");
    let assert_read_only = |reason: &str| {
        let refused = fs::write(volume.join("stolen"), "x").expect_err(reason);
        assert_eq!(refused.raw_os_error(), Some(Errno::EROFS as i32), "{reason}");
    };
    assert_read_only("the mount is read-only");
    let writable = MsFlags::MS_BIND | MsFlags::MS_REMOUNT;
    mount(None::<&str>, &volume, None::<&str>, writable, None::<&str>).expect("root may");
    assert_read_only("the server refuses to create files");
    fixture.write("objects/config.json", &config_map("app", &[("a", "2")]));
    wait_content(&volume.join("a"), "2");
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn a_volume_that_another_process_unmounts_is_mounted_again_also_by_the_next_supervisor() {
    let fixture = fixture();
    let mut running = fixture.run();
    let volume = running.volume("config");
    for content in ["2", "3"] {
        umount(&volume).expect("unmounted");
        wait_content(&volume.join("gone"), "x");
        fixture.write("objects/config.json", &config_map("app", &[("a", content), ("gone", "x")]));
        wait_content(&volume.join("a"), content);
        fixture.kill_supervisor(&mut running);
        running = fixture.run();
    }
    assert_eq!(fixture.mounts().len(), 4);
    assert_stops_clean(running, &fixture);
}
