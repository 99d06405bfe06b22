//! `fusermount3`: the program with a setuid bit that mounts FUSE file systems for users. It checks that the directory belongs to
//! the user, and passes the FUSE device over a socket, which it finds by an environment variable.

use std::io::{self, ErrorKind, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

use super::{Audience, ViewError};

const PROGRAM: &str = "fusermount3";
/// The environment variable with the number of the socket's descriptor. podfs passes the socket as standard input, number 0.
const SOCKET: &str = "_FUSE_COMMFD";
/// The file system type of a view in `/proc/mounts`; a user may not use `fuse.podfs`.
pub(super) const FS_TYPE: &str = "fuse.podfs-view";
const OPTIONS: &str = "ro,nosuid,nodev,noexec,fsname=podfs,subtype=podfs-view";

/// Mounts a FUSE file system at a directory that the user owns. Returns the FUSE device.
///
/// # Errors
/// When fusermount3 cannot be run, or fails. If the user can correct the cause, podfs explains it in its own words.
pub(super) fn mount(directory: &Path, audience: Audience) -> Result<OwnedFd, ViewError> {
    let options = match audience {
        Audience::Owner => OPTIONS.to_owned(),
        Audience::Everyone => format!("{OPTIONS},allow_other,default_permissions"),
    };
    let (ours, theirs) = UnixStream::pair().map_err(ViewError::Program)?;
    let mut command = command();
    command.args(["-o", &options, "--"]).arg(directory).env(SOCKET, "0").stdin(OwnedFd::from(theirs));
    let child = command.spawn().map_err(cannot_run)?;
    // Only the child keeps its end of the socket, so `receive` does not wait longer than the child lives.
    drop(command);
    let device = receive(&ours);
    match (end(child), device) {
        (Ok(()), Ok(Some(device))) => Ok(device),
        (Err(FusermountError::Refused(sentence)), _) => Err(refusal(directory, sentence)),
        (Ok(()), Ok(None)) => Err(refusal(directory, "it gives no device".to_owned())),
        (Err(FusermountError::Lost(error)), _) | (Ok(()), Err(error)) => Err(ViewError::Program(error)),
    }
}

/// Unmounts a file system, even if it is in use or its process has ended.
///
/// # Errors
/// When fusermount3 cannot be run, or fails.
pub(super) fn unmount(directory: &Path) -> Result<(), ViewError> {
    let child = command().args(["-u", "-z", "--"]).arg(directory).stdin(Stdio::null()).spawn().map_err(cannot_run)?;
    end(child).map_err(|reason| ViewError::Unmount { path: directory.to_owned(), reason })
}

fn command() -> Command {
    let mut command = Command::new(PROGRAM);
    // In a process group of its own, fusermount3 does not get another Ctrl-C while it unmounts.
    command.stdout(Stdio::null()).stderr(Stdio::piped()).env("LC_ALL", "C").process_group(0);
    command
}

fn cannot_run(error: io::Error) -> ViewError {
    match error.kind() {
        ErrorKind::NotFound => ViewError::NoProgram,
        _ => ViewError::Program(error),
    }
}

/// Why fusermount3 did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum FusermountError {
    /// podfs could not wait for fusermount3 or read its output.
    #[error(transparent)]
    Lost(#[from] io::Error),
    /// It failed with this message.
    #[error("{0}")]
    Refused(String),
}

/// Waits for the end of fusermount3.
fn end(child: Child) -> Result<(), FusermountError> {
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().map(|line| line.trim().trim_start_matches("fusermount3: ")).find(|line| !line.is_empty());
    Err(FusermountError::Refused(line.map_or_else(|| output.status.to_string(), str::to_owned)))
}

fn refusal(directory: &Path, sentence: String) -> ViewError {
    if sentence.contains("user_allow_other") {
        return ViewError::AllowOther;
    }
    if sentence.contains("/dev/fuse") || sentence.contains("fuse device not found") {
        return ViewError::Device(sentence);
    }
    ViewError::Refused { path: directory.to_owned(), reason: sentence }
}

/// The descriptor that fusermount3 sends over the socket; none if fusermount3 ends without sending one.
fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!([i32; 1]);
    let received = loop {
        match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC) {
            Err(nix::errno::Errno::EINTR) => {}
            received => break received?,
        }
    };
    for message in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(descriptors) = message
            && let Some(descriptor) = descriptors.first()
        {
            // SAFETY: the kernel has just made the descriptor for this process, and nothing else owns its number.
            return Ok(Some(unsafe { OwnedFd::from_raw_fd(*descriptor) }));
        }
    }
    Ok(None)
}
