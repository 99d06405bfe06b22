//! The inotify events of commits: they are exactly those of the kubelet's AtomicWriter, because a commit consists of
//! system calls on the mount. The watches are for all events, so the lists here also show which events do *not* come:
//! no MODIFY, no CLOSE_WRITE.

use std::fs;
use std::time::Duration;

use podfs_fuse::client::Commit;
use podfs_fuse::projection::image::DirectoryAttributes;
use podfs_fuse::projection::tree::Root;
use tempfile::TempDir;

use crate::common::namespace::{Container, Propagation, bind};
use crate::common::watch::{Watcher, renamed, switched};
use crate::common::{Fixture, Served, config_map, layout, plain_root, pod, wait_content};

/// The first events of each switch, at the root.
const SWITCH: [&str; 5] = [
    "root CREATE|ISDIR new",
    "root ATTRIB|ISDIR new",
    "root CREATE ..data_tmp",
    "root MOVED_FROM ..data_tmp",
    "root MOVED_TO ..data",
];

/// The last event of each switch.
const OLD_REMOVED: &str = "root DELETE|ISDIR old";

/// The last events of a switch if file `a` and its generation are watched, and `a` is removed last.
const OLD_A_REMOVED: [&str; 7] = [
    "file ATTRIB",
    "file DELETE_SELF",
    "file IGNORED",
    "data DELETE a",
    "data DELETE_SELF",
    "data IGNORED",
    OLD_REMOVED,
];

/// The events of a switch: the first ones, and then these.
fn switch_with(middle: &[&'static str], last: &[&'static str]) -> Vec<&'static str> {
    [&SWITCH, middle, last].concat()
}

#[test]
fn the_first_write_raises_the_events_of_the_atomic_writer() {
    // EV-01, EV-02, EV-03, EV-08
    let mut served = Served::new(&plain_root());
    let watcher = Watcher::on("root", served.path());
    let generation = switched(served.commit(&[("a", "1"), ("b", "1"), ("sub/x", "1"), ("sub/y", "1")]));
    let links = ["root CREATE a", "root CREATE b", "root CREATE sub"];
    assert_eq!(watcher.events_renamed(&[(&generation, "new")]), switch_with(&links, &[]));
}

#[test]
fn an_update_raises_events_in_the_order_of_the_atomic_writer() {
    // EV-01, EV-02, EV-03, EV-04, EV-05, EV-08, AW-14: `a` changes, `b` is removed, `c` is added.
    let mut served = Served::new(&plain_root());
    let old = switched(served.commit(&[("a", "1"), ("b", "1")]));
    fs::read(served.path().join("b")).expect("a lookup of `b`");
    let mut watcher = Watcher::on("root", served.path());
    watcher.add("file", &served.path().join("a"));
    watcher.add("data", &served.path().join("..data"));
    let new = switched(served.commit(&[("a", "2"), ("c", "2")]));
    let expected = switch_with(&["root CREATE c", "root DELETE b", "data DELETE b"], &OLD_A_REMOVED);
    assert_eq!(watcher.events_renamed(&[(&old, "old"), (&new, "new")]), expected);
}

#[test]
fn a_kept_old_generation_raises_events_when_it_is_removed() {
    // EV-04, EV-05: the events are the same as without the pause, only later. Two old generations are removed one after
    // the other.
    let mut served = Served::new(&plain_root());
    served.projection.keep_old_for(Duration::from_secs(3600));
    let old = switched(served.commit(&[("a", "1"), ("b", "1")]));
    let kept = served.path().join(&old);
    let mut watcher = Watcher::on("root", served.path());
    watcher.add("file", &served.path().join("a"));
    watcher.add("data", &served.path().join("..data"));
    let second = switched(served.commit(&[("a", "2")]));
    assert_eq!(watcher.events_renamed(&[(&old, "old"), (&second, "new")]), switch_with(&["root DELETE b"], &[]));
    assert_eq!(
        fs::read_to_string(kept.join("b")).expect("the old generation is kept"),
        "1",
        "no process has looked up `b` before"
    );
    assert_eq!(watcher.events(), ["data OPEN b", "data ACCESS b", "data CLOSE_NOWRITE b"]);
    let third = switched(served.commit(&[("a", "3")]));
    assert_eq!(watcher.events_renamed(&[(&second, "old"), (&third, "new")]), switch_with(&[], &[]));
    assert_eq!(served.projection.old_usage().generations, 2);

    served.projection.remove_old();
    assert_eq!(watcher.events(), [""; 0], "the old generations are not due yet");
    served.projection.keep_old_for(Duration::ZERO);
    served.projection.remove_old();
    let end = ["data DELETE b", "file ATTRIB", "file DELETE_SELF", "file IGNORED", "data DELETE a", "data DELETE_SELF"];
    let second_removed = format!("root DELETE|ISDIR {second}");
    assert_eq!(
        watcher.events_renamed(&[(&old, "old")]),
        [&end[..], &["data IGNORED", OLD_REMOVED, &second_removed]].concat()
    );
    assert_eq!(served.projection.next_removal(), None);
    assert!(!kept.exists());
}

#[test]
fn a_watch_on_a_nested_file_gets_its_end() {
    // EV-04, EV-05: also for a file below directories, and for a key whose bytes do not change.
    let mut served = Served::new(&plain_root());
    let old = switched(served.commit(&[("sub/deep/x", "same"), ("y", "1")]));
    let mut watcher = Watcher::on("file", &served.path().join("sub/deep/x"));
    watcher.add("sub", &served.path().join("sub"));
    let new = switched(served.commit(&[("sub/deep/x", "same"), ("y", "2")]));
    let expected =
        ["file ATTRIB", "file DELETE_SELF", "file IGNORED", "sub DELETE|ISDIR deep", "sub DELETE_SELF", "sub IGNORED"];
    assert_eq!(watcher.events_renamed(&[(&old, "old"), (&new, "new")]), expected);
}

