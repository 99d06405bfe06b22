//! The cgroup of a pod's server, which accounts for the server's memory alone, and can limit it.
//!
//! podfs uses cgroups of version 2 only. It does not touch the hierarchies of version 1.
//!
//! 1. The server's cgroup is `podfs-<pod uid>`. The supervisor makes it in the supervisor's own cgroup if it may divide
//!    that: systemd has delegated the cgroup (`Delegate=yes`), or systemd does not manage it, as in a container.
//! 2. A server starts in its cgroup, so the kernel accounts all of the server's memory to that cgroup. A keeper is a
//!    child of its server, and stays in the cgroup.
//! 3. A limit needs the memory controller. The kernel enables the controller for children of a cgroup only if that
//!    cgroup has no processes (`cgroups(7)`). So for a limit, and only then, the supervisor moves to the cgroup
//!    `podfs-supervisors` beside the servers' cgroups. When a supervisor of a unit has ended, systemd disables the
//!    controller, because it starts the unit's next supervisor in the parent cgroup. That supervisor enables the
//!    controller again, but the kernel does not account for memory that the server took before.
//! 4. The kernel never kills all processes of the cgroup together (`memory.oom.group` is 0): it kills a server that
//!    takes too much memory, but not the server's keeper.
//! 5. The supervisor removes the cgroup when the server and its keeper have ended. After a crash, the pod's next podfs
//!    removes it: the lock file has the path of the cgroup. An adopted server stays in its cgroup.
//!
//! Without such a cgroup everything works, and the server is in the supervisor's cgroup.
//!
//! A supervisor that `podfs node` starts without systemd has a cgroup, too: `podfs-pod-<pod uid>`, beside the daemon's
//! cgroup where possible. So killing the daemon's cgroup does not end the volumes. If the daemon is in a cgroup that
//! the kubelet kills, the supervisor's cgroup is above the cgroups of the kubelet.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use podfs_fuse::mount::table::mounts;
use rustix::fs::getxattr;
use tracing::{debug, info, warn};

use crate::manifest::pod::PodUid;

/// The name of the cgroup to which supervisors move whose own cgroup must have no processes.
const SUPERVISORS: &str = "podfs-supervisors";
/// The prefix of the names of supervisors' cgroups.
const OF_SUPERVISOR: &str = "podfs-pod-";
/// The file that lists the processes of a cgroup; writing a pid to it moves that process.
const PROCESSES: &str = "cgroup.procs";
/// How long the processes of a cgroup that were killed may take to end. One that waits for a source that does not answer takes longer, and its cgroup
/// stays.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// How long podfs waits for processes that no signal has ended. A pod of the same uid below another run directory has the same cgroup.
const GRACE: Duration = Duration::from_millis(500);
/// How long a process may take to exit that the kernel no longer lists.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);
const REMOVAL_PAUSE: Duration = Duration::from_millis(2);

