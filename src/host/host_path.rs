//! The paths of hostPath volumes. podfs opens a path, checks the type of the volume, and makes a missing file or directory if the
//! type says so.
//!
//! The kubelet takes every error of stat(2) as a missing path (HP-08). podfs makes a file or directory only if the path does not
//! exist. For podfs, the path of a volume without a type has to exist. With a kubelet, the container runtime makes a missing path
//! later.

use std::fs::{DirBuilder, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use super::error::OpenFailure;
use super::{FileKind, HostError, HostSource};
use crate::volume::{HostPath, HostPathType};

/// The modes of new directories and files, before the umask.
const DIRECTORY: u32 = 0o755;
const FILE: u32 = 0o644;

/// Opens the path of a hostPath volume. Makes a missing file or directory first if the type says so (HP-02, HP-03), except below a
/// directory from which podfs follows no symbolic link.
///
/// # Errors
/// When the path does not exist, leads to a file of another type, or cannot be made.
pub fn open(host_path: &HostPath) -> Result<HostSource, HostError> {
    let HostPath { path, kind, within } = host_path;
    if let Some(within) = within {
        return check(path, *kind, HostSource::open_within(within, path));
    }
    match (HostSource::open(path), kind) {
        (Err(OpenFailure::Missing), HostPathType::DirectoryOrCreate) => {
            make_directory(path)?;
            check(path, *kind, HostSource::open(path))
        }
        (Err(OpenFailure::Missing), HostPathType::FileOrCreate) => {
            make_file(path)?;
            check(path, *kind, HostSource::open(path))
        }
        (opened, _) => check(path, *kind, opened),
    }
}

/// Checks an opened path against the type of the volume, and explains why a path could not be opened.
fn check(path: &Path, kind: HostPathType, opened: Result<HostSource, OpenFailure>) -> Result<HostSource, HostError> {
    let path = path.to_owned();
    let Some((expected, allowed)) = expectation(kind) else {
        return opened.map_err(|obstacle| match obstacle {
            OpenFailure::Missing => HostError::Refused(format!(
                "hostPath {} cannot be used: it does not exist; make it, or give the volume the type DirectoryOrCreate",
                path.display()
            )),
            obstacle => HostError::Open { what: "hostPath", path, obstacle },
        });
    };
    match opened {
        Ok(source) if source.kind() == allowed => Ok(source),
        Ok(_) => Err(HostError::WrongType { path, expected, found: None }),
        Err(obstacle) => Err(HostError::WrongType { path, expected, found: Some(obstacle) }),
    }
}

/// The kind of file that a type requires, in the kubelet's words.
fn expectation(kind: HostPathType) -> Option<(&'static str, FileKind)> {
    Some(match kind {
        HostPathType::Unchecked => return None,
        HostPathType::DirectoryOrCreate | HostPathType::Directory => ("a directory", FileKind::Directory),
        HostPathType::FileOrCreate | HostPathType::File => ("a file", FileKind::File),
        HostPathType::Socket => ("a socket file", FileKind::Socket),
        HostPathType::CharDevice => ("a character device", FileKind::CharDevice),
        HostPathType::BlockDevice => ("a block device", FileKind::BlockDevice),
    })
}

fn make_directory(path: &Path) -> Result<(), HostError> {
    let made = DirBuilder::new().recursive(true).mode(DIRECTORY).create(path);
    made.map_err(|cause| HostError::Make { what: "directory", path: path.to_owned(), cause })
}

/// Makes an empty file. The directory of the file has to exist.
fn make_file(path: &Path) -> Result<(), HostError> {
    // With O_EXCL (`create_new`), the kernel follows no symbolic link that another process makes at this moment.
    match OpenOptions::new().write(true).create_new(true).mode(FILE).open(path) {
        Ok(_) => Ok(()),
        Err(cause) if cause.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(cause) if cause.kind() == ErrorKind::NotFound => Err(HostError::Refused(format!(
            "cannot make the file {}: its directory does not exist, and FileOrCreate makes none",
            path.display()
        ))),
        Err(cause) => Err(HostError::Make { what: "file", path: path.to_owned(), cause }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use HostPathType::*;

    use super::*;

    fn open_as(path: &Path, kind: HostPathType) -> Result<FileKind, String> {
        let opened = open(&HostPath { path: path.to_owned(), kind, within: None });
        opened.map(|source| source.kind()).map_err(|error| error.to_string())
    }

    /// A directory with one entry of each kind: `dir`, `file`, `socket`, and links to them.
    fn host() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().expect("a directory");
        let base = directory.path().to_owned();
        fs::create_dir(base.join("dir")).expect("a directory");
        fs::write(base.join("file"), "").expect("a file");
        drop(UnixListener::bind(base.join("socket")).expect("a socket"));
        for name in ["dir", "file", "socket"] {
            symlink(name, base.join(format!("to-{name}"))).expect("a link");
        }
        symlink("nowhere", base.join("dangling")).expect("a link");
        symlink("loop", base.join("loop")).expect("a link");
        (directory, base)
    }

    #[test]
    fn hp_04_hp_05_each_type_accepts_its_kind_and_links_to_it() {
        let (_guard, base) = host();
        for (kind, name, found) in [
            (Unchecked, "socket", FileKind::Socket),
            (Directory, "dir", FileKind::Directory),
            (DirectoryOrCreate, "dir", FileKind::Directory),
            (File, "file", FileKind::File),
            (FileOrCreate, "file", FileKind::File),
            (Socket, "socket", FileKind::Socket),
        ] {
            assert_eq!(open_as(&base.join(name), kind), Ok(found));
            assert_eq!(open_as(&base.join(format!("to-{name}")), kind), Ok(found));
        }
        assert_eq!(open_as(Path::new("/dev/null"), CharDevice), Ok(FileKind::CharDevice));
    }

    #[test]
    fn hp_04_another_kind_is_refused_with_the_kubelets_text() {
        let (_guard, base) = host();
        for (kind, name, text) in [
            (Directory, "file", "a directory"),
            (DirectoryOrCreate, "file", "a directory"),
            (File, "dir", "a file"),
            (FileOrCreate, "socket", "a file"),
            (Socket, "file", "a socket file"),
            (CharDevice, "file", "a character device"),
            (BlockDevice, "dir", "a block device"),
        ] {
            let path = base.join(name);
            let expected = format!("hostPath type check failed: {} is not {text}", path.display());
            assert_eq!(open_as(&path, kind), Err(expected));
        }
        let path = base.join("missing");
        let expected = format!("hostPath type check failed: {} is not a directory: it does not exist", path.display());
        assert_eq!(open_as(&path, Directory), Err(expected));
    }

    #[test]
    fn hp_01_nothing_is_made_without_a_type() {
        let (_guard, base) = host();
        let error = open_as(&base.join("missing"), Unchecked).expect_err("missing");
        assert!(
            error.ends_with("it does not exist; make it, or give the volume the type DirectoryOrCreate"),
            "{error}"
        );
        assert!(!base.join("missing").exists());
    }

    #[test]
    fn hp_02_a_missing_directory_is_made_with_its_parents() {
        let (_guard, base) = host();
        let path = base.join("a/b");
        assert_eq!(open_as(&path, DirectoryOrCreate), Ok(FileKind::Directory));
        let mode = fs::metadata(&path).expect("made").permissions().mode() & 0o7777;
        assert_eq!(mode, 0o755 & !umask());
    }

    #[test]
    fn hp_03_a_missing_file_is_made_without_its_parents() {
        let (_guard, base) = host();
        assert_eq!(open_as(&base.join("new"), FileOrCreate), Ok(FileKind::File));
        let mode = fs::metadata(base.join("new")).expect("made").permissions().mode() & 0o7777;
        assert_eq!(mode, 0o644 & !umask());
        let error = open_as(&base.join("a/new"), FileOrCreate).expect_err("no parent");
        assert!(error.contains("its directory does not exist, and FileOrCreate makes none"), "{error}");
        assert!(!base.join("a").exists());
    }

    #[test]
    fn dangling_links_are_reported_and_never_replaced() {
        let (_guard, base) = host();
        for kind in [Unchecked, Directory, DirectoryOrCreate, FileOrCreate] {
            let error = open_as(&base.join("dangling"), kind).expect_err("dangling");
            assert!(error.contains("a symbolic link that leads to nothing"), "{error}");
            let error = open_as(&base.join("loop"), kind).expect_err("a loop");
            assert!(error.contains("its symbolic links lead in a circle"), "{error}");
        }
        assert!(!base.join("nowhere").exists());
    }

    #[test]
    fn a_source_stays_what_it_was_when_its_path_becomes_a_link() {
        let (_guard, base) = host();
        let path = base.join("dir");
        let source = open(&HostPath { path: path.clone(), kind: Directory, within: None }).expect("a directory");
        fs::rename(&path, base.join("moved")).expect("renamed");
        symlink("/etc", &path).expect("a link");
        assert_eq!(source.real_path().expect("a path"), base.join("moved").canonicalize().expect("a path"));
    }

    #[test]
    fn no_link_leads_out_of_the_directory_that_holds_the_path() {
        let (_guard, base) = host();
        let shared = base.join("dir");
        fs::create_dir(shared.join("sub")).expect("a directory");
        symlink("../..", shared.join("out")).expect("a link");
        symlink("sub", shared.join("in")).expect("a link");
        symlink("dir", base.join("shared")).expect("a link");
        let open_within = |within: &str, path: &str| {
            let within = base.join(within);
            let opened = open(&HostPath { path: within.join(path), kind: Directory, within: Some(within) });
            opened.map(|source| source.kind()).map_err(|error| error.to_string())
        };
        for within in ["dir", "shared"] {
            assert_eq!(open_within(within, ""), Ok(FileKind::Directory));
            assert_eq!(open_within(within, "sub"), Ok(FileKind::Directory));
            for link in ["out", "out/dir", "in"] {
                let error = open_within(within, link).expect_err("a link");
                assert!(error.contains("a symbolic link is on the path, and podfs follows none below"), "{error}");
            }
            assert!(open_within(within, "missing").expect_err("missing").ends_with("it does not exist"));
        }
    }

    fn umask() -> u32 {
        let status = fs::read_to_string("/proc/self/status").expect("a status");
        let line = status.lines().find_map(|line| line.strip_prefix("Umask:")).expect("a umask");
        u32::from_str_radix(line.trim(), 8).expect("octal")
    }
}
