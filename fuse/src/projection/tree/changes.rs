//! How a tree changes: by announced steps, in their order. Every other change is `EROFS`.

use std::ffi::OsStr;
use std::time::SystemTime;

use nix::errno::Errno;

use super::super::image::Index;
use super::super::steps::{DATA, DATA_TMP, Step};
use super::{Attached, Attributes, Link, NodeId, NodeKind, Place, Staged, Tree};

impl Tree {
    /// From now on these steps are accepted, in this order; what was announced before is void.
    pub fn announce(&mut self, steps: Vec<Step>, staged: Option<Staged>, time: SystemTime) {
        self.announced = steps.into();
        self.staged = staged;
        self.time = time;
    }

    /// The nodes of generation `name` that the kernel knows. From now on no other can be looked up,
    /// so that the answer stays true while they are unlinked.
    ///
    /// # Errors
    /// `ENOENT` when no such generation is attached.
    pub fn close_generation(&mut self, name: &str) -> Result<Vec<Index>, Errno> {
        let base = self.generation_base(name).ok_or(Errno::ENOENT)?;
        self.generations.get_mut(&base).ok_or(Errno::ENOENT).map(Attached::close)
    }

    /// `mkdir(2)`: attaches the staged generation.
    ///
    /// # Errors
    /// `EROFS` when it was not announced.
    pub fn make_directory(&mut self, parent: NodeId, name: &OsStr) -> Result<Attributes, Errno> {
        let name = announced_name(parent, name)?;
        self.take_step(&Step::MakeGeneration { name: name.to_owned() })?;
        let staged = self.staged.take_if(|staged| staged.name.as_str() == name).ok_or(Errno::EROFS)?;
        let base = self.next;
        let generation = Attached::new(staged, base, self.time);
        self.next += u64::from(generation.image().nodes());
        self.generations.insert(base, generation);
        self.entries.insert(name, NodeId(base), NodeKind::Directory);
        self.count(NodeId(base));
        self.attributes(NodeId(base))
    }

    /// `chmod(2)` of a generation's directory.
    ///
    /// # Errors
    /// `EROFS` when it was not announced.
    pub fn set_mode(&mut self, node: NodeId, mode: u16) -> Result<Attributes, Errno> {
        let name = match self.place(node)? {
            Place::Generation(generation, 0) => generation.name().to_string(),
            _ => return Err(Errno::EROFS),
        };
        self.take_step(&Step::SetMode { name, mode })?;
        if let Some(generation) = self.generations.get_mut(&node.0) {
            generation.set_mode(mode);
        }
        self.attributes(node)
    }

    /// `symlink(2)` in the root.
    ///
    /// # Errors
    /// `EROFS` when it was not announced.
    pub fn make_link(&mut self, parent: NodeId, name: &OsStr, target: &OsStr) -> Result<Attributes, Errno> {
        let name = announced_name(parent, name)?;
        let target = target.to_str().ok_or(Errno::EROFS)?;
        let uid = match self.announced.front() {
            Some(Step::MakeLink { uid, .. }) => *uid,
            _ => return Err(Errno::EROFS),
        };
        self.take_step(&Step::MakeLink { name: name.to_owned(), target: target.to_owned(), uid })?;
        let node = NodeId(self.next);
        self.next += 1;
        let (name, target) = (name.to_owned(), target.to_owned());
        self.entries.insert(&name, node, NodeKind::Link);
        self.links.insert(node, Link { name, target, uid, time: self.time, lookups: 1, unlinked: false });
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
        self.take_step(&Step::Switch)?;
        self.remove_entry(DATA);
        let entry = self.entries.remove(DATA_TMP).ok_or(Errno::ENOENT)?;
        if let Some(link) = self.links.get_mut(&entry.node) {
            link.name = DATA.to_owned();
        }
        self.entries.insert(DATA, entry.node, NodeKind::Link);
        Ok(())
    }

    /// `unlink(2)` of a link, or of a file of a closed generation.
    ///
    /// # Errors
    /// `EROFS` when it was not announced.
    pub fn unlink(&mut self, parent: NodeId, name: &OsStr) -> Result<(), Errno> {
        let name = name.to_str().ok_or(Errno::EROFS)?;
        self.take_step(&Step::Unlink { directory: self.directory_path(parent), name: name.to_owned() })?;
        self.remove(parent, name)
    }

    /// `rmdir(2)` in a closed generation, or of a generation with all that is left of it.
    ///
    /// # Errors
    /// `EROFS` when it was not announced.
    pub fn remove_directory(&mut self, parent: NodeId, name: &OsStr) -> Result<(), Errno> {
        let name = name.to_str().ok_or(Errno::EROFS)?;
        self.take_step(&Step::RemoveDirectory { directory: self.directory_path(parent), name: name.to_owned() })?;
        self.remove(parent, name)
    }

    fn take_step(&mut self, step: &Step) -> Result<(), Errno> {
        if self.announced.front() != Some(step) {
            return Err(Errno::EROFS);
        }
        self.announced.pop_front();
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

    /// Takes a name out of the root; what stood behind it goes when the kernel forgot it.
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

/// Steps happen in the root; a name that is not UTF-8 was never announced.
fn announced_name(parent: NodeId, name: &OsStr) -> Result<&str, Errno> {
    name.to_str().filter(|_| parent == NodeId::ROOT).ok_or(Errno::EROFS)
}
