//! The programs of libnfs: an independent NFS client in C.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Output};

/// The addresses and the name with which libnfs finds an export.
#[derive(Clone, Debug)]
pub struct Libnfs {
    pub nfs: SocketAddr,
    pub mount: SocketAddr,
    /// The server's name of the export, with a slash at its beginning.
    pub export: String,
}

impl Libnfs {
    /// The lines of `nfs-ls` for a directory of the export: mode, links, owner, size, name.
    #[track_caller]
    pub fn ls(&self, path: &str) -> Vec<String> {
        let listing = String::from_utf8_lossy(&output_of("nfs-ls", &[self.url(path).into()])).into_owned();
        listing.lines().map(str::to_owned).collect()
    }

    /// The names of a directory of the export, sorted.
    #[track_caller]
    pub fn names(&self, path: &str) -> Vec<String> {
        let name = |line: &String| line.split_whitespace().next_back().map(str::to_owned);
        let mut names: Vec<_> = self.ls(path).iter().filter_map(name).collect();
        names.sort();
        names
    }

    /// The content of a file of the export.
    #[track_caller]
    pub fn cat(&self, path: &str) -> Vec<u8> {
        output_of("nfs-cat", &[self.url(path).into()])
    }

    /// Copies a local file into the export.
    #[track_caller]
    pub fn put(&self, from: &Path, to: &str) {
        output_of("nfs-cp", &[from.into(), self.url(to).into()]);
    }

    /// Copies a file of the export to a local path.
    #[track_caller]
    pub fn take(&self, from: &str, to: &Path) {
        output_of("nfs-cp", &[self.url(from).into(), to.into()]);
    }

    /// Runs `nfs-ls`, `nfs-cat` or `nfs-cp`, which may fail.
    pub fn run(program: &str, arguments: &[OsString]) -> Output {
        Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"))
    }

    /// The URL of a path in the export.
    pub fn url(&self, path: &str) -> String {
        let Self { nfs, mount, export } = self;
        let slash = if path.is_empty() { "" } else { "/" };
        format!("nfs://{}{export}{slash}{path}?version=3&nfsport={}&mountport={}", nfs.ip(), nfs.port(), mount.port())
    }
}

/// The output of a program. Panics if the program fails.
#[track_caller]
fn output_of(program: &str, arguments: &[OsString]) -> Vec<u8> {
    let Output { status, stdout, stderr } = Libnfs::run(program, arguments);
    assert!(status.success(), "{program} {arguments:?}: {status}: {}", String::from_utf8_lossy(&stderr));
    stdout
}
