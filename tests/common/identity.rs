//! Properties of a volume that must not change when another process takes it over.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use super::tree;

/// The identity of a directory of a volume, as its users see it.
#[derive(Debug, PartialEq, Eq)]
pub struct Identity {
    pub mount: u64,
    /// The target of `..data`, if there is one.
    pub generation: Option<String>,
    /// Names and inode numbers.
    pub files: Vec<(String, u64)>,
}

pub fn identity(directory: &Path) -> Identity {
    let mount = statx(CWD, directory, AtFlags::empty(), StatxFlags::MNT_ID).expect("attributes").stx_mnt_id;
    let generation = fs::read_link(directory.join("..data")).ok().map(|link| link.display().to_string());
    let files = tree::names(directory).into_iter().map(|name| {
        let inode = fs::metadata(directory.join(&name)).expect("a file").ino();
        (name, inode)
    });
    Identity { mount, generation, files: files.collect() }
}
