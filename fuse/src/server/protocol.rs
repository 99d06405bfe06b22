//! Messages between supervisor and server.
//!
//! A message is a frame on a stream socket: its length (4 bytes, native order), then JSON. A few
//! descriptors travel with it, attached to the first byte (`SCM_RIGHTS`, `unix(7)`). The supervisor
//! asks, the server answers, one message each.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::SystemTime;

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::passthrough::{DataPath, Options};
use crate::projection::GenerationName;
use crate::projection::steps::Step;
use crate::projection::tree::Root;

/// Both ends are the same binary; a frame above this is a mistake, not a message.
const MAX_FRAME: usize = 256 << 20;

/// A volume, as both processes count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VolumeId(pub u32);

/// What the supervisor asks for.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Serve a new, empty projection on the FUSE device that comes with this message.
    Serve {
        /// Its number from now on.
        volume: VolumeId,
        /// How its root looks.
        root: Root,
        /// Report every request on standard output.
        trace: bool,
    },
    /// Serve a passthrough volume: on the FUSE device that comes with this message first, what the second
    /// descriptor is open on.
    Pass {
        /// Its number from now on.
        volume: VolumeId,
        /// How it is served.
        options: Options,
    },
    /// Accept these changes next, in this order.
    Announce {
        /// The volume they are for.
        volume: VolumeId,
        /// The changes.
        steps: Vec<Step>,
        /// The generation that [`Step::MakeGeneration`] attaches; its image comes with this message.
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
    /// Tell how many FUSE requests were served.
    Requests {
        /// The volume they were for.
        volume: VolumeId,
    },
    /// The volume is unmounted; forget it.
    Remove {
        /// The volume.
        volume: VolumeId,
    },
}

/// What the server answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// It is done.
    Done,
    /// The changes are expected; these threads answer for them.
    Announced {
        /// The volume's session thread, once it has served a request.
        session: Option<i32>,
        /// The thread that wrote this answer.
        control: i32,
    },
    /// The volume is served, and its data travels like this.
    Passing(DataPath),
    /// Indexes of the nodes that the kernel knows.
    Known(Vec<u32>),
    /// Number of requests since the volume is served.
    Requests(u64),
    /// It could not be done.
    Failed(String),
}

/// Most descriptors of one message.
const MAX_DESCRIPTORS: usize = 2;

/// Sends one message and its descriptors.
///
/// # Errors
/// When the other process is gone.
pub fn send(stream: &UnixStream, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?.to_ne_bytes();
    let raw: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let rights = if raw.is_empty() { &[][..] } else { &rights };
    let sent = loop {
        let parts = [IoSlice::new(&length), IoSlice::new(&body)];
        match sendmsg::<()>(stream.as_raw_fd(), &parts, rights, MsgFlags::MSG_NOSIGNAL, None) {
            Err(nix::errno::Errno::EINTR) => {}
            sent => break sent?,
        }
    };
    let mut stream = stream;
    let rest_of_length = length.get(sent..).unwrap_or(&[]);
    stream.write_all(rest_of_length)?;
    stream.write_all(&body[sent.saturating_sub(length.len())..])
}

/// Receives one message; `None` when the other process closed the socket.
///
/// # Errors
/// When the socket fails, or what comes is no message.
pub fn receive<T: DeserializeOwned>(stream: &UnixStream) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut length = [0; 4];
    let (got, descriptors) = receive_first(stream, &mut length)?;
    if got == 0 {
        return Ok(None);
    }
    let mut stream = stream;
    stream.read_exact(&mut length[got..])?;
    let length = u32::from_ne_bytes(length) as usize;
    if length > MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a control message is too long"));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok(Some((serde_json::from_slice(&body)?, descriptors)))
}

fn receive_first(stream: &UnixStream, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    loop {
        let mut space = nix::cmsg_space!([std::os::fd::RawFd; MAX_DESCRIPTORS]);
        let mut parts = [IoSliceMut::new(buffer)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let received = match recvmsg::<()>(stream.as_fd().as_raw_fd(), &mut parts, Some(&mut space), flags) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_arrives_with_its_descriptor() {
        let (a, b) = UnixStream::pair().expect("a socket pair");
        let (reader, mut writer) = io::pipe().expect("a pipe");
        send(&a, &Reply::Requests(7), &[reader.as_fd()]).expect("sent");
        drop(reader);
        let (reply, mut descriptors) = receive::<Reply>(&b).expect("received").expect("a message");
        assert!(matches!(reply, Reply::Requests(7)));
        writer.write_all(b"x").expect("the pipe still has a reader");
        let mut byte = [0];
        std::fs::File::from(descriptors.pop().expect("a descriptor")).read_exact(&mut byte).expect("a byte");
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn a_large_message_arrives_whole() {
        let (a, b) = UnixStream::pair().expect("a socket pair");
        let known: Vec<u32> = (0..1_000_000).collect();
        let message = Reply::Known(known.clone());
        let sender = std::thread::spawn(move || send(&a, &message, &[]));
        let (reply, _) = receive::<Reply>(&b).expect("received").expect("a message");
        sender.join().expect("the sender").expect("sent");
        assert!(matches!(reply, Reply::Known(got) if got == known));
    }

    #[test]
    fn a_closed_socket_is_the_end_and_garbage_is_an_error() {
        let (a, b) = UnixStream::pair().expect("a socket pair");
        drop(a);
        assert!(receive::<Reply>(&b).expect("an end").is_none());
        let (mut a, b) = UnixStream::pair().expect("a socket pair");
        a.write_all(&[3, 0, 0, 0, b'x', b'x', b'x']).expect("written");
        assert!(receive::<Reply>(&b).is_err());
        a.write_all(&[0xff; 4]).expect("written");
        assert!(receive::<Reply>(&b).is_err());
    }
}
