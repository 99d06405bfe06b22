//! Messages between supervisor and server.
//!
//! A message is a frame on a stream socket: its length (4 bytes, native order), then JSON. A message may have
//! descriptors (`SCM_RIGHTS`, unix(7)): the first `MAX_DESCRIPTORS` are attached to its first byte, the next ones to its second
//! byte, and so on. The supervisor sends a request, and the server answers, each with one message.
//!
//! An earlier version receives only the descriptors of the first byte, and refuses a message that lacks some.

#[cfg(test)]
mod tests;

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::SystemTime;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::audit::AuditSubject;
use crate::live::step::LiveStep;
use crate::live::tree::{SavedLiveTree, Slot};
use crate::nfs;
use crate::passthrough::{DataPath, PassthroughOptions};
use crate::projection::GenerationName;
use crate::projection::steps::ProjectionStep;
use crate::projection::tree::Root;
use crate::projection::tree::saved::SavedTree;
use crate::session::NodeId;

/// Longest frame of a process that the receiver trusts, in bytes. Both programs send shorter ones.
const MAX_FRAME: usize = 256 << 20;

/// Longest frame of a server. A container may have taken it over, and the supervisor needs several times as much memory for a frame. The
/// description of a volume with 100,000 files is shorter.
pub const MAX_REPLY: usize = 16 << 20;

/// The number of a volume, which is the same in both processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VolumeNumber(pub u32);

/// The version of the messages. Supervisor and server must have the same.
pub const VERSION: u32 = 2;

/// The pod and the version of the sender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// The sender's [`VERSION`].
    pub protocol: u32,
    /// The version of its program.
    pub program: String,
    /// The pod's uid; empty when there is no pod.
    pub pod: String,
    /// Whether the program knows live parts of projections. An earlier version does not send this field, and gets no requests
    /// about them.
    #[serde(default)]
    pub live: bool,
}

impl Greeting {
    /// The greeting of this version of a program, for a pod.
    pub fn new(program: &str, pod: &str) -> Self {
        Self { protocol: VERSION, program: program.to_owned(), pod: pod.to_owned(), live: true }
    }
}

/// The state of a volume, for a server's successor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VolumeDescription {
    /// Its number.
    pub volume: VolumeNumber,
    /// The supervisor's record about it.
    pub about: Value,
    /// Its kind, with the fields of the kind.
    pub body: VolumeBody,
}

/// The requests of a projection that the server reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reporting {
    /// Report every request on standard output.
    pub trace: bool,
    /// Write a line for each open of a file on standard error, with these fields.
    #[serde(default)]
    pub audit: Option<AuditSubject>,
}

/// The kind of a volume, with its fields.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum VolumeBody {
    /// Generations of files. The message has their images, after the volume's other descriptors.
    Projection {
        /// The tree.
        tree: Box<SavedTree>,
        /// The requests that the server reports.
        #[serde(flatten)]
        reporting: Reporting,
    },
    /// A source of the host. The last descriptors of the message are the source, the mount table of its namespace, and the
    /// memory of its rings if the volume may use io_uring.
    Passthrough {
        /// The options of the mount.
        options: PassthroughOptions,
    },
    /// An export of an NFS server. The last descriptors of the message are its log file and its sockets.
    Nfs {
        /// The options of the mount.
        options: Box<nfs::options::ExportOptions>,
    },
    /// Live parts of a projection. The message has their images, after the volume's other descriptors.
    Live {
        /// The projection.
        of: VolumeNumber,
        /// The tree.
        tree: Box<SavedLiveTree>,
    },
}

