//! The kernel's NFS client: exports that podfs mounts itself, without mount.nfs. It attaches the mounts nowhere.
//!
//! If the NFS server does not answer, the system call that mounts waits in the kernel for minutes, and only the end of the process
//! ends the call. So a child process makes the mount ([`mounter`]):
//!
//! 1. The supervisor starts this program once more, with a socket as its standard input, and sends the export and its options.
//! 2. The child answers with an error, or with the descriptor of the mount (`SCM_RIGHTS`). The mount is attached nowhere; it
//!    lives as long as that descriptor is open in any process.
//! 3. After `DEADLINE` the supervisor kills the child. Only a thread for this purpose waits for the child's end. The kernel kills
//!    the child when the thread that has started it ends, or the whole supervisor.
//!
//! A mount that failed leaves nothing behind, so podfs can try it again from the start. Mounts of one export with the same options
//! share one superblock, unless they have the option `nosharecache`.

pub mod mounter;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

use podfs_fuse::protocol::{receive, send};
use podfs_nfs::ExportAddress;
use rustix::mount::{FsOpenFlags, fsopen};
use serde::{Deserialize, Serialize};

use super::error::KernelNfsError;
use super::{HostError, HostSource};
use crate::volume::nfs_options::NfsVersion;
use crate::volume::{Nfs, NfsOptions};

/// The subcommand of the child process that mounts.
pub const SUBCOMMAND: &str = "mount-nfs";

/// The time limit of a mount, with the attempts with all versions of NFS and all addresses of the server.
const DEADLINE: Duration = Duration::from_secs(30);

/// Whether this kernel has an NFS client. The kernel loads the module if there is one, and sends nothing over the network.
pub fn is_available() -> bool {
    fsopen("nfs", FsOpenFlags::FSOPEN_CLOEXEC).is_ok()
}

/// An export to mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelMount {
    /// The export.
    #[serde(flatten)]
    pub address: ExportAddress,
    /// The versions of NFS to try, one after the other, in the kernel's words.
    pub versions: Vec<String>,
    /// The NFS server's port, if the options name it.
    pub port: Option<u16>,
    /// The host of the MOUNT service, if it is another host than the NFS server.
    pub mount_host: Option<String>,
    /// Other options for the kernel's client, in the words of nfs(5).
    pub words: Vec<String>,
    /// The mount is read-only.
    pub read_only: bool,
    /// Setuid bits have no effect: programs run with the ids of their callers.
    pub no_suid: bool,
    /// Device files have no effect.
    pub no_dev: bool,
    /// The kernel executes no program of the mount.
    pub no_exec: bool,
}

impl KernelMount {
    /// The export of a volume.
    pub fn new(source: &Nfs, options: &NfsOptions, read_only: bool) -> Self {
        let versions: &[&str] = match options.version {
            Some(NfsVersion::V3) => &["3"],
            Some(NfsVersion::V4(Some(0))) => &["4.0"],
            Some(NfsVersion::V4(Some(1))) => &["4.1"],
            Some(NfsVersion::V4(Some(_))) => &["4.2"],
            Some(NfsVersion::V4(None)) => &["4.2", "4.1", "4.0"],
            None => &["4.2", "4.1", "4.0", "3"],
        };
        Self {
            address: source.address.clone(),
            versions: versions.iter().map(|version| (*version).to_owned()).collect(),
            port: options.port,
            mount_host: options.mount_host.clone(),
            words: options.words.iter().filter(|word| is_for_the_kernel(word)).cloned().collect(),
            read_only: read_only || options.read_only,
            no_suid: options.no_suid,
            no_dev: options.no_dev,
            no_exec: options.no_exec,
        }
    }

    /// Whether the mount options have this option, with a value.
    fn has(&self, option: &str) -> bool {
        self.words.iter().any(|word| word.split_once('=').is_some_and(|(name, _)| name == option))
    }

    /// Whether the client may use Kerberos.
    fn is_with_kerberos(&self) -> bool {
        let flavors = self.words.iter().filter_map(|word| word.strip_prefix("sec="));
        flavors.flat_map(|flavors| flavors.split(':')).any(|flavor| flavor.starts_with("krb5"))
    }

    /// Whether the client sends everything through TLS.
    fn is_with_tls(&self) -> bool {
        self.words.iter().any(|word| word == "xprtsec=tls" || word == "xprtsec=mtls")
    }
}

