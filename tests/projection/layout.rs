//! The layout of a projection: the generation, `..data`, the links, their modes and owners; and the entries that the next
//! payload keeps or removes.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::stat::{Mode, umask};
use podfs_fuse::client::Commit;
use podfs_fuse::projection::{FileEntry, ImageLayout};

use crate::common::tree::{files, names, parse};
use crate::common::watch::switched;
use crate::common::{DIRECTORIES, Fixture, Served, config_map, plain_root, pod, wait_content};

fn link(path: &Path) -> PathBuf {
    fs::read_link(path).expect("a link")
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).expect("attributes").permissions().mode() & 0o7777
}

fn inode(path: &Path) -> u64 {
    fs::symlink_metadata(path).expect("attributes").ino()
}

fn sorted_names(directory: &Path) -> Vec<String> {
    let mut names = names(directory);
    names.sort();
    names
}

#[test]
fn the_layout_is_that_of_the_atomic_writer() {
    // AW-01, AW-05, FU-14
    let mut served = Served::new(&plain_root());
    let generation = switched(served.commit(&[("foo", "1"), ("sub/deep/bar", "2"), ("sub/zab", "3")]));
    let root = served.path();
    assert_eq!(sorted_names(root), [&generation, "..data", "foo", "sub"]);
    assert_eq!(link(&root.join("..data")), Path::new(&generation));
    assert_eq!(link(&root.join("foo")), Path::new("..data/foo"));
    assert_eq!(link(&root.join("sub")), Path::new("..data/sub"));
    assert_eq!(sorted_names(&root.join(&generation)), ["foo", "sub"]);
    assert_eq!(sorted_names(&root.join("sub")), ["deep", "zab"]);
    assert!(fs::symlink_metadata(root.join("sub/deep/bar")).expect("a file").is_file());
}

#[test]
fn a_generation_is_named_by_the_time_in_utc() {
    // AW-02, also if podfs runs in another time zone.
    let fixture = Fixture::new(&crate::common::config_pod());
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "1")]));
    let mut command = fixture.command();
    command.env("TZ", "XYZ-14");
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let volume = running.volume("config");
    let name = link(&volume.join("..data")).into_os_string().into_string().expect("UTF-8");
    let time = fs::metadata(volume.join(&name)).expect("a directory").mtime();
    let date = Command::new("date").args(["-u", &format!("-d@{time}"), "+..%Y_%m_%d_%H_%M_%S."]).output();
    let date = String::from_utf8(date.expect("date runs").stdout).expect("UTF-8");
    let number = name.strip_prefix(date.trim()).expect("the name begins with the time");
    assert!(!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()), "{name}");
}

#[test]
fn modes_are_exact_under_any_umask() {
    // AW-03, AW-04, AW-05, CM-03
    let modes = [("a", "0400"), ("b", "0407"), ("c", "0440"), ("d", "0666"), ("e", "0777"), ("sub/dir/f", "0644")];
    let items = modes.map(|(path, mode)| format!("{{key: k, path: {path}, mode: {mode}}}")).join(", ");
    let fixture = Fixture::new(&pod(&format!("[{{name: config, configMap: {{name: app, items: [{items}]}}}}]")));
    fixture.write("objects/app.yaml", &config_map("app", &[("k", "text")]));
    let mut command = fixture.command();
    // SAFETY: umask is async-signal-safe and cannot fail.
    unsafe {
        command.pre_exec(|| {
            umask(Mode::from_bits_truncate(0o077));
            Ok(())
        });
    }
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let volume = running.volume("config");
    for (path, expected) in modes {
        let expected = u32::from_str_radix(expected, 8).expect("octal");
        assert_eq!(mode(&volume.join("..data/").join(path)), expected, "{path}");
    }
    let generation = volume.join(link(&volume.join("..data")));
    for directory in [generation.clone(), generation.join("sub"), generation.join("sub/dir")] {
        assert_eq!(mode(&directory), 0o755, "{}", directory.display());
    }
    assert_eq!(mode(&volume), 0o777, "the root has the mode of an emptyDir on disk");
}

