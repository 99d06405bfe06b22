//! Messages between supervisor and server.
//!
//! A message is a frame on a stream socket: its length (4 bytes, native order), then JSON. A message may have
//! a few descriptors, attached to its first byte (`SCM_RIGHTS`, unix(7)). The supervisor sends a request, and the server answers,
//! each with one message.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::SystemTime;

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
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

/// Longest frame, in bytes. Both programs send shorter ones.
const MAX_FRAME: usize = 256 << 20;

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
    /// A source of the host. The last two descriptors of the message are the source and the mount table of its namespace.
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
    /// Serve a passthrough volume. The message has its device, mount, region, source and mount table.
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
    /// The server accepts the steps. These are its threads for them.
    Announced {
        /// The volume's session thread, once it has served a request.
        session: Option<i32>,
        /// The thread that wrote this answer.
        control: i32,
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

/// Most descriptors of one message (`SCM_MAX_FD` is 253).
const MAX_DESCRIPTORS: usize = 250;

/// Sends one message and its descriptors.
///
/// # Errors
/// When the other process has closed the socket.
pub fn send(socket: &impl AsFd, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?.to_ne_bytes();
    let raw: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let rights = if raw.is_empty() { &[][..] } else { &rights };
    let socket = socket.as_fd();
    let sent = loop {
        let parts = [IoSlice::new(&length), IoSlice::new(&body)];
        match sendmsg::<()>(socket.as_raw_fd(), &parts, rights, MsgFlags::MSG_NOSIGNAL, None) {
            Err(nix::errno::Errno::EINTR) => {}
            sent => break sent?,
        }
    };
    let rest_of_length = length.get(sent..).unwrap_or(&[]);
    send_all(socket, rest_of_length)?;
    send_all(socket, &body[sent.saturating_sub(length.len())..])
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
        match rustix::net::send(socket, bytes, rustix::net::SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            sent => bytes = &bytes[sent?..],
        }
    }
    Ok(())
}

fn receive_all(socket: BorrowedFd<'_>, mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::read(socket, &mut *bytes) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => bytes = &mut bytes[got?..],
        }
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
    let (got, descriptors) = receive_descriptors(socket, &mut length)?;
    if got == 0 {
        return Ok(None);
    }
    let socket = socket.as_fd();
    receive_all(socket, &mut length[got..])?;
    let length = u32::from_ne_bytes(length) as usize;
    if length > most {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a control message is too long"));
    }
    let mut body = vec![0; length];
    receive_all(socket, &mut body)?;
    Ok(Some((serde_json::from_slice(&body)?, descriptors)))
}

/// Calls recvmsg(2) once. Returns the number of bytes, and the descriptors.
pub(super) fn receive_descriptors(socket: &impl AsFd, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    loop {
        let mut space = nix::cmsg_space!([std::os::fd::RawFd; MAX_DESCRIPTORS]);
        let mut parts = [IoSliceMut::new(buffer)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let received = match recvmsg::<()>(socket.as_fd().as_raw_fd(), &mut parts, Some(&mut space), flags) {
            Err(nix::errno::Errno::EINTR) => continue,
            received => received?,
        };
        let mut descriptors = Vec::new();
        for message in received.cmsgs()? {
            if let ControlMessageOwned::ScmRights(raw) = message {
                for raw in raw {
                    // SAFETY: recvmsg(2) has returned this descriptor, and no other code owns it.
                    descriptors.push(unsafe { OwnedFd::from_raw_fd(raw) });
                }
            }
        }
        return Ok((received.bytes, descriptors));
    }
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_message_arrives_with_its_descriptor() {
        let (a, b) = UnixStream::pair().expect("a socket pair");
        let (reader, mut writer) = io::pipe().expect("a pipe");
        send(&a, &ServerReply::Kept { keeper: 7 }, &[reader.as_fd()]).expect("sent");
        drop(reader);
        let (reply, mut descriptors) = receive::<ServerReply>(&b).expect("received").expect("a message");
        assert!(matches!(reply, ServerReply::Kept { keeper: 7 }));
        writer.write_all(b"x").expect("the pipe still has a reader");
        let mut byte = [0];
        std::fs::File::from(descriptors.pop().expect("a descriptor")).read_exact(&mut byte).expect("a byte");
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn a_large_message_arrives_whole() {
        let (a, b) = UnixStream::pair().expect("a socket pair");
        let known: Vec<u32> = (0..1_000_000).collect();
        let message = ServerReply::Known(known.clone());
        let sender = std::thread::spawn(move || send(&a, &message, &[]));
        let (reply, _) = receive::<ServerReply>(&b).expect("received").expect("a message");
        sender.join().expect("the sender").expect("sent");
        assert!(matches!(reply, ServerReply::Known(got) if got == known));
    }

    #[test]
    fn a_message_of_a_podfs_without_access_log_is_understood() {
        let root = serde_json::json!({"mode": 0o755, "gid": 0, "directories": []});
        let text = serde_json::json!({"Serve": {"volume": 3, "about": null, "root": root, "trace": true}}).to_string();
        let request: ServerRequest = serde_json::from_str(&text).expect("a message");
        let expected = Reporting { trace: true, audit: None };
        assert!(matches!(request, ServerRequest::Serve { reporting, .. } if reporting == expected));
    }

    #[test]
    fn a_closed_socket_is_the_end_and_garbage_is_an_error() {
        let (a, b) = UnixStream::pair().expect("a socket pair");
        drop(a);
        assert!(receive::<ServerReply>(&b).expect("an end").is_none());
        let (mut a, b) = UnixStream::pair().expect("a socket pair");
        a.write_all(&[3, 0, 0, 0, b'x', b'x', b'x']).expect("written");
        assert!(receive::<ServerReply>(&b).is_err());
        a.write_all(&[0xff; 4]).expect("written");
        assert!(receive::<ServerReply>(&b).is_err());
    }
}