#[test]
fn a_watch_that_is_armed_again_gets_each_update() {
    // EV-04: a reloader that watches the file itself has to add its watch again after each update, as with the kubelet.
    let mut served = Served::with(&[("a", "0")]);
    for round in 1..=20 {
        let watcher = Watcher::on("file", &served.path().join("a"));
        served.commit(&[("a", &round.to_string())]);
        assert_eq!(watcher.events(), ["file ATTRIB", "file DELETE_SELF", "file IGNORED"], "round {round}");
    }
}

#[test]
fn each_update_moves_data_once() {
    // EV-01
    let mut served = Served::with(&[("a", "0")]);
    let watcher = Watcher::on("root", served.path());
    for round in 1..=20 {
        served.commit(&[("a", &round.to_string()), (&format!("key-{round}"), "")]);
        let events = watcher.events();
        let moves = events.iter().filter(|event| *event == "root MOVED_TO ..data").count();
        assert_eq!(moves, 1, "round {round}: {events:?}");
    }
}

#[test]
fn an_unchanged_payload_raises_no_event() {
    // EV-06, AW-10: the first events come from the change after the unchanged payload.
    let mut served = Served::new(&plain_root());
    let old = switched(served.commit(&[("a", "1"), ("sub/b", "1")]));
    let mut watcher = Watcher::on("root", served.path());
    watcher.add("data", &served.path().join("..data"));
    watcher.add("file", &served.path().join("a"));
    assert_eq!(served.commit(&[("a", "1"), ("sub/b", "1")]), Commit::Unchanged);
    let new = switched(served.commit(&[("a", "2"), ("sub/b", "1")]));
    let expected = switch_with(&[], &OLD_A_REMOVED);
    assert_eq!(watcher.events_renamed(&[(&old, "old"), (&new, "new")]), expected);
}

#[test]
fn an_object_rewritten_without_a_change_raises_no_event() {
    // EV-06, from a manifest to the mount. Both objects are in one file, so the change of the second volume shows that
    // podfs has read the rewritten first object. The first events come from the change after that.
    let fixture =
        Fixture::new(&pod("[{name: quiet, configMap: {name: quiet}}, {name: loud, configMap: {name: loud}}]"));
    let write = |quiet: &str, loud: &str, label: &str| {
        let quiet = config_map("quiet", &[("a", quiet)]).replace(r#""name":"quiet""#, label);
        fixture.write("objects/all.yaml", &format!("{quiet}\n---\n{}", config_map("loud", &[("b", loud)])));
    };
    write("1", "1", r#""name":"quiet""#);
    let running = fixture.run();
    let (quiet, loud) = (running.volume("quiet"), running.volume("loud"));
    let old = fs::read_link(quiet.join("..data")).expect("a link");
    let watcher = Watcher::on("root", &quiet);
    write("1", "2", r#""name":"quiet","labels":{"new":"label"}"#);
    wait_content(&loud.join("b"), "2");
    write("2", "2", r#""name":"quiet""#);
    let events = watcher.events_until_removal("root");
    let new = fs::read_link(quiet.join("..data")).expect("a link");
    let names = [(&*old.to_string_lossy(), "old"), (&*new.to_string_lossy(), "new")];
    let events: Vec<_> = events.into_iter().map(|event| renamed(event, &names)).collect();
    assert_eq!(events, switch_with(&[], &[OLD_REMOVED]));
}

#[test]
fn an_update_with_an_fs_group_raises_no_more_events_than_one_without() {
    // EV-02, EV-05: the kubelet also changes owner and mode of the old files, just before the switch; podfs does not.
    let mut served = Served::new(&Root { mode: 0o2777, gid: 1001, directories: Default::default() });
    let directories = DirectoryAttributes { mode: 0o2755, gid: 1001 };
    let mut commit =
        |payload: &[(&str, &str)]| switched(served.projection.commit(&layout(payload), directories).expect("a commit"));
    let old = commit(&[("a", "1")]);
    let mut watcher = Watcher::on("root", served.visible.path());
    watcher.add("file", &served.visible.path().join("a"));
    let new = commit(&[("a", "2")]);
    let expected = switch_with(&[], &["file ATTRIB", "file DELETE_SELF", "file IGNORED", OLD_REMOVED]);
    assert_eq!(watcher.events_renamed(&[(&old, "old"), (&new, "new")]), expected);
}

#[test]
fn a_watcher_in_another_mount_namespace_gets_the_same_events() {
    // EV-07: the volume is bind-mounted into a container, as container runtimes do.
    let mut served = Served::new(&plain_root());
    let old = switched(served.commit(&[("a", "1"), ("b", "1")]));
    let mount_point = TempDir::new().expect("a directory");
    let container = Container::new(Propagation::Private);
    let (from, to) = (served.path().to_owned(), mount_point.path().to_owned());
    let watcher = container.run(move || {
        bind(&from, &to);
        let mut watcher = Watcher::on("root", &to);
        watcher.add("file", &to.join("a"));
        watcher
    });
    let new = switched(served.commit(&[("a", "2"), ("b", "2"), ("c", "2")]));
    let events = container.run({
        let (old, new) = (old.clone(), new.clone());
        move || watcher.events_renamed(&[(&old, "old"), (&new, "new")])
    });
    let end = ["file ATTRIB", "file DELETE_SELF", "file IGNORED", OLD_REMOVED];
    assert_eq!(events, switch_with(&["root CREATE c"], &end));
}
