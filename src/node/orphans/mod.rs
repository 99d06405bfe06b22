//! Directories of pods that the node no longer has: the daemon removes empty directories, and reports the others.
//!
//! A pass looks at each directory in `ROOT/pods` whose pod the manager does not have and that no process serves (OR-01):
//!
//! 1. A directory with a mount on it or in it stays: the pass knows this from the mount table, and does not access the mount.
//! 2. In the other directories, the pass removes empty directories with rmdir(2), the innermost first, and empty files below
//!    `volume-subpaths`, which are mount points of containers. It never removes anything else, so no file of a volume (OR-02).
//! 3. The pass walks down by descriptors, without links, and stops at a mount: the kernel refuses to enter it
//!    (`RESOLVE_NO_XDEV`), also if the mount has just appeared.
//! 4. Before the walk, the pass deletes the content of emptyDirs that supervisors of this daemon kept over a shutdown of the
//!    node, if the pod has not come back. A file beside the content marks it (`host::empty_dir`). The pass deletes nothing while
//!    podfs does not know for certain that the pod is gone ([`PodPresence::Uncertain`]).
//! 5. Other complete content of an emptyDir stays as it is, with its empty directories.
//! 6. Before a pass changes a pod's directory, it locks the directory, as supervisors do (`supervisor::run_dir::volumes_lock`),
//!    and looks again whether the pod has come back. So it touches no pod whose supervisor has another run directory, or has
//!    just started.
//! 7. The pass reports the directories that stay when these change, in one report (OR-03). It looks at such a directory
//!    again after 2, 4, 8 and 16 seconds, then every 30 seconds, or when the directory has changed.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, OsStr};
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use podfs_fuse::mount::table::mounts;
use podfs_fuse::{Backoff, DoublingPause};
use rustix::fs::{AtFlags, FileType, statat, unlinkat};
use rustix::io::Errno;
use tracing::{debug, info};

use crate::admin::leftovers::HOMES;
use crate::host::empty_dir;
use crate::host::walk::{EntryPlace, MountPointPolicy, Visitor, WalkEntry, enter, walk};
use crate::manifest::pod::PodUid;
use crate::node::spans;
use crate::supervisor::run_dir::file_names::{LOCK, SERVER};
use crate::supervisor::run_dir::timed_lock::lock_until;

/// How long a pass skips a directory that stays, unless it changes. Passes look again without a change, because an unmount
/// does not change the directory. The pause doubles each time, because other obstacles may stay for days.
const PAUSE: DoublingPause = DoublingPause::new(Duration::from_secs(2), Duration::from_secs(30));
/// The directory of volumes in a pod's directory.
const VOLUMES: &str = "volumes";
/// The directory of containers' subPaths in a pod's directory.
const SUB_PATHS: &str = "volume-subpaths";
/// How many of the directories that stay a report names.
const NAMED: usize = 5;

/// What the manager knows of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodPresence {
    /// The node has the pod.
    Known,
    /// The node may have the pod, although no source describes it.
    Uncertain,
    /// The node no longer has the pod.
    Gone,
}

/// Looks for orphaned directories, pass after pass.
#[derive(Debug)]
pub struct Orphans {
    pods: PathBuf,
    run: PathBuf,
    kept: BTreeMap<PodUid, KeptDirectory>,
}

/// A directory that stays.
#[derive(Debug)]
struct KeptDirectory {
    reason: String,
    /// When its content last changed.
    changed: Option<ModificationTime>,
    /// When a pass last looked at it.
    looked: Instant,
    /// How long passes skip it after that.
    pause: Duration,
    backoff: Backoff,
}

/// `st_mtime`.
type ModificationTime = (i64, u64);

/// The result of a pass.
#[derive(Debug, Default)]
pub struct OrphanPass {
    /// The pods whose directories were removed.
    pub removed: Vec<PodUid>,
    /// The directories that stay, if the directories or their reasons have changed since the last pass.
    pub report: Option<OrphanReport>,
}

/// The report of the directories that stay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrphanReport(Vec<(PodUid, String)>);

