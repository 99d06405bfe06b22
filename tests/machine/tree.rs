//! The initial files of the guest, which become its initramfs.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// The guest's root directory.
pub struct Tree(TempDir);

impl Default for Tree {
    fn default() -> Self {
        Self(TempDir::with_prefix("podfs-test-").expect("a directory"))
    }
}

impl Tree {
    pub fn directory(&self, path: &Path) {
        fs::create_dir_all(self.place(path)).expect("directories");
    }

    pub fn copy(&self, from: &Path, to: &str) {
        fs::copy(from, self.place(Path::new(to))).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }

    pub fn write(&self, to: &str, text: &str, mode: u32) {
        let place = self.place(Path::new(to));
        fs::write(&place, text).expect("written");
        fs::set_permissions(place, Permissions::from_mode(mode)).expect("the mode is set");
    }

    /// Adds a program without its debugging information, which is the largest part of the file, and with its libraries. A
    /// library below `unpacked`, which has the layout of a root directory, takes precedence over an installed one.
    pub fn program(&self, from: &Path, to: &str, unpacked: Option<&Path>) {
        let stripped = Command::new("strip").arg("-o").arg(self.place(Path::new(to))).arg(from).status();
        assert!(stripped.expect("strip runs").success(), "{} cannot be stripped", from.display());
        let mut libraries = Command::new("ldd");
        if let Some(unpacked) = unpacked {
            libraries.env("LD_LIBRARY_PATH", unpacked.join("usr/lib/x86_64-linux-gnu"));
        }
        let libraries = libraries.arg(from).output().expect("ldd runs");
        // A line is `libc.so.6 => /lib/…/libc.so.6 (0x…)`, or just a path for the loader.
        let libraries = String::from_utf8(libraries.stdout).expect("text");
        for library in libraries.split_whitespace().filter(|word| word.starts_with('/')).map(Path::new) {
            let below = unpacked.and_then(|unpacked| library.strip_prefix(unpacked).ok());
            let to = below.map_or_else(|| library.to_owned(), |below| Path::new("/").join(below));
            self.copy(library, &to.to_string_lossy());
        }
    }

    /// Writes the initramfs to `archive`. It is not compressed, because the slow guest would need long to decompress it.
    pub fn pack(&self, busybox: &Path, archive: &Path) {
        const PACK: &str = r#""$0" find . | "$0" cpio -o -H newc 2>/dev/null"#;
        let mut pack = Command::new(busybox);
        pack.args(["sh", "-c", PACK]).arg(busybox).current_dir(self.0.path());
        let status = pack.stdout(File::create(archive).expect("a file")).status().expect("busybox runs");
        assert!(status.success(), "the initramfs cannot be packed");
    }

    /// The path on the host for a path of the guest. Creates the missing directories above it.
    fn place(&self, path: &Path) -> PathBuf {
        let place = self.0.path().join(path.strip_prefix("/").expect("an absolute path"));
        fs::create_dir_all(place.parent().expect("a parent")).expect("directories");
        place
    }
}
