//! The system calls of the kubelet's `AtomicWriter`, in the same order, as the peer of a commit.
//!
//! They stand for the work of the real writer, not for its code: the overhead of Go is left out.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

/// Writes `payload` as generation `round` below `volume`. Returns the time until `..data` was switched.
pub fn write(volume: &Path, payload: &[(String, Vec<u8>)], round: usize) -> Duration {
    let began = Instant::now();
    let data = volume.join("..data");
    let old = fs::read_link(&data).ok().map(|name| volume.join(name));
    if let Some(old) = &old {
        let _removed = fs::read_dir(old).expect("the old generation").count();
        let _changed = payload.iter().any(|(key, content)| fs::read(old.join(key)).ok().as_ref() != Some(content));
    }
    let name = format!("..2026_11_20_17_46_18.{round}");
    let generation = volume.join(&name);
    DirBuilder::new().mode(0o700).create(&generation).expect("a directory");
    fs::set_permissions(&generation, Permissions::from_mode(0o755)).expect("a mode");
    for (key, content) in payload {
        let path = generation.join(key);
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(&path).expect("a file");
        file.write_all(content).expect("written");
        drop(file);
        fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("a mode");
    }
    symlink(&name, volume.join("..data_tmp")).expect("a link");
    fs::rename(volume.join("..data_tmp"), &data).expect("a rename");
    let switched = began.elapsed();
    for (key, _) in payload {
        if fs::read_link(volume.join(key)).is_err() {
            symlink(format!("..data/{key}"), volume.join(key)).expect("a link");
        }
    }
    if let Some(old) = old {
        fs::remove_dir_all(old).expect("removed");
    }
    switched
}
