//! A payload in a memory file: an index of directories and files, then their bytes.
//!
//! ```text
//! Header | Node × nodes | names | content | lookup count × nodes
//! ```
//!
//! The supervisor writes an image once. Each process has a copy of the index and the names, which it has checked: a container may have
//! taken over the server, which can write the memory file. The supervisor also copies content that it compares; only the server reads
//! content in place, to answer. Node 0 is the generation's own directory. The children of a directory are
//! consecutive nodes, sorted by name: a lookup is a binary search and a listing is a slice.
//!
//! The bytes of an image depend only on its payload, so payloads are equal if and only if their images are. This does not
//! include the lookup counts: the number of answers with each node to the kernel. They outlive the server.

mod layout;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};
use zeroize::Zeroizing;

use super::memory::{Block, KeptBytes};
pub use layout::{DirectoryAttributes, FileEntry, ImageError, ImageLayout};

const MAGIC: u64 = u64::from_le_bytes(*b"podfs\0\0\x01");
/// The first bytes of an image whose content the owner has zeroed.
const ZEROED: u64 = u64::from_le_bytes(*b"podfs\0\0\0");

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct ImageHeader {
    magic: u64,
    nodes: u64,
    names: u64,
    content: u64,
}

/// A directory or file in the index.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct RawNode {
    name: u32,
    name_length: u16,
    /// Type and permission bits, as `st_mode`.
    mode: u16,
    uid: u32,
    gid: u32,
    parent: u32,
    /// Directory: how many of its children are directories.
    subdirectories: u32,
    /// Directory: index of its first child. File: offset of its first byte in the content.
    start: u64,
    /// Directory: number of children. File: size in bytes.
    length: u64,
}

const S_IFDIR: u16 = libc::S_IFDIR as u16;
const S_IFREG: u16 = libc::S_IFREG as u16;
const PERMISSIONS: u16 = 0o7777;

impl RawNode {
    fn is_directory(&self) -> bool {
        self.mode & !PERMISSIONS == S_IFDIR
    }
}

/// A payload in shared memory, ready to be served.
pub struct Image {
    block: Block,
    nodes: Box<[RawNode]>,
    names: Box<str>,
    /// The bytes of the block that are content.
    content: Range<usize>,
}

/// Index of a directory or file within its image; 0 is the generation's own directory.
pub(crate) type Index = u32;

/// The type of a node of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ImageNodeKind {
    /// Its children are the nodes with these indexes, sorted by name.
    Directory { children: Range<Index>, subdirectories: u32 },
    /// Its bytes are these of the image: [`Image::served`], [`Image::copied`].
    File { content: Range<usize> },
}

