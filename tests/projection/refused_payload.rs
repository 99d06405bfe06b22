//! A volume shows a payload completely, with the right owners from the start, or not at all.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::common::tree::files;
use crate::common::watch::Watcher;
use crate::common::{Fixture, config_map, generation, wait_content};

/// Every key of ConfigMap `app`, and below `a/` a key of ConfigMap `other`.
const VOLUME: &str = "
    - name: config
      projected:
        sources:
        - configMap: {name: app}
        - configMap: {name: other, items: [{key: deep, path: a/deep}]}";

#[test]
fn a_payload_with_one_impossible_path_changes_nothing() {
    // AW-07, AW-17, AW-20: after the first update, `a` would have to be a file and a directory.
    let fixture = Fixture::new(&crate::common::pod(VOLUME));
    fixture.write("objects/app.yaml", &config_map("app", &[("b", "1")]));
    fixture.write("objects/other.yaml", &config_map("other", &[("deep", "1")]));
    let running = fixture.run();
    let volume = running.volume("config");
    let (before, shown) = (generation(&volume), files(&volume));
    let watcher = Watcher::on("root", &volume);

    fixture.write("objects/app.yaml", &config_map("app", &[("a", "2"), ("b", "2")]));
    running.wait_log("\"a\"");
    assert_eq!((generation(&volume), files(&volume)), (before, shown), "`b` is not shown without `a`");

    fixture.write("objects/app.yaml", &config_map("app", &[("b", "3")]));
    wait_content(&volume.join("b"), "3");
    let events = watcher.events_until_removal("root");
    assert_eq!(events.iter().filter(|event| event.contains("CREATE|ISDIR")).count(), 1, "{events:?}");
}

#[test]
fn the_fs_group_is_there_from_the_start_and_nothing_is_walked() {
    // AW-24, FG-02, FG-05: the kubelet changes the group of the files in a separate step. This step also walks the old
    // generation, and it may fail. In podfs, modes and groups are part of the payload.
    let pod = crate::common::pod("[{name: config, configMap: {name: app}}]")
        .replace("spec:", "spec:\n  securityContext: {fsGroup: 1001}");
    let fixture = Fixture::new(&pod);
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "1")]));
    let running = fixture.run();
    let volume = running.volume("config");
    let mut watcher = Watcher::on("root", &volume);
    watcher.add("file", &volume.join("a"));
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "2")]));
    let events = watcher.events_until_removal("root");
    let switch = events.iter().position(|event| event == "root MOVED_TO ..data").expect("a switch");
    let touched: Vec<_> = events[..switch].iter().filter(|event| event.contains("ATTRIB")).collect();
    assert_eq!(touched.len(), 1, "only the new generation's directory is touched before the switch: {events:?}");
    assert!(touched[0].starts_with("root ATTRIB|ISDIR .."), "{touched:?}");

    let file = fs::metadata(volume.join("a")).expect("a file");
    assert_eq!((file.uid(), file.gid(), file.mode() & 0o7777), (0, 1001, 0o644), "the owner stays root");
    let link = fs::symlink_metadata(volume.join("a")).expect("a link");
    assert_eq!((link.gid(), link.mode() & 0o7777), (1001, 0o777), "links get the group, their mode stays");
    let directory = fs::metadata(volume.join("..data")).expect("a directory");
    assert_eq!((directory.gid(), directory.mode() & 0o7777), (1001, 0o2755));
}
