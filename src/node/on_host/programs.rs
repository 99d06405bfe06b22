//! The copies of podfs on the node, which the daemon and the supervisors execute.
//!
//! Each copy is a directory `VERSION-DIGEST` with `podfs`, `podfs-supervisor` and `podfs-fuse`, which never changes: podfs makes it under another name
//! and renames it. The link `current` leads to the last installed one; `podfs upgrade` uses it. podfs removes a copy when no
//! process runs a program of it. Supervisor and server end together only with the pod, so a copy stays while a pod uses it.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use podfs_fuse::program;
use ring::digest::{Context, SHA256};

use crate::supervisor::installed::{CURRENT, SUPERVISOR, supervisor_program};
use crate::supervisor::server::program::ServerProgram;

/// The prefix of an incomplete copy; the id of the process that makes it follows.
const NEW: &str = ".new-";
/// How many bytes of the digest distinguish builds of one version.
const DIGEST: usize = 6;

/// The programs of this podfs.
pub(super) struct Programs {
    podfs: File,
    supervisor: File,
    server: File,
    name: String,
}

impl Programs {
    /// The programs that this process runs and would start.
    ///
    /// # Errors
    /// When they cannot be found or read.
    pub(super) fn own() -> io::Result<Programs> {
        let server = ServerProgram::find().map_err(io::Error::other)?;
        let supervisor = supervisor_program().map_err(io::Error::other)?;
        let (mut podfs, mut server) = (File::open("/proc/self/exe")?, File::open(server.executable())?);
        let mut supervisor = File::open(supervisor)?;
        let digest = digest([&mut podfs, &mut supervisor, &mut server])?;
        Ok(Programs { podfs, supervisor, server, name: format!("{}-{digest}", program::version()) })
    }

    /// Copies the programs into the directory, unless it has them. Returns the path of podfs.
    ///
    /// # Errors
    /// When the directory cannot be written to.
    pub(super) fn install(&self, directory: &Path) -> io::Result<PathBuf> {
        DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
        let copy = directory.join(&self.name);
        if !copy.is_dir() {
            let new = directory.join(format!("{NEW}{}", std::process::id()));
            let made = self.copy(&new).and_then(|()| fs::rename(&new, &copy));
            if let Err(error) = made {
                let _ = fs::remove_dir_all(&new);
                // Another container has just installed the same programs.
                if !copy.is_dir() {
                    return Err(error);
                }
            }
        }
        let current = directory.join(CURRENT);
        // A restart of the container needs no space on a full disk.
        if !fs::read_link(&current).is_ok_and(|target| target == Path::new(&self.name)) {
            let link = directory.join(format!("{NEW}{}-link", std::process::id()));
            let _ = fs::remove_file(&link);
            symlink(&self.name, &link)?;
            fs::rename(&link, current)?;
        }
        Ok(copy.join("podfs"))
    }

    fn copy(&self, directory: &Path) -> io::Result<()> {
        let _left = fs::remove_dir_all(directory);
        DirBuilder::new().mode(0o755).create(directory)?;
        for (program, name) in [(&self.podfs, "podfs"), (&self.supervisor, SUPERVISOR), (&self.server, program::NAME)] {
            let mut program = program.try_clone()?;
            program.seek(SeekFrom::Start(0))?;
            let mut copy = OpenOptions::new().write(true).create_new(true).mode(0o700).open(directory.join(name))?;
            io::copy(&mut program, &mut copy)?;
            copy.set_permissions(Permissions::from_mode(0o755))?;
            copy.sync_all()?;
        }
        File::open(directory)?.sync_all()
    }
}

fn digest(files: [&mut File; 3]) -> io::Result<String> {
    let mut context = Context::new(&SHA256);
    let mut buffer = vec![0; 1 << 16];
    for file in files {
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                length => context.update(&buffer[..length]),
            }
        }
    }
    Ok(context.finish().as_ref().iter().take(DIGEST).map(|byte| format!("{byte:02x}")).collect())
}

/// Removes the copies that no process runs, except the one with `podfs`. Returns the removed ones.
///
/// # Errors
/// When the directory or the processes cannot be read.
pub(super) fn remove_unused(directory: &Path, podfs: &Path) -> io::Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    // The copies are listed before the processes, so a copy that another process installs meanwhile is not in the list.
    let entries: Vec<_> = fs::read_dir(directory)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    let running = running()?;
    for path in entries {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_used = match name.strip_prefix(NEW) {
            Some(pid) => Path::new("/proc").join(pid.split('-').next().unwrap_or_default()).exists(),
            None => podfs.starts_with(&path) || running.iter().any(|program| program.starts_with(&path)),
        };
        if is_used || name == CURRENT {
            continue;
        }
        let gone = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        match gone {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => removed.push(path),
        }
    }
    Ok(removed)
}

/// The programs of all processes, as paths of the node.
fn running() -> io::Result<BTreeSet<PathBuf>> {
    let processes = fs::read_dir("/proc")?.filter_map(Result::ok);
    Ok(processes.filter_map(|process| fs::read_link(process.path().join("exe")).ok()).collect())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_copy_is_whole_is_made_once_and_goes_when_no_process_runs_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = directory.path();
        let program = |name: &str| File::open(name).expect("a program");
        let (podfs, supervisor, server) = (program("/bin/sleep"), program("/bin/false"), program("/bin/true"));
        let mut programs = Programs { podfs, supervisor, server, name: "1-a".to_owned() };
        let first = programs.install(at).expect("installed");
        assert_eq!(first, at.join("1-a/podfs"));
        assert_eq!(fs::read(&first).expect("a copy"), fs::read("/bin/sleep").expect("a program"));
        assert_eq!(fs::metadata(at.join("1-a/podfs-fuse")).expect("a copy").permissions().mode() & 0o7777, 0o755);
        let mut user = Command::new(&first).arg("60").stdin(Stdio::null()).spawn().expect("it runs");
        programs.name = "2-b".to_owned();
        let second = programs.install(at).expect("installed");
        assert_eq!(fs::read_link(at.join(CURRENT)).expect("a link"), Path::new("2-b"));
        // Left by a container that was killed while it copied; no process has this number.
        fs::create_dir(at.join(".new-999999999")).expect("a directory");
        let removed = remove_unused(at, &second).expect("looked");
        assert_eq!(removed, [at.join(".new-999999999")], "a process runs the other one");
        user.kill().expect("killed");
        user.wait().expect("it ends");
        assert_eq!(remove_unused(at, &second).expect("looked"), [at.join("1-a")]);
        assert_eq!(programs.install(at).expect("it is there"), second);
        assert_eq!(fs::read_dir(at).expect("a directory").count(), 2, "the copy and the link");
    }
}
