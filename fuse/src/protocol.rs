//! Messages between supervisor and server.
//!
//! A message is a frame on a stream socket: its length (4 bytes, native order), then JSON. A few
//! descriptors travel with it, attached to the first byte (`SCM_RIGHTS`, `unix(7)`). The supervisor
//! asks, the server answers, one message each.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::SystemTime;

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::audit::Subject;
use crate::live::step::LiveStep;
use crate::live::tree::{SavedLiveTree, Slot};
use crate::nfs;
use crate::passthrough::{DataPath, PassthroughOptions};
use crate::projection::GenerationName;
use crate::projection::steps::ProjectionStep;
use crate::projection::tree::Root;
use crate::projection::tree::saved::SavedTree;
use crate::session::NodeId;

/// Both ends are programs of podfs; a frame above this is a mistake, not a message.
const MAX_FRAME: usize = 256 << 20;

/// A volume, as both processes count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VolumeId(pub u32);

/// The version of the messages. A supervisor and a server that speak different ones do not talk.
pub const VERSION: u32 = 2;

/// Whose server it is, and what it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// The sender's [`VERSION`].
    pub protocol: u32,
    /// The version of its program.
    pub program: String,
    /// The pod's uid; empty when there is no pod.
    pub pod: String,
    /// Whether it knows of live parts of projections. An earlier version does not send it, and gets no requests about them.
    #[serde(default)]
    pub live: bool,
}

impl Greeting {
    /// Of this version of a program, for a pod.
    pub fn new(program: &str, pod: &str) -> Self {
        Self { protocol: VERSION, program: program.to_owned(), pod: pod.to_owned(), live: true }
    }
}

/// A volume, for the successor of a server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Description {
    /// Its number.
    pub volume: VolumeId,
    /// The supervisor's own record of it.
    pub about: Value,
    /// Its kind, with the fields of the kind.
    pub body: VolumeBody,
}

/// Which requests of a projection the server reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reporting {
    /// Report every request on standard output.
    pub trace: bool,
    /// Write a line for each open of a file on standard error, with this in it.
    #[serde(default)]
    pub audit: Option<Subject>,
}

/// The kind of a volume, with its fields.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum VolumeBody {
    /// Generations of files. Their images come with the message, after the volume's other descriptors.
    Projection {
        /// The tree.
        tree: Box<SavedTree>,
        /// Which of its requests the server reports.
        #[serde(flatten)]
        reporting: Reporting,
    },
    /// A source of the host. It is open on the last descriptor but one of the message; the last one is the table of the mounts
    /// that it is among.
    Passthrough {
        /// How it is served.
        options: PassthroughOptions,
    },
    /// An export of an NFS server. The file of its log and its sockets are the last descriptors of the message.
    Nfs {
        /// How it is served.
        options: Box<nfs::options::ExportOptions>,
    },
    /// Live parts of a projection. Their images come with the message, after the volume's other descriptors.
    Live {
        /// The projection.
        of: VolumeId,
        /// The tree.
        tree: Box<SavedLiveTree>,
    },
}

