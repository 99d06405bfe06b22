//! Giving a volume to the pod's fsGroup: podfs walks over the tree and changes each entry, as the kubelet does.
//!
//! podfs changes a directory after its entries, and the root last. So if the root has the right group and mode, an earlier walk was
//! complete. podfs gives symbolic links to the group, but never follows them. It logs an entry that it cannot change, and continues
//! with the mount (FG-02).

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use podfs_fuse::mount::private::ContainerAccess;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, chmod, chownat, fstat, openat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::walk::{EntryPlace, MountPointPolicy, Visitor, WalkEntry, walk};
use super::{FileKind, HostError, HostSource};
use crate::manifest::pod::FsGroupPolicy;
use crate::payload::{OwnedEntry, fs_group_mode};

/// The time after which podfs first reports that the change takes long, and the time between later reports (FG-05).
const FIRST_NOTICE: Duration = Duration::from_secs(30);
const NEXT_NOTICE: Duration = Duration::from_secs(60);
/// The number of entries after which the walk reads the clock.
const BETWEEN_LOOKS: u64 = 256;
/// How many of the entries that podfs could not change the log names.
const NAMED: u64 = 5;

/// A report about the group of a volume's files. The variants have the names of the kubelet's events, and a sentence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reason", content = "message")]
pub enum OwnershipNotice {
    /// Other pods use the volume, whose files have another group (LP-03).
    AlreadyMountedVolume(String),
    /// podfs gives many files to the group (FG-05).
    VolumePermissionChangeInProgress(String),
}

/// The last report about a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnershipReport {
    /// The name of the volume in the pod.
    pub volume: String,
    /// The report; `None` when a change has ended.
    pub notice: Option<OwnershipNotice>,
}

/// Learns of the reports about volumes. Cheap to clone.
#[derive(Clone)]
pub struct OwnershipObserver(Arc<dyn Fn(OwnershipReport) + Send + Sync>);

impl OwnershipObserver {
    /// Calls `observe` with each report.
    pub fn new(observe: impl Fn(OwnershipReport) + Send + Sync + 'static) -> OwnershipObserver {
        OwnershipObserver(Arc::new(observe))
    }

    /// Reports that the volume, which other pods use, stays as it is with the group `found`.
    pub fn is_shared(&self, volume: &str, persistent_volume: &str, group: u32, found: u32) {
        let sentence = format!(
            "The requested fsGroup is {group}, but the volume {persistent_volume} has GID {found}. The volume may not be shareable."
        );
        warn!("{sentence}");
        self.report(volume, Some(OwnershipNotice::AlreadyMountedVolume(sentence)));
    }

    /// Reports that the files of the volume have the right group, as far as podfs looks.
    pub fn agrees(&self, volume: &str) {
        self.report(volume, None);
    }

    fn report(&self, volume: &str, notice: Option<OwnershipNotice>) {
        self.0(OwnershipReport { volume: volume.to_owned(), notice });
    }
}

/// Gives `source` and everything below it to `group`, unless the policy lets podfs skip a source whose root has the right group and
/// mode.
///
/// # Errors
/// When a directory cannot be read.
pub fn give_to_group(
    source: &HostSource,
    group: u32,
    policy: FsGroupPolicy,
    volume: &str,
    observer: &OwnershipObserver,
) -> Result<(), HostError> {
    let failed = |cause: io::Error| HostError::failed(format!("cannot give the volume to group {group}"), cause);
    let root = fstat(source).map_err(|errno| failed(errno.into()))?;
    if source.kind() == FileKind::Directory {
        if !needs_walk(policy, RootAttributes::of(&root), group, ContainerAccess::ReadWrite) {
            observer.agrees(volume);
            return Ok(());
        }
        let directory = reopen(source.as_fd()).map_err(|errno| failed(errno.into()))?;
        let now = Instant::now();
        let mut change =
            OwnershipChange { group, volume, observer, given: 0, refused: 0, started: now, notice: now + FIRST_NOTICE };
        let walked = walk(directory, MountPointPolicy::Enter, &mut change);
        observer.report(volume, None);
        walked.map_err(failed)?;
        if change.refused > 0 {
            warn!("volume {volume:?}: podfs cannot give {} entries to group {group}", change.refused);
        }
    }
    if let Err(errno) = give_one(source.as_fd(), &root, group) {
        warn!("volume {volume:?}: podfs cannot give its root to group {group}: {errno}");
    }
    Ok(())
}

/// The group of a source.
pub fn group_of(source: &HostSource) -> Option<u32> {
    fstat(source).ok().map(|found| found.st_gid)
}

/// The attributes of a volume's root that the policy compares.
#[derive(Clone, Copy, Debug)]
struct RootAttributes {
    is_directory: bool,
    gid: u32,
    mode: u16,
}

