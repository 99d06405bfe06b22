//! Live parts: bind mounts of single paths, which show each payload in place.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use podfs_fuse::client::LivePartError;
use podfs_fuse::mount::directories::Directories;
use podfs_fuse::mount::point::{MountPoint, OldMountPolicy};
use podfs_fuse::mount::private::{MountOptions, MountPointType};
use proptest::prelude::*;
use tempfile::TempDir;

use crate::common::set_on_drop::SetOnDrop;
use crate::common::stopped::Stopped;
use crate::common::tree::{Files, files, parse};
use crate::common::undisturbed::undisturbed;
use crate::common::watch::Watcher;
use crate::common::{Served, plain_root};

/// A served projection volume, and bind mounts of some of its paths.
struct BoundPaths {
    served: Served,
    directory: TempDir,
    mounted: Vec<PathBuf>,
}

impl BoundPaths {
    fn with(payload: &str) -> BoundPaths {
        let mut served = Served::new(&plain_root());
        served.commit_files(&parse(payload));
        BoundPaths { served, directory: TempDir::with_prefix("podfs-test-").expect("a directory"), mounted: Vec::new() }
    }

    fn commit(&mut self, payload: &str) {
        self.served.commit_files(&parse(payload));
    }

    /// Mounts a path, as for a container.
    #[track_caller]
    fn bind(&mut self, path: &str) -> PathBuf {
        self.try_bind(path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    fn try_bind(&mut self, path: &str) -> Result<PathBuf, LivePartError> {
        let part = self.served.projection.live_part(path, &MountOptions::default())?;
        let is_directory = rustix::fs::statat(part.as_fd(), c"", rustix::fs::AtFlags::EMPTY_PATH)
            .is_ok_and(|attributes| rustix::fs::FileType::from_raw_mode(attributes.st_mode).is_dir());
        let mount_point_type = if is_directory { MountPointType::Directory } else { MountPointType::File };
        let target = self.directory.path().join(self.mounted.len().to_string());
        let mut directories = Directories::default();
        let point = MountPoint::prepare_shape(&target, mount_point_type, OldMountPolicy::RemoveDead, &mut directories)?;
        point.attach(&part)?.lose();
        self.mounted.push(target.clone());
        Ok(target)
    }
}

impl Drop for BoundPaths {
    fn drop(&mut self) {
        for target in &self.mounted {
            let _ = umount2(target, MntFlags::MNT_DETACH);
        }
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).expect("attributes").ino()
}

#[test]
fn a_live_file_changes_in_place_and_an_open_one_has_the_new_bytes_at_its_next_read() {
    let mut bound = BoundPaths::with("app.yaml=one; other=x");
    let file = bound.bind("app.yaml");
    let (mut open, number) = (File::open(&file).expect("a file"), inode(&file));
    assert_eq!(read(&file), "one");
    for content in ["a longer text than before", "short", "", "back"] {
        bound.commit(&format!("app.yaml={content}; other=x"));
        assert_eq!(read(&file), content);
        let mut again = String::new();
        open.rewind().expect("rewound");
        open.read_to_string(&mut again).expect("an open file can be read");
        assert_eq!((again.as_str(), inode(&file)), (content, number));
        assert_eq!(fs::metadata(&file).expect("attributes").len(), content.len() as u64);
    }
    assert_eq!(open.metadata().expect("attributes").ino(), number);
}

#[test]
fn watchers_of_a_live_file_get_the_events_of_an_editor() {
    let mut bound = BoundPaths::with("app.yaml=one; other=x");
    let (file, other) = (bound.bind("app.yaml"), bound.bind("other"));
    let mut watcher = Watcher::on("file", &file);
    watcher.add("other", &other);
    bound.commit("app.yaml=two; other=x");
    assert_eq!(watcher.events(), ["file OPEN", "file MODIFY", "file CLOSE_WRITE", "file ATTRIB"]);
    bound.commit("app.yaml=two@600; other=x");
    assert_eq!(watcher.events(), ["file ATTRIB"]);
    assert_eq!(fs::metadata(&file).expect("attributes").mode() & 0o7777, 0o600);
    bound.commit("app.yaml=two@600; other=x; more=y");
    assert_eq!(watcher.events(), [""; 0], "a commit of another file causes no event");
}

#[test]
fn watchers_of_a_live_directory_get_events_of_its_names() {
    let mut bound = BoundPaths::with("conf.d/a=1; conf.d/b=1");
    let directory = bound.bind("conf.d");
    let watcher = Watcher::on("dir", &directory);
    bound.commit("conf.d/a=2; conf.d/c/deep=1");
    let events = watcher.events();
    let is_change =
        |event: &&String| ["CREATE", "DELETE", "MODIFY", "CLOSE_WRITE"].iter().any(|word| event.contains(word));
    let events: Vec<&str> = events.iter().filter(is_change).map(String::as_str).collect();
    assert_eq!(events, ["dir CREATE|ISDIR c", "dir MODIFY a", "dir CLOSE_WRITE a", "dir DELETE b"]);
    assert_eq!(files(&directory), parse("a=2; c/deep=1"));
}

#[test]
fn a_key_that_vanishes_leaves_the_file_as_it_was_and_one_that_returns_is_seen_again() {
    let mut bound = BoundPaths::with("a=one; d/x=1");
    let (file, directory) = (bound.bind("a"), bound.bind("d"));
    let (number, root) = (inode(&file), inode(&directory));
    bound.commit("b=other");
    assert_eq!((read(&file).as_str(), files(&directory)), ("one", Files::new()));
    bound.commit("a/below=now a directory; d=now a file");
    assert_eq!((read(&file).as_str(), files(&directory)), ("one", Files::new()));
    let below = bound.bind("a");
    assert_eq!(files(&below), parse("below=now a directory"));
    bound.commit("a=two; d/y=2");
    assert_eq!((read(&file).as_str(), files(&directory)), ("two", parse("y=2")));
    assert_eq!(files(&below), Files::new(), "the mount of a directory does not become a file");
    assert_eq!((inode(&file), inode(&directory)), (number, root));
}

#[test]
fn keys_that_the_payload_lacks_are_not_bound() {
    let mut bound = BoundPaths::with("a=1; d/x=1");
    assert!(matches!(bound.try_bind("b"), Err(LivePartError::Missing(path)) if path == "b"));
    assert!(matches!(bound.try_bind("a/b"), Err(LivePartError::NotADirectory(path)) if path == "a/b"));
    let all = bound.bind("..data");
    assert_eq!(files(&all), parse("a=1; d/x=1"));
    let one = bound.bind("..data/./d//x");
    assert_eq!(read(&one), "1");
}

#[test]
fn a_removed_file_that_is_open_keeps_its_bytes() {
    let mut bound = BoundPaths::with("d/a=kept; d/b=1");
    let directory = bound.bind("d");
    let open = File::open(directory.join("a")).expect("a file");
    for payload in ["d/b=2", "d/b=3", "d/a=new; d/b=4"] {
        bound.commit(payload);
        rustix::fs::fadvise(&open, 0, None, rustix::fs::Advice::DontNeed).expect("advice");
        let mut bytes = [0; 16];
        let length = open.read_at(&mut bytes, 0).expect("an open file can be read");
        assert_eq!(&bytes[..length], b"kept", "{payload}");
    }
    assert_eq!(read(&directory.join("a")), "new");
}

#[test]
fn only_a_commit_changes_a_live_part() {
    let mut bound = BoundPaths::with("d/a=1; f=1");
    let (directory, file) = (bound.bind("d"), bound.bind("f"));
    for refused in [
        fs::write(&file, "x").expect_err("the mount is read-only"),
        fs::write(directory.join("new"), "x").expect_err("the mount is read-only"),
        fs::remove_file(directory.join("a")).expect_err("the mount is read-only"),
        fs::create_dir(directory.join("new")).expect_err("the mount is read-only"),
    ] {
        assert_eq!(refused.raw_os_error(), Some(Errno::EROFS as i32));
    }
    // A privileged container can make its own mount writable.
    for target in [&directory, &file] {
        let flags = nix::mount::MsFlags::MS_REMOUNT | nix::mount::MsFlags::MS_BIND;
        nix::mount::mount(None::<&str>, target, None::<&str>, flags, None::<&str>).expect("remounted");
    }
    for refused in [
        fs::write(&file, "x").expect_err("the server refuses it"),
        fs::write(directory.join("new"), "x").expect_err("the server refuses it"),
        fs::remove_file(directory.join("a")).expect_err("the server refuses it"),
        fs::create_dir(directory.join("new")).expect_err("the server refuses it"),
        fs::set_permissions(&file, fs::Permissions::from_mode(0o777)).expect_err("the server refuses it"),
    ] {
        assert_eq!(refused.raw_os_error(), Some(Errno::EROFS as i32));
    }
    bound.commit("d/a=2; f=2");
    assert_eq!((read(&file).as_str(), files(&directory)), ("2", parse("a=2")));
}

#[test]
fn a_warm_live_part_sends_no_message_until_it_changes() {
    let mut bound = BoundPaths::with("conf.d/a=1; conf.d/sub/b=2; app=3");
    let (directory, file) = (bound.bind("conf.d"), bound.bind("app"));
    let round = |app: &str| {
        assert_eq!((read(&file).as_str(), files(&directory)), (app, parse("a=1; sub/b=2")));
        fs::metadata(directory.join("absent")).expect_err("the file does not exist");
        fs::metadata(&file).expect("attributes");
    };
    for app in ["3", "4"] {
        bound.commit(&format!("conf.d/a=1; conf.d/sub/b=2; app={app}"));
        undisturbed(|| {
            (0..2).for_each(|_| round(app));
            let stopped = Stopped::server(&bound.served);
            round(app);
            stopped.was_not_needed()
        });
    }
}

#[test]
fn no_read_of_a_small_file_mixes_two_payloads() {
    // The file fits into one page of the page cache, so each read must return the bytes of one payload.
    let content = |round: usize| format!("{round:05}").repeat(1 + round * 37 % 700);
    let mut bound = BoundPaths::with(&format!("app={}", content(0)));
    let file = bound.bind("app");
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let set_done = SetOnDrop(&done);
        let reader = || {
            let open = File::open(&file).expect("a file");
            let mut last = 0;
            while !done.load(Ordering::Relaxed) {
                let mut bytes = vec![0; 4096];
                let length = open.read_at(&mut bytes, 0).expect("read");
                let text = str::from_utf8(&bytes[..length]).expect("digits");
                let round: usize = text[..5].parse().expect("a number");
                // The kernel may limit a read that began before the change to the earlier size of the file.
                let expected = content(round);
                assert!(
                    expected.starts_with(text),
                    "one read returned bytes of two payloads: {text:?} for {expected:?}"
                );
                assert!(round >= last, "a read returned payload {round}, an earlier read returned payload {last}");
                last = round;
            }
        };
        let readers = [scope.spawn(reader), scope.spawn(reader)];
        for round in 1..300 {
            bound.commit(&format!("app={}", content(round)));
            assert_eq!(read(&file), content(round));
        }
        drop(set_done);
        readers.into_iter().for_each(|reader| reader.join().expect("each read returned one payload"));
    });
}