#[test]
fn paths_are_normalised() {
    // AW-06, AW-09: a name may begin with two dots, except the first name of a path.
    let items =
        "[{key: k, path: foo////bar}, {key: k, path: ./plain}, {key: k, path: foo/..odd}, {key: k, path: .dot}]";
    let fixture = Fixture::new(&pod(&format!("[{{name: config, configMap: {{name: app, items: {items}}}}}]")));
    fixture.write("objects/app.yaml", &config_map("app", &[("k", "x")]));
    let running = fixture.run();
    let volume = running.volume("config");
    let name = link(&volume.join("..data")).into_os_string().into_string().expect("UTF-8");
    assert_eq!(sorted_names(&volume), [&name, "..data", ".dot", "foo", "plain"]);
    assert_eq!(sorted_names(&volume.join("foo")), ["..odd", "bar"]);
    assert_eq!(fs::read_to_string(volume.join("foo/bar")).expect("a file"), "x");
}

#[test]
fn an_unchanged_payload_keeps_generation_and_inodes() {
    // AW-10
    let mut served = Served::with(&[("a", "1"), ("sub/b", "2")]);
    let generation_and_inodes = |root: &Path| {
        let paths = ["..data", "a", "sub", "..data/a", "..data/sub", "..data/sub/b"];
        (link(&root.join("..data")), paths.map(|path| inode(&root.join(path))))
    };
    let before = generation_and_inodes(served.path());
    assert_eq!(served.commit(&[("sub/b", "2"), ("a", "1")]), Commit::Unchanged);
    assert_eq!(generation_and_inodes(served.path()), before);
    served.commit(&[("a", "1"), ("sub/b", "3")]);
    assert_ne!(generation_and_inodes(served.path()), before, "another payload changes them");
}

#[test]
fn a_changed_mode_alone_is_applied() {
    // AW-11: the kubelet compares bytes only, and so keeps the old mode; podfs applies the new mode.
    let mut served = Served::new(&plain_root());
    let first = switched(served.commit_files(&parse("a=same; b=same")));
    let second = switched(served.commit_files(&parse("a=same@0400; b=same")));
    assert_ne!(first, second);
    assert_eq!(mode(&served.path().join("..data/a")), 0o400);
    assert_eq!(mode(&served.path().join("..data/b")), 0o644);
}

#[test]
fn a_changed_owner_alone_is_applied() {
    // AW-11
    let mut served = Served::with(&[("a", "same")]);
    commit_owned(&mut served, &[("a", 1234)]);
    assert_eq!(fs::metadata(served.path().join("a")).expect("a file").uid(), 1234);
}

#[test]
fn any_change_gives_every_file_a_new_inode_and_time() {
    // AW-12
    let mut served = Served::with(&[("a", "1"), ("same", "same"), ("sub/same", "same")]);
    let inode_and_time = |path: &str| {
        let metadata = fs::metadata(served.visible.path().join(path)).expect("a file");
        (metadata.ino(), metadata.modified().expect("a time"))
    };
    let paths = ["a", "same", "sub", "sub/same"];
    let before = paths.map(inode_and_time);
    served
        .projection
        .commit(&crate::common::layout(&[("a", "2"), ("same", "same"), ("sub/same", "same")]), DIRECTORIES)
        .expect("a commit");
    for (path, before) in paths.into_iter().zip(before) {
        let after = inode_and_time(path);
        assert!(after.0 != before.0 && after.1 > before.1, "{path}: {before:?}, then {after:?}");
    }
}

#[test]
fn a_removed_key_disappears_and_a_link_stays_while_a_key_below_it_remains() {
    // AW-14
    let mut served = Served::with(&[("a", "1"), ("gone", "1"), ("sub/x", "1"), ("sub/y", "1"), ("all/x", "1")]);
    let (a, sub) = (inode(&served.path().join("a")), inode(&served.path().join("sub")));
    let generation = switched(served.commit(&[("a", "2"), ("sub/y", "1")]));
    assert_eq!(sorted_names(served.path()), [&generation, "..data", "a", "sub"]);
    assert_eq!(files(served.path()), parse("a=2; sub/y=1"));
    assert_eq!(inode(&served.path().join("a")), a, "the link of a changed key is the same one");
    assert_eq!(inode(&served.path().join("sub")), sub);
}

#[test]
fn an_empty_payload_has_an_empty_generation() {
    // AW-15, from the start and after content.
    let mut served = Served::new(&plain_root());
    for payload in [&[][..], &[("a", "1"), ("sub/b", "1")], &[]] {
        let generation = switched(served.commit(payload));
        assert_eq!(link(&served.path().join("..data")), Path::new(&generation));
        assert_eq!(names(&served.path().join("..data")).len(), payload.len());
    }
    assert_eq!(sorted_names(served.path()).len(), 2, "only the generation and `..data`");
}

