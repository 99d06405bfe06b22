//! The files that the guest starts with: podfs at the place where this build has it, this test program, their
//! libraries, and a shell.

use std::env::current_exe;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::common::PODFS;
use crate::machine::Machine;

/// What the kernel runs.
const INIT: &str = include_str!("init");

/// Writes the archive to `at`. It is not compressed: the guest would take longer to unpack it than to read it.
pub fn build(machine: &Machine, at: &Path) {
    let tree = Tree(TempDir::with_prefix("podfs-test-").expect("a directory"));
    tree.directory(Path::new(env!("CARGO_TARGET_TMPDIR")));
    for directory in ["/dev", "/etc", "/new-root", "/proc", "/sys", "/tmp"] {
        tree.directory(Path::new(directory));
    }
    tree.copy(&machine.busybox, "/bin/busybox");
    tree.copy(&machine.fuse_module, "/fuse.ko");
    let init = tree.place(Path::new("/init"));
    fs::write(&init, INIT).expect("written");
    fs::set_permissions(init, Permissions::from_mode(0o755)).expect("the mode is set");
    tree.program(Path::new(PODFS), PODFS);
    tree.program(&current_exe().expect("this program"), "/tests");
    tree.pack(&machine.busybox, at);
}

/// The guest's root directory.
struct Tree(TempDir);

impl Tree {
    /// Where a path of the guest is; the directories that lead there are made.
    fn place(&self, path: &Path) -> PathBuf {
        let place = self.0.path().join(path.strip_prefix("/").expect("an absolute path"));
        fs::create_dir_all(place.parent().expect("a parent")).expect("directories");
        place
    }

    fn directory(&self, path: &Path) {
        fs::create_dir_all(self.place(path)).expect("directories");
    }

    fn copy(&self, from: &Path, to: &str) {
        fs::copy(from, self.place(Path::new(to))).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }

    /// A program without its debugging information, which is most of it, and with its libraries.
    fn program(&self, from: &Path, to: &str) {
        let stripped = Command::new("strip").arg("-o").arg(self.place(Path::new(to))).arg(from).status();
        assert!(stripped.expect("strip runs").success(), "{} cannot be stripped", from.display());
        let libraries = Command::new("ldd").arg(from).output().expect("ldd runs");
        // `libc.so.6 => /lib/…/libc.so.6 (0x…)`; the loader stands there without an arrow.
        let libraries = String::from_utf8(libraries.stdout).expect("text");
        let paths = libraries.split_whitespace().filter(|word| word.starts_with('/'));
        paths.for_each(|library| self.copy(Path::new(library), library));
    }

    fn pack(&self, busybox: &Path, at: &Path) {
        const PACK: &str = r#""$0" find . | "$0" cpio -o -H newc 2>/dev/null"#;
        let mut pack = Command::new(busybox);
        pack.args(["sh", "-c", PACK]).arg(busybox).current_dir(self.0.path());
        let packed = pack.stdout(File::create(at).expect("a file")).status().expect("busybox runs");
        assert!(packed.success(), "the initramfs cannot be packed");
    }
}