impl Orphans {
    /// The directories of pods below the root directory. The pods' locks are in the run directory.
    pub fn new(run_directory: &Path, root_directory: &Path) -> Orphans {
        Orphans { pods: root_directory.join("pods"), run: run_directory.to_owned(), kept: BTreeMap::new() }
    }

    /// How many directories stay.
    pub fn kept_directories(&self) -> usize {
        self.kept.len()
    }

    /// Looks at the directories of all pods but those that are known. `presence` says what the manager knows of a pod at that
    /// moment.
    ///
    /// # Errors
    /// When the directory of all pods or the mount table cannot be read. Before the first pod of a node, there is no directory.
    pub fn pass(&mut self, presence: impl Fn(&PodUid) -> PodPresence) -> io::Result<OrphanPass> {
        let run = self.run.clone();
        let presence = |uid: &PodUid| if is_served(&run, uid) { PodPresence::Known } else { presence(uid) };
        let entries = match std::fs::read_dir(&self.pods) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(OrphanPass::default()),
            entries => entries?,
        };
        let uids = entries.filter_map(|entry| PodUid::parse(entry.ok()?.file_name().to_str()?).ok());
        let orphans: BTreeSet<PodUid> = uids.filter(|uid| presence(uid) != PodPresence::Known).collect();
        let before = self.kept.len();
        self.kept.retain(|uid, _| orphans.contains(uid));
        let mut pass = OrphanPass::default();
        let mut has_changed = self.kept.len() != before;
        let due: Vec<_> = orphans.into_iter().filter(|uid| self.is_due(uid)).collect();
        if !due.is_empty() {
            let pods = self.pods.canonicalize()?;
            let mounted = mounted_below(&pods)?;
            let directory = File::open(&pods)?;
            for uid in due {
                let _span = spans::of_uid(&uid, None).entered();
                match remove(&pods, directory.as_fd(), &uid, &mounted, || presence(&uid))? {
                    Removal::Complete => {
                        has_changed |= self.kept.remove(&uid).is_some();
                        pass.removed.push(uid);
                    }
                    Removal::Returned => has_changed |= self.kept.remove(&uid).is_some(),
                    Removal::Stays(reason) => {
                        let earlier = self.kept.get(&uid);
                        has_changed |= earlier.is_none_or(|earlier| earlier.reason != reason);
                        let changed = changed(&pods.join(uid.as_str()));
                        let same = earlier.filter(|earlier| earlier.changed == changed);
                        let mut backoff = same.map_or(PAUSE.backoff(), |same| same.backoff);
                        let (looked, pause) = (Instant::now(), backoff.fail());
                        self.kept.insert(uid, KeptDirectory { reason, changed, looked, pause, backoff });
                    }
                }
            }
        }
        if has_changed && !self.kept.is_empty() {
            let kept = self.kept.iter().map(|(uid, kept)| (uid.clone(), kept.reason.clone()));
            pass.report = Some(OrphanReport(kept.collect()));
        }
        Ok(pass)
    }

    fn is_due(&self, uid: &PodUid) -> bool {
        self.kept.get(uid).is_none_or(|kept| {
            kept.looked.elapsed() >= kept.pause || kept.changed != changed(&self.pods.join(uid.as_str()))
        })
    }
}

/// Whether a process with this run directory serves the pod, or has left records with which podfs has to retire the pod first.
fn is_served(run: &Path, uid: &PodUid) -> bool {
    let run = run.join(uid.as_str());
    [LOCK, SERVER].iter().any(|name| run.join(name).symlink_metadata().is_ok())
}

/// Removes the directory of a pod that no process serves any more, as far as it is empty. Returns why a part of it
/// stays, if one does.
///
/// # Errors
/// When the directory of all pods or the mount table cannot be read.
pub(super) fn remove_pod(root_directory: &Path, uid: &PodUid) -> io::Result<Option<String>> {
    let pods = match root_directory.join("pods").canonicalize() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        pods => pods?,
    };
    match remove(&pods, File::open(&pods)?.as_fd(), uid, &mounted_below(&pods)?, || PodPresence::Gone)? {
        Removal::Complete | Removal::Returned => Ok(None),
        Removal::Stays(reason) => Ok(Some(reason)),
    }
}

