//! Removes the remains of killed podfs processes: dead mounts, mount points, directories, run files.
//!
//! The cleanup changes nothing of a served pod, and no supervisor changes a pod during its cleanup:
//! 1. The cleanup takes the pod's lock before it looks at the pod, and holds it until the end. A supervisor holds this lock for
//!    its whole life; a `podfs run` that starts during the cleanup waits for it.
//! 2. A server that goes on without its supervisor listens on its socket. Then the cleanup leaves the pod as it is. If none of the
//!    pod's volumes is mounted on the node any more, no new container can use them, and the cleanup ends the server.
//! 3. The cleanup unmounts a mount lazily, if the mount's server is dead and nothing else is mounted inside it.
//! 4. It removes recorded files and directories with `leftovers`, and only empty ones.
//! 5. It removes the run files last. They stay if the next podfs of the pod needs them.
//!
//! A cleanup with content ([`Cleanup::clean_with_content`]) is of one pod. It follows the same rules, and deletes the content of the
//! pod's emptyDirs when none of the pod's mounts is left. It also holds the lock on the directory of the pod's volumes, so a podfs
//! with another run directory does not serve the pod meanwhile.
//!
//! A retired pod ([`Cleanup::retire`]) does not come back: the cleanup ends its server in any case, unmounts its mounts with
//! the mounts inside them, and deletes the content of its emptyDirs. The order is the same, so the next retirement finishes a
//! retirement that was killed: it finds the remains by their records or names.

mod files;

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use podfs_fuse::mount::table::{FS_TYPE, MountTableEntry, mounts};
use podfs_fuse::mount::visible::detach;
use uuid::Uuid;

use super::leftovers::{HOMES, PodRemoval, RemovalOutcome, remove_if_empty};
use super::probe::{ServerState, server_state};
use crate::host::local;
use crate::manifest::pod::PodUid;
use crate::supervisor::control::peer;
use crate::supervisor::run_dir::bounds::{Bounds, OUTSIDE, path_exists};
use crate::supervisor::run_dir::cgroup;
use crate::supervisor::run_dir::claim::{self, PodLock, PodLockError};
use crate::supervisor::run_dir::file_names::{LOCK, UNREADABLE};
use crate::supervisor::run_dir::record::PodLockRecord;
use crate::supervisor::run_dir::server_socket;
use crate::supervisor::run_dir::trust;
use crate::supervisor::run_dir::volumes_lock::VolumesLock;
use crate::supervisor::server::kill_server;

/// The outcome of a cleanup for one path or server; in a dry run, what the cleanup would do.
#[derive(Debug, PartialEq, Eq)]
pub enum CleanupStep {
    /// A mount was unmounted.
    Unmounted(PathBuf),
    /// A file or directory was removed.
    Removed(PathBuf),
    /// The cleanup has ended the server with this process id. If the pod is not retired, none of its volumes was mounted on the
    /// node.
    Ended(u32),
    /// A file, directory or mount stays, for this reason.
    Left(PathBuf, String),
}

/// A step as a line of the report. The second field says whether the cleanup is a dry run.
pub struct CleanupLine<'a>(pub &'a CleanupStep, pub bool);

impl fmt::Display for CleanupLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CleanupLine(CleanupStep::Unmounted(path), false) => write!(f, "unmounted {}", path.display()),
            CleanupLine(CleanupStep::Unmounted(path), true) => write!(f, "would unmount {}", path.display()),
            CleanupLine(CleanupStep::Removed(path), false) => write!(f, "removed {}", path.display()),
            CleanupLine(CleanupStep::Removed(path), true) => write!(f, "would remove {}", path.display()),
            CleanupLine(CleanupStep::Ended(pid), false) => {
                write!(f, "ended the server of a pod whose volumes are all unmounted (pid {pid})")
            }
            CleanupLine(CleanupStep::Ended(pid), true) => {
                write!(f, "would end the server of a pod whose volumes are all unmounted (pid {pid})")
            }
            CleanupLine(CleanupStep::Left(path, reason), false) => write!(f, "left {}: {reason}", path.display()),
            CleanupLine(CleanupStep::Left(path, reason), true) => write!(f, "would leave {}: {reason}", path.display()),
        }
    }
}

/// What a cleanup removes.
enum CleanupScope {
    /// What killed podfs processes of the node have left.
    Node,
    /// What the killed podfs of one pod has left, with the content of its emptyDirs. The field is the pod's directory.
    Content(PathBuf),
    /// Everything of a pod that does not come back. The field is the pod's directory.
    Retirement(PathBuf),
}

