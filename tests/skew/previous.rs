//! The programs of the previous version.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use crate::common::Fixture;
use crate::common::builds::{Builds, PROGRAMS, VERSION, other_build};
use crate::common::packages::top;

/// The version that a pod or a daemon begins with. The other one follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    Previous,
    Today,
}

impl First {
    pub const BOTH: [First; 2] = [First::Previous, First::Today];

    /// Both versions in the directory of a fixture. The first one is installed.
    pub fn builds(self, fixture: &Fixture) -> Builds {
        let mut builds = Builds::with_programs(fixture, &PREVIOUS.version, &PREVIOUS.directory);
        if self == First::Previous {
            builds.put_other();
        }
        builds
    }
}

static PREVIOUS: LazyLock<Previous> = LazyLock::new(Previous::find);

struct Previous {
    version: String,
    directory: PathBuf,
}

impl Previous {
    fn find() -> Previous {
        let output = Command::new(top().join("tests/skew/build")).stderr(Stdio::inherit()).output().expect("a script");
        assert!(output.status.success(), "the previous version is not built");
        let built = PathBuf::from(String::from_utf8(output.stdout).expect("text").trim());
        let version = version_of(&built.join("podfs"));
        if version != VERSION {
            return Previous { version, directory: built };
        }
        // Until a release gives this tree another version, both programs report the same one, and podfs compares versions.
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("previous");
        fs::create_dir_all(&directory).expect("a directory");
        for name in PROGRAMS {
            let (_, program) = other_build(&fs::read(built.join(name)).expect("a program"));
            // Another test program may be starting the file.
            let new = directory.join(format!("{name}.{}", std::process::id()));
            fs::write(&new, program).expect("written");
            fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).expect("executable");
            fs::rename(&new, directory.join(name)).expect("renamed");
        }
        let version = version_of(&directory.join("podfs"));
        assert_ne!(version, VERSION);
        Previous { version, directory }
    }
}

/// The version that a podfs prints.
fn version_of(podfs: &Path) -> String {
    let output = Command::new(podfs).arg("version").output().expect("podfs runs");
    let text = String::from_utf8(output.stdout).expect("text");
    text.trim().strip_prefix("podfs ").expect("the name, then the version").to_owned()
}
