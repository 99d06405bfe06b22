//! Which recorded paths podfs unmounts and removes. A lock file records the paths that an earlier podfs has made, so
//! that the next podfs removes them. A process that can write such a file could make podfs unmount and remove any path.
//! So podfs touches only paths in the pod's run directory and below podfs's root directory, and the cgroup of the pod's
//! server.

use std::ffi::OsStr;
use std::io;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, statfs, statx};

use super::record::PodLockRecord;

/// Why podfs leaves a recorded path alone.
pub const OUTSIDE: &str = "is neither below the root directory nor in the pod's run directory";

/// The directories in which podfs touches recorded paths.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// The pod's run directory.
    run: PathBuf,
    /// The root directory, as podfs was given it; and without symbolic links, if that is another path.
    roots: Vec<PathBuf>,
}

impl Bounds {
    /// The bounds of the pod with this run directory.
    ///
    /// # Errors
    /// When a path is relative, and this process has no working directory.
    pub fn new(run: &Path, root: &Path) -> io::Result<Self> {
        let root = std::path::absolute(root)?;
        let resolved = std::fs::canonicalize(&root);
        let mut roots = vec![root];
        roots.extend(resolved.ok().filter(|resolved| *resolved != roots[0]));
        Ok(Self { run: std::path::absolute(run)?, roots })
    }

    /// Removes the paths outside these bounds from `record`, and returns them.
    pub fn apply(&self, record: &mut PodLockRecord) -> Vec<PathBuf> {
        let mut outside = Vec::new();
        let mut keep = |paths: &mut Vec<PathBuf>, is_inside: &dyn Fn(&Path) -> bool| {
            paths.retain(|path| {
                let stays = is_plain(path) && is_inside(path);
                if !stays && !outside.contains(path) {
                    outside.push(path.clone());
                }
                stays
            });
        };
        // podfs may also have made directories above the run directory and the root directory. It removes only empty
        // ones.
        keep(&mut record.run, &|path| self.run.starts_with(path));
        keep(&mut record.directories, &|path| {
            self.roots.iter().any(|root| path.starts_with(root) || root.starts_with(path))
        });
        let is_below = |path: &Path| self.roots.iter().any(|root| path.starts_with(root) && path != root);
        keep(&mut record.files, &is_below);
        keep(&mut record.written, &is_below);
        keep(&mut record.mounts, &is_below);
        if let Some(cgroup) = record.cgroup.take_if(|cgroup| !self.is_cgroup_of_server(cgroup))
            && path_exists(&cgroup)
        {
            outside.push(cgroup);
        }
        outside
    }

    /// Whether this is a directory of the cgroup file system, with the name of the cgroup of the pod's server.
    fn is_cgroup_of_server(&self, path: &Path) -> bool {
        let uid = path.file_name().and_then(OsStr::to_str).and_then(|name| name.strip_prefix("podfs-"));
        let is_named = is_plain(path) && uid.is_some() && uid == self.run.file_name().and_then(OsStr::to_str);
        // `CGROUP2_SUPER_MAGIC`
        is_named && statfs(path).is_ok_and(|found| found.f_type == 0x6367_7270)
    }
}

/// Whether a path exists. With `AT_STATX_DONT_SYNC`, the kernel does not ask the server of a file system that is
/// mounted there, which may not answer.
pub fn path_exists(path: &Path) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    statx(CWD, path, flags, StatxFlags::empty()).is_ok()
}

/// Whether a path is absolute and has no `..`.
fn is_plain(path: &Path) -> bool {
    path.is_absolute() && !path.components().any(|part| part == Component::ParentDir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_paths_outside_the_directories_are_ignored() {
        let paths = |all: &[&str]| all.iter().map(PathBuf::from).collect::<Vec<_>>();
        let bounds = Bounds::new(Path::new("/none/run/u1"), Path::new("/none/root")).expect("absolute paths");
        let mut record = PodLockRecord {
            run: paths(&["/none", "/none/run", "/none/run/u1", "/none/run/u2", "/etc"]),
            directories: paths(&["/none/root", "/none/root/pods", "/none/rootkit", "/none/root/../etc", "etc"]),
            files: paths(&["/none/root/pods/file", "/etc/passwd"]),
            written: paths(&["/none/root/pods/etc-hosts", "/etc/hosts"]),
            mounts: paths(&["/none/root/pods/volume", "/none/root", "/home", "/none/root/pods/../../home"]),
            ..PodLockRecord::default()
        };
        let outside = bounds.apply(&mut record);
        assert_eq!(record.run, paths(&["/none", "/none/run", "/none/run/u1"]));
        assert_eq!(record.directories, paths(&["/none/root", "/none/root/pods"]));
        assert_eq!(record.files, paths(&["/none/root/pods/file"]));
        assert_eq!(record.written, paths(&["/none/root/pods/etc-hosts"]));
        assert_eq!(record.mounts, paths(&["/none/root/pods/volume"]));
        let left = [
            "/none/run/u2",
            "/etc",
            "/none/rootkit",
            "/none/root/../etc",
            "etc",
            "/etc/passwd",
            "/etc/hosts",
            "/none/root",
            "/home",
            "/none/root/pods/../../home",
        ];
        assert_eq!(outside, paths(&left));
    }
}
