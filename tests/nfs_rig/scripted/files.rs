//! The small file system: numbered nodes in memory, which a test may make as strange as it likes.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::nfs_rig::protocol::{error, kind};

pub use crate::nfs_rig::caller::Handle;

/// The number of the root.
const ROOT: u64 = 1;

/// All files.
pub struct Files {
    nodes: BTreeMap<u64, Node>,
    /// The verifier in answers to WRITE and COMMIT. It changes with a crash.
    pub verifier: u64,
    /// Replies leave out all attributes that they may leave out.
    pub sparse: bool,
    /// READ, WRITE and FSINFO: the most bytes at once.
    pub most: u32,
    /// Part of every handle: with another one, those of before are stale.
    pub age: u64,
    next: u64,
}

/// A file, a directory or a symbolic link. The server answers with exactly these values.
#[derive(Clone, Debug, Default)]
pub struct Node {
    pub kind: u32,
    pub mode: u32,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    pub fileid: u64,
    /// The content, or where the link leads.
    pub content: Vec<u8>,
    /// A size that is not that of the content.
    pub size: Option<u64>,
    /// Seconds and nanoseconds.
    pub atime: (u32, u32),
    pub mtime: (u32, u32),
    pub ctime: (u32, u32),
    /// The content that would remain after a crash.
    pub committed: Vec<u8>,
    /// The verifier by which an exclusive CREATE recognises its own file.
    pub verifier: Option<[u8; 8]>,
    pub parent: u64,
    pub entries: Vec<Entry>,
}

/// An entry of a directory. Cookies grow.
#[derive(Clone, Debug)]
pub struct Entry {
    pub cookie: u64,
    pub name: Vec<u8>,
    pub node: u64,
}

impl Default for Files {
    fn default() -> Self {
        let (nodes, most) = (BTreeMap::new(), 1 << 20);
        let mut files = Self { nodes, verifier: 1, sparse: false, most, age: 1, next: ROOT };
        files.make(kind::DIRECTORY, 0o777);
        files
    }
}

impl Files {
    /// Makes a file, and the directories that lead to it.
    pub fn add(&mut self, path: &str, content: &[u8]) -> &mut Node {
        let file = self.add_node(path, kind::FILE, 0o666);
        (file.content, file.committed) = (content.to_vec(), content.to_vec());
        file
    }

    /// Makes a directory, and those that lead to it.
    pub fn add_directory(&mut self, path: &str) -> &mut Node {
        self.add_node(path, kind::DIRECTORY, 0o777)
    }

    /// Gives a node one more name, which may be none that a file can have.
    pub fn add_name(&mut self, directory: &str, name: &[u8], node: &str) {
        let (directory, node) = (self.find(directory).expect("a directory"), self.find(node).expect("a node"));
        self.enter(directory, name, node);
    }

    /// A node by its path from the root, which is the empty path.
    #[track_caller]
    pub fn node(&mut self, path: &str) -> &mut Node {
        let number = self.find(path).unwrap_or_else(|| panic!("there is no {path}"));
        self.nodes.get_mut(&number).expect("it has a name")
    }

    pub fn exists(&self, path: &str) -> bool {
        self.find(path).is_some()
    }

    /// The handle of a node by its path.
    #[track_caller]
    pub fn handle(&self, path: &str) -> Handle {
        self.handle_of(self.find(path).unwrap_or_else(|| panic!("there is no {path}")))
    }

    /// Simulates a crash: uncommitted content is lost, and the verifier changes.
    pub fn lose_uncommitted(&mut self) {
        self.verifier += 1;
        for node in self.nodes.values_mut().filter(|node| node.kind == kind::FILE) {
            node.content.clone_from(&node.committed);
        }
    }

    /// The node with this number.
    pub(super) fn get(&mut self, number: u64) -> &mut Node {
        self.nodes.get_mut(&number).expect("handles are given for nodes that are there")
    }

