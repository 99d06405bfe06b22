//! The files of a mounted volume as a map, and payloads with modes in a notation of one line.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use podfs_fuse::client::Commit;
use podfs_fuse::projection::{FileEntry, ImageLayout};

use super::{DIRECTORIES, Served};

/// Files by path: bytes and permission bits.
pub type Files = BTreeMap<String, (Vec<u8>, u16)>;

/// Every file below `root`, links followed, without the names directly in `root` that start with `..`.
pub fn files(root: &Path) -> Files {
    let mut files = Files::new();
    collect(root, "", &mut files);
    files
}

fn collect(directory: &Path, prefix: &str, files: &mut Files) {
    let is_visible = |name: &String| !(prefix.is_empty() && name.starts_with(".."));
    for name in names(directory).into_iter().filter(is_visible) {
        let (path, shown) = (directory.join(&name), format!("{prefix}{name}"));
        let metadata = fs::metadata(&path).expect("an entry that is listed can be looked at");
        if metadata.is_dir() {
            collect(&path, &format!("{shown}/"), files);
        } else {
            let mode = u16::try_from(metadata.permissions().mode() & 0o7777).expect("twelve bits");
            files.insert(shown, (fs::read(&path).expect("a file"), mode));
        }
    }
}

/// The names in a directory, in the order of the directory.
pub fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("a listing");
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8")).collect()
}

/// `foo=text; bar/zab=more@0400` as files; the mode is 0644 unless it is given.
pub fn parse(payload: &str) -> Files {
    let entries = payload.split(';').map(str::trim).filter(|entry| !entry.is_empty());
    entries.map(parse_entry).collect()
}

fn parse_entry(entry: &str) -> (String, (Vec<u8>, u16)) {
    let (path, value) = entry.split_once('=').expect("path=content");
    let (content, mode) = value.split_once('@').unwrap_or((value, "644"));
    (path.to_owned(), (content.into(), u16::from_str_radix(mode, 8).expect("an octal mode")))
}

impl Served {
    /// Commits files with their modes.
    pub fn commit_files(&mut self, files: &Files) -> Commit {
        let entries =
            files.iter().map(|(path, (content, mode))| FileEntry { path, content, mode: *mode, uid: 0, gid: 0 });
        let layout = ImageLayout::new(entries, DIRECTORIES).expect("a tree");
        self.projection.commit(&layout, DIRECTORIES).expect("a commit")
    }
}