/// Why podfs cannot make or use a cgroup.
#[derive(Debug, thiserror::Error)]
enum CgroupError {
    #[error("cannot make {}: {cause}", path.display())]
    Make {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("cannot use {}: {cause}", path.display())]
    Use {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

impl From<CgroupError> for io::Error {
    fn from(error: CgroupError) -> io::Error {
        io::Error::other(error)
    }
}

/// The cgroup of a pod's server. Dropping it waits until the processes in it have ended, and removes it.
#[derive(Debug)]
pub(in crate::supervisor) struct Cgroup {
    path: PathBuf,
    directory: File,
}

impl Cgroup {
    /// A cgroup for the pod's server, with a limit of `memory` bytes. `removal_error` is the cgroup that an earlier podfs made
    /// for the pod: it is used again if it has processes, and removed otherwise. `None` if podfs can make no cgroup.
    pub(in crate::supervisor) fn of_server(uid: &PodUid, memory: Option<u64>, left: Option<&Path>) -> Option<Cgroup> {
        let made = match left.filter(|left| has_processes(left)) {
            Some(left) => Self::open(left),
            None => {
                left.iter().for_each(|left| remove(left));
                own().and_then(|own| Self::make(&own, uid))
            }
        };
        match (&made, memory) {
            (Ok(cgroup), Some(bytes)) => {
                if let Err(error) = cgroup.limit_memory(&bytes.to_string()) {
                    warn!("podfs cannot limit the memory of the server: {error}");
                }
            }
            // An earlier podfs may have had a limit.
            (Ok(cgroup), None) => drop(fs::write(cgroup.path.join("memory.max"), "max")),
            (Err(error), Some(_)) => warn!("podfs cannot limit the memory of the server: {error}"),
            (Err(error), None) => info!("the server has no cgroup of its own: {error}"),
        }
        made.inspect(|cgroup| debug!("the server's cgroup is {}", cgroup.path.display())).ok()
    }

    fn make(parent: &Path, uid: &PodUid) -> io::Result<Cgroup> {
        let path = parent.join(format!("podfs-{}", uid.as_str()));
        match fs::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(CgroupError::Make { path, cause: error }.into())
            }
            _ => Self::open(&path),
        }
    }

    fn open(path: &Path) -> io::Result<Cgroup> {
        let directory = File::open(path).map_err(|cause| CgroupError::Use { path: path.to_owned(), cause })?;
        Ok(Cgroup { path: path.to_owned(), directory })
    }

    /// The path of the cgroup.
    pub(in crate::supervisor) fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of the cgroup, to start processes in the cgroup.
    pub(in crate::supervisor) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    fn limit_memory(&self, bytes: &str) -> io::Result<()> {
        let limit = self.path.join("memory.max");
        if !limit.exists() {
            enable_memory(self.path.parent().unwrap_or(&self.path))?;
        }
        fs::write(limit, bytes)?;
        // Only kernels before 4.19 have no such file.
        let _ = fs::write(self.path.join("memory.oom.group"), "0");
        Ok(())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        remove_when_empty(&self.path);
    }
}

/// Makes the cgroup of a supervisor that the daemon starts. The cgroup stays when the daemon ends.
pub(crate) fn of_supervisor(uid: &PodUid) -> io::Result<OwnedFd> {
    let path = path_of_supervisor(uid)?;
    match fs::create_dir(&path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(CgroupError::Make { path, cause: error }.into())
        }
        _ => Ok(File::open(&path)?.into()),
    }
}

/// Removes the cgroup that [`of_supervisor`] makes, when no process is in it.
pub(crate) fn remove_named_of_supervisor(uid: &PodUid) {
    if let Ok(path) = path_of_supervisor(uid) {
        remove_of_supervisor(&path);
    }
}

/// The path of the cgroup of a supervisor that the daemon starts.
fn path_of_supervisor(uid: &PodUid) -> io::Result<PathBuf> {
    let name = format!("{OF_SUPERVISOR}{}", uid.as_str());
    if let Some(parent) = outside_of_kubelet()? {
        return Ok(parent.join(name));
    }
    let own = own()?;
    let is_outermost = visible(&own_path()?)?.is_none_or(|(top, path)| path == top);
    // systemd has delegated the cgroup of the unit, and not the cgroup above.
    let is_unit = own.extension().is_some_and(|kind| kind == "service" || kind == "scope");
    let parent = own.parent().filter(|_| !is_outermost && !is_unit).unwrap_or(&own);
    Ok(parent.join(name))
}

/// If this process is in a cgroup that the kubelet kills: the nearest cgroup above the cgroups of the kubelet.
fn outside_of_kubelet() -> io::Result<Option<PathBuf>> {
    let own = own_path()?;
    let Some((top, _)) = visible(&own)? else { return Ok(None) };
    let mut parts = own.strip_prefix("/").unwrap_or(&own).iter();
    let is_kubelets = |part: &std::ffi::OsStr| part.to_str().is_some_and(belongs_to_kubelet);
    let above: PathBuf = parts.by_ref().take_while(|part| !is_kubelets(part)).collect();
    let is_killed = own.iter().any(is_kubelets);
    Ok(is_killed.then(|| top.join(above)))
}

