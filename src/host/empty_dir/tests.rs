//! Homes of emptyDirs, as one podfs after the other finds them.

use std::os::unix::fs::MetadataExt;

use super::*;
use crate::types::golden::{CHANGED, golden};

const DISK: EmptyDirPlan = EmptyDirPlan { backing: EmptyDirBacking::Disk, mode: 0o777, gid: 0 };
const MEMORY: EmptyDirPlan = EmptyDirPlan { backing: EmptyDirBacking::Memory { bytes: 1 << 20 }, mode: 0o1777, gid: 0 };

/// A home. Dropping it unmounts the content, also when a test fails.
struct EmptyDirHome(tempfile::TempDir);

impl EmptyDirHome {
    fn new() -> EmptyDirHome {
        EmptyDirHome(tempfile::tempdir().expect("a directory"))
    }

    fn content(&self) -> PathBuf {
        content_path(self.0.path())
    }

    fn set_up(&self, plan: &EmptyDirPlan) -> EmptyDirContent {
        EmptyDirContent::set_up(self.0.path(), plan).expect("content")
    }

    fn entries(&self) -> usize {
        fs::read_dir(self.0.path()).expect("a listing").count()
    }
}

impl Drop for EmptyDirHome {
    fn drop(&mut self) {
        while memory::take_off(&self.content()).is_ok() {}
    }
}

fn owned(path: &Path) -> (u32, u32) {
    let found = fs::metadata(path).expect("a directory");
    (found.mode() & 0o7777, found.gid())
}

#[test]
fn ed_01_ed_10_the_root_has_its_mode_and_group_under_any_umask() {
    let home = EmptyDirHome::new();
    let content = home.set_up(&DISK);
    assert_eq!(owned(&home.content()), (0o777, 0));
    assert!(content.delete().expect("deleted").is_empty());
    assert_eq!(home.entries(), 0);
    home.set_up(&EmptyDirPlan { mode: 0o2777, gid: 4711, ..DISK });
    assert_eq!(owned(&home.content()), (0o2777, 4711));
}

#[test]
fn ed_01_ed_02_memory_is_a_tmpfs_of_its_size() {
    let home = EmptyDirHome::new();
    let content = home.set_up(&MEMORY);
    assert_eq!(owned(&home.content()), (0o1777, 0));
    let file = home.content().join("file");
    fs::write(&file, vec![0; 512 << 10]).expect("it fits");
    let error = fs::write(&file, vec![0; 2 << 20]).expect_err("it does not fit");
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    assert!(content.delete().expect("deleted").is_empty());
    assert_eq!(home.entries(), 0);
}

#[test]
fn ed_03_memory_is_not_swapped_where_the_kernel_can_promise_it() {
    let home = EmptyDirHome::new();
    home.set_up(&MEMORY);
    let table = fs::read_to_string("/proc/self/mounts").expect("a table");
    let at = home.content().canonicalize().expect("a path");
    let line = table.lines().find(|line| line.contains(at.to_str().expect("text"))).expect("mounted");
    let release = rustix::system::uname();
    let version = release.release().to_str().expect("text");
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let modern = (numbers.next(), numbers.next()) >= (Some(6), Some(4));
    assert_eq!(line.contains("noswap"), modern, "{line}");
}

#[test]
fn ed_05_complete_content_is_found_again() {
    for plan in [DISK, MEMORY] {
        let home = EmptyDirHome::new();
        drop(home.set_up(&plan));
        fs::write(home.content().join("kept"), "").expect("a file");
        drop(home.set_up(&plan));
        assert!(home.content().join("kept").exists(), "{}", plan.backing);
    }
}

#[test]
fn ed_05_content_that_is_gone_or_incomplete_is_made_anew() {
    let home = EmptyDirHome::new();
    drop(home.set_up(&DISK));
    fs::remove_dir(home.content()).expect("removed");
    drop(home.set_up(&DISK));
    fs::write(home.content().join("old"), "").expect("a file");
    fs::remove_file(home.0.path().join(READY)).expect("removed");
    drop(home.set_up(&DISK));
    assert_eq!(fs::read_dir(home.content()).expect("a listing").count(), 0);

    drop(home.set_up(&MEMORY));
    fs::write(home.content().join("old"), "").expect("a file");
    memory::take_off(&home.content()).expect("unmounted, as by a reboot");
    drop(home.set_up(&MEMORY));
    assert_eq!(fs::read_dir(home.content()).expect("a listing").count(), 0);
    assert!(memory::is_memory(File::open(home.content()).expect("a directory")));
}