impl CleanupScope {
    /// The directory of the only pod.
    fn pod(&self) -> Option<&Path> {
        match self {
            CleanupScope::Node => None,
            CleanupScope::Content(pod) | CleanupScope::Retirement(pod) => Some(pod),
        }
    }

    fn is_retirement(&self) -> bool {
        matches!(self, CleanupScope::Retirement(_))
    }
}

/// A cleanup of this node or of one pod.
pub struct Cleanup<'a> {
    dry_run: bool,
    report: &'a mut dyn FnMut(&CleanupStep),
    /// Mounts of pods that the cleanup leaves alone.
    kept: Vec<PathBuf>,
    /// The directories of pods below which the cleanup leaves all mounts alone.
    kept_pods: Vec<PathBuf>,
    /// The root directory of the pods to clean up.
    root: PathBuf,
    /// Mounts that the cleanup has reported.
    reported: Vec<PathBuf>,
    /// Directories of emptyDirs whose content a dry run would have deleted, with the directories.
    deleted: Vec<PathBuf>,
    scope: CleanupScope,
}

impl<'a> Cleanup<'a> {
    /// Calls `report` after each step. With `dry_run`, the cleanup changes nothing.
    pub fn new(dry_run: bool, report: &'a mut dyn FnMut(&CleanupStep)) -> Self {
        Self {
            dry_run,
            report,
            kept: Vec::new(),
            kept_pods: Vec::new(),
            root: PathBuf::new(),
            reported: Vec::new(),
            deleted: Vec::new(),
            scope: CleanupScope::Node,
        }
    }

    /// Cleans up after the pods of `run_directory`, then unmounts dead mounts below `root_directory` that no pod has recorded.
    ///
    /// # Errors
    /// When the run directory or the mount table cannot be read.
    pub fn clean(mut self, run_directory: &Path, root_directory: &Path) -> io::Result<()> {
        let run_directory = std::path::absolute(run_directory)?;
        self.root = root_directory.to_owned();
        trust::check(&run_directory)?;
        trust::check(root_directory)?;
        let mut entries = match std::fs::read_dir(&run_directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            entries => entries?.filter_map(|entry| Some(entry.ok()?.path())).collect(),
        };
        entries.sort();
        for directory in entries {
            if let Err(error) = PodLockRecord::check_version(&directory) {
                self.leave_pod(&directory, &error.to_string());
                continue;
            }
            match PodLockRecord::read(&directory) {
                Some(record) => drop(self.pod(&directory, &Bounds::new(&directory, root_directory)?, record)),
                None if has_uid(&directory) && path_exists(&directory.join(LOCK)) => {
                    let bounds = Bounds::new(&directory, root_directory)?;
                    self.pod(&directory, &bounds, PodLockRecord::default());
                }
                // The pod's podfs was killed before it wrote the record of the pod, or after it removed the record.
                None if has_uid(&directory) => drop(self.settle(&directory, remove_if_empty(&directory, self.dry_run))),
                None => {}
            }
        }
        self.unknown_mounts(&std::fs::canonicalize(root_directory).unwrap_or_else(|_| root_directory.to_owned()))?;
        if !self.dry_run {
            self.report_devices(local::sweep(root_directory));
        }
        Ok(())
    }

    /// Removes everything of a pod that does not come back: its server, its mounts, the content of its emptyDirs, its
    /// directories as far as they are empty, its run files. Returns whether it removed everything that podfs
    /// made.
    ///
    /// # Errors
    /// When users other than root can change a directory, or the mount table cannot be read.
    pub fn retire(mut self, run_directory: &Path, root_directory: &Path, uid: &PodUid) -> io::Result<bool> {
        let directory = std::path::absolute(run_directory)?.join(uid.as_str());
        trust::check(&directory)?;
        trust::check(root_directory)?;
        let root = std::fs::canonicalize(root_directory).unwrap_or_else(|_| root_directory.to_owned());
        let pod = root.join("pods").join(uid.as_str());
        self.scope = CleanupScope::Retirement(pod.clone());
        self.root = root;
        self.only_pod(&directory, root_directory, &pod, uid)
    }