#[test]
fn a_link_belongs_to_the_owner_of_what_it_shows() {
    // AW-22: an existing link keeps its owner, as with the kubelet.
    let mut served = Served::new(&plain_root());
    commit_owned(&mut served, &[("a", 1234), ("b", 0)]);
    commit_owned(&mut served, &[("a", 0), ("b", 0), ("c", 99)]);
    let owner = |path: &str| fs::symlink_metadata(served.path().join(path)).expect("attributes").uid();
    assert_eq!(["a", "b", "c", "..data"].map(owner), [1234, 0, 99, 0]);
    assert_eq!(["..data/a", "..data/b", "..data/c"].map(owner), [0, 0, 99]);
}

fn commit_owned(served: &mut Served, payload: &[(&str, u32)]) {
    let entries =
        payload.iter().map(|(path, uid)| FileEntry { path, content: b"same", mode: 0o644, uid: *uid, gid: 0 });
    let layout = ImageLayout::new(entries, DIRECTORIES).expect("a tree");
    switched(served.projection.commit(&layout, DIRECTORIES).expect("a commit"));
}

/// Rows of the tables in the tests of the kubelet's AtomicWriter: a name, and payloads that follow each other.
const ROWS: &[(&str, &[&str])] = &[
    ("basic 1", &["foo=foo; bar=bar"]),
    ("basic mode 1", &["foo=foo@0777; bar=bar@0400"]),
    ("dotfiles", &["foo=foo; bar=bar; .dotfile=dotfile; .dotfile.file=dotfile.file"]),
    ("dotfiles mode", &["foo=foo@0407; bar=bar@0440; .dotfile=dotfile@0777; .dotfile.file=dotfile.file@0666"]),
    ("subdirectories 1", &["foo/bar.txt=foo/bar; bar/zab.txt=bar/zab.txt"]),
    ("subdirectories mode 1", &["foo/bar.txt=foo/bar@0400; bar/zab.txt=bar/zab.txt@0400"]),
    (
        "subdirectories 3",
        &[
            "foo/bar.txt=foo/bar; bar/zab.txt=bar/zab.txt; foo/blaz/bar.txt=foo/blaz/bar; bar/zib/zab.txt=bar/zib/zab.txt",
        ],
    ),
    (
        "kitchen sink",
        &["foo.log=foo; bar.zap=bar; .dotfile=dotfile; foo/bar.txt=foo/bar; bar/zab.txt=bar/zab.txt; \
         foo/blaz/bar.txt=foo/blaz/bar; bar/zib/zab.txt=bar/zib/zab.txt@0400; \
         1/2/3/4/5/6/7/8/9/10/.dotfile.lib=1-2-3-dotfile@0777"],
    ),
    ("update", &["foo=foo; bar=bar", "foo=foo2; bar=bar2@0640"]),
    ("no update 2", &["foo/bar.txt=foo; bar/zab.txt=bar", "foo/bar.txt=foo; bar/zab.txt=bar"]),
    ("add 1", &["foo/bar.txt=foo; bar/zab.txt=bar", "foo/bar.txt=foo; bar/zab.txt=bar; blu/zip.txt=zip"]),
    ("add 2", &["foo/bar.txt=foo; bar/zab.txt=bar", "foo/bar.txt=foo; bar/zab.txt=bar; blu/two/2/3/4/5/zip.txt=zip"]),
    ("add 3", &["foo/bar.txt=foo; bar/zab.txt=bar", "foo/bar.txt=foo; bar/zab.txt=bar; bar/2/3/4/5/zip.txt=zip"]),
    ("delete 1", &["foo/bar.txt=foo; bar/zab.txt=bar", "foo/bar.txt=foo"]),
    ("delete 2", &["foo/bar.txt=foo; bar/1/2/3/zab.txt=bar", "foo/bar.txt=foo"]),
    (
        "delete 3",
        &["foo/bar.txt=foo; bar/1/2/sip.txt=sip; bar/1/2/3/zab.txt=bar", "foo/bar.txt=foo; bar/1/2/sip.txt=sip"],
    ),
    (
        "delete 4",
        &["foo/bar.txt=foo; bar/1/2/sip.txt=sip; bar/1/2/3/4/5/6zab.txt=bar", "foo/bar.txt=foo; bar/1/2/sip.txt=sip"],
    ),
    ("delete all", &["foo/bar.txt=foo; bar/1/2/sip.txt=sip; bar/1/2/3/4/5/6zab.txt=bar", ""]),
    ("add and delete 1", &["foo/bar.txt=foo", "bar/baz.txt=baz"]),
    (
        "paths to remove: subdirs 3",
        &["foo.txt=foo; zip/1/2/3/4/bar.txt=zip/b}ar; zap/a/b/c/bar.txt=zap/bar", "foo.txt=foo"],
    ),
    (
        "paths to remove: subdirs 4",
        &[
            "foo.txt=foo; zap/1/2/3/4/bar.txt=zip/bar; zap/1/2/c/bar.txt=zap/bar; zap/1/2/magic.txt=indigo",
            "foo.txt=foo; zap/1/2/magic.txt=indigo",
        ],
    ),
    ("update 1", &["foo=foo; bar=bar", "foo=foo2@0400; bar=bar2@0400", "foo=foo3@0600; bar=bar3@0600"]),
    (
        "update 2",
        &["foo/bar.txt=foo/bar; bar/zab.txt=bar/zab.txt", "foo/bar.txt=foo/bar2; bar/zab.txt=bar/zab.txt2@0400"],
    ),
    ("clear sentinel", &["foo=foo; bar=bar", "foo=foo2; bar=bar2", "foo=foo3; bar=bar3", "foo=foo4; bar=bar4"]),
    (
        "subdirectories 2",
        &[
            "foo/bar.txt=foo/bar; bar/zab.txt=bar/zab.txt; foo/blaz/bar.txt=foo/blaz/bar; bar/zib/zab.txt=bar/zib/zab.txt",
            "foo/bar.txt=foo/bar2; bar/zab.txt=bar/zab.txt2; foo/blaz/bar.txt=foo/blaz/bar2; bar/zib/zab.txt=bar/zib/zab.txt2",
        ],
    ),
    (
        "add 1 and 2",
        &[
            "foo/bar.txt=foo/bar; bar/zab.txt=bar/zab.txt; foo/blaz/bar.txt=foo/blaz/bar; bar/zib/zib/zab.txt=bar/zib/zab.txt",
            "foo/bar.txt=foo/bar2; bar/zab.txt=bar/zab.txt2; foo/blaz/bar.txt=foo/blaz/bar2; bar/zib/zab.txt=bar/zib/zab.txt2; \
         add/new/keys.txt=addNewKeys",
            "foo/bar.txt=foo/bar2; bar/zab.txt=bar/zab.txt2; foo/blaz/bar.txt=foo/blaz/bar2; bar/zib/zab.txt=bar/zib/zab.txt2; \
         add/new/keys.txt=addNewKeys; add/new/keys2.txt=addNewKeys2; add/new/keys3.txt=addNewKeys3",
        ],
    ),
    (
        "remove 1",
        &[
            "foo/bar.txt=foo/bar; bar/zab.txt=bar/zab.txt; foo/blaz/bar.txt=foo/blaz/bar; zip/zap/zup/fop.txt=zip/zap/zup/fop.txt",
            "foo/bar.txt=foo/bar2; bar/zab.txt=bar/zab.txt2",
            "foo/bar.txt=foo/bar",
        ],
    ),
];