/// The cgroup that a daemon made for the supervisor of this pod. `pid` is a supervisor or a server of the pod: its
/// cgroup is that one, or is in that one.
pub(crate) fn found_of_supervisor(uid: &PodUid, pid: u32) -> Option<PathBuf> {
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let own = PathBuf::from(cgroups.lines().find_map(|line| line.strip_prefix("0::/"))?);
    let name = format!("{OF_SUPERVISOR}{}", uid.as_str());
    let own = own.ancestors().find(|path| path.ends_with(&name))?;
    let mounts = mounts().ok()?.into_iter().filter(|mounted| mounted.fs_type == "cgroup2");
    mounts.map(|mounted| mounted.at.join(own)).find(|path| path.is_dir())
}

/// Removes the cgroup of a supervisor that has ended with its server, if a daemon made the cgroup. Waits for the server
/// and its keeper, which may end a moment after the supervisor.
pub(crate) fn remove_of_supervisor(cgroup: &Path) {
    let name = cgroup.file_name().and_then(|name| name.to_str());
    if let Some(uid) = name.and_then(|name| name.strip_prefix(OF_SUPERVISOR)) {
        [SUPERVISORS, &format!("podfs-{uid}")].iter().for_each(|below| remove_when_empty(&cgroup.join(below)));
        remove_when_empty(cgroup);
    }
}

/// Warns if podfs runs in a cgroup that the kubelet kills.
pub(in crate::supervisor) fn warn_of_kubelet() {
    let Ok(path) = own_path() else { return };
    if path.iter().filter_map(|part| part.to_str()).any(belongs_to_kubelet) {
        warn!(
            "podfs runs in the cgroup {}, so it ends when Kubernetes ends what is there, and its volumes with it; start it \
             as a unit of its own (systemd-run podfs run …)",
            path.display()
        );
    }
}

/// Warns if the supervisors that this daemon starts stay in its container's cgroups of version 1. podfs moves them only in the hierarchy
/// of version 2.
pub(crate) fn warn_of_version_1() {
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let kept = of_version_1(&cgroups);
    if !kept.is_empty() {
        warn!(
            "this node has cgroups of version 1, and no systemd: the supervisors and servers of pods stay in those of podfs' container \
             ({}), so they end with the container, and count against its limits; boot the node with cgroups of version 2 alone \
             (systemd.unified_cgroup_hierarchy=1, or cgroup_no_v1=all), or run podfs node outside of a container",
            kept.join(", ")
        );
    }
}

/// The cgroups of version 1 that a process is in, each with its controllers, as in `/proc/PID/cgroup`. Leaves out root cgroups.
fn of_version_1(cgroups: &str) -> Vec<&str> {
    let groups = cgroups.lines().filter_map(|line| line.split_once(':')).filter(|(number, _)| *number != "0");
    let is_kept = |group: &&str| {
        let of_controller = |(controllers, path): (&str, &str)| !controllers.starts_with("name=") && path != "/";
        group.split_once(':').is_some_and(of_controller)
    };
    groups.map(|(_, group)| group).filter(is_kept).collect()
}

fn belongs_to_kubelet(part: &str) -> bool {
    part.starts_with("kubepods") || part.starts_with("kubelet")
}

/// The cgroup to divide: the cgroup of this process; or, if this process has moved to [`SUPERVISORS`], the cgroup above
/// that.
fn own() -> io::Result<PathBuf> {
    let own = own_path()?;
    let refused = |problem: &str| Err(io::Error::other(format!("podfs' cgroup {} {problem}", own.display())));
    let Some((top, path)) = visible(&own)? else { return refused("is not to be seen below a cgroup2 mount") };
    if systemd_keeps(&top, &path) {
        return refused("is systemd's; give podfs' unit Delegate=yes");
    }
    match path.parent() {
        Some(parent) if path.ends_with(SUPERVISORS) => Ok(parent.to_owned()),
        _ => Ok(path),
    }
}