/// A request of the supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub enum ServerRequest {
    /// The first message of every connection.
    Hello(Greeting),
    /// Listen at the socket in this message, for the next supervisor after the end of this connection.
    Listen,
    /// Serve a new, empty projection. The message has its device, mount and region.
    Serve {
        /// Its number.
        volume: VolumeNumber,
        /// The record for the supervisor that adopts it.
        about: Value,
        /// The attributes of its root.
        root: Root,
        /// The requests that the server reports.
        #[serde(flatten)]
        reporting: Reporting,
    },
    /// Serve a passthrough volume. The message has its device, mount, region, source and mount table, and the memory of its
    /// rings if the volume may use io_uring.
    Pass {
        /// Its number.
        volume: VolumeNumber,
        /// The record for the supervisor that adopts it.
        about: Value,
        /// The options of the mount.
        options: PassthroughOptions,
    },
    /// Serve an NFS export. The message has its device, mount, region, log file and sockets.
    Export {
        /// Its number.
        volume: VolumeNumber,
        /// The record for the supervisor that adopts it.
        about: Value,
        /// The options of the mount.
        options: Box<nfs::options::ExportOptions>,
    },
    /// Serve the live parts of a projection; there are none yet. The message has their device, mount and region.
    Mirror {
        /// Its number.
        volume: VolumeNumber,
        /// The record for the supervisor that adopts it.
        about: Value,
        /// The projection.
        of: VolumeNumber,
        /// Report every request on standard output.
        trace: bool,
    },
    /// Inherit the open files of a dead server. The message has the channel of its keeper, if there is one, then the volumes'
    /// regions.
    Inherit {
        /// Whether the message has the channel of a keeper.
        keeper: bool,
    },
    /// Load a volume of a dead server. The message has its device, mount, region and the descriptors of its kind.
    Resume(VolumeDescription),
    /// Serve the loaded volumes.
    Start,
    /// List the volumes.
    Volumes,
    /// Describe a volume to a supervisor that adopts it. The answer has its device, mount, region and the descriptors of its
    /// kind.
    Describe {
        /// The volume.
        volume: VolumeNumber,
    },
    /// Start another keeper, because the last one has ended.
    Keep,
    /// Accept these steps next, in this order.
    Announce {
        /// The volume.
        volume: VolumeNumber,
        /// The steps.
        steps: Vec<ProjectionStep>,
        /// The generation of [`ProjectionStep::MakeGeneration`]. The message has its image.
        staged: Option<GenerationName>,
        /// The timestamp of new files.
        time: SystemTime,
    },
    /// Close a generation, and list the nodes that the kernel knows.
    Close {
        /// The volume.
        volume: VolumeNumber,
        /// The generation.
        generation: GenerationName,
    },
    /// Accept these steps of live parts next, in this order. The message has the image after them.
    Update {
        /// The volume.
        volume: VolumeNumber,
        /// All slots.
        slots: Vec<Slot>,
        /// The steps.
        steps: Vec<LiveStep>,
        /// The number of the image.
        number: u64,
        /// The timestamp of changed files.
        time: SystemTime,
    },
    /// Apply the next step of live parts, for which there is no system call.
    Take {
        /// The volume.
        volume: VolumeNumber,
        /// The number of steps before it.
        applied: u64,
    },
    /// Zero the images of live parts that no node needs, except these, which the supervisor would send to a successor.
    DropImages {
        /// The volume.
        volume: VolumeNumber,
        /// Their numbers.
        but: Vec<u64>,
    },
    /// Also write a line for each FUSE request to the pipe in this message. Without a pipe, close those of all readers.
    Trace {
        /// The volume.
        volume: VolumeNumber,
    },
    /// Use another address for the NFS server of the volume, and of those that share its sockets.
    Move {
        /// The volume.
        volume: VolumeNumber,
        /// The address.
        place: nfs::options::NfsAddress,
    },
    /// Forget the volume, which is unmounted.
    Remove {
        /// The volume.
        volume: VolumeNumber,
    },
    /// End, because the pod no longer needs a server.
    End,
}

impl ServerRequest {
    /// Whether it makes the server serve a new volume.
    pub(crate) fn begins_volume(&self) -> bool {
        matches!(self, Self::Serve { .. } | Self::Pass { .. } | Self::Export { .. } | Self::Mirror { .. })
    }
}

/// A reply of the server.
#[derive(Debug, Serialize, Deserialize)]
pub enum ServerReply {
    /// The server has done it.
    Done,
    /// The answer to a greeting. The message has the channel of the server's keeper.
    Hello {
        /// The server's version and protocol.
        greeting: Greeting,
        /// The process id of its keeper.
        keeper: i32,
        /// Whether the keeper can start the next server. An earlier version does not send this field, and its keepers cannot.
        #[serde(default)]
        keeper_starts_successor: bool,
    },
    /// The server has started a keeper. The message has its channel.
    Kept {
        /// Its process id.
        keeper: i32,
    },
    /// The server accepts the steps. These threads of the server take part in them.
    Announced {
        /// The volume's session thread, once it has served a request.
        session: Option<i32>,
        /// The thread that wrote this answer.
        control: i32,
    },
    /// The server serves the loaded volumes, except these, with the reasons.
    Started {
        /// The volumes that it cannot serve.
        failed: Vec<(VolumeNumber, String)>,
    },
    /// The server serves the volume, with this data path.
    Passing(DataPath),
    /// The volumes of the server.
    Volumes(Vec<VolumeNumber>),
    /// The state of a volume.
    Described(VolumeDescription),
    /// Indexes of the nodes that the kernel knows.
    Known(Vec<u32>),
    /// The unlinked nodes that the kernel knows.
    Unlinked(Vec<NodeId>),
    /// The request failed, for this reason.
    Failed(String),
}

