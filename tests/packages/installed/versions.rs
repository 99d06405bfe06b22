//! Versions of the package: the package of this tree, and later packages with another version and other programs.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use tempfile::TempDir;

use crate::common::builds::{VERSION, another, other_build};
use crate::common::packages::{PROGRAMS, packages, stdout_of};

/// Three packages with increasing versions.
pub struct Versions {
    /// The directory stays after the test; the next run replaces it.
    directory: PathBuf,
}

impl Versions {
    /// The packages, which the first call makes.
    pub fn get() -> &'static Versions {
        static VERSIONS: LazyLock<Versions> = LazyLock::new(Versions::make);
        &VERSIONS
    }

    fn make() -> Versions {
        // The packages are in the target directory, because the system's temporary directory may be small.
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("installed");
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).expect("a directory");
        fs::copy(&packages().deb, directory.join("first.deb")).expect("copied");
        let versions = Versions { directory };
        let programs = PROGRAMS.map(|path| (path, other_build(&versions.program(path)).1));
        versions.variant("second", "2", &programs);
        versions.variant("stranger", "3", &[(PROGRAMS[0], stranger(&another(VERSION)).into_bytes())]);
        versions
    }

    /// The package of this tree.
    pub fn first(&self) -> PathBuf {
        self.directory.join("first.deb")
    }

    /// A later package with other programs.
    pub fn second(&self) -> PathBuf {
        self.directory.join("second.deb")
    }

    /// The latest package, whose servers refuse the protocol of the other packages.
    pub fn stranger(&self) -> PathBuf {
        self.directory.join("stranger.deb")
    }

    /// A program in the first package.
    fn program(&self, path: &str) -> Vec<u8> {
        let tree = self.unpacked();
        fs::read(tree.path().join(path)).expect("a program")
    }

    fn unpacked(&self) -> TempDir {
        let tree = TempDir::with_prefix_in("tree-", &self.directory).expect("a directory");
        stdout_of(Command::new("dpkg-deb").arg("--raw-extract").arg(self.first()).arg(tree.path()));
        fs::set_permissions(tree.path(), Permissions::from_mode(0o755)).expect("permissions");
        tree
    }

    /// The first package with another revision and other programs.
    fn variant(&self, name: &str, revision: &str, programs: &[(&str, Vec<u8>)]) {
        let tree = self.unpacked();
        let control = tree.path().join("DEBIAN/control");
        let text = fs::read_to_string(&control).expect("a control file");
        let set_version = |line: &str| match line.strip_prefix("Version: ") {
            Some(version) => {
                let upstream = version.rsplit_once('-').map_or(version, |(upstream, _)| upstream);
                format!("Version: {upstream}-{revision}\n")
            }
            None => format!("{line}\n"),
        };
        fs::write(&control, text.lines().map(set_version).collect::<String>()).expect("written");
        for (path, program) in programs {
            fs::write(tree.path().join(path), program).expect("written");
        }
        // The checksums do not fit the new programs.
        let _ = fs::remove_file(tree.path().join("DEBIAN/md5sums"));
        let packed = self.directory.join(format!("{name}.deb"));
        stdout_of(Command::new("dpkg-deb").args(["--build", "-Znone"]).arg(tree.path()).arg(packed));
    }
}

/// A podfs whose servers answer every message with an error, as a server with another protocol does.
fn stranger(version: &str) -> String {
    let answer = format!(r#"{{"Failed":"podfs {version} speaks another protocol than the podfs before"}}"#);
    let length: String =
        u32::try_from(answer.len()).expect("short").to_ne_bytes().map(|byte| format!("\\{byte:03o}")).concat();
    format!("#!/bin/sh\n[ \"$1\" != server ] || printf '{length}%s' '{answer}' >&0\nexec /podfs.before \"$@\"\n")
}

/// The path of a package in a machine.
pub fn path_in_machine(package: &Path) -> String {
    format!("/root/{}", package.file_name().expect("a name").display())
}