#[test]
fn the_tree_equals_each_payload_in_turn() {
    // AW-25: the test reads all files between the payloads, so that the kernel caches each layout.
    for (name, payloads) in ROWS {
        let mut served = Served::new(&plain_root());
        for payload in *payloads {
            let payload = parse(payload);
            served.commit_files(&payload);
            assert_eq!(files(served.path()), payload, "{name}");
            let hidden = names(served.path()).into_iter().filter(|name| name.starts_with("..")).count();
            assert_eq!(hidden, 2, "{name}: one generation and `..data`");
        }
    }
}

#[test]
fn the_rows_hold_one_after_the_other_in_one_volume_too() {
    // AW-25: a file becomes a directory of the same name, and the other way round.
    let mut served = Served::new(&plain_root());
    for payload in ROWS.iter().flat_map(|(_, payloads)| *payloads).map(|payload| parse(payload)) {
        served.commit_files(&payload);
        assert_eq!(files(served.path()), payload);
    }
}

#[test]
fn an_absent_name_that_was_looked_up_appears_with_an_update() {
    // The kernel caches that a name is absent; a commit must invalidate this.
    let fixture = Fixture::new(&crate::common::config_pod());
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "1")]));
    let running = fixture.run();
    let volume = running.volume("config");
    for name in ["late", "..data/late"] {
        for _ in 0..2 {
            assert!(!volume.join(name).exists());
        }
    }
    fixture.write("objects/app.yaml", &config_map("app", &[("late", "2")]));
    wait_content(&volume.join("late"), "2");
    assert!(!volume.join("a").exists());
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "3")]));
    wait_content(&volume.join("a"), "3");
    assert!(!volume.join("late").exists());
}