/// The outcome of the removal of a pod's directory.
enum Removal {
    /// Nothing of it is left.
    Complete,
    /// A part of it stays, for this reason.
    Stays(String),
    /// The pod has come back, and its directory stays as it is.
    Returned,
}

fn mounted_below(pods: &Path) -> io::Result<Vec<PathBuf>> {
    Ok(mounts()?.into_iter().map(|mounted| mounted.at).filter(|at| at.starts_with(pods)).collect())
}

/// Removes the directory of a pod, as far as it is empty.
fn remove(
    pods: &Path,
    directory: BorrowedFd<'_>,
    uid: &PodUid,
    mounted: &[PathBuf],
    presence: impl Fn() -> PodPresence,
) -> io::Result<Removal> {
    let path = pods.join(uid.as_str());
    let stays = |reason| Ok(Removal::Stays(reason));
    if let Some(at) = mounted.iter().find(|at| at.starts_with(&path)) {
        return stays(format!("{} is a mount point", at.display()));
    }
    let name = CString::new(uid.as_str())?;
    let pod = match enter(directory, &name, MountPointPolicy::Stop) {
        Ok(pod) => pod,
        Err(Errno::NOENT) => return Ok(Removal::Complete),
        Err(Errno::XDEV) => return stays(format!("{} is a mount point", path.display())),
        Err(Errno::NOTDIR | Errno::LOOP) => return stays(format!("{} is not a directory", path.display())),
        Err(errno) => return stays(format!("cannot open {}: {}", path.display(), io::Error::from(errno))),
    };
    // The walk closes its own descriptor early, and the lock has to last until the end.
    let Ok(_lock) = lock_until(File::from(pod.try_clone()?), Instant::now()) else {
        return stays(format!(
            "a podfs with another --run-dir serves it, or another podfs works on {}",
            path.display()
        ));
    };
    let presence = presence();
    if presence == PodPresence::Known {
        return Ok(Removal::Returned);
    }
    if let Some(home) = delete_kept_content(&path, presence) {
        return stays(format!("{} has the content of an emptyDir", home.display()));
    }
    let mut removal = DirectoryRemoval { pod: &path, stays: Vec::new(), count: 0 };
    if let Err(error) = walk(pod, MountPointPolicy::Stop, &mut removal) {
        return stays(format!("cannot read {}: {error}", path.display()));
    }
    if removal.count > 0 {
        return stays(removal.sentence());
    }
    match unlinkat(directory, &name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(Removal::Complete),
        Err(errno) => stays(format!("failed to rmdir() {}: {}", path.display(), io::Error::from(errno))),
    }
}

/// Deletes the content of emptyDirs that was kept over a shutdown, if the pod is gone. Returns a home whose content stays.
fn delete_kept_content(pod: &Path, presence: PodPresence) -> Option<PathBuf> {
    let homes = pod.join(HOMES).read_dir().into_iter().flatten().flatten();
    let homes = homes.filter(|home| home.file_type().is_ok_and(|kind| kind.is_dir())).map(|home| home.path());
    let (deleted, mut staying): (Vec<_>, Vec<_>) =
        homes.partition(|home| presence == PodPresence::Gone && empty_dir::is_left_to_agent(home));
    for home in &deleted {
        let volume = home.file_name().and_then(OsStr::to_str);
        match empty_dir::remove(home) {
            Ok(left) if left.is_empty() => {
                info!(volume, "{}: the content of the emptyDir is deleted with its pod", home.display())
            }
            Ok(left) => debug!(volume, "{}: podfs leaves of its content {left}", home.display()),
            Err(error) => debug!(volume, "{}: {error}", home.display()),
        }
    }
    staying.retain(|home| empty_dir::has_content(home));
    staying.into_iter().next()
}

/// The removal of the entries of a pod's directory.
struct DirectoryRemoval<'a> {
    pod: &'a Path,
    /// The first entries that stay, each with the reason.
    stays: Vec<String>,
    count: usize,
}