/// The cgroup of this process, from the root of its cgroup namespace (`cgroups(7)`).
fn own_path() -> io::Result<PathBuf> {
    let cgroups = fs::read_to_string("/proc/self/cgroup")?;
    let path = cgroups.lines().find_map(|line| line.strip_prefix("0::"));
    path.map(PathBuf::from).ok_or_else(|| io::Error::other("there are no cgroups of version 2"))
}

/// The mount point of the cgroup file system that shows the cgroup of this process, and the whole path of that cgroup.
fn visible(own: &Path) -> io::Result<Option<(PathBuf, PathBuf)>> {
    let below = own.strip_prefix("/").unwrap_or(own);
    let mounts = mounts()?.into_iter().filter(|mounted| mounted.fs_type == "cgroup2");
    let mut paths = mounts.map(|mounted| (mounted.at.join(below), mounted.at));
    // The mount may have another root than the cgroup namespace. Then the path leads to a cgroup of other processes.
    let is_own = |path: &Path| listed(path).is_ok_and(|pids| pids.contains(&std::process::id()));
    Ok(paths.find(|(path, _)| is_own(path)).map(|(path, top)| (top, path)))
}

/// Whether systemd has made the cgroup, or one above it, for a unit, and has not delegated that.
fn systemd_keeps(top: &Path, path: &Path) -> bool {
    let is_unit = |path: &&Path| path.extension().is_some_and(|kind| kind == "service" || kind == "scope");
    let below = path.ancestors().take_while(|ancestor| *ancestor != top);
    let Some(unit) = below.into_iter().find(is_unit) else { return false };
    let delegated = |name: &str| {
        let mut value = [0; 8];
        getxattr(unit, name, &mut value[..]).is_ok_and(|length| value[..length].starts_with(b"1"))
    };
    !delegated("trusted.delegate") && !delegated("user.delegate")
}

/// Enables the memory controller for the children of a cgroup. If the cgroup has processes, moves this process out of
/// it first.
fn enable_memory(parent: &Path) -> io::Result<()> {
    let available = fs::read_to_string(parent.join("cgroup.controllers"))?;
    if !available.split_whitespace().any(|controller| controller == "memory") {
        return Err(io::Error::other(format!("{} has no memory controller", parent.display())));
    }
    let enable = || fs::write(parent.join("cgroup.subtree_control"), "+memory");
    match enable() {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
        enabled => return enabled,
    }
    let supervisors = parent.join(SUPERVISORS);
    match fs::create_dir(&supervisors) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => fs::write(supervisors.join(PROCESSES), "0")?,
    }
    enable().map_err(|error| match error.kind() {
        io::ErrorKind::ResourceBusy => {
            io::Error::other(format!("others than podfs are in {}, so it cannot be divided", parent.display()))
        }
        _ => error,
    })
}

/// The ids of the processes in a cgroup.
fn listed(cgroup: &Path) -> io::Result<Vec<u32>> {
    let pids = fs::read_to_string(cgroup.join(PROCESSES))?;
    Ok(pids.lines().filter_map(|pid| pid.parse().ok()).collect())
}

fn has_processes(cgroup: &Path) -> bool {
    listed(cgroup).is_ok_and(|pids| !pids.is_empty())
}

/// Waits until all processes of a cgroup have ended, such as the keeper of a killed server, and removes it. Over io_uring, a killed
/// process ends late: the kernel first ends its requests.
pub(crate) fn remove_when_empty(cgroup: &Path) {
    let began = Instant::now();
    remove_while(cgroup, || began.elapsed() < GRACE || began.elapsed() < END_TIMEOUT && all_end(cgroup));
}