impl RootAttributes {
    fn of(found: &Stat) -> RootAttributes {
        let is_directory = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        RootAttributes { is_directory, gid: found.st_gid, mode: bits(found) }
    }
}

/// Whether podfs has to walk over the volume (FG-03).
fn needs_walk(policy: FsGroupPolicy, root: RootAttributes, group: u32, access: ContainerAccess) -> bool {
    let wanted = fs_group_mode(0, OwnedEntry::Directory, access);
    policy == FsGroupPolicy::Always || !root.is_directory || root.gid != group || root.mode & wanted != wanted
}

/// The walk that gives a tree to a group.
struct OwnershipChange<'a> {
    group: u32,
    volume: &'a str,
    observer: &'a OwnershipObserver,
    /// How many entries the walk has visited.
    given: u64,
    /// How many of them podfs could not change.
    refused: u64,
    started: Instant,
    /// When the next report about the progress is due.
    notice: Instant,
}

impl Visitor for OwnershipChange<'_> {
    fn visit(&mut self, found: &WalkEntry<'_>, place: &EntryPlace<'_>) -> io::Result<()> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let entry = match openat(found.parent, found.name, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(()),
            opened => opened?,
        };
        if let Err(errno) = give_one(entry.as_fd(), &fstat(&entry)?, self.group) {
            self.refused += 1;
            if self.refused <= NAMED {
                let path = place.path();
                warn!(
                    "volume {:?}: podfs cannot give {} to group {}: {errno}",
                    self.volume,
                    path.display(),
                    self.group
                );
            }
        }
        self.given += 1;
        self.report_progress();
        Ok(())
    }

    fn blocked(&mut self, place: &EntryPlace<'_>, cause: Errno) -> io::Result<()> {
        Err(io::Error::other(format!("{}: {cause}", place.path().display())))
    }
}

impl OwnershipChange<'_> {
    /// Reports the progress if a report is due.
    fn report_progress(&mut self) {
        if !self.given.is_multiple_of(BETWEEN_LOOKS) {
            return;
        }
        let now = Instant::now();
        if now >= self.notice {
            self.notice = now + NEXT_NOTICE;
            warn!(
                "volume {:?}: podfs has given {} entries to group {} in {} s, and more are left; \
                 fsGroupChangePolicy: OnRootMismatch does this only once",
                self.volume,
                self.given,
                self.group,
                now.duration_since(self.started).as_secs()
            );
            let sentence = format!(
                "Setting volume ownership for {} is taking longer than expected, consider using OnRootMismatch, processed {} files",
                self.volume, self.given
            );
            self.observer.report(self.volume, Some(OwnershipNotice::VolumePermissionChangeInProgress(sentence)));
        }
    }
}

/// Gives one entry to the group, and adds bits to its mode. The owner stays. chown(2) takes the setuid bit from a file, so this
/// sets it again.
fn give_one(entry: BorrowedFd<'_>, before: &Stat, group: u32) -> Result<(), Errno> {
    const EMPTY_PATH: &CStr = c"";
    let owned = chownat(entry, EMPTY_PATH, None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH);
    let kind = match FileType::from_raw_mode(before.st_mode) {
        FileType::Symlink => return owned,
        FileType::Directory => OwnedEntry::Directory,
        _ => OwnedEntry::File,
    };
    let mode = fs_group_mode(bits(before), kind, ContainerAccess::ReadWrite);
    // The kernel does not change the mode of a descriptor with `O_PATH`, but that of this path, which leads to the same file.
    let path: PathBuf = format!("/proc/self/fd/{}", entry.as_raw_fd()).into();
    owned.and(chmod(path, Mode::from_raw_mode(mode.into())))
}

/// The permission bits of a mode.
fn bits(found: &Stat) -> u16 {
    // Twelve bits fit into the type.
    (found.st_mode & 0o7777) as u16
}

