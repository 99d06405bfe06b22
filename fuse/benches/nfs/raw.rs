//! The client without a mount: calls in a loop, one at a time and sixteen.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use podfs_nfs::ExportAddress;
use podfs_nfs::mount::{MountRequest, mount};
use podfs_nfs::rpc::{Credential, Slice};
use podfs_nfs::server::Servers;
use podfs_nfs::v3::{AttributeChanges, Creation, NfsFileHandle, Stability};
use podfs_nfs::{CallOptions, Export};
use tokio::task::spawn_local;

use crate::nfs_rig::Ganesha;
use crate::peer::Peer;
use crate::rig::{self, Figure, header, measure, median, row, server};

pub const ROUNDS: usize = 5;
pub const MEBIBYTE: u32 = 1 << 20;
/// The file that is read and written, in MiB.
pub const FILE_SIZE: u64 = 256;
pub const ENTRIES: usize = 10_000;

pub static ROOT: Credential = Credential::User { uid: 0, gid: 0, groups: Vec::new() };

/// The calls of a loop.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Work {
    Read,
    Write,
    ReadSome,
    Getattr,
    Lookup,
    Create,
    /// The calls that the kernel causes when it creates a file.
    LookupAndCreate,
    /// A whole directory.
    List,
}

/// Both clients, and the files that they work on.
pub struct Scene {
    pub server: Ganesha,
    export: Rc<Export>,
    file: NfsFileHandle,
    data: Slice,
    directory: NfsFileHandle,
    /// The number of directories that were made.
    made: Cell<u32>,
}

pub fn run() {
    rig::run(async {
        let scene = Scene::new().await;
        header("the client alone, one run", "nfs3_client");
        let works = [
            ("read 1 MiB, MiB/s", Work::Read, FILE_SIZE),
            ("write 1 MiB unstable, MiB/s", Work::Write, FILE_SIZE),
            ("read 4 KiB anywhere", Work::ReadSome, 20_000),
            ("GETATTR", Work::Getattr, 20_000),
            ("CREATE", Work::Create, 10_000),
        ];
        for (what, work, count) in works {
            for depth in [1, 16] {
                scene.compare(&format!("{what}, {depth} at a time"), work, count, depth).await;
            }
        }
        scene.compare("READDIRPLUS of 10 000, directories", Work::List, 10, 1).await;
    });
}

impl Scene {
    pub async fn new() -> Self {
        Self::at(server(), None).await
    }

    /// `address` is where the client finds the server, if that is not the server's own address.
    pub async fn at(server: Ganesha, address: Option<SocketAddr>) -> Self {
        let directory = server.exported().join("listed");
        std::fs::create_dir_all(&directory).expect("made");
        for index in 0..ENTRIES as u64 {
            std::fs::write(directory.join(listed(index)), "").expect("written");
        }
        let budget = Duration::from_secs(20);
        let export = ExportAddress::parse("bench", "/export").expect("an address");
        let request = MountRequest {
            port: Some(address.unwrap_or(server.address()).port()),
            mount_port: Some(server.mount_address().port()),
            ..MountRequest::new(export, server.address().ip(), budget)
        };
        let export = Rc::new(mount(&Servers::default(), &request).await.expect("it is mounted"));
        let options = CallOptions::new(&ROOT);
        let creation = Creation::Unchecked(AttributeChanges::default());
        let file =
            export.create(options, &export.root(), b"file", &creation).await.expect("made").handle.expect("a handle");
        let data: Slice = vec![7; MEBIBYTE as usize].into();
        for index in 0..FILE_SIZE {
            let offset = index * u64::from(MEBIBYTE);
            export.write(options, &file, offset, &data, Stability::Unstable).await.expect("written");
        }
        let directory = export.lookup(options, &export.root(), b"listed").await.expect("found").handle;
        Self { server, export, file, data, directory, made: Cell::new(0) }
    }

