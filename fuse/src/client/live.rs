//! The supervisor's side of the live parts of one projection: their mount, and its updates.
//!
//! An update announces its steps to the server, and then performs them one by one: system calls on the private mount, and
//! messages for two kinds of steps. It confirms each completed step in the replica, as in a [commit](super::projection).
//!
//! 1. If a supervisor is killed between two steps, the server still has the announced steps. The next supervisor performs
//!    them first, so that the kernel raises every event, and then compares the live parts with the projection's current generation.
//! 2. A step that fails does not stop later updates: the next update begins from the present state of the live parts.
//! 3. An update whose content cannot be read changes nothing. Without the file, the plan would remove the inode that a container has
//!    mounted, and no later update would reach that container.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, StatxFlags, Timespec, Timestamps, UTIME_OMIT, chmodat, futimens,
    mkdirat, mknodat, openat, openat2, statx, unlinkat,
};
use serde_json::Value;
use zeroize::Zeroizing;

use super::ServerClient;
use super::commit_error::CommitError;
use super::held::{HeldLive, TreeReplica};
use super::mounted::MountedVolume;
use crate::live::plan::{bytes, children, plan};
use crate::live::step::{LiveStep, split};
use crate::live::tree::{LiveTree, LiveUpdate, PartType, Slot, find_in};
use crate::mount::MountError;
use crate::mount::private::{MountOptions, PrivateMount, open_device};
use crate::projection::image::{DirectoryAttributes, FileEntry, Image, ImageLayout, Index};
use crate::protocol::{ServerRequest, VolumeNumber};

/// Why podfs cannot show a path of a projection as a live part.
#[derive(Debug, thiserror::Error)]
pub enum LivePartError {
    /// The payload has no such path.
    #[error("the volume has no {0:?} yet")]
    Missing(String),
    /// The path leads through a file.
    #[error("{0:?} leads through a file; only a directory has something in it")]
    NotADirectory(String),
    /// The file system of live parts, or the part, cannot be mounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The update that adds the path failed.
    #[error(transparent)]
    Update(#[from] CommitError),
}

/// The mounted live parts of a projection.
pub(super) struct LiveMount {
    mounted: MountedVolume,
    tree: TreeReplica<LiveTree>,
    /// Whether an earlier supervisor or a failed step may have left an update incomplete.
    untidy: bool,
}

impl LiveMount {
    /// Mounts the file system of the live parts of the projection `of`, without parts.
    pub(super) fn start(
        server: &Arc<ServerClient>,
        of: VolumeNumber,
        options: &MountOptions,
        about: Value,
        trace: bool,
    ) -> Result<Self, MountError> {
        let failed =
            |cause| MountError::Failed { what: "the server does not serve live parts of the volume".to_owned(), cause };
        let device = open_device()?;
        let mount = PrivateMount::new(device.as_fd(), options)?;
        if !server.supports_live_parts().map_err(failed)? {
            let old = "the pod's server is of an earlier version; replace it with podfs upgrade";
            return Err(failed(io::Error::other(old)));
        }
        let kind = HeldLive::new(of);
        let tree = kind.tree();
        let request = |volume, about| ServerRequest::Mirror { volume, about, of, trace };
        let (mounted, _) = MountedVolume::begin(server, device, mount, about, kind, request).map_err(failed)?;
        Ok(Self { mounted, tree, untidy: false })
    }

    /// The live parts of a supervisor that was killed, perhaps during an update, and the id of their projection.
    ///
    /// # Errors
    /// The volume, if it is of another kind.
    pub(super) fn adopt(mounted: MountedVolume) -> Result<(VolumeNumber, Self), MountedVolume> {
        match mounted.held.of_kind::<HeldLive>().map(|held| (held.projection(), held.tree())) {
            Some((projection, tree)) => Ok((projection, Self { mounted, tree, untidy: true })),
            None => Err(mounted),
        }
    }

    /// Whether no server could continue with the live parts.
    pub(super) fn is_given_up(&self) -> bool {
        self.mounted.held.is_given_up()
    }