/// Most descriptors that are attached to one byte (`SCM_MAX_FD` is 253).
const MAX_DESCRIPTORS: usize = 250;

/// Sends one message and its descriptors.
///
/// # Errors
/// When the other process has closed the socket, or the message has more descriptors than its bytes can carry.
pub fn send(socket: &impl AsFd, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let frame = frame(message)?;
    let (socket, mut rest) = (socket.as_fd(), &frame[..]);
    let mut groups = descriptors.chunks(MAX_DESCRIPTORS).peekable();
    if groups.len() > frame.len() {
        return Err(io::Error::other(format!("a message cannot carry {} descriptors", descriptors.len())));
    }
    while let Some(group) = groups.next() {
        let part = if groups.peek().is_some() { &rest[..1] } else { rest };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        rights.push(SendAncillaryMessage::ScmRights(group));
        let sent = retry_on_intr(|| sendmsg(socket, &[IoSlice::new(part)], &mut rights, SendFlags::NOSIGNAL))?;
        rest = &rest[sent..];
    }
    send_all(socket, rest)
}

/// The bytes of a message, for a non-blocking socket.
///
/// # Errors
/// When the message is too long.
pub fn frame(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let length = u32::try_from(frame.len() - 4).map_err(io::Error::other)?;
    frame[..4].copy_from_slice(&length.to_ne_bytes());
    Ok(frame)
}

fn send_all(socket: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        bytes = &bytes[retry_on_intr(|| rustix::net::send(socket, bytes, SendFlags::NOSIGNAL))?..];
    }
    Ok(())
}

/// Fills `bytes`, and adds the descriptors that come with them to `descriptors`.
fn receive_all(socket: &impl AsFd, mut bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<()> {
    while !bytes.is_empty() {
        let (got, more) = receive_descriptors(socket, bytes)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        descriptors.extend(more);
        bytes = &mut bytes[got..];
    }
    Ok(())
}

/// Receives one message; `None` when the other process closed the socket.
///
/// # Errors
/// When the socket fails, or the bytes are no message.
pub fn receive<T: DeserializeOwned>(socket: &impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    receive_at_most(socket, MAX_FRAME)
}

/// Like [`receive`], with at most `most` bytes.
///
/// # Errors
/// Those of [`receive`].
pub fn receive_at_most<T: DeserializeOwned>(socket: &impl AsFd, most: usize) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut length = [0; 4];
    let (got, mut descriptors) = receive_descriptors(socket, &mut length)?;
    if got == 0 {
        return Ok(None);
    }
    receive_all(socket, &mut length[got..], &mut descriptors)?;
    let length = u32::from_ne_bytes(length) as usize;
    if length > most {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a control message is too long"));
    }
    let mut body = vec![0; length];
    receive_all(socket, &mut body, &mut descriptors)?;
    Ok(Some((serde_json::from_slice(&body)?, descriptors)))
}

/// Calls recvmsg(2) once. Returns the number of bytes, and the descriptors.
///
/// # Errors
/// When the socket fails, or not all descriptors have arrived: this process may have no more, or there are too many of them.
pub(super) fn receive_descriptors(socket: &impl AsFd, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(buffer)];
    let received = retry_on_intr(|| recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC))?;
    let descriptors = |message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    };
    // On an error, this closes those that have arrived.
    let descriptors: Vec<OwnedFd> = control.drain().filter_map(descriptors).flatten().collect();
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::NOBUFS.into());
    }
    Ok((received.bytes, descriptors))
}

/// Why a supervisor and a server cannot work together.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GreetingError {
    /// They have different versions of messages.
    #[error("podfs {theirs} speaks another protocol than podfs {ours}")]
    Protocol {
        /// The version of this program.
        ours: String,
        /// The version of the other one.
        theirs: String,
    },
    /// They serve different pods.
    #[error("it serves pod {ours:?}, not {theirs:?}")]
    Pod {
        /// The pod of this process.
        ours: String,
        /// The pod of the other one.
        theirs: String,
    },
}

/// The words of [`GreetingError::Protocol`] by which a supervisor recognises the reason of a server that refuses it. Servers of other
/// versions say the same.
pub(crate) const OTHER_PROTOCOL: &str = "speaks another protocol than podfs";

/// Checks whether two processes can work together.
///
/// # Errors
/// The reason why they cannot.
pub(crate) fn check(ours: &Greeting, theirs: &Greeting) -> Result<(), GreetingError> {
    if ours.protocol != theirs.protocol {
        return Err(GreetingError::Protocol { ours: ours.program.clone(), theirs: theirs.program.clone() });
    }
    if ours.pod != theirs.pod {
        return Err(GreetingError::Pod { ours: ours.pod.clone(), theirs: theirs.pod.clone() });
    }
    Ok(())
}
