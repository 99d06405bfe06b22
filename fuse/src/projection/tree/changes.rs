//! Changes of a tree: only announced steps, in their order. Every other change fails with `EROFS`.
//!
//! The supervisor has a replica of each tree, and [confirms](ProjectionTree::confirm) each performed step there. The server's tree
//! is at most one step ahead: the step whose system call has no answer yet. So after the server's death, its successor begins with
//! the replica and the number of steps that the server had applied ([`ProjectionTree::catch_up`]).

use std::ffi::OsStr;
use std::time::SystemTime;

use nix::errno::Errno;

use super::super::image::Index;
use super::super::steps::{DATA, DATA_TMP, ProjectionStep};
use super::{
    AttachedGeneration, LookupCount, NodeAttributes, NodeId, NodeKind, NodePlace, ProjectionTree, StagedGeneration,
    TreeLink,
};

impl ProjectionTree {
    /// Accepts these steps, in this order, in place of all earlier ones.
    pub fn announce(&mut self, steps: Vec<ProjectionStep>, staged: Option<StagedGeneration>, time: SystemTime) {
        if let (Some(before), Some(now)) = (&self.staged, &staged)
            && before.name == now.name
        {
            // The supervisor announces the same generation again, because an earlier server did not answer. Both images are the
            // same memory.
            before.image.disown();
        }
        self.announced = steps.into();
        self.staged = staged;
        self.time = time;
        self.unanswered_step = None;
    }

    /// Closes generation `name`. Returns its nodes that the kernel knows and that are not unlinked. The kernel can look up no
    /// others, so the result is valid until they are unlinked. An interrupted removal begins again here.
    ///
    /// # Errors
    /// `ENOENT` when no such generation is attached.
    pub fn close_generation(&mut self, name: &str) -> Result<Vec<Index>, Errno> {
        let known = self.generation_mut(name)?.known_nodes();
        self.close_generation_but(name, &known)?;
        Ok(known)
    }

    /// Like [`Self::close_generation`]. `known` are the nodes that the kernel knows, as another process has counted them.
    ///
    /// # Errors
    /// `ENOENT` when no such generation is attached.
    pub fn close_generation_but(&mut self, name: &str, known: &[Index]) -> Result<(), Errno> {
        self.generation_mut(name)?.close(known);
        Ok(())
    }

    /// Applies the step of a system call that the caller has made.
    ///
    /// # Errors
    /// `EROFS` when it is not the next one.
    pub fn confirm(&mut self, step: &ProjectionStep) -> Result<(), Errno> {
        self.take_step(step)
    }

    /// Catches up with a tree that has applied this number of steps since the projection was mounted. If the server of that tree
    /// did not answer the last request, the kernel sends that request again.
    ///
    /// # Errors
    /// `EINVAL` when that tree is not the same or one step ahead.
    pub fn catch_up(&mut self, applied: u64) -> Result<(), Errno> {
        if applied == self.applied {
            return Ok(());
        }
        let step = self.announced.front().filter(|_| applied == self.applied + 1).cloned().ok_or(Errno::EINVAL)?;
        self.take_step(&step)?;
        self.unanswered_step = Some(step);
        Ok(())
    }

    /// Number of steps applied since the projection was mounted.
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// `mkdir(2)`: attaches the staged generation.
    ///
    /// # Errors
    /// `EROFS` when it was not announced.
    pub fn make_directory(&mut self, parent: NodeId, name: &OsStr) -> Result<NodeAttributes, Errno> {
        let name = announced_name(parent, name)?;
        let repetition = self.take(&ProjectionStep::MakeGeneration { name: name.to_owned() })?;
        let node = self.child(NodeId::ROOT, name)?;
        if repetition == Repetition::No {
            self.count(node);
        }
        self.attributes(node)
    }

    /// `chmod(2)` of a generation's directory.
    ///
    /// # Errors
    /// `EROFS` when it was not announced.
    pub fn set_mode(&mut self, node: NodeId, mode: u16) -> Result<NodeAttributes, Errno> {
        let name = match self.place(node)? {
            NodePlace::Generation(generation, 0) => generation.name().to_string(),
            _ => return Err(Errno::EROFS),
        };
        self.take(&ProjectionStep::SetMode { name, mode })?;
        self.attributes(node)
    }

    /// `symlink(2)` in the root.
    ///
    /// # Errors
    /// `EROFS` when it was not announced.
    pub fn make_link(&mut self, parent: NodeId, name: &OsStr, target: &OsStr) -> Result<NodeAttributes, Errno> {
        let name = announced_name(parent, name)?;
        let target = target.to_str().ok_or(Errno::EROFS)?;
        // The request does not have the owner.
        let mut steps = self.unanswered_step.iter().chain(self.announced.front());
        let uid = steps.find_map(|step| step.link_owner(name)).ok_or(Errno::EROFS)?;
        self.take(&ProjectionStep::MakeLink { name: name.to_owned(), target: target.to_owned(), uid })?;
        let node = self.child(NodeId::ROOT, name)?;
        self.attributes(node)
    }