    pub(super) fn handle_of(&self, number: u64) -> Handle {
        [self.age.to_be_bytes(), number.to_be_bytes()].concat()
    }

    /// The node that a handle is of.
    pub(super) fn resolve(&self, handle: &[u8]) -> Result<u64, u32> {
        let (age, number) = handle.split_first_chunk::<8>().ok_or(error::BADHANDLE)?;
        let number = number.try_into().map(u64::from_be_bytes).map_err(|_| error::BADHANDLE)?;
        let is_there = u64::from_be_bytes(*age) == self.age && self.nodes.contains_key(&number);
        if is_there { Ok(number) } else { Err(error::STALE) }
    }

    /// The node in a directory that has this name.
    pub(super) fn look_up(&self, directory: u64, name: &[u8]) -> Result<u64, u32> {
        let directory = &self.nodes[&directory];
        if directory.kind != kind::DIRECTORY {
            return Err(error::NOTDIR);
        }
        let entry = directory.entries.iter().find(|entry| entry.name == name);
        entry.map(|entry| entry.node).ok_or(error::NOENT)
    }

    /// A new node without a name.
    pub(super) fn make(&mut self, kind: u32, mode: u32) -> u64 {
        let (fileid, now) = (self.next, now());
        self.next += 1;
        let links = if kind == kind::DIRECTORY { 2 } else { 0 };
        let parent = ROOT;
        let node = Node { kind, mode, links, fileid, atime: now, mtime: now, ctime: now, parent, ..Node::default() };
        self.nodes.insert(fileid, node);
        fileid
    }

    /// Gives a node a name; what had it loses it.
    pub(super) fn enter(&mut self, directory: u64, name: &[u8], number: u64) {
        let _ = self.leave(directory, name);
        let cookie = self.next + 100;
        self.next += 1;
        let (node, now) = (self.get(number), now());
        if node.kind == kind::DIRECTORY {
            node.parent = directory;
        } else {
            node.links += 1;
        }
        node.ctime = now;
        let directory = self.get(directory);
        directory.entries.push(Entry { cookie, name: name.to_vec(), node: number });
        (directory.mtime, directory.ctime) = (now, now);
    }

    /// Takes a name away, and the node with its last one.
    pub(super) fn leave(&mut self, directory: u64, name: &[u8]) -> Result<u64, u32> {
        let number = self.look_up(directory, name)?;
        let (now, directory) = (now(), self.get(directory));
        directory.entries.retain(|entry| entry.name != name);
        (directory.mtime, directory.ctime) = (now, now);
        let node = self.get(number);
        node.ctime = now;
        if node.kind != kind::DIRECTORY {
            node.links -= 1;
        }
        Ok(number)
    }

    /// Forgets a node that has no name any more.
    pub(super) fn forget_nameless(&mut self, number: u64) {
        let node = self.get(number);
        if node.links == 0 || node.kind == kind::DIRECTORY {
            self.nodes.remove(&number);
        }
    }

    fn find(&self, path: &str) -> Option<u64> {
        let mut names = path.split('/').filter(|name| !name.is_empty());
        names.try_fold(ROOT, |directory, name| self.look_up(directory, name.as_bytes()).ok())
    }

    fn add_node(&mut self, path: &str, kind: u32, mode: u32) -> &mut Node {
        let mut directory = ROOT;
        let (way, name) = path.rsplit_once('/').unwrap_or(("", path));
        for part in way.split('/').filter(|part| !part.is_empty()) {
            directory = self.look_up(directory, part.as_bytes()).unwrap_or_else(|_| {
                let made = self.make(kind::DIRECTORY, 0o777);
                self.enter(directory, part.as_bytes(), made);
                made
            });
        }
        let made = self.make(kind, mode);
        self.enter(directory, name.as_bytes(), made);
        self.get(made)
    }
}

/// Seconds and nanoseconds.
pub fn now() -> (u32, u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    (now.as_secs().try_into().expect("before 2106"), now.subsec_nanos())
}