/// Removes a cgroup, unless a process is in it.
pub(crate) fn remove(cgroup: &Path) {
    let deadline = Instant::now() + EXIT_TIMEOUT;
    // The kernel no longer lists a process that begins to exit, but the process stays in the cgroup until it has exited.
    remove_while(cgroup, || !has_processes(cgroup) && Instant::now() < deadline);
}

/// Whether each process of a cgroup exits, or was killed and will.
fn all_end(cgroup: &Path) -> bool {
    // A process without a status has ended meanwhile.
    let ends = |pid: u32| fs::read_to_string(format!("/proc/{pid}/status")).map_or(true, |status| ends(&status));
    listed(cgroup).unwrap_or_default().into_iter().all(ends)
}

/// Whether the process with this `/proc/PID/status` exits, or has a pending SIGKILL.
fn ends(status: &str) -> bool {
    const KILL: u64 = 1 << (libc::SIGKILL - 1);
    let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let is_killed =
        |key: &str| value(key).and_then(|set| u64::from_str_radix(set, 16).ok()).is_some_and(|set| set & KILL != 0);
    value("State:").is_some_and(|state| state.starts_with(['Z', 'X'])) || is_killed("SigPnd:") || is_killed("ShdPnd:")
}

/// Tries to remove a cgroup, as long as a process is in it and `tries_again` says so.
fn remove_while(cgroup: &Path, tries_again: impl Fn() -> bool) {
    loop {
        match fs::remove_dir(cgroup) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && tries_again() => {
                thread::sleep(REMOVAL_PAUSE);
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return debug!("the cgroup {} stays: {error}", cgroup.display());
            }
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_process_ends_and_another_one_does_not() {
        let status = |state: &str, shared: &str| {
            format!("Name:\tx\nState:\t{state}\nSigPnd:\t0000000000000000\nShdPnd:\t{shared}\n")
        };
        assert!(ends(&status("D (disk sleep)", "0000000000000100")));
        assert!(ends(&status("Z (zombie)", "0000000000000000")));
        assert!(!ends(&status("S (sleeping)", "0000000000004000")));
    }

    #[test]
    fn cgroups_of_version_1_are_those_of_controllers() {
        let hybrid = "9:name=systemd:/kubepods/pod1\n8:pids:/kubepods/pod1\n4:memory:/\n0::/kubepods/pod1\n";
        assert_eq!(of_version_1(hybrid), ["pids:/kubepods/pod1"]);
        assert_eq!(of_version_1("0::/kubepods/pod1\n"), Vec::<&str>::new());
    }

    #[test]
    fn cgroups_of_the_kubelet_are_known_by_their_names() {
        // FU-16
        for path in
            ["/kubepods.slice/kubepods-pod1.slice", "/kubelet.slice", "/system.slice/kubelet.service", "/kubepods/pod1"]
        {
            assert!(Path::new(path).iter().filter_map(|part| part.to_str()).any(belongs_to_kubelet), "{path}");
        }
        assert!(!["/", "system.slice", "podfs.service"].into_iter().any(belongs_to_kubelet));
    }

    #[test]
    fn a_unit_that_systemd_has_not_delegated_is_not_divided() {
        let top = tempfile::tempdir().expect("a directory");
        let service = top.path().join("system.slice/podfs.service");
        fs::create_dir_all(service.join("below")).expect("directories");
        assert!(systemd_keeps(top.path(), &service));
        assert!(systemd_keeps(top.path(), &service.join("below")));
        assert!(!systemd_keeps(top.path(), &top.path().join("system.slice")), "a slice is no unit with processes");
        assert!(!systemd_keeps(top.path(), top.path()));
        let set = rustix::fs::setxattr(&service, "trusted.delegate", b"1", rustix::fs::XattrFlags::empty());
        set.expect("root may");
        assert!(!systemd_keeps(top.path(), &service));
        assert!(!systemd_keeps(top.path(), &service.join("below")));
    }
}