    /// Cleans up after one pod, and deletes the content of its emptyDirs. Changes nothing while a process serves the pod. Returns
    /// whether it removed everything that podfs made.
    ///
    /// # Errors
    /// When there is nothing of the pod, users other than root can change a directory, or the mount table cannot be read.
    pub fn clean_with_content(mut self, run_directory: &Path, root_directory: &Path, uid: &PodUid) -> io::Result<bool> {
        let directory = std::path::absolute(run_directory)?.join(uid.as_str());
        trust::check(&directory)?;
        trust::check(root_directory)?;
        let root = std::fs::canonicalize(root_directory).unwrap_or_else(|_| root_directory.to_owned());
        let pod = root.join("pods").join(uid.as_str());
        if !path_exists(&directory) && !path_exists(&pod) {
            return Err(io::Error::new(ErrorKind::NotFound, format!("neither it nor {} exists", pod.display())));
        }
        if claim::is_held(&directory) {
            let pid = PodLockRecord::read(&directory).unwrap_or_default().pid;
            self.report_left(&directory, &format!("podfs (pid {pid}) has the pod"));
            return Ok(false);
        }
        let mut volumes = VolumesLock::new(&pod);
        if volumes.lock().is_err() {
            self.report_left(&pod, "a podfs with another --run-dir serves the pod");
            return Ok(false);
        }
        self.scope = CleanupScope::Content(pod.clone());
        self.root = root;
        self.only_pod(&directory, root_directory, &pod, uid)
    }

    /// Leaves a pod whose record this version of podfs cannot use, with all mounts below the pod's directory.
    fn leave_pod(&mut self, directory: &Path, reason: &str) {
        let root = std::fs::canonicalize(&self.root).unwrap_or_else(|_| self.root.clone());
        self.kept_pods.extend(directory.file_name().map(|uid| root.join("pods").join(uid)));
        self.report_left(directory, &format!("podfs cannot use the record of the pod: {reason}"));
    }

    /// Cleans up the only pod of the scope.
    fn only_pod(&mut self, directory: &Path, root_directory: &Path, pod: &Path, uid: &PodUid) -> io::Result<bool> {
        let record = PodLockRecord::read(directory);
        if record.is_some() || path_exists(&directory.join(LOCK)) {
            let bounds = Bounds::new(directory, root_directory)?;
            return Ok(self.pod(directory, &bounds, record.unwrap_or_default()));
        }
        // The node has restarted, or an earlier cleanup was killed before its last step.
        self.block_devices(directory);
        let all = self.unknown_mounts(pod)? && self.contents(pod) && self.drivers(pod);
        let all = self.devices(uid.as_str()) && all;
        if !self.scope.is_retirement() {
            // No record names the directories above the content.
            for above in pod.join(HOMES).ancestors().take(HOMES.split('/').count() + 1) {
                if remove_if_empty(above, self.dry_run) == RemovalOutcome::Removed {
                    (self.report)(&CleanupStep::Removed(above.to_owned()));
                }
            }
        }
        let outcome = remove_if_empty(directory, self.dry_run);
        Ok(self.settle(directory, outcome) && all)
    }

    /// Cleans up one pod. If its lock file has no valid record, `before` is empty, and the cleanup finds only the pod's server, and
    /// mounts below the pod's directory. Returns whether the next podfs of the pod needs none of its run files.
    fn pod(&mut self, directory: &Path, bounds: &Bounds, before: PodLockRecord) -> bool {
        let (claim, mut record) = match PodLock::take_leftovers(directory) {
            Ok(claimed) => claimed,
            Err(PodLockError::Lock { cause, .. }) if cause.kind() == ErrorKind::NotFound => return true,
            Err(error) => {
                self.kept.extend(before.mounts);
                let reason = match error {
                    PodLockError::Taken { pid, .. } => format!("podfs (pid {pid}) has the pod"),
                    other => other.to_string(),
                };
                self.report_left(directory, &reason);
                return false;
            }
        };
        if let Ok(server) = server_socket::connect(directory).map(UnixStream::from) {
            if !self.scope.is_retirement() && !self.is_unmounted(directory, &record) {
                self.kept.extend(record.mounts);
                claim.leave_record();
                self.report_left(directory, "the pod is still served; podfs run of the pod takes it over");
                return false;
            }
            self.end(directory, peer(&server));
        }
        let outside: Vec<_> = bounds.apply(&mut record).into_iter().filter(|path| path_exists(path)).collect();
        outside.iter().for_each(|path| self.report_left(path, &format!("it {OUTSIDE}")));
        if let (Some(cgroup), false) = (&record.cgroup, self.dry_run) {
            // The server has ended, or does so now.
            cgroup::remove_when_empty(cgroup);
            cgroup.parent().into_iter().for_each(cgroup::remove_of_supervisor);
        }
        // `volumes` removes the directories of the block devices.
        self.block_devices(directory);
        let all = directory.file_name().and_then(|uid| uid.to_str()).is_none_or(|uid| self.devices(uid));
        let all = self.volumes(&record) && all && outside.is_empty();
        if all && !self.scope.is_retirement() {
            self.keep_unreadable(directory);
        }
        if all {
            self.run_files(directory, claim, &record)
        } else {
            claim.leave_record()
        }
        all
    }