    /// A detached, read-only mount of the part at `path` of `generation`.
    pub(super) fn part(&mut self, path: &str, generation: &Image) -> Result<OwnedFd, LivePartError> {
        let (path, shape) = resolve(path, generation)?;
        let slot = Slot { path, shape };
        let mut slots = self.tree.lock().slots().to_vec();
        let place = slots.iter().position(|other| *other == slot);
        let number = place.unwrap_or(slots.len());
        if place.is_none() {
            slots.push(slot);
        }
        self.show(slots, generation)?;
        Ok(self.mounted.held.clone_mount(|mount| mount.read_only_part(&number.to_string()))?)
    }

    /// Updates the parts to the content of `generation`.
    pub(super) fn follow(&mut self, generation: &Image) -> Result<(), CommitError> {
        let slots = self.tree.lock().slots().to_vec();
        self.show(slots, generation)
    }

    fn show(&mut self, slots: Vec<Slot>, generation: &Image) -> Result<(), CommitError> {
        if self.untidy {
            let pending = self.tree.lock().announced();
            // The plan below has the failed steps again.
            let _ = self.perform(&pending);
        }
        let (before, has_same_slots) = {
            let tree = self.tree.lock();
            (tree.newest().map(|(number, image)| (number, Arc::clone(image))), tree.slots() == slots)
        };
        let files = files(&slots, generation, before.as_ref().map(|(_, image)| &**image));
        let contents = contents(&files, &slots)?;
        let layout = layout(&files, &contents, generation)?;
        if !self.untidy && has_same_slots && before.as_ref().is_some_and(|(_, image)| layout.equals(image)) {
            return Ok(());
        }
        self.untidy = true;
        let image = Arc::new(layout.image().map_err(CommitError::Memory)?);
        let number = before.map_or(0, |(number, _)| number + 1);
        let steps = {
            let mut tree = self.tree.lock();
            tree.set_slots(slots.clone());
            plan(&tree, &image)
        };
        let update = LiveUpdate { slots, steps: steps.clone(), number, image, time: SystemTime::now() };
        // The replica gets the update first, so that a successor that starts meanwhile accepts its steps.
        self.tree.lock().announce(update.clone());
        let unlinked = self.mounted.server.update(self.mounted.volume, &update).map_err(CommitError::Server)?;
        self.tree.lock().keep_unlinked(&unlinked);
        self.perform(&steps)?;
        self.refresh(&steps)?;
        let needed = self.tree.lock().needed_images().into_iter().collect();
        self.mounted.server.drop_images(self.mounted.volume, needed).map_err(CommitError::Server)?;
        self.tree.lock().drop_images(&[]);
        self.untidy = false;
        Ok(())
    }

    fn perform(&self, steps: &[LiveStep]) -> Result<(), CommitError> {
        steps.iter().try_for_each(|step| {
            let failed = |cause| CommitError::Step { call: describe(step), cause };
            self.perform_one(step).map_err(failed)?;
            self.tree.lock().confirm(step).map_err(|errno| failed(errno.into()))
        })
    }

    fn perform_one(&self, step: &LiveStep) -> io::Result<()> {
        match step {
            LiveStep::Swap { .. } | LiveStep::Settle => {
                let applied = self.tree.lock().applied();
                self.mounted.server.take(self.mounted.volume, applied)?;
            }
            LiveStep::MakeDirectory { path } => {
                let (directory, name) = self.parent(path)?;
                mkdirat(directory, name, Mode::from_raw_mode(0o700))?;
            }
            LiveStep::MakeFile { path } => {
                let (directory, name) = self.parent(path)?;
                mknodat(directory, name, FileType::RegularFile, Mode::from_raw_mode(0o600), 0)?;
            }
            LiveStep::Modify { path } => {
                let (directory, name) = self.parent(path)?;
                let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let file = openat(directory, name, flags, Mode::empty())?;
                // The server shows the time of the payload, not this one.
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
                let last_modification = Timespec { tv_sec: now.as_secs().cast_signed(), tv_nsec: 0 };
                futimens(file, &Timestamps { last_access, last_modification })?;
            }
            LiveStep::Touch { path } => {
                let (directory, name) = self.parent(path)?;
                // The server shows the mode of the payload, not this one.
                chmodat(directory, name, Mode::from_raw_mode(0o400), AtFlags::empty())?;
            }
            LiveStep::RemoveFile { path } => {
                let (directory, name) = self.parent(path)?;
                unlinkat(directory, name, AtFlags::empty())?;
            }
            LiveStep::RemoveDirectory { path } => {
                let (directory, name) = self.parent(path)?;
                unlinkat(directory, name, AtFlags::REMOVEDIR)?;
            }
        }
        Ok(())
    }

