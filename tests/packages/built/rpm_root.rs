//! The rpm, installed by rpm itself: into a root that has all of this machine below it, so that its scripts run as well.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use crate::common::namespace::bind;
use crate::common::packages::{packages, told_by};
use crate::common::scratch::Scratch;

#[test]
fn the_rpm_is_installed_runs_and_is_removed_without_a_trace() {
    let root = Root::new();
    root.rpm(&["--initdb"]);
    let before = root.changed();
    // Debian's libraries are not in rpm's database.
    root.rpm(&["--install", "--nodeps", packages().rpm.to_str().expect("a text")]);
    root.rpm(&["--verify", "--nodeps", "podfs"]);
    let version = told_by(Command::new("chroot").arg(root.path()).args(["/usr/bin/podfs", "version"]));
    assert_eq!(version.trim(), concat!("podfs ", env!("CARGO_PKG_VERSION")));

    root.rpm(&["--erase", "podfs"]);
    let left: Vec<_> = root.changed().difference(&before).cloned().collect();
    assert_eq!(left, Vec::<PathBuf>::new());
}

#[test]
fn an_edited_setting_survives_an_upgrade_by_rpm() {
    let root = Root::new();
    let rpm = packages().rpm.to_str().expect("a text");
    root.rpm(&["--initdb"]);
    root.rpm(&["--install", "--nodeps", rpm]);
    let settings = root.path().join("etc/podfs/podfs.toml");
    fs::write(&settings, "# edited\n").expect("written");
    root.rpm(&["--upgrade", "--nodeps", "--replacepkgs", rpm]);
    assert_eq!(fs::read_to_string(&settings).expect("a text"), "# edited\n");
}

/// An overlay of this machine's root: writes go to a directory of their own.
struct Root {
    merged: TempDir,
    upper: Scratch,
}

impl Root {
    fn new() -> Self {
        let (merged, upper) = (TempDir::with_prefix("podfs-test-").expect("a directory"), Scratch::tmpfs(""));
        let directory = |name| {
            let directory = upper.path().join(name);
            fs::create_dir(&directory).expect("a directory");
            directory.display().to_string()
        };
        let options = format!("lowerdir=/,upperdir={},workdir={}", directory("changed"), directory("work"));
        mount(Some("overlay"), merged.path(), Some("overlay"), MsFlags::empty(), Some(options.as_str()))
            .expect("an overlay");
        // Mounts are not seen through an overlay, and scripts write to /dev/null.
        bind(Path::new("/dev"), &merged.path().join("dev"));
        Self { merged, upper }
    }

    fn path(&self) -> &Path {
        self.merged.path()
    }

    fn rpm(&self, arguments: &[&str]) {
        told_by(Command::new("rpm").arg("--root").arg(self.path()).args(["--dbpath", "/var/lib/rpm"]).args(arguments));
    }

    /// Everything but rpm's own files that is there and was not in the machine's root, or that is missing.
    fn changed(&self) -> BTreeSet<PathBuf> {
        let top = self.upper.path().join("changed");
        let found = told_by(Command::new("find").arg(&top).args(["-not", "-type", "d", "-print0"]));
        let found =
            found.split('\0').filter(|path| !path.is_empty()).map(|path| Path::new(OsStr::from_bytes(path.as_bytes())));
        let inside = found.map(|path| path.strip_prefix(&top).expect("it is inside").to_owned());
        inside.filter(|path| !path.starts_with("var/lib/rpm")).collect()
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = umount2(self.path(), MntFlags::MNT_DETACH);
    }
}