    /// Whether none of the pod's mounts is in the mount table: neither a recorded one, nor one below the pod's directory if the
    /// lock file has no valid record.
    fn is_unmounted(&self, directory: &Path, record: &PodLockRecord) -> bool {
        let root = std::fs::canonicalize(&self.root).unwrap_or_else(|_| self.root.clone());
        let pod = directory.file_name().map(|uid| root.join("pods").join(uid));
        let pod = pod.filter(|_| PodLockRecord::read(directory).is_none());
        let is_of_pod =
            |at: &PathBuf| record.mounts.contains(at) || pod.as_ref().is_some_and(|pod| at.starts_with(pod));
        mounts().is_ok_and(|table| !table.iter().any(|mounted| is_of_pod(&mounted.at)))
    }

    /// Keeps the content of a lock file that has no valid record: it may name mounts and directories that the cleanup did not find.
    fn keep_unreadable(&mut self, directory: &Path) {
        if PodLockRecord::read(directory).is_some() {
            return;
        }
        let copy = directory.join(UNREADABLE);
        let kept = if self.dry_run { Ok(0) } else { std::fs::copy(directory.join(LOCK), &copy) };
        let reason = match kept {
            Ok(_) => "podfs cannot read this record; unmount and remove the paths in it, then remove it".to_owned(),
            Err(error) => format!("podfs cannot keep the record that it cannot read: {error}"),
        };
        self.report_left(&copy, &reason);
    }

    /// Kills the server with this process id, which listens in the directory.
    fn end(&mut self, directory: &Path, pid: Option<u32>) {
        let (Some(pid), Some(uid)) = (pid, directory.file_name().and_then(|name| name.to_str())) else { return };
        if !self.dry_run {
            kill_server(pid.cast_signed(), uid);
        }
        (self.report)(&CleanupStep::Ended(pid));
    }

    /// Removes the mounts, files and directories of a record. Returns whether the next podfs of the pod needs none of its
    /// run files.
    fn volumes(&mut self, record: &PodLockRecord) -> bool {
        let mut unmounted = Vec::new();
        let mut all = true;
        for path in record.mounts.iter().rev() {
            if self.unmount_all(path) { unmounted.push(path.clone()) } else { all = false }
        }
        if let Some(pod) = self.scope.pod().map(Path::to_owned) {
            let is_unmounted = self.unknown_mounts(&pod).unwrap_or(false) && (all || self.scope.is_retirement());
            all &= is_unmounted && self.contents(&pod);
        }
        let is_pod = |above: &&Path| above.parent().and_then(Path::file_name).is_some_and(|name| name == "pods");
        let made = record.directories.iter().filter_map(|made| made.ancestors().find(is_pod));
        let pods: BTreeSet<&Path> = made.chain(self.scope.pod()).collect();
        for pod in pods.into_iter().map(Path::to_owned).collect::<Vec<_>>() {
            all &= self.drivers(&pod);
        }
        let mut leftovers = PodRemoval::new(&record.directories, &unmounted, self.dry_run);
        for file in &record.files {
            let outcome = leftovers.remove_file(file);
            all &= self.settle(file, outcome);
        }
        for file in &record.written {
            let outcome = leftovers.remove_written(file);
            all &= self.settle(file, outcome);
        }
        let mut in_use: Vec<&Path> = Vec::new();
        for directory in record.directories.iter().rev() {
            if !self.deleted.is_empty() && directory.canonicalize().is_ok_and(|path| self.deleted.contains(&path)) {
                leftovers.expect_removed(directory);
                continue;
            }
            let outcome = leftovers.remove_directory(directory);
            let is_removed = matches!(outcome, RemovalOutcome::Removed | RemovalOutcome::Absent);
            // The report has the reason only for the innermost directory, or for the mount on it. The directories above stay for
            // the same reason.
            let is_reported =
                in_use.iter().any(|inner| inner.starts_with(directory)) || self.reported.contains(directory);
            if is_removed || !is_reported {
                all &= self.settle(directory, outcome);
            }
            if !is_removed {
                in_use.push(directory);
            }
        }
        all
    }

    /// Unmounts all mounts on a recorded path. Returns whether none is left.
    fn unmount_all(&mut self, path: &Path) -> bool {
        let Ok(table) = mounts() else { return false };
        let at = table.iter().filter(|mounted| mounted.at == path);
        for mounted in at.rev() {
            if !self.unmount(mounted, &table) {
                return false;
            }
        }
        true
    }