    /// Makes the kernel request the attributes of changed directories again. It may have got an answer before the change and
    /// store it after the change; it would then use the old attributes for ever. A projection does the same with its root.
    fn refresh(&self, steps: &[LiveStep]) -> Result<(), CommitError> {
        let removed =
            |path: &str| steps.iter().any(|step| *step == LiveStep::RemoveDirectory { path: path.to_owned() });
        let changed: BTreeSet<&str> = steps.iter().filter_map(LiveStep::changed_directory).collect();
        changed.into_iter().filter(|path| !removed(path)).try_for_each(|path| {
            let failed = |cause| CommitError::Step { call: format!("stat of {path:?}"), cause };
            let directory = self.directory(path).map_err(failed)?;
            let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
            statx(directory, c"", flags, StatxFlags::BASIC_STATS).map(drop).map_err(|errno| failed(errno.into()))
        })
    }

    fn parent<'a>(&self, path: &'a str) -> io::Result<(OwnedFd, &'a str)> {
        let (directory, name) = split(path);
        Ok((self.directory(directory)?, name))
    }

    /// Opens a directory of the mount. It follows no links and stays in the mount, so a server cannot lead podfs elsewhere.
    fn directory(&self, path: &str) -> io::Result<OwnedFd> {
        let path = if path.is_empty() { "." } else { path };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        Ok(openat2(&self.mounted.held.mount, path, flags, Mode::empty(), resolve)?)
    }
}

/// Converts a path in the volume to one in the payload, and gives its type. The `..data` of a path is left out.
fn resolve(path: &str, generation: &Image) -> Result<(String, PartType), LivePartError> {
    let path_of_link = path.strip_prefix("..data/").unwrap_or(path);
    let names: Vec<_> = path_of_link.split('/').filter(|name| !matches!(*name, "" | "." | "..data")).collect();
    let mut at: Index = 0;
    for name in &names {
        if !generation.is_directory(at) {
            return Err(LivePartError::NotADirectory(path.to_owned()));
        }
        at = generation.child(at, name.as_bytes()).ok_or_else(|| LivePartError::Missing(path.to_owned()))?;
    }
    let shape = if generation.is_directory(at) { PartType::Directory } else { PartType::File };
    Ok((names.join("/"), shape))
}

/// A file of a slot: its path, and the node of an image with its content.
type SlotFile<'a> = (String, &'a Image, Index);

/// The files of `generation` that these slots show. If the payload no longer has the file of a slot, its content is that in
/// `before`.
fn files<'a>(slots: &[Slot], generation: &'a Image, before: Option<&'a Image>) -> Vec<SlotFile<'a>> {
    let mut files = Vec::new();
    for (number, slot) in slots.iter().enumerate() {
        let name = number.to_string();
        let found = find_in(generation, &slot.path);
        match slot.shape {
            PartType::Directory => {
                if let Some(directory) = found.filter(|found| generation.is_directory(*found)) {
                    collect(generation, directory, &name, &mut files);
                }
            }
            PartType::File => match found.filter(|found| !generation.is_directory(*found)) {
                Some(file) => files.push((name, generation, file)),
                None => {
                    let last = before.and_then(|before| Some((before, find_in(before, &name)?)));
                    files.extend(last.map(|(before, file)| (name, before, file)));
                }
            },
        }
    }
    files
}

