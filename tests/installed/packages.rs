//! Packages of this build: as `packaging/build` makes it, and others that differ in version and program.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;

use crate::common::PODFS;
use crate::common::builds::other_build;

/// What is installed in these tests.
pub struct Packages {
    /// It stays beside the build, for the next run to write over.
    directory: PathBuf,
    /// The version that the program of [`Packages::second`] tells.
    pub second_version: String,
}

impl Packages {
    /// They are made once.
    pub fn get() -> &'static Packages {
        static PACKAGES: OnceLock<Packages> = OnceLock::new();
        PACKAGES.get_or_init(Packages::make)
    }

    fn make() -> Packages {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("installed");
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).expect("a directory");
        let mut build = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/build"));
        build.args(["--program", PODFS, "--revision", "1", "--output"]).arg(directory.join("built"));
        done(&mut build);
        let built = fs::read_dir(directory.join("built")).expect("packages").flatten().map(|entry| entry.path());
        let is_it = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("podfs_") && name.ends_with(".deb")
        };
        let deb = built.into_iter().find(is_it).expect("a package for Debian");
        fs::rename(deb, directory.join("first.deb")).expect("renamed");
        let mut packages = Packages { directory, second_version: String::new() };
        let (version, program) = other_build(&packages.program());
        packages.variant("second", "2", &program);
        packages.second_version = version;
        let stranger = stranger(&packages.second_version);
        packages.variant("stranger", "3", stranger.as_bytes());
        packages
    }

    /// This build.
    pub fn first(&self) -> PathBuf {
        self.directory.join("first.deb")
    }

    /// A later package, whose program tells another version.
    pub fn second(&self) -> PathBuf {
        self.directory.join("second.deb")
    }

    /// A package later than that, whose servers refuse to talk to podfs of other packages.
    pub fn stranger(&self) -> PathBuf {
        self.directory.join("stranger.deb")
    }

    /// The program in the first package.
    fn program(&self) -> Vec<u8> {
        let tree = self.unpacked();
        fs::read(tree.path().join("usr/bin/podfs")).expect("a program")
    }

    fn unpacked(&self) -> TempDir {
        let tree = TempDir::with_prefix_in("tree-", &self.directory).expect("a directory");
        done(Command::new("dpkg-deb").arg("--raw-extract").arg(self.first()).arg(tree.path()));
        fs::set_permissions(tree.path(), Permissions::from_mode(0o755)).expect("permissions");
        tree
    }

    /// The first package with another revision and program.
    fn variant(&self, name: &str, revision: &str, program: &[u8]) {
        let tree = self.unpacked();
        let control = tree.path().join("DEBIAN/control");
        let text = fs::read_to_string(&control).expect("a control file");
        let set = |line: &str| match line.strip_prefix("Version: ") {
            Some(version) => {
                let upstream = version.rsplit_once('-').map_or(version, |(upstream, _)| upstream);
                format!("Version: {upstream}-{revision}\n")
            }
            None => format!("{line}\n"),
        };
        fs::write(&control, text.lines().map(set).collect::<String>()).expect("written");
        fs::write(tree.path().join("usr/bin/podfs"), program).expect("written");
        // The program is another one than its package says.
        let _ = fs::remove_file(tree.path().join("DEBIAN/md5sums"));
        let packed = self.directory.join(format!("{name}.deb"));
        done(Command::new("dpkg-deb").args(["--build", "-Znone"]).arg(tree.path()).arg(packed));
    }
}

/// A podfs that answers for its servers what one of another protocol answers, whatever it is asked.
fn stranger(version: &str) -> String {
    let answer = format!(r#"{{"Failed":"podfs {version} speaks another protocol than the podfs before"}}"#);
    let length: String =
        u32::try_from(answer.len()).expect("short").to_ne_bytes().map(|byte| format!("\\{byte:03o}")).concat();
    format!("#!/bin/sh\n[ \"$1\" != server ] || printf '{length}%s' '{answer}' >&0\nexec /podfs.before \"$@\"\n")
}

#[track_caller]
fn done(command: &mut Command) {
    let done = command.output().expect("it starts");
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Where the package of this name is put in a machine.
pub fn inside(package: &Path) -> String {
    format!("/root/{}", package.file_name().expect("a name").display())
}