#[test]
fn another_medium_takes_the_place_of_the_one_before() {
    let home = EmptyDirHome::new();
    drop(home.set_up(&MEMORY));
    drop(home.set_up(&DISK));
    assert!(!memory::is_memory(File::open(home.content()).expect("a directory")));
}

#[test]
fn ed_08_a_foreign_mount_on_the_content_is_left_alone() {
    use podfs_fuse::mount::bind::bind;
    use podfs_fuse::mount::directories::Directories;
    use podfs_fuse::mount::point::{MountPoint, OldMountPolicy};
    use podfs_fuse::mount::private::ContainerAccess;

    let (home, outside) = (EmptyDirHome::new(), tempfile::tempdir().expect("a directory"));
    fs::write(outside.path().join("keep"), "").expect("a file");
    let content = home.set_up(&DISK);
    let mut directories = Directories::default();
    let point = MountPoint::prepare(&home.content(), OldMountPolicy::RemoveDead, &mut directories).expect("a point");
    let opened = File::open(outside.path()).expect("a directory");
    let foreign =
        point.attach_bind(&bind(opened.as_fd(), ContainerAccess::ReadWrite).expect("a clone")).expect("mounted");
    fs::write(home.0.path().join(READY), MEMORY.backing.to_string()).expect("written");
    EmptyDirContent::set_up(home.0.path(), &MEMORY).expect_err("it is no tmpfs of podfs");
    fs::write(home.0.path().join(READY), DISK.backing.to_string()).expect("written");
    let refused = EmptyDirContent::set_up(home.0.path(), &DISK).expect_err("it is covered").to_string();
    assert_eq!(refused, format!("another file system is mounted on {}; unmount it", home.content().display()));
    assert_eq!(content.delete().expect("nothing fails").to_string(), "1 entry: content is a mount point");
    assert!(outside.path().join("keep").exists());
    foreign.unmount().expect("unmounted");
}

#[test]
fn ed_08_content_below_a_foreign_tmpfs_is_left_alone() {
    let home = EmptyDirHome::new();
    drop(home.set_up(&DISK));
    fs::write(home.content().join("keep"), "").expect("a file");
    memory::mount_tmpfs(&home.content(), 1 << 20).expect("a tmpfs");
    EmptyDirContent::set_up(home.0.path(), &DISK).expect_err("it is covered");
    assert_eq!(remove(home.0.path()).expect("nothing fails").to_string(), "1 entry: content is a mount point");
    memory::take_off(&home.content()).expect("unmounted");
    assert!(home.content().join("keep").exists() && !home.set_up(&DISK).is_new());
}

#[test]
fn ed_05_content_that_cannot_be_opened_is_not_made_anew() {
    let home = EmptyDirHome::new();
    drop(home.set_up(&DISK));
    fs::write(home.content().join("keep"), "").expect("a file");
    let hidden = home.0.path().join("hidden");
    fs::rename(home.content(), &hidden).expect("renamed");
    // openat2 fails with ELOOP, as it could with EMFILE or EIO.
    std::os::unix::fs::symlink(&hidden, home.content()).expect("a link");
    let error = EmptyDirContent::set_up(home.0.path(), &DISK).expect_err("a link").to_string();
    assert!(error.starts_with(&format!("cannot open {}: ", home.content().display())), "{error}");
    assert!(hidden.join("keep").exists() && home.content().is_symlink());
}

#[test]
fn huge_pages_of_a_size_that_the_node_lacks_are_reported() {
    let home = EmptyDirHome::new();
    let plan = EmptyDirPlan { backing: EmptyDirBacking::HugePages { page_size: 3 << 20, limit: None }, ..DISK };
    let error = EmptyDirContent::set_up(home.0.path(), &plan).expect_err("there are no such pages").to_string();
    assert!(error.contains("no huge pages"), "{error}");
    assert_eq!(home.entries(), 0, "nothing is left of the content");
}

