//! rpm installs the package into a root directory. That is an overlay of this machine's root, so that the scripts of the
//! package have the programs that they need.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use crate::common::namespace::bind;
use crate::common::packages::{packages, stdout_of};
use crate::common::scratch::Scratch;

#[test]
fn the_rpm_is_installed_runs_and_is_removed_without_a_trace() {
    let root = Root::new();
    root.rpm(&["--initdb"]);
    let before = root.changed();
    // Without `--nodeps`, rpm would refuse the package: rpm's database does not have the libraries, which are Debian's.
    root.rpm(&["--install", "--nodeps", packages().rpm.to_str().expect("a text")]);
    root.rpm(&["--verify", "--nodeps", "podfs"]);
    let version = stdout_of(Command::new("chroot").arg(root.path()).args(["/usr/bin/podfs", "version"]));
    assert_eq!(version.trim(), concat!("podfs ", env!("CARGO_PKG_VERSION")));

    root.rpm(&["--erase", "podfs"]);
    let remaining: Vec<_> = root.changed().difference(&before).cloned().collect();
    assert_eq!(remaining, Vec::<PathBuf>::new());
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

/// An overlay of this machine's root: writes go to a tmpfs.
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
        // An overlay does not show the mounts in its lower directory, and the scripts need /dev/null.
        bind(Path::new("/dev"), &merged.path().join("dev"));
        Self { merged, upper }
    }

    fn path(&self) -> &Path {
        self.merged.path()
    }

    fn rpm(&self, arguments: &[&str]) {
        stdout_of(
            Command::new("rpm").arg("--root").arg(self.path()).args(["--dbpath", "/var/lib/rpm"]).args(arguments),
        );
    }

    /// The files that were added, changed or removed, except those of rpm's database.
    fn changed(&self) -> BTreeSet<PathBuf> {
        let top = self.upper.path().join("changed");
        let list = stdout_of(Command::new("find").arg(&top).args(["-not", "-type", "d", "-print0"]));
        let paths =
            list.split('\0').filter(|path| !path.is_empty()).map(|path| Path::new(OsStr::from_bytes(path.as_bytes())));
        let relative = paths.map(|path| path.strip_prefix(&top).expect("find lists paths below top").to_owned());
        relative.filter(|path| !path.starts_with("var/lib/rpm")).collect()
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = umount2(self.path(), MntFlags::MNT_DETACH);
    }
}