    /// A row of the table.
    async fn compare(&self, what: &str, work: Work, count: u64, depth: u64) {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            ours.push(self.ours(work, count, depth, self.new_directory().await).await);
            theirs.push(self.theirs(work, count, depth, self.new_directory().await).await);
        }
        row(what, median(ours), median(theirs));
    }

    /// Makes an empty directory, and removes the one before. The server has it in its cache, because it has made it.
    pub async fn new_directory(&self) -> NfsFileHandle {
        let count = self.made.replace(self.made.get() + 1);
        if let Some(last) = count.checked_sub(1) {
            std::fs::remove_dir_all(self.server.exported().join(format!("created-{last}"))).expect("removed");
        }
        let name = format!("created-{count}");
        let made = self
            .export
            .mkdir(CallOptions::new(&ROOT), &self.export.root(), name.as_bytes(), &AttributeChanges::default())
            .await;
        made.expect("made").handle.expect("a handle")
    }

    pub async fn ours(&self, work: Work, count: u64, depth: u64, created: NfsFileHandle) -> Figure {
        let makes = matches!(work, Work::Create | Work::LookupAndCreate);
        let directory = if makes { created } else { self.directory };
        let calls = async {
            let tasks: Vec<_> = (0..depth)
                .map(|first| {
                    let (export, data, file) = (Rc::clone(&self.export), self.data.clone(), self.file);
                    spawn_local(async move {
                        for index in (first..count).step_by(depth as usize) {
                            step(&export, work, index, &file, &directory, &data).await;
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.expect("no panic");
            }
        };
        measure(count, calls).await
    }

    async fn theirs(&self, work: Work, count: u64, depth: u64, created: NfsFileHandle) -> Figure {
        let mut peers = Vec::new();
        for _ in 0..depth {
            peers.push(Peer::connect(&self.server, &created).await);
        }
        let data = self.data.clone();
        let calls = async {
            let tasks: Vec<_> = (0..depth)
                .zip(peers)
                .map(|(first, mut peer)| {
                    let data = data.clone();
                    spawn_local(async move {
                        for index in (first..count).step_by(depth as usize) {
                            peer.step(work, index, &data).await;
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.expect("no panic");
            }
        };
        measure(count, calls).await
    }
}

/// A file of the directory that is listed.
pub fn listed(index: u64) -> String {
    format!("file-{index:06}")
}

/// A file that is created.
pub fn made(index: u64) -> String {
    format!("file-{index}")
}

/// An offset in the file, another one for each `index`.
pub fn scattered_offset(index: u64) -> u64 {
    index.wrapping_mul(0x9e37_79b9) % (FILE_SIZE * 256) * 4096
}

async fn step(export: &Export, work: Work, index: u64, file: &NfsFileHandle, directory: &NfsFileHandle, data: &Slice) {
    let options = CallOptions::new(&ROOT);
    match work {
        Work::Read => {
            let read = export.read(options, file, index * u64::from(MEBIBYTE), MEBIBYTE).await.expect("read");
            assert_eq!(read.data.len(), MEBIBYTE as usize);
        }
        Work::Write => {
            export.write(options, file, index * u64::from(MEBIBYTE), data, Stability::Unstable).await.expect("written");
        }
        Work::ReadSome => {
            export.read(options, file, scattered_offset(index), 4096).await.expect("read");
        }
        Work::Getattr => {
            export.getattr(options, file).await.expect("attributes");
        }
        Work::Lookup => {
            export.lookup(options, directory, listed(index).as_bytes()).await.expect("found");
        }
        Work::LookupAndCreate => {
            let name = made(index);
            export.lookup(options, directory, name.as_bytes()).await.expect_err("there is no such file");
            let creation = Creation::Guarded(AttributeChanges::default());
            export.create(options, directory, name.as_bytes(), &creation).await.expect("made");
        }
        Work::Create => {
            let creation = Creation::Guarded(AttributeChanges::default());
            export.create(options, directory, made(index).as_bytes(), &creation).await.expect("made");
        }
        Work::List => {
            let (mut cookie, mut verifier, mut names) = (0, [0; 8], 0);
            loop {
                let page = export.readdirplus(options, directory, cookie, verifier).await.expect("listed");
                page.entries().for_each(|entry| (cookie, names) = (entry.cookie, names + 1));
                verifier = page.verifier;
                if page.is_last {
                    break;
                }
            }
            assert!(names >= ENTRIES);
        }
    }
}