    /// `rename(2)` of `..data_tmp` to `..data`.
    ///
    /// # Errors
    /// `EROFS` when it was not announced.
    pub fn rename(&mut self, parent: NodeId, name: &OsStr, new_parent: NodeId, new_name: &OsStr) -> Result<(), Errno> {
        if announced_name(parent, name)? != DATA_TMP || announced_name(new_parent, new_name)? != DATA {
            return Err(Errno::EROFS);
        }
        self.take(&ProjectionStep::Switch).map(drop)
    }

    /// `unlink(2)` of a link, or of a file of a closed generation.
    ///
    /// # Errors
    /// `EROFS` when it was not announced.
    pub fn unlink(&mut self, parent: NodeId, name: &OsStr) -> Result<(), Errno> {
        let name = name.to_str().ok_or(Errno::EROFS)?;
        self.take(&ProjectionStep::Unlink { directory: self.directory_path(parent), name: name.to_owned() }).map(drop)
    }

    /// `rmdir(2)` in a closed generation, or of a generation with its remaining nodes.
    ///
    /// # Errors
    /// `EROFS` when it was not announced.
    pub fn remove_directory(&mut self, parent: NodeId, name: &OsStr) -> Result<(), Errno> {
        let name = name.to_str().ok_or(Errno::EROFS)?;
        self.take(&ProjectionStep::RemoveDirectory { directory: self.directory_path(parent), name: name.to_owned() })
            .map(drop)
    }

    /// Applies the next step, unless an earlier server has applied it without an answer.
    fn take(&mut self, step: &ProjectionStep) -> Result<Repetition, Errno> {
        if self.unanswered_step.take_if(|before| before == step).is_some() {
            return Ok(Repetition::Yes);
        }
        self.take_step(step)?;
        self.unanswered_step = None;
        Ok(Repetition::No)
    }

    fn take_step(&mut self, step: &ProjectionStep) -> Result<(), Errno> {
        if self.announced.front() != Some(step) {
            return Err(Errno::EROFS);
        }
        self.apply(step)?;
        self.announced.pop_front();
        self.applied += 1;
        Ok(())
    }

    fn apply(&mut self, step: &ProjectionStep) -> Result<(), Errno> {
        match step {
            ProjectionStep::MakeGeneration { name } => {
                let staged = self.staged.take_if(|staged| staged.name.as_str() == name).ok_or(Errno::EROFS)?;
                let base = self.next;
                let generation = AttachedGeneration::new(staged, base, self.time);
                self.next += u64::from(generation.image().nodes());
                self.generations.insert(base, generation);
                self.entries.insert(name, NodeId(base), NodeKind::Directory);
            }
            ProjectionStep::SetMode { name, mode } => self.generation_mut(name)?.set_mode(*mode),
            ProjectionStep::MakeLink { name, target, uid } => {
                let node = NodeId(self.next);
                self.next += 1;
                self.entries.insert(name, node, NodeKind::Link);
                let (name, target) = (name.to_owned(), target.to_owned());
                let link = TreeLink {
                    name,
                    target,
                    uid: *uid,
                    time: self.time,
                    lookups: LookupCount::Counted(1),
                    unlinked: false,
                };
                self.links.insert(node, link);
            }
            ProjectionStep::Switch => {
                self.remove_entry(DATA);
                let entry = self.entries.remove(DATA_TMP).ok_or(Errno::ENOENT)?;
                if let Some(link) = self.links.get_mut(&entry.node) {
                    link.name = DATA.to_owned();
                }
                self.entries.insert(DATA, entry.node, NodeKind::Link);
            }
            ProjectionStep::Unlink { directory, name } | ProjectionStep::RemoveDirectory { directory, name } => {
                let parent = self.find(directory).ok_or(Errno::ENOENT)?;
                self.remove(parent, name)?;
            }
        }
        Ok(())
    }

    fn remove(&mut self, parent: NodeId, name: &str) -> Result<(), Errno> {
        if parent == NodeId::ROOT {
            self.remove_entry(name);
            return Ok(());
        }
        let (base, index) = self.in_generation(parent).ok_or(Errno::EROFS)?;
        let generation = self.generations.get_mut(&base).ok_or(Errno::ESTALE)?;
        generation.remove_child(index, name)
    }

    /// Removes a name from the root. Its link or generation stays until the kernel has forgotten it.
    fn remove_entry(&mut self, name: &str) {
        let Some(entry) = self.entries.remove(name) else { return };
        if let Some(link) = self.links.get_mut(&entry.node) {
            link.unlinked = true;
            self.sweep_link(entry.node);
        } else if let Some(generation) = self.generations.get_mut(&entry.node.0) {
            generation.detach();
            self.sweep_generation(entry.node.0);
        }
    }
}

/// Whether an earlier server has applied the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repetition {
    /// It has not.
    No,
    /// It has, and only the answer is missing.
    Yes,
}

/// The name of a step. It must be in the root, and UTF-8.
fn announced_name(parent: NodeId, name: &OsStr) -> Result<&str, Errno> {
    name.to_str().filter(|_| parent == NodeId::ROOT).ok_or(Errno::EROFS)
}