/// A directory or file of an image.
#[derive(Clone, Debug)]
pub(crate) struct ImageNode {
    pub(crate) kind: ImageNodeKind,
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Image {
    /// Opens the image of another process, and becomes its owner, which zeroes it.
    ///
    /// # Errors
    /// `InvalidData` when it is not a valid image. Later code does not trust the other process.
    pub fn adopt(file: OwnedFd) -> io::Result<Self> {
        let block = Block::adopt(file)?;
        // The other process may serve an image that this one refuses.
        block.disown();
        let image = Self::read(block)?;
        image.check()?;
        image.own();
        Ok(image)
    }

    fn read(mut block: Block) -> io::Result<Self> {
        let mut header = ImageHeader::new_zeroed();
        block.read(0, header.as_mut_bytes()).map_err(|_| not_an_image())?;
        let nodes = usize::try_from(header.nodes).ok().filter(|nodes| *nodes > 0 && u32::try_from(*nodes).is_ok());
        let [name @ .., version] = header.magic.to_ne_bytes();
        if name == *b"podfs\0\0" && version > 1 {
            let sentence = format!(
                "the generation's image has version {version}, which another version of podfs made; serve the volume with that version, \
                 or start the volume anew"
            );
            return Err(io::Error::new(io::ErrorKind::Unsupported, sentence));
        }
        let nodes = nodes.filter(|_| matches!(header.magic, MAGIC | ZEROED)).ok_or_else(not_an_image)?;
        block.count(nodes).map_err(|_| not_an_image())?;
        let layout = || {
            let index_end = nodes.checked_mul(size_of::<RawNode>())?.checked_add(size_of::<ImageHeader>())?;
            let names_end = index_end.checked_add(usize::try_from(header.names).ok()?)?;
            let end = names_end.checked_add(usize::try_from(header.content).ok()?)?;
            // The bytes between the content and the counters are padding.
            let whole = end.checked_next_multiple_of(size_of::<AtomicU64>()) == Some(block.length());
            whole.then_some((index_end..names_end, names_end..end))
        };
        let (names, content) = layout().ok_or_else(not_an_image)?;
        let mut index = vec![RawNode::new_zeroed(); nodes];
        block.read(size_of::<ImageHeader>(), index.as_mut_bytes())?;
        let mut text = vec![0; names.len()];
        block.read(names.start, &mut text)?;
        let text = String::from_utf8(text).map_err(|_| not_an_image())?;
        Ok(Self::with_index(block, index.into(), text.into(), content))
    }

    fn with_index(mut block: Block, nodes: Box<[RawNode]>, names: Box<str>, content: Range<usize>) -> Self {
        block.keep(KeptBytes { length: content.start, mark: ZEROED });
        Self { block, nodes, names, content }
    }

    /// Checks that all references of the index are inside the image, parents are correct, and names are sorted.
    fn check(&self) -> io::Result<()> {
        let (nodes, names) = (&self.nodes, &self.names);
        let name = |node: &RawNode| names.get(node.name as usize..node.name as usize + usize::from(node.name_length));
        let whole = nodes.iter().enumerate().all(|(position, node)| {
            let Some(end) = node.start.checked_add(node.length) else { return false };
            let linked = position == 0 || (node.parent as usize) < position;
            if !node.is_directory() {
                return linked && position > 0 && end <= self.content.len() as u64 && name(node).is_some();
            }
            let inside = end <= nodes.len() as u64 && (node.length == 0 || node.start > position as u64);
            linked && inside && name(node).is_some() && {
                let children = &nodes[node.start as usize..end as usize];
                children.iter().all(|child| child.parent as usize == position)
                    && children.is_sorted_by(|a, b| name(a) < name(b))
            }
        });
        if whole { Ok(()) } else { Err(not_an_image()) }
    }

    /// Whether the owner has zeroed the content, because no process uses it any more.
    pub(crate) fn is_zeroed(&self) -> bool {
        let mut first = [0; size_of::<u64>()];
        self.block.read(0, &mut first).is_ok_and(|()| first == ZEROED.to_ne_bytes())
    }

    /// Number of directories and files, the generation's own directory included.
    pub(crate) fn nodes(&self) -> Index {
        self.nodes.len() as Index
    }

    /// The node at `index`, if there is one.
    pub(crate) fn node(&self, index: Index) -> Option<ImageNode> {
        let node = self.nodes.get(index as usize)?;
        let kind = if node.is_directory() {
            let children = node.start as Index..(node.start + node.length) as Index;
            ImageNodeKind::Directory { children, subdirectories: node.subdirectories }
        } else {
            let start = self.content.start + node.start as usize;
            ImageNodeKind::File { content: start..start + node.length as usize }
        };
        Some(ImageNode { kind, mode: node.mode & PERMISSIONS, uid: node.uid, gid: node.gid })
    }

    /// The child of `directory` with this name.
    pub(crate) fn child(&self, directory: Index, name: &[u8]) -> Option<Index> {
        let ImageNodeKind::Directory { children, .. } = self.node(directory)?.kind else {
            return None;
        };
        let nodes = &self.nodes[children.start as usize..children.end as usize];
        let found = nodes.binary_search_by(|node| self.name_of(node).as_bytes().cmp(name)).ok()?;
        Some(children.start + found as Index)
    }

    /// The last element of the path of `index`; empty for the generation's own directory.
    pub(crate) fn name(&self, index: Index) -> &str {
        self.name_of(&self.nodes[index as usize])
    }

    /// The path of `index` below the generation's own directory.
    pub(crate) fn path(&self, index: Index) -> String {
        let mut elements = Vec::new();
        let mut at = index;
        while at != 0 {
            elements.push(self.name(at));
            at = self.nodes[at as usize].parent;
        }
        elements.reverse();
        elements.join("/")
    }

    /// Whether the node at `index` is a directory.
    pub(crate) fn is_directory(&self, index: Index) -> bool {
        self.nodes[index as usize].is_directory()
    }

    /// The directory with the entry `index`. The parent of the generation's own directory is that directory itself.
    pub(crate) fn parent(&self, index: Index) -> Index {
        self.nodes[index as usize].parent
    }

    /// The names directly below the generation's own directory, each with its owner: the owner of the
    /// first file at or below it.
    pub(crate) fn top_level(&self) -> impl Iterator<Item = (&str, u32)> {
        let children = match self.node(0).map(|node| node.kind) {
            Some(ImageNodeKind::Directory { children, .. }) => children,
            _ => 0..0,
        };
        children.map(|index| (self.name(index), self.first_owner(index)))
    }

    fn first_owner(&self, mut index: Index) -> u32 {
        loop {
            match self.node(index) {
                Some(ImageNode { kind: ImageNodeKind::Directory { children, .. }, .. }) if !children.is_empty() => {
                    index = children.start;
                }
                Some(node) => return node.uid,
                None => return 0,
            }
        }
    }

    /// The bytes of a file in place. Only the server may call this, to send them to the kernel.
    pub(crate) fn served(&self, content: Range<usize>) -> &[u8] {
        &self.block.served()[content]
    }

    /// A copy of the bytes of a file.
    pub(crate) fn copied(&self, content: Range<usize>) -> io::Result<Zeroizing<Vec<u8>>> {
        let mut bytes = Zeroizing::new(vec![0; content.len()]);
        self.block.read(content.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Whether a file has these bytes.
    pub(crate) fn has_bytes(&self, content: Range<usize>, bytes: &[u8]) -> bool {
        content.len() == bytes.len() && self.reader(content).has_all(&[bytes])
    }

    /// Whether these bytes are a part of the content.
    pub(crate) fn contains(&self, content: &Range<usize>) -> bool {
        self.content.start <= content.start && content.start <= content.end && content.end <= self.content.end
    }

    fn reader(&self, content: Range<usize>) -> ContentReader<'_> {
        let buffer = Zeroizing::new(vec![0; content.len().min(ContentReader::LONGEST_PART)]);
        ContentReader { block: &self.block, content, buffer, unread: 0..0 }
    }

    /// The kernel's lookup count of each node. Shared by all processes that have the image.
    pub(crate) fn lookups(&self) -> &[AtomicU64] {
        self.block.counters()
    }

    /// Total size of all files in bytes.
    pub fn content_size(&self) -> u64 {
        self.content.len() as u64
    }

    /// Its memory in bytes.
    pub(crate) fn memory(&self) -> u64 {
        (self.block.length() + size_of_val(self.block.counters())) as u64
    }

    /// Makes this process the owner, which zeroes the image when it drops it.
    pub(crate) fn own(&self) {
        self.block.own();
    }

    /// Makes the process that gets the descriptor the owner, which zeroes the image.
    pub(crate) fn disown(&self) {
        self.block.disown();
    }

    /// The same image, whose content the kernel does not let this process read.
    #[cfg(test)]
    pub(crate) fn unreadable(mut self) -> Self {
        self.block.forbid_reading();
        self
    }

    fn name_of(&self, node: &RawNode) -> &str {
        let start = node.name as usize;
        &self.names[start..start + usize::from(node.name_length)]
    }
}

/// Copies content part by part, to compare it.
struct ContentReader<'a> {
    block: &'a Block,
    /// The bytes that are not in the buffer yet.
    content: Range<usize>,
    buffer: Zeroizing<Vec<u8>>,
    /// The bytes of the buffer that are not compared yet.
    unread: Range<usize>,
}

impl ContentReader<'_> {
    const LONGEST_PART: usize = 64 << 10;

    /// Whether the next bytes are these, one after the other. There are as many.
    fn has_all(mut self, contents: &[&[u8]]) -> bool {
        contents.iter().all(|content| self.has(content))
    }

    fn has(&mut self, mut expected: &[u8]) -> bool {
        while !expected.is_empty() {
            if self.unread.is_empty() && self.fill().is_err() {
                return false;
            }
            let length = expected.len().min(self.unread.len());
            let (now, later) = expected.split_at(length);
            if length == 0 || self.buffer[self.unread.start..][..length] != *now {
                return false;
            }
            self.unread.start += length;
            expected = later;
        }
        true
    }

    fn fill(&mut self) -> io::Result<()> {
        let length = self.buffer.len().min(self.content.len());
        self.block.read(self.content.start, &mut self.buffer[..length])?;
        self.content.start += length;
        self.unread = 0..length;
        Ok(())
    }
}

impl AsFd for Image {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.block.as_fd()
    }
}

fn not_an_image() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the memory file is not a generation's image")
}

#[cfg(test)]
mod tests;