/// A request of the supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub enum ServerRequest {
    /// The first message of every connection.
    Hello(Greeting),
    /// Be found by supervisors at the socket that comes with this message, when this connection is lost.
    Listen,
    /// Serve a new, empty projection. Device, mount and region come with this message.
    Serve {
        /// Its number from now on.
        volume: VolumeId,
        /// For the supervisor that adopts it.
        about: Value,
        /// How its root looks.
        root: Root,
        /// Which of its requests the server reports.
        #[serde(flatten)]
        reporting: Reporting,
    },
    /// Serve a passthrough volume. Device, mount, region, source and mount table come with this message.
    Pass {
        /// Its number from now on.
        volume: VolumeId,
        /// For the supervisor that adopts it.
        about: Value,
        /// How it is served.
        options: PassthroughOptions,
    },
    /// Serve an NFS export. Device, mount, region, the file of its log and its sockets come with this message.
    Export {
        /// Its number from now on.
        volume: VolumeId,
        /// For the supervisor that adopts it.
        about: Value,
        /// How it is served.
        options: Box<nfs::options::ExportOptions>,
    },
    /// Serve live parts of a projection, none yet. Device, mount and region come with this message.
    Mirror {
        /// Its number from now on.
        volume: VolumeId,
        /// For the supervisor that adopts it.
        about: Value,
        /// The projection.
        of: VolumeId,
        /// Report every request on standard output.
        trace: bool,
    },
    /// Take over what a dead server had open for its volumes. The volumes' regions come with this message, and before them
    /// the channel of its keeper, if there still is one.
    Inherit {
        /// Whether there is.
        keeper: bool,
    },
    /// Get ready to go on with a volume whose server is dead. Device, mount, region and what belongs to its body come with
    /// this message.
    Resume(Description),
    /// Answer for the resumed volumes.
    Start,
    /// Tell which volumes are served.
    Volumes,
    /// Describe a volume to a supervisor that adopts it. Device, mount, region and what belongs to its body come with the
    /// answer.
    Describe {
        /// The volume.
        volume: VolumeId,
    },
    /// Have another keeper: the one there was is gone.
    Keep,
    /// Accept these changes next, in this order.
    Announce {
        /// The volume they are for.
        volume: VolumeId,
        /// The changes.
        steps: Vec<ProjectionStep>,
        /// The generation that [`ProjectionStep::MakeGeneration`] attaches; its image comes with this message.
        staged: Option<GenerationName>,
        /// The time that what is made shows.
        time: SystemTime,
    },
    /// Close a generation and tell which of its nodes the kernel knows.
    Close {
        /// The volume it is in.
        volume: VolumeId,
        /// The generation.
        generation: GenerationName,
    },
    /// Accept these changes of live parts next, in this order. The image that they lead to comes with this message.
    Update {
        /// The volume they are for.
        volume: VolumeId,
        /// All slots.
        slots: Vec<Slot>,
        /// The changes.
        steps: Vec<LiveStep>,
        /// The number of the image.
        number: u64,
        /// The time that what changes shows.
        time: SystemTime,
    },
    /// Make the change of live parts that comes after so many, for which there is no system call.
    Take {
        /// The volume it is in.
        volume: VolumeId,
        /// How many changes there were before.
        applied: u64,
    },
    /// Zero the images of live parts that no node needs any more, but these, which the supervisor would hand to a successor.
    DropImages {
        /// The volume.
        volume: VolumeId,
        /// Their numbers.
        but: Vec<u64>,
    },
    /// Write a line per FUSE request to the pipe that comes with this message, too; without one, let all readers go.
    Trace {
        /// The volume.
        volume: VolumeId,
    },
    /// The NFS server of the volume, and of those that share its sockets, is elsewhere.
    Move {
        /// The volume.
        volume: VolumeId,
        /// Where.
        place: nfs::options::NfsAddress,
    },
    /// The volume is unmounted; forget it.
    Remove {
        /// The volume.
        volume: VolumeId,
    },
    /// The pod needs the server no more.
    End,
}

impl ServerRequest {
    /// Whether it makes the server serve a volume that no server has served yet.
    pub(crate) fn begins_volume(&self) -> bool {
        matches!(self, Self::Serve { .. } | Self::Pass { .. } | Self::Export { .. } | Self::Mirror { .. })
    }
}

/// A reply of the server.
#[derive(Debug, Serialize, Deserialize)]
pub enum ServerReply {
    /// It is done.
    Done,
    /// The answer to a greeting. The channel of the server's keeper comes with this message.
    Hello {
        /// The server's version and protocol.
        greeting: Greeting,
        /// Its keeper's process.
        keeper: i32,
        /// Whether the keeper can start the next server. An earlier version does not say it, and its keepers cannot.
        #[serde(default)]
        keeper_starts_successor: bool,
    },
    /// A keeper was started. Its channel comes with this message.
    Kept {
        /// Its process.
        keeper: i32,
    },
    /// The changes are expected; these threads answer for them.
    Announced {
        /// The volume's session thread, once it has served a request.
        session: Option<i32>,
        /// The thread that wrote this answer.
        control: i32,
    },
    /// The volume is served, and its data travels like this.
    Passing(DataPath),
    /// The volumes that are served.
    Volumes(Vec<VolumeId>),
    /// A volume.
    Described(Description),
    /// Indexes of the nodes that the kernel knows.
    Known(Vec<u32>),
    /// The unlinked nodes that the kernel knows.
    Unlinked(Vec<NodeId>),
    /// It could not be done.
    Failed(String),
}

/// Most descriptors of one message (`SCM_MAX_FD` is 253).
const MAX_DESCRIPTORS: usize = 250;

/// Sends one message and its descriptors.
///
/// # Errors
/// When the other process is gone.
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

/// A message as [`send`] sends it, for a socket that is not to block.
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
/// When the socket fails, or what comes is no message.
pub fn receive<T: DeserializeOwned>(socket: &impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    receive_at_most(socket, MAX_FRAME)
}

/// As [`receive`], from a peer that may send at most `most` bytes.
///
/// # Errors
/// As [`receive`].
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

/// Receives once, whatever is there, and the descriptors that came with it.
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
                    // SAFETY: the kernel just made this descriptor for this process alone.
                    descriptors.push(unsafe { OwnedFd::from_raw_fd(raw) });
                }
            }
        }
        return Ok((received.bytes, descriptors));
    }
}

/// Why a supervisor and a server do not work together.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GreetingError {
    /// Their messages differ.
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

/// Whether two processes can talk.
///
/// # Errors
/// Why not.
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
    fn a_message_of_a_podfs_that_knew_no_access_log_is_understood() {
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