    /// Unmounts the topmost mount of its path, if its server is dead or the pod is retired. Returns whether it is
    /// unmounted.
    fn unmount(&mut self, mounted: &MountTableEntry, table: &[MountTableEntry]) -> bool {
        let path = &mounted.at;
        self.reported.push(path.clone());
        let reason = match inside(mounted, table) {
            // Its server has been killed.
            _ if self.scope.is_retirement() => None,
            Some(inner) => Some(format!("{} is mounted inside it", inner.display())),
            // A bind mount of a directory of the host has no server.
            None if mounted.fs_type != FS_TYPE => None,
            None => match server_state(path) {
                ServerState::Dead => None,
                ServerState::Alive => Some("a process still answers for it".to_owned()),
                ServerState::Silent => Some("the volume does not answer, and its server may still exist".to_owned()),
            },
        };
        let reason =
            reason.or_else(|| if self.dry_run { None } else { detach(path).err().map(|error| error.to_string()) });
        match &reason {
            None => (self.report)(&CleanupStep::Unmounted(path.clone())),
            Some(reason) => self.report_left(path, reason),
        }
        reason.is_none()
    }

    /// Unmounts dead mounts below `root` that no pod has recorded: their run directory is lost, or a `podfs mount` was
    /// killed. Returns whether none stays below `root`.
    fn unknown_mounts(&mut self, root: &Path) -> io::Result<bool> {
        let table = mounts()?;
        let is_kept = |path: &Path| self.kept_pods.iter().any(|pod| path.starts_with(pod));
        let known = |path: &PathBuf| self.kept.contains(path) || self.reported.contains(path) || is_kept(path);
        let unknown: Vec<_> =
            table.iter().filter(|mounted| mounted.fs_type == FS_TYPE && !known(&mounted.at)).collect();
        let mut all = true;
        for mounted in unknown.into_iter().rev() {
            let is_below = mounted.at.starts_with(root);
            if !is_below && self.scope.pod().is_some() {
                continue;
            }
            let path = &mounted.at;
            match (server_state(path), is_below) {
                (ServerState::Dead, true) => all &= self.unmount(mounted, &table),
                (ServerState::Dead, false) => {
                    self.report_left(
                        path,
                        &format!("no process answers for it; umount -l {} removes it", in_shell(path)),
                    );
                }
                (_, true) if self.scope.pod().is_some() => {
                    self.report_left(
                        path,
                        "a server answers for it, and podfs does not know its supervisor; end that server",
                    );
                    all = false;
                }
                _ => {}
            }
        }
        Ok(all)
    }

    /// Reports the outcome for a path. Returns whether the next podfs does not need its record.
    fn settle(&mut self, path: &Path, outcome: RemovalOutcome) -> bool {
        match outcome {
            RemovalOutcome::Absent => true,
            RemovalOutcome::Removed => {
                (self.report)(&CleanupStep::Removed(path.to_owned()));
                true
            }
            RemovalOutcome::InUse(reason) => {
                self.report_left(path, &reason);
                true
            }
            RemovalOutcome::Kept(reason) => {
                self.report_left(path, &reason);
                false
            }
        }
    }

    fn report_left(&mut self, path: &Path, reason: &str) {
        (self.report)(&CleanupStep::Left(path.to_owned(), reason.to_owned()));
    }
}

/// A path as an argument in a shell.
fn in_shell(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

/// A mount inside `mount` that a lazy unmount of `mount` would remove from the node. Inside a bind mount, the mounts of its
/// source do not count: they are mounted at the source, too.
fn inside<'a>(mount: &MountTableEntry, table: &'a [MountTableEntry]) -> Option<&'a Path> {
    let is_inside = |other: &MountTableEntry| other.at != mount.at && other.at.starts_with(&mount.at);
    let is_elsewhere = |inner: &MountTableEntry| {
        let mut outside = table.iter().filter(|other| !other.at.starts_with(&mount.at));
        mount.fs_type != FS_TYPE && outside.any(|other| other.device == inner.device && other.root == inner.root)
    };
    table.iter().find(|other| is_inside(other) && !is_elsewhere(other)).map(|other| other.at.as_path())
}

fn holds_only(directory: &Path, these: &[PathBuf]) -> bool {
    let entries = directory.read_dir();
    entries.is_ok_and(|mut entries| entries.all(|entry| entry.is_ok_and(|entry| these.contains(&entry.path()))))
}

fn has_uid(directory: &Path) -> bool {
    let name = directory.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| Uuid::try_parse(name).is_ok())
}
