//! The small file system of the server: numbered nodes in memory. A test may give them impossible attributes and names.

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
    /// Whether replies omit all optional attributes and handles.
    pub sparse: bool,
    /// The most bytes of a READ and of a WRITE, which FSINFO reports.
    pub most: u32,
    /// A part of every handle: after a change of this value, all earlier handles are stale.
    pub age: u64,
    /// The number of the next node.
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
    /// The content of a file, or the target of a symbolic link.
    pub content: Vec<u8>,
    /// A size that differs from the size of the content.
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

/// An entry of a directory. A later entry has a larger cookie.
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
    /// Creates a file, and the missing directories of its path.
    pub fn add(&mut self, path: &str, content: &[u8]) -> &mut Node {
        let file = self.add_node(path, kind::FILE, 0o666);
        (file.content, file.committed) = (content.to_vec(), content.to_vec());
        file
    }

    /// Creates a directory, and the missing directories of its path.
    pub fn add_directory(&mut self, path: &str) -> &mut Node {
        self.add_node(path, kind::DIRECTORY, 0o777)
    }

    /// Gives a node another name, which may be one that no file can have.
    pub fn add_name(&mut self, directory: &str, name: &[u8], node: &str) {
        let (directory, node) = (self.find(directory).expect("a directory"), self.find(node).expect("a node"));
        self.enter(directory, name, node);
    }

    /// A node by its path from the root, which is the empty path.
    #[track_caller]
    pub fn node(&mut self, path: &str) -> &mut Node {
        let number = self.find(path).unwrap_or_else(|| panic!("there is no {path}"));
        self.nodes.get_mut(&number).expect("each name has a node")
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
        self.nodes.get_mut(&number).expect("callers have checked that the node exists")
    }

    pub(super) fn handle_of(&self, number: u64) -> Handle {
        [self.age.to_be_bytes(), number.to_be_bytes()].concat()
    }

    /// The number of the node with this handle.
    pub(super) fn resolve(&self, handle: &[u8]) -> Result<u64, u32> {
        let (age, number) = handle.split_first_chunk::<8>().ok_or(error::BADHANDLE)?;
        let number = number.try_into().map(u64::from_be_bytes).map_err(|_| error::BADHANDLE)?;
        let exists = u64::from_be_bytes(*age) == self.age && self.nodes.contains_key(&number);
        if exists { Ok(number) } else { Err(error::STALE) }
    }

    /// The number of the node with this name in a directory.
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

    /// Gives a node a name in a directory. An earlier node of this name loses it.
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

    /// Removes a name from a directory. Returns the number of its node, which still exists.
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

    /// Removes a node if it has no name any more.
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
        let (parents, name) = path.rsplit_once('/').unwrap_or(("", path));
        for parent in parents.split('/').filter(|parent| !parent.is_empty()) {
            directory = self.look_up(directory, parent.as_bytes()).unwrap_or_else(|_| {
                let number = self.make(kind::DIRECTORY, 0o777);
                self.enter(directory, parent.as_bytes(), number);
                number
            });
        }
        let number = self.make(kind, mode);
        self.enter(directory, name.as_bytes(), number);
        self.get(number)
    }
}

/// The present time, in seconds and nanoseconds.
pub fn now() -> (u32, u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    (now.as_secs().try_into().expect("before 2106"), now.subsec_nanos())
}