/// The content of each of these files.
///
/// # Errors
/// When one of them cannot be read.
fn contents(files: &[SlotFile<'_>], slots: &[Slot]) -> Result<Vec<Zeroizing<Vec<u8>>>, CommitError> {
    let failed = |path: &str, cause| {
        let (number, below) = path.split_once('/').unwrap_or((path, ""));
        let slot = number.parse().ok().and_then(|number: usize| slots.get(number));
        let shown = [slot.map_or("", |slot| &slot.path), below].into_iter().filter(|part| !part.is_empty());
        CommitError::LiveContent { path: shown.collect::<Vec<_>>().join("/"), cause }
    };
    files.iter().map(|(path, image, file)| bytes(image, *file).map_err(|cause| failed(path, cause))).collect()
}

/// The layout of these files with these contents. Directories have the mode and group of `generation`.
fn layout<'a>(
    files: &'a [SlotFile<'a>],
    contents: &'a [Zeroizing<Vec<u8>>],
    generation: &Image,
) -> Result<ImageLayout<'a>, CommitError> {
    let entries = files.iter().zip(contents).filter_map(|((path, image, file), content)| {
        let node = image.node(*file)?;
        Some(FileEntry { path, content, mode: node.mode, uid: node.uid, gid: node.gid })
    });
    let root = generation.node(0).map_or(DirectoryAttributes { mode: 0o755, gid: 0 }, |root| DirectoryAttributes {
        mode: root.mode,
        gid: root.gid,
    });
    let unlikely = |error| CommitError::Memory(io::Error::other(error));
    ImageLayout::new(entries, root).map_err(unlikely)
}

/// The files below a directory, each with its path below `at`.
fn collect<'a>(image: &'a Image, directory: Index, at: &str, files: &mut Vec<SlotFile<'a>>) {
    for child in children(image, directory) {
        let path = format!("{at}/{}", image.name(child));
        if image.is_directory(child) {
            collect(image, child, &path, files);
        } else {
            files.push((path, image, child));
        }
    }
}

fn describe(step: &LiveStep) -> String {
    match step {
        LiveStep::MakeDirectory { path } => format!("mkdir {path}"),
        LiveStep::MakeFile { path } => format!("mknod {path}"),
        LiveStep::Swap { .. } => "the change of the files' content".to_owned(),
        LiveStep::Modify { path } => format!("utimensat {path}"),
        LiveStep::Touch { path } => format!("chmod {path}"),
        LiveStep::RemoveFile { path } => format!("unlink {path}"),
        LiveStep::RemoveDirectory { path } => format!("rmdir {path}"),
        LiveStep::Settle => "the end of an update".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_whose_content_cannot_be_read_fails_and_removes_no_file() {
        let image = || {
            let entry = FileEntry { path: "conf.d/log", content: b"1", mode: 0o644, uid: 0, gid: 0 };
            let root = DirectoryAttributes { mode: 0o755, gid: 0 };
            ImageLayout::new([entry], root).expect("a tree").image().expect("an image")
        };
        let slots = [
            Slot { path: "conf.d/log".to_owned(), shape: PartType::File },
            Slot { path: "conf.d".to_owned(), shape: PartType::Directory },
        ];
        let readable = image();
        let shown = contents(&files(&slots, &readable, None), &slots).expect("read");
        assert!(shown.len() == 2 && shown.iter().all(|content| ***content == *b"1"));
        let unreadable = image().unreadable();
        for slot in slots {
            let slots = [slot];
            let error = contents(&files(&slots, &unreadable, None), &slots).expect_err("it cannot be read").to_string();
            let sentence =
                "cannot read \"conf.d/log\" to update live subPath mounts, which keep their earlier content: ";
            assert!(error.starts_with(sentence), "{error}");
        }
    }
}
