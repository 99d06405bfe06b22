//! The programs of libnfs: a client that others wrote, in C.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Output};

/// An export as libnfs finds it.
#[derive(Clone, Debug)]
pub struct Libnfs {
    pub nfs: SocketAddr,
    pub mount: SocketAddr,
    /// As the server calls it, with a slash in front.
    pub export: String,
}

impl Libnfs {
    /// The lines of `nfs-ls` for a directory of the export: mode, links, owner, size, name.
    #[track_caller]
    pub fn ls(&self, path: &str) -> Vec<String> {
        let listed = String::from_utf8_lossy(&succeeded("nfs-ls", &[self.url(path).into()])).into_owned();
        listed.lines().map(str::to_owned).collect()
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
        succeeded("nfs-cat", &[self.url(path).into()])
    }

    /// Copies a file of this machine into the export.
    #[track_caller]
    pub fn put(&self, from: &Path, to: &str) {
        succeeded("nfs-cp", &[from.into(), self.url(to).into()]);
    }

    /// Copies a file of the export to this machine.
    #[track_caller]
    pub fn take(&self, from: &str, to: &Path) {
        succeeded("nfs-cp", &[self.url(from).into(), to.into()]);
    }

    /// `nfs-ls`, `nfs-cat` or `nfs-cp`, that may fail.
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

#[track_caller]
fn succeeded(program: &str, arguments: &[OsString]) -> Vec<u8> {
    let Output { status, stdout, stderr } = Libnfs::run(program, arguments);
    assert!(status.success(), "{program} {arguments:?}: {status}: {}", String::from_utf8_lossy(&stderr));
    stdout
}