impl DirectoryRemoval<'_> {
    fn stays(&mut self, place: &Path, cause: Errno) {
        let path = self.pod.join(place);
        self.count += 1;
        if !self.stays.is_empty() {
            return;
        }
        let cause = match cause {
            Errno::XDEV | Errno::BUSY => {
                return self.stays.push(format!("cannot delete directory {}: it is a mount point", path.display()));
            }
            Errno::NOTDIR => "it is a file".to_owned(),
            cause => io::Error::from(cause).to_string(),
        };
        // Like the kubelet, names the volume that is not empty.
        let mut parts = place.iter();
        let at = |depth: usize| self.pod.join(place.iter().take(depth).collect::<PathBuf>());
        self.stays.push(match parts.next().and_then(OsStr::to_str) {
            Some(VOLUMES) if place.iter().count() > 3 => {
                format!("failed to rmdir() volume at path {}: directory not empty", at(3).display())
            }
            Some(SUB_PATHS) if place.iter().count() > 4 => {
                format!("failed to remove subpath at path {}: directory not empty", at(4).display())
            }
            Some(VOLUMES) => format!("failed to rmdir() volume at path {}: {cause}", path.display()),
            Some(SUB_PATHS) => format!("failed to remove subpath at path {}: {cause}", path.display()),
            _ => format!("failed to rmdir() {}: {cause}", path.display()),
        });
    }

    fn sentence(self) -> String {
        match (self.stays.into_iter().next(), self.count) {
            (Some(first), 1) => first,
            (Some(first), count) => format!("{first} ({count} entries stay)"),
            (None, _) => String::new(),
        }
    }
}

impl Visitor for DirectoryRemoval<'_> {
    fn visit(&mut self, found: &WalkEntry<'_>, place: &EntryPlace<'_>) -> io::Result<()> {
        let path = place.path();
        let removed = match found.is_directory {
            true => unlinkat(found.parent, found.name, AtFlags::REMOVEDIR),
            false if is_sub_path(&path) && is_empty_file(found.parent, found.name) => {
                unlinkat(found.parent, found.name, AtFlags::empty())
            }
            false => Err(Errno::NOTDIR),
        };
        match removed {
            Ok(()) | Err(Errno::NOENT) => {}
            // The entries that stay in the directory are counted already.
            Err(Errno::NOTEMPTY | Errno::EXIST) if self.count > 0 => {}
            Err(errno) => self.stays(&path, errno),
        }
        Ok(())
    }

    fn blocked(&mut self, place: &EntryPlace<'_>, cause: Errno) -> io::Result<()> {
        self.stays(&place.path(), cause);
        Ok(())
    }
}

/// `volume-subpaths/VOLUME/CONTAINER/NUMBER`.
fn is_sub_path(path: &Path) -> bool {
    path.starts_with(SUB_PATHS) && path.iter().count() == 4
}

fn is_empty_file(parent: BorrowedFd<'_>, name: &CStr) -> bool {
    statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::RegularFile && found.st_size == 0)
}

/// When the content of a directory last changed. Sends no request to a file system that is mounted on it.
fn changed(path: &Path) -> Option<ModificationTime> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let found = rustix::fs::statx(rustix::fs::CWD, path, flags, rustix::fs::StatxFlags::MTIME).ok()?;
    Some((found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec.into()))
}

/// Reads `2 orphaned pod directories stay: orphaned pod "a" found, but …; orphaned pod "b" found, but …`.
impl fmt::Display for OrphanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let directories = if self.0.len() == 1 { "directory stays" } else { "directories stay" };
        write!(f, "{} orphaned pod {directories}: ", self.0.len())?;
        let named = self
            .0
            .iter()
            .take(NAMED)
            .map(|(uid, reason)| format!("orphaned pod {:?} found, but {reason}", uid.as_str()));
        f.write_str(&named.collect::<Vec<_>>().join("; "))?;
        if self.0.len() > NAMED { write!(f, "; and {} more", self.0.len() - NAMED) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;