/// Opens a directory for reading that is open with `O_PATH`.
fn reopen(directory: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    openat(directory, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::Path;

    use super::*;

    const GROUP: u32 = 4711;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("a mode");
    }

    /// Mode, owner and group of an entry itself.
    fn owned(path: &Path) -> (u32, u32, u32) {
        let found = fs::symlink_metadata(path).expect("an entry");
        (found.mode() & 0o7777, found.uid(), found.gid())
    }

    fn give_tree(path: &Path, policy: FsGroupPolicy) {
        let observer = OwnershipObserver::new(|_| {});
        give_to_group(&HostSource::open(path).expect("a source"), GROUP, policy, "data", &observer).expect("given");
    }

    #[test]
    fn fg_05_a_change_that_takes_long_is_reported_until_it_ends() {
        let reports = Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = Arc::clone(&reports);
        let observer = OwnershipObserver::new(move |report| seen.lock().expect("no panic").push(report));
        let now = Instant::now();
        let mut change = OwnershipChange {
            group: GROUP,
            volume: "data",
            observer: &observer,
            given: BETWEEN_LOOKS,
            refused: 0,
            started: now,
            notice: now,
        };
        change.report_progress();
        change.given = 2 * BETWEEN_LOOKS;
        // The next report is not due yet.
        change.report_progress();
        change.notice = now;
        change.report_progress();
        let base = tempfile::tempdir().expect("a directory");
        let source = HostSource::open(base.path()).expect("a source");
        give_to_group(&source, GROUP, FsGroupPolicy::Always, "data", &observer).expect("given");
        let progress = |files: u64| {
            let sentence = format!(
                "Setting volume ownership for data is taking longer than expected, consider using OnRootMismatch, processed \
                 {files} files"
            );
            Some(OwnershipNotice::VolumePermissionChangeInProgress(sentence))
        };
        let expected = [progress(BETWEEN_LOOKS), progress(2 * BETWEEN_LOOKS), None]
            .map(|notice| OwnershipReport { volume: "data".to_owned(), notice });
        assert_eq!(*reports.lock().expect("no panic"), expected);
    }

    #[test]
    fn fg_03_the_policy_decides_by_the_root_alone() {
        use FsGroupPolicy::{Always, OnRootMismatch};
        let root = |gid, mode| RootAttributes { is_directory: true, gid, mode };
        let rows = [
            (Always, root(GROUP, 0o2770), true),
            (Always, root(0, 0o755), true),
            (OnRootMismatch, root(0, 0o2770), true),
            (OnRootMismatch, root(GROUP, 0o2750), true),
            (OnRootMismatch, root(GROUP, 0o770), true),
            (OnRootMismatch, root(0, 0o755), true),
            (OnRootMismatch, RootAttributes { is_directory: false, ..root(GROUP, 0o2770) }, true),
            (OnRootMismatch, root(GROUP, 0o2770), false),
        ];
        for (policy, root, expected) in rows {
            assert_eq!(needs_walk(policy, root, GROUP, ContainerAccess::ReadWrite), expected, "{policy:?} {root:?}");
        }
        assert!(!needs_walk(OnRootMismatch, root(GROUP, 0o2550), GROUP, ContainerAccess::ReadOnly));
    }

    #[test]
    fn fg_01_fg_02_everything_is_given_and_only_bits_are_added() {
        let base = tempfile::tempdir().expect("a directory");
        let (root, outside) = (base.path().join("root"), base.path().join("outside"));
        fs::create_dir_all(root.join("dir/deep")).expect("directories");
        for (name, mode) in [("plain", 0o644), ("private", 0o600), ("none", 0), ("setuid", 0o4755)] {
            fs::write(root.join("dir").join(name), "").expect("a file");
            set_mode(&root.join("dir").join(name), mode);
        }
        std::os::unix::fs::chown(root.join("dir/private"), Some(1000), Some(1000)).expect("owned");
        fs::write(&outside, "").expect("a file");
        set_mode(&outside, 0o600);
        symlink(&outside, root.join("link")).expect("a link");
        set_mode(&root, 0o755);
        give_tree(&root, FsGroupPolicy::Always);
        let rows = [
            ("", (0o2775, 0, GROUP)),
            ("dir", (0o2775, 0, GROUP)),
            ("dir/deep", (0o2775, 0, GROUP)),
            ("dir/plain", (0o664, 0, GROUP)),
            ("dir/private", (0o660, 1000, GROUP)),
            ("dir/none", (0o660, 0, GROUP)),
            ("dir/setuid", (0o4775, 0, GROUP)),
            ("link", (0o777, 0, GROUP)),
        ];
        for (path, expected) in rows {
            assert_eq!(owned(&root.join(path)), expected, "{path}");
        }
        assert_eq!(owned(&outside), (0o600, 0, 0));
    }

    #[test]
    fn fg_03_a_root_that_matches_spares_the_walk() {
        let base = tempfile::tempdir().expect("a directory");
        let rogue = base.path().join("rogue");
        fs::create_dir(&rogue).expect("a directory");
        give_tree(base.path(), FsGroupPolicy::Always);
        set_mode(&rogue, 0o700);
        give_tree(base.path(), FsGroupPolicy::OnRootMismatch);
        assert_eq!(owned(&rogue).0, 0o700);
        set_mode(base.path(), 0o770);
        give_tree(base.path(), FsGroupPolicy::OnRootMismatch);
        assert_eq!((owned(&rogue).0, owned(base.path()).0), (0o2770, 0o2770));
    }
}