#[test]
fn ed_05_only_incomplete_content_is_removed_as_incomplete() {
    let home = EmptyDirHome::new();
    drop(home.set_up(&DISK));
    assert!(remove_incomplete(home.0.path()).expect("read").is_empty());
    assert!(home.content().exists());
    // An earlier podfs could make this file on a full disk, and not write it.
    fs::write(home.0.path().join(READY), "").expect("written");
    assert!(home.set_up(&DISK).is_new());
    fs::write(home.0.path().join(READY), "").expect("written");
    assert!(remove_incomplete(home.0.path()).expect("read").is_empty());
    assert!(!home.0.path().exists());
}

/// Words in `ready` that this version of podfs does not know.
const UNKNOWN: [&str; 5] = ["disk-2", "Memory", "hugepages-", "hugepages-0", "{\"version\":2}"];

#[test]
fn ed_05_content_whose_storage_is_unknown_is_neither_used_nor_made_anew() {
    for word in UNKNOWN.into_iter().chain(["", "\0\0\0\0"]) {
        let home = EmptyDirHome::new();
        drop(home.set_up(&DISK));
        let (kept, ready) = (home.content().join("kept"), home.0.path().join(READY));
        fs::write(&kept, "data").expect("a file");
        fs::write(&ready, word).expect("written");
        for plan in [DISK, MEMORY] {
            let refused = EmptyDirContent::set_up(home.0.path(), &plan).expect_err("unknown").to_string();
            let reason = match word.trim_matches('\0') {
                "" => "is empty, as after a crash of the node".to_owned(),
                word => format!("says {word:?}, which another version of podfs wrote"),
            };
            assert!(refused.contains(&format!("{} {reason}", ready.display())), "{refused}");
            assert!(refused.contains("or write the storage of the content"), "{refused}");
            assert!(has_content(home.0.path()));
            assert!(remove_incomplete(home.0.path()).expect("read").is_empty());
            assert_eq!(fs::read_to_string(&kept).expect("it stays"), "data", "{word:?}");
            assert_eq!(fs::read_to_string(&ready).expect("it stays"), word);
            assert_eq!(home.entries(), 2);
        }
        // What the sentence says.
        fs::write(&ready, "disk\n").expect("written");
        assert!(!home.set_up(&DISK).is_new() && kept.exists());
        fs::write(&ready, word).expect("written");
        assert!(remove(home.0.path()).expect("read").is_empty() && !home.0.path().exists(), "the pod has ended");
    }
}

#[test]
fn ed_05_memory_whose_storage_is_unknown_stays_mounted() {
    for word in UNKNOWN {
        let home = EmptyDirHome::new();
        drop(home.set_up(&MEMORY));
        fs::write(home.content().join("kept"), "data").expect("a file");
        fs::write(home.0.path().join(READY), word).expect("written");
        EmptyDirContent::set_up(home.0.path(), &DISK).expect_err("unknown");
        assert_eq!(remove(home.0.path()).expect("nothing fails").to_string(), "1 entry: content is a mount point");
        assert_eq!(fs::read_to_string(home.content().join("kept")).expect("it stays"), "data");
    }
}

#[test]
fn ed_05_content_without_files_is_made_anew_if_the_word_about_it_is_lost() {
    let home = EmptyDirHome::new();
    drop(home.set_up(&MEMORY));
    memory::take_off(&home.content()).expect("unmounted, as by a reboot");
    fs::write(home.0.path().join(READY), "\0\0").expect("written");
    assert!(!has_content(home.0.path()));
    assert!(home.set_up(&MEMORY).is_new());
}

#[test]
fn ready_has_the_words_that_other_versions_read() {
    let huge = |page_size| EmptyDirBacking::HugePages { page_size, limit: None };
    let backings = [DISK.backing, MEMORY.backing, huge(2 << 20), huge(1 << 30)];
    let words: Vec<_> = golden!("empty-dir-ready.txt").lines().collect();
    assert_eq!(backings.map(|backing| backing.to_string()), words[..], "{CHANGED}");
    for plan in [DISK, MEMORY] {
        let home = EmptyDirHome::new();
        drop(home.set_up(&plan));
        let ready = fs::read_to_string(home.0.path().join(READY)).expect("a word");
        assert!(words.contains(&ready.as_str()), "{ready}: {CHANGED}");
        assert!(!home.set_up(&plan).is_new());
    }
}