/// The files that a bind mount of `path` must show after the payload `now`: if the mount is of a file, the content of
/// this file in the last payload that had it; if the mount is of a directory, the files below it in `now`.
fn model(path: &str, is_file: bool, before: Option<&Files>, now: &Files) -> Files {
    if is_file {
        let current = now.get(path).map(|file| Files::from([(String::new(), file.clone())]));
        return current.or(before.cloned()).expect("the path was a file when the test bound it");
    }
    let prefix = format!("{path}/");
    now.iter().filter_map(|(other, file)| Some((other.strip_prefix(&prefix)?.to_owned(), file.clone()))).collect()
}

fn content_of(target: &Path, is_file: bool) -> Files {
    if !is_file {
        return files(target);
    }
    let mode = fs::metadata(target).expect("attributes").mode() & 0o7777;
    Files::from([(String::new(), (fs::read(target).expect("a file"), mode as u16))])
}

fn payloads() -> impl Strategy<Value = Vec<Files>> {
    let name = prop_oneof![Just("a"), Just("b"), Just("c")];
    let path = prop::collection::vec(name, 1..4).prop_map(|names| names.join("/"));
    let size = prop_oneof![0..64_usize, 4000..4200_usize, 9000..20_000_usize];
    let file = (path, size, any::<u8>(), prop_oneof![Just(0o644_u16), Just(0o400)]);
    let payload = prop::collection::vec(file, 0..8).prop_map(|drafts| {
        let mut payload = Files::new();
        for (path, size, byte, mode) in drafts {
            let conflicts = |other: &String| {
                *other == path || other.starts_with(&format!("{path}/")) || path.starts_with(&format!("{other}/"))
            };
            if !payload.keys().any(conflicts) {
                payload.insert(path, (vec![byte; size], mode));
            }
        }
        payload
    });
    prop::collection::vec(payload, 1..10)
}

proptest! {
    // Each case makes several mounts and starts a process.
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, max_shrink_iters: 64, ..Default::default() })]

    #[test]
    fn a_bind_of_each_path_shows_what_the_model_says_after_every_payload(payloads in payloads()) {
        let mut bound = BoundPaths::with("");
        // For each path, and whether the mount is of a file: the mount point, and the content that it must show.
        let mut binds: BTreeMap<(String, bool), (PathBuf, Files)> = BTreeMap::new();
        for payload in &payloads {
            bound.served.commit_files(payload);
            let paths = payload.keys().flat_map(|path| {
                let parents = path.match_indices('/').map(|(end, _)| (path[..end].to_owned(), false));
                parents.chain([(path.clone(), true)]).collect::<Vec<_>>()
            });
            for (path, is_file) in paths {
                if !binds.contains_key(&(path.clone(), is_file)) {
                    let target = bound.bind(&path);
                    binds.insert((path, is_file), (target, Files::new()));
                }
            }
            for ((path, is_file), (target, before)) in &mut binds {
                *before = model(path, *is_file, Some(before), payload);
                prop_assert_eq!(&content_of(target, *is_file), before, "{}", path);
            }
        }
    }
}
