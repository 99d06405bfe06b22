//! The packages of podfs, as `packaging/build` makes them.
//!
//! `tests/run` builds them as they are published, though less optimized and compressed, and sets `PODFS_TEST_PACKAGES` to their
//! directory. Without that variable, a test packs the podfs that cargo has built for the tests, which takes less time. Paths of
//! this machine are in that podfs.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use super::PODFS;

/// The programs of a package, from the root.
pub const PROGRAMS: [&str; 3] = ["usr/bin/podfs", "usr/libexec/podfs/podfs-fuse", "usr/libexec/podfs/podfs-supervisor"];

/// The paths of the four packages.
pub struct Packages {
    pub deb: PathBuf,
    pub dbgsym: PathBuf,
    pub rpm: PathBuf,
    pub debuginfo: PathBuf,
    /// Whether they hold a podfs that was built as the published one, not the podfs of these tests.
    pub published: bool,
}

/// The packages of this tree.
pub fn packages() -> &'static Packages {
    static PACKAGES: LazyLock<Packages> = LazyLock::new(|| match env::var_os("PODFS_TEST_PACKAGES") {
        Some(directory) => {
            let directory = Path::new(&directory);
            wait_until_complete(directory);
            Packages { published: true, ..Packages::within(directory) }
        }
        None => {
            let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages");
            build(
                &top(),
                Command::new(top().join("packaging/build"))
                    .args(["--fast", "--program", PODFS])
                    .arg("--output")
                    .arg(&directory),
            );
            Packages::within(&directory)
        }
    });
    &PACKAGES
}

/// Waits for the packages that `tests/run` builds while the first tests run.
fn wait_until_complete(directory: &Path) {
    let until = Instant::now() + Duration::from_secs(30 * 60);
    while !directory.join("complete").exists() {
        assert!(!directory.join("failed").exists(), "packaging/build failed; tests/run prints its output at the end");
        assert!(Instant::now() < until, "there are no packages in {}", directory.display());
        thread::sleep(Duration::from_millis(500));
    }
}

impl Packages {
    /// The packages of this version and revision 1 in a directory.
    pub fn within(directory: &Path) -> Self {
        let version = env!("CARGO_PKG_VERSION");
        let (debian, machine) = if cfg!(target_arch = "aarch64") { ("arm64", "aarch64") } else { ("amd64", "x86_64") };
        Self {
            deb: directory.join(format!("podfs_{version}-1_{debian}.deb")),
            dbgsym: directory.join(format!("podfs-dbgsym_{version}-1_{debian}.deb")),
            rpm: directory.join(format!("podfs-{version}-1.{machine}.rpm")),
            debuginfo: directory.join(format!("podfs-debuginfo-{version}-1.{machine}.rpm")),
            published: false,
        }
    }

    /// All packages, in a fixed order.
    pub fn all(&self) -> [&Path; 4] {
        [&self.deb, &self.dbgsym, &self.rpm, &self.debuginfo]
    }
}

/// The top of this tree.
pub fn top() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Runs `packaging/build` of a tree, as in a shell there.
#[track_caller]
pub fn build(top: &Path, command: &mut Command) {
    let output = command.current_dir(top).output().expect("packaging/build starts");
    assert!(output.status.success(), "packaging/build fails:\n{}", String::from_utf8_lossy(&output.stderr));
}

/// The standard output of a program. Fails the test if the program fails.
#[track_caller]
pub fn stdout_of(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; tests/run installs it"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} fails:\n{stderr}{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
