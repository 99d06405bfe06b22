//! What must not change when another process goes on with a volume.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use super::tree;

/// The mount, the generation, numbers of files.
pub fn identity(volume: &Path) -> (u64, Option<String>, Vec<(String, u64)>) {
    let mount = statx(CWD, volume, AtFlags::empty(), StatxFlags::MNT_ID).expect("attributes").stx_mnt_id;
    let generation = fs::read_link(volume.join("..data")).ok().map(|link| link.display().to_string());
    let files = tree::names(volume).into_iter().map(|name| {
        let inode = fs::metadata(volume.join(&name)).expect("a file").ino();
        (name, inode)
    });
    (mount, generation, files.collect())
}
