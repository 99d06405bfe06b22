//! The layout of a payload: its files, sorted into the tree of an image.

use std::collections::{BTreeMap, VecDeque};
use std::io;

use zerocopy::IntoBytes;

use super::{Image, ImageHeader, MAGIC, PERMISSIONS, RawNode, S_IFDIR, S_IFREG};
use crate::projection::memory::Block;

/// Longest name of the kernel (`NAME_MAX`), in bytes.
const NAME_MAX: usize = 255;

/// One file of a payload.
#[derive(Clone, Copy)]
pub struct FileEntry<'a> {
    /// Its path: relative, normalised, elements separated by `/`.
    pub path: &'a str,
    /// Its bytes.
    pub content: &'a [u8],
    /// Permission bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// The attributes of the directories of a payload, including the generation's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryAttributes {
    /// Permission bits, setgid included.
    pub mode: u16,
    /// Group. Directories belong to root.
    pub gid: u32,
}

/// Why entries are no valid tree.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// An element of a path is empty, `.`, `..`, holds a NUL byte or is longer than 255 bytes.
    #[error("path {0:?} cannot be shown as a file: each element needs 1 to 255 bytes and may not be `.` or `..`")]
    Path(String),
    /// A path is a file, and a directory for another path.
    #[error("{0:?} is a file and cannot also be a directory; give one of the two another path")]
    FileAndDirectory(String),
    /// The same path twice.
    #[error("{0:?} is given twice")]
    Twice(String),
    /// Too many names or nodes for the index.
    #[error("the payload has too many files")]
    TooLarge,
}

/// The layout of a payload without its copy, to compare it with an [`Image`] or to make one.
pub struct ImageLayout<'a> {
    nodes: Vec<RawNode>,
    names: String,
    contents: Vec<&'a [u8]>,
    content_size: u64,
}

impl<'a> ImageLayout<'a> {
    /// Sorts `entries` into a tree.
    pub fn new(
        entries: impl IntoIterator<Item = FileEntry<'a>>,
        directories: DirectoryAttributes,
    ) -> Result<Self, ImageError> {
        let mut root = NameTree::default();
        for entry in entries {
            root.insert(entry)?;
        }
        let mut layout = Self { nodes: Vec::new(), names: String::new(), contents: Vec::new(), content_size: 0 };
        layout.push_tree(&root, directories)?;
        Ok(layout)
    }

    /// Adds nodes breadth first, so that the children of each directory are consecutive nodes.
    fn push_tree(&mut self, root: &NameTree<'a>, directories: DirectoryAttributes) -> Result<(), ImageError> {
        let directory = |parent| RawNode {
            name: 0,
            name_length: 0,
            mode: S_IFDIR | directories.mode & PERMISSIONS,
            uid: 0,
            gid: directories.gid,
            parent,
            subdirectories: 0,
            start: 0,
            length: 0,
        };
        self.nodes.push(directory(0));
        let mut pending = VecDeque::from([(0, root)]);
        while let Some((index, branch)) = pending.pop_front() {
            self.nodes[index].start = self.nodes.len() as u64;
            self.nodes[index].length = branch.0.len() as u64;
            let parent = u32::try_from(index).map_err(|_| ImageError::TooLarge)?;
            for (name, twig) in &branch.0 {
                let mut node = match twig {
                    NameTreeEntry::Branch(below) => {
                        pending.push_back((self.nodes.len(), below));
                        self.nodes[index].subdirectories += 1;
                        directory(parent)
                    }
                    NameTreeEntry::Leaf(entry) => self.push_content(entry, parent),
                };
                node.name = u32::try_from(self.names.len()).map_err(|_| ImageError::TooLarge)?;
                node.name_length = u16::try_from(name.len()).map_err(|_| ImageError::TooLarge)?;
                self.names.push_str(name);
                self.nodes.push(node);
            }
        }
        u32::try_from(self.nodes.len()).map_err(|_| ImageError::TooLarge)?;
        Ok(())
    }

    fn push_content(&mut self, entry: &FileEntry<'a>, parent: u32) -> RawNode {
        let start = self.content_size;
        self.contents.push(entry.content);
        self.content_size += entry.content.len() as u64;
        RawNode {
            name: 0,
            name_length: 0,
            mode: S_IFREG | entry.mode & PERMISSIONS,
            uid: entry.uid,
            gid: entry.gid,
            parent,
            subdirectories: 0,
            start,
            length: entry.content.len() as u64,
        }
    }

    /// Whether `image` shows exactly this payload: paths, bytes, modes and owners.
    pub fn equals(&self, image: &Image) -> bool {
        // The content comes last, because it has to be copied from the memory file.
        image.content.len() as u64 == self.content_size
            && image.nodes.as_bytes() == self.nodes.as_bytes()
            && *image.names == *self.names
            && image.reader(image.content.clone()).has_all(&self.contents)
    }

    /// Copies the payload into a new image, which this process then owns.
    pub fn image(&self) -> io::Result<Image> {
        let header = ImageHeader {
            magic: MAGIC,
            nodes: self.nodes.len() as u64,
            names: self.names.len() as u64,
            content: self.content_size,
        };
        let mut parts = vec![header.as_bytes(), self.nodes.as_bytes(), self.names.as_bytes()];
        parts.extend(&self.contents);
        let start: usize = parts[..3].iter().map(|part| part.len()).sum();
        let content = start..start + self.contents.iter().map(|content| content.len()).sum::<usize>();
        let block = Block::new(&parts, self.nodes.len())?;
        Ok(Image::with_index(block, self.nodes.clone().into(), self.names.as_str().into(), content))
    }
}

/// A tree of names, sorted bytewise, while a layout is made.
#[derive(Default)]
struct NameTree<'a>(BTreeMap<&'a str, NameTreeEntry<'a>>);

enum NameTreeEntry<'a> {
    Branch(NameTree<'a>),
    Leaf(FileEntry<'a>),
}

impl<'a> NameTree<'a> {
    fn insert(&mut self, entry: FileEntry<'a>) -> Result<(), ImageError> {
        let mut branch = self;
        let mut rest = entry.path;
        loop {
            let (name, below) = match rest.split_once('/') {
                Some((name, below)) => (name, Some(below)),
                None => (rest, None),
            };
            if name.is_empty() || name == "." || name == ".." || name.len() > NAME_MAX || name.contains('\0') {
                return Err(ImageError::Path(entry.path.to_owned()));
            }
            let Some(below) = below else {
                return match branch.0.insert(name, NameTreeEntry::Leaf(entry)) {
                    None => Ok(()),
                    Some(NameTreeEntry::Leaf(_)) => Err(ImageError::Twice(entry.path.to_owned())),
                    Some(NameTreeEntry::Branch(_)) => Err(ImageError::FileAndDirectory(entry.path.to_owned())),
                };
            };
            match branch.0.entry(name).or_insert_with(|| NameTreeEntry::Branch(NameTree::default())) {
                NameTreeEntry::Branch(next) => branch = next,
                NameTreeEntry::Leaf(file) => return Err(ImageError::FileAndDirectory(file.path.to_owned())),
            }
            rest = below;
        }
    }
}
