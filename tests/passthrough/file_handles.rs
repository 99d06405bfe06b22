//! File handles (`open_by_handle_at(2)`), which backup tools and NFS servers use: a handle opens its file also after the kernel
//! has dropped the file from its caches.

use std::fs::{self, File, Permissions};
use std::io::read_to_string;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::common::eventually;
use crate::common::file_handle::FileHandle;
use crate::common::forgetting::forget_unused;
use crate::common::passthrough::{Mounted, disk_directory};

const DIRECTORY: libc::c_int = libc::O_RDONLY | libc::O_DIRECTORY;

/// A tree with the files `file`, `above/file` and `above/below/file`. The content of each file is its path.
fn mounted_tree() -> Mounted {
    let mounted = Mounted::new();
    fs::create_dir_all(mounted.path().join("above/below")).expect("directories");
    for name in ["file", "above/file", "above/below/file"] {
        fs::write(mounted.path().join(name), name).expect("written");
    }
    mounted
}

/// The path of an open file in `/proc/self/fd`.
fn proc_path(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("a listing");
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8")).collect();
    names.sort_unstable();
    names
}

#[test]
fn a_handle_leads_to_a_file_that_the_kernel_has_forgotten() {
    let mounted = mounted_tree();
    symlink("file", mounted.path().join("link")).expect("a link");
    let at = |name: &str| mounted.path().join(name);
    let files = ["file", "above/file", "above/below/file"].map(|name| (name, FileHandle::of(&at(name))));
    let directories = ["above", "above/below"].map(|name| (name, FileHandle::of(&at(name))));
    let (link, root) = (FileHandle::of(&at("link")), FileHandle::of(mounted.path()));
    let number = |name: &str| fs::symlink_metadata(mounted.source().join(name)).expect("attributes").ino();
    for _ in 0..3 {
        forget_unused(mounted.path());
        for (name, handle) in &files {
            let file = handle.open(mounted.path(), libc::O_RDONLY).expect(name);
            assert_eq!(read_to_string(&file).expect("read"), *name);
            assert_eq!(file.metadata().expect("attributes").ino(), number(name), "{name}");
        }
        forget_unused(mounted.path());
        for (name, handle) in &directories {
            let directory = handle.open(mounted.path(), DIRECTORY).expect(name);
            assert_eq!(directory.metadata().expect("attributes").ino(), number(name), "{name}");
            assert!(names(&proc_path(&directory)).contains(&"file".to_owned()));
            assert_eq!(
                fs::read_to_string(proc_path(&directory).join("../file")).expect("read"),
                match *name {
                    "above" => "file",
                    _ => "above/file",
                }
            );
        }
        forget_unused(mounted.path());
        let link = link.open(mounted.path(), libc::O_PATH | libc::O_NOFOLLOW).expect("a link");
        assert_eq!(link.metadata().expect("attributes").ino(), number("link"));
        assert_eq!(
            names(&proc_path(&root.open(mounted.path(), DIRECTORY).expect("the root"))),
            ["above", "file", "link"]
        );
    }
    // Changes through a handle reach the source.
    forget_unused(mounted.path());
    let file = files[2].1.open(mounted.path(), libc::O_RDWR).expect("open for writing");
    file.set_permissions(Permissions::from_mode(0o751)).expect("set");
    file.set_len(5).expect("truncated");
    assert_eq!(fs::read_to_string(mounted.source().join("above/below/file")).expect("read"), "above");
    assert_eq!(fs::metadata(mounted.source().join("above/below/file")).expect("attributes").mode() & 0o7777, 0o751);
}