/// Whether podfs passes an option to the kernel as it is. It does not pass the options for the version and for the host of the
/// MOUNT service, because it chooses the version and resolves the host itself. Nor does it pass options that only mount.nfs knows.
fn is_for_the_kernel(word: &str) -> bool {
    let name = word.split('=').next().unwrap_or(word);
    let for_version = ["nfsvers", "vers", "minorversion", "v3", "v4", "v4.0", "v4.1", "v4.2"];
    let not_for_kernel = ["mounthost", "mountaddr", "nodirsync", "retry", "bg", "fg"];
    !for_version.contains(&name) && !not_for_kernel.contains(&name)
}

/// Mounts an export. The mount is attached nowhere, and the kernel drops it with the last descriptor of the source.
///
/// # Errors
/// When podfs cannot start the mounting process, or the process fails or does not answer within `DEADLINE`.
pub fn mount(export: &KernelMount) -> Result<HostSource, HostError> {
    mount_within(export, DEADLINE)
}

fn mount_within(export: &KernelMount, deadline: Duration) -> Result<HostSource, HostError> {
    let failed = |cause| HostError::KernelNfs { address: export.address.clone(), cause };
    let no_process = |cause: io::Error| failed(KernelNfsError::NoProcess(cause));
    let (ours, theirs) = UnixStream::pair().map_err(no_process)?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("podfs").arg(SUBCOMMAND).stdin(OwnedFd::from(theirs));
    let child = command.spawn().map(MountProcess).map_err(no_process)?;
    // This closes the supervisor's copy of the child's end. So when the child ends, the supervisor reads the end of the file.
    drop(command);
    ours.set_read_timeout(Some(deadline)).map_err(no_process)?;
    send(&ours, export, &[]).map_err(no_process)?;
    // The child sends its error as text.
    let answer = receive::<Result<(), String>>(&ours);
    drop(child);
    match answer {
        Ok(Some((Ok(()), mut descriptors))) => {
            let descriptor = descriptors.pop().ok_or_else(|| failed(KernelNfsError::Lost))?;
            HostSource::of(descriptor).map_err(|errno| failed(KernelNfsError::Mounted(errno.into())))
        }
        Ok(Some((Err(sentence), _))) => Err(failed(KernelNfsError::Refused(sentence))),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            let seconds = deadline.as_secs();
            Err(failed(match export.is_with_kerberos() {
                true => KernelNfsError::SilentWithKerberos(seconds),
                false => KernelNfsError::Silent(seconds),
            }))
        }
        Ok(None) => Err(failed(KernelNfsError::NoAnswer(io::ErrorKind::UnexpectedEof.into()))),
        Err(error) => Err(failed(KernelNfsError::NoAnswer(error))),
    }
}

/// The process that mounts. Dropping this kills the process, and reaps it when it has ended.
struct MountProcess(Child);

impl Drop for MountProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        if matches!(self.0.try_wait(), Ok(Some(_))) {
            return;
        }
        let pid = self.0.id();
        let wait = move || {
            let pid = nix::unistd::Pid::from_raw(pid.cast_signed());
            let _ = nix::sys::wait::waitpid(pid, None);
        };
        // If the kernel starts no thread, the child stays a zombie until this process ends.
        let _ = std::thread::Builder::new().name("mounted".to_owned()).spawn(wait);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn export(options: &[&str]) -> KernelMount {
        let address = ExportAddress::parse("nas", "/data").expect("an address");
        let source = Nfs { address, read_only: false };
        KernelMount::new(&source, &NfsOptions::parse(options.iter().copied()).expect("options"), false)
    }

    #[test]
    fn versions_are_tried_from_the_highest_if_the_volume_names_none() {
        assert_eq!(export(&[]).versions, ["4.2", "4.1", "4.0", "3"]);
        assert_eq!(export(&["nfsvers=4"]).versions, ["4.2", "4.1", "4.0"]);
        for (word, version) in [("nfsvers=3", "3"), ("vers=4.1", "4.1"), ("v4.2", "4.2"), ("minorversion=0", "4.0")] {
            let export = export(&[word]);
            assert_eq!((&*export.versions, &*export.words), (&[version.to_owned()][..], &[][..]), "{word}");
        }
    }

    #[test]
    fn the_kernel_gets_only_its_own_options() {
        let export = export(&["nfsvers=4.1,hard,timeo=50,_netdev,retry=2,ro,nosuid,podfs.backend=kernel,port=1"]);
        assert_eq!(export.words, ["hard", "timeo=50", "port=1"]);
        assert_eq!((export.read_only, export.no_suid, export.no_dev, export.port), (true, true, false, Some(1)));
    }
}
