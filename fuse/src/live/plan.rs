//! The plan of an update: the steps from the payload that live parts show to another one.
//!
//! In this order, no file refers to one that is missing: the plan first makes new files, then changes the bytes of all files at
//! once, then removes the files that the payload no longer has. It removes a name that changes between file and directory before it
//! makes the name again.

use std::collections::BTreeSet;
use std::io;

use zeroize::Zeroizing;

use super::step::LiveStep;
use super::tree::{LiveTree, PartType};
use crate::projection::image::{Image, ImageNodeKind, Index};
use crate::session::NodeId;

/// The steps after which `tree` shows `image`, whose top-level names are those of the slots.
pub fn plan(tree: &LiveTree, image: &Image) -> Vec<LiveStep> {
    let mut plan = StepPlan::of(tree, image);
    for (number, slot) in tree.slots().iter().enumerate() {
        let name = number.to_string();
        let (shown, wanted) = (tree.find(&name), image.child(0, name.as_bytes()));
        match (slot.shape, shown, wanted) {
            // The directory of a slot stays, empty, when the payload no longer has it.
            (PartType::Directory, Some(shown), None) => plan.empty(shown, &name),
            (PartType::Directory, None, None) => plan.first.push(LiveStep::MakeDirectory { path: name }),
            (PartType::Directory | PartType::File, shown, wanted) => plan.compare(shown, wanted, &name),
        }
    }
    plan.steps()
}

struct StepPlan<'a> {
    tree: &'a LiveTree,
    image: &'a Image,
    first: Vec<LiveStep>,
    swapped: Vec<String>,
    events: Vec<LiveStep>,
    last: Vec<LiveStep>,
}

impl<'a> StepPlan<'a> {
    fn of(tree: &'a LiveTree, image: &'a Image) -> Self {
        Self { tree, image, first: Vec::new(), swapped: Vec::new(), events: Vec::new(), last: Vec::new() }
    }

    fn steps(self) -> Vec<LiveStep> {
        let Self { first, swapped, events, last, .. } = self;
        let swap = (!swapped.is_empty()).then_some(LiveStep::Swap { paths: swapped });
        first.into_iter().chain(swap).chain(events).chain(last).chain([LiveStep::Settle]).collect()
    }

    fn compare(&mut self, shown: Option<NodeId>, wanted: Option<Index>, path: &str) {
        match (shown, wanted) {
            (None, None) => {}
            (None, Some(wanted)) => self.make(wanted, path),
            (Some(shown), None) => self.last.extend(removal(self.tree, shown, path)),
            (Some(shown), Some(wanted)) => match (self.tree.is_directory(shown), self.image.is_directory(wanted)) {
                (true, true) => {
                    self.compare_attributes(shown, wanted, path);
                    for name in self.names(shown, wanted) {
                        let children = (self.tree.child(shown, &name), self.image.child(wanted, name.as_bytes()));
                        self.compare(children.0, children.1, &format!("{path}/{name}"));
                    }
                }
                (false, false) => self.compare_file(shown, wanted, path),
                (true, false) | (false, true) => {
                    self.first.extend(removal(self.tree, shown, path));
                    self.make(wanted, path);
                }
            },
        }
    }

    /// Removes the entries of a directory.
    fn empty(&mut self, directory: NodeId, path: &str) {
        for name in self.tree.children(directory) {
            let child = self.tree.child(directory, &name);
            self.compare(child, None, &format!("{path}/{name}"));
        }
    }

    fn make(&mut self, wanted: Index, path: &str) {
        if !self.image.is_directory(wanted) {
            self.first.push(LiveStep::MakeFile { path: path.to_owned() });
            self.first.push(LiveStep::Modify { path: path.to_owned() });
            return;
        }
        self.first.push(LiveStep::MakeDirectory { path: path.to_owned() });
        for child in children(self.image, wanted) {
            self.make(child, &format!("{path}/{}", self.image.name(child)));
        }
    }

    fn compare_file(&mut self, shown: NodeId, wanted: Index, path: &str) {
        // Without an answer, the file counts as changed: that costs events, and nothing else.
        if bytes(self.image, wanted).is_ok_and(|bytes| self.tree.has_bytes(shown, &bytes)) {
            return self.compare_attributes(shown, wanted, path);
        }
        self.swapped.push(path.to_owned());
        self.events.push(LiveStep::Modify { path: path.to_owned() });
        self.events.push(LiveStep::Touch { path: path.to_owned() });
    }

    fn compare_attributes(&mut self, shown: NodeId, wanted: Index, path: &str) {
        if !self.tree.looks_like(shown, self.image, wanted) {
            self.swapped.push(path.to_owned());
            self.events.push(LiveStep::Touch { path: path.to_owned() });
        }
    }

    fn names(&self, shown: NodeId, wanted: Index) -> BTreeSet<String> {
        let coming = children(self.image, wanted).map(|child| self.image.name(child).to_owned());
        coming.chain(self.tree.children(shown)).collect()
    }
}

/// Removes a node and all nodes below it.
fn removal(tree: &LiveTree, node: NodeId, path: &str) -> Vec<LiveStep> {
    if !tree.is_directory(node) {
        return vec![LiveStep::RemoveFile { path: path.to_owned() }];
    }
    let below = tree.children(node).into_iter().filter_map(|name| {
        let child = tree.child(node, &name)?;
        Some(removal(tree, child, &format!("{path}/{name}")))
    });
    below.flatten().chain([LiveStep::RemoveDirectory { path: path.to_owned() }]).collect()
}

/// The indexes of the entries of a directory.
pub(crate) fn children(image: &Image, directory: Index) -> impl Iterator<Item = Index> + use<> {
    match image.node(directory).map(|node| node.kind) {
        Some(ImageNodeKind::Directory { children, .. }) => children,
        _ => 0..0,
    }
}

/// A copy of the bytes of a file.
///
/// # Errors
/// When the node is no file, and those of `pread(2)`.
pub(crate) fn bytes(image: &Image, file: Index) -> io::Result<Zeroizing<Vec<u8>>> {
    match image.node(file).ok_or(io::ErrorKind::NotFound)?.kind {
        ImageNodeKind::File { content } => image.copied(content),
        ImageNodeKind::Directory { .. } => Err(io::ErrorKind::IsADirectory.into()),
    }
}