#[test]
fn a_handle_leads_to_a_file_that_was_renamed() {
    let mounted = mounted_tree();
    let at = |name: &str| mounted.path().join(name);
    let [file, directory] = ["above/below/file", "above/below"].map(|name| FileHandle::of(&at(name)));
    fs::rename(at("above/below/file"), at("above/below/other")).expect("renamed");
    fs::rename(at("above/below"), at("moved")).expect("moved");
    forget_unused(mounted.path());
    // A process of the host renames files, too. The volume gets no request for this.
    fs::create_dir(mounted.source().join("new")).expect("created");
    fs::rename(mounted.source().join("moved"), mounted.source().join("new/place")).expect("moved");
    forget_unused(mounted.path());
    let file = file.open(mounted.path(), libc::O_RDONLY).expect("the file");
    assert_eq!(read_to_string(file).expect("read"), "above/below/file");
    let directory = directory.open(mounted.path(), DIRECTORY).expect("the directory");
    assert_eq!(names(&proc_path(&directory)), ["other"]);
    assert_eq!(names(&proc_path(&directory).join("..")), ["place"]);
}

#[test]
fn a_handle_of_a_removed_file_is_stale_once_nothing_has_it_open() {
    let mounted = mounted_tree();
    let at = |name: &str| mounted.path().join(name);
    let names = ["file", "above/below/file", "above/below"];
    let handles = names.map(|name| FileHandle::of(&at(name)));
    let open = File::open(at("file")).expect("open");
    fs::remove_file(at("file")).expect("removed");
    fs::remove_file(at("above/below/file")).expect("removed");
    fs::remove_dir(at("above/below")).expect("removed");
    assert_eq!(
        read_to_string(handles[0].open(mounted.path(), libc::O_RDONLY).expect("the file is open")).expect("read"),
        "file"
    );
    drop(open);
    for handle in &handles {
        eventually("the handle is stale", || handle.refused(mounted.path()) == Some(libc::ESTALE));
    }
    // The handles do not open later files, even if these have the inode numbers of the removed files.
    ["file", "other"].iter().for_each(|name| fs::write(at(name), "new").expect("written"));
    forget_unused(mounted.path());
    handles.iter().for_each(|handle| assert_eq!(handle.refused(mounted.path()), Some(libc::ESTALE)));
    // A process of the host removes a file. The volume gets no request for this.
    let handle = FileHandle::of(&at("above/file"));
    fs::remove_file(mounted.source().join("above/file")).expect("removed");
    eventually("the handle is stale", || {
        forget_unused(mounted.path());
        handle.refused(mounted.path()) == Some(libc::ESTALE)
    });
}

#[test]
fn a_handle_of_another_volume_is_stale() {
    let (mounted, other) = (mounted_tree(), mounted_tree());
    let same = mounted.second();
    let volumes = [&mounted, &other, &same];
    let names = ["file", "above", "above/file", "above/below", "above/below/file"];
    let handles = volumes.map(|volume| names.map(|name| FileHandle::of(&volume.path().join(name))));
    for _ in 0..2 {
        for (number, volume) in volumes.iter().enumerate() {
            for (owner, handles) in handles.iter().enumerate().filter(|(owner, _)| *owner != number) {
                let refused = handles.each_ref().map(|handle| handle.refused(volume.path()));
                assert_eq!(refused, [Some(libc::ESTALE); 5], "handles of volume {owner} in volume {number}");
            }
        }
        volumes.iter().for_each(|volume| drop(fs::metadata(volume.path().join("above/file"))));
        forget_unused(mounted.path());
    }
}

#[test]
fn a_handle_of_a_directory_that_left_the_source_leads_to_nothing_outside() {
    let base = disk_directory();
    let (source, outside) = (base.path().join("source"), base.path().join("outside"));
    [&source, &outside].iter().for_each(|path| fs::create_dir(path).expect("created"));
    fs::create_dir_all(source.join("above/below")).expect("directories");
    fs::write(outside.join("secret"), "secret").expect("written");
    let mounted = Mounted::of(&source);
    let handle = FileHandle::of(&mounted.path().join("above/below"));
    fs::rename(source.join("above/below"), outside.join("below")).expect("moved");
    eventually("the handle is stale", || {
        forget_unused(mounted.path());
        handle.refused(mounted.path()) == Some(libc::ESTALE)
    });
    fs::rename(outside.join("below"), source.join("back")).expect("moved back");
    let back = handle.open(mounted.path(), DIRECTORY).expect("the directory is in the source again");
    assert_eq!(names(&proc_path(&back).join("..")), ["above", "back"]);
}
