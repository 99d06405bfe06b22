//! Answers: results as bytes for the kernel.

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::{Immutable, IntoBytes};

use super::abi::{
    AttrOut, CopyFileRangeOut, Dirent, EntryOut, FileLock, GetxattrOut, Kstatfs, LseekOut, NOTIFY_INVAL_INODE,
    NOTIFY_PRUNE, NotifyInvalInodeOut, NotifyPruneOut, OpenOut, OutHeader, StatxOut, UNIQUE_RESEND, WriteOut,
};
use super::ids::NodeId;
use super::ring_reply::RingReply;
use crate::region::in_flight::InFlightSlot;
use crate::region::{BegunRequest, FileMark, Region};

/// The answer to a request.
#[derive(Debug)]
pub enum Answer {
    /// Success, without a body.
    Done,
    /// The kernel waits for no answer.
    Silence,
    /// The service answers by itself, with the [`DeferredAnswer`] it took.
    Later,
    /// A name's node.
    Entry(EntryOut),
    /// Attributes.
    Attributes(AttrOut),
    /// Attributes, in full.
    Statx(Box<StatxOut>),
    /// An open file or directory.
    Open(OpenOut),
    /// A file that is new and open.
    Created(EntryOut, OpenOut),
    /// Number of bytes written.
    Written(u32),
    /// The bytes in the exchange's buffer.
    Buffer,
    /// Size of an extended attribute, or of the list of their names.
    XattrSize(u32),
    /// The file system as a whole.
    FileSystem(Kstatfs),
    /// A conflicting lock, or none.
    Lock(FileLock),
    /// An offset.
    Offset(u64),
    /// Number of bytes copied.
    Copied(u64),
}

/// A request that the server is answering.
pub struct Exchange<'a> {
    /// The buffer that [`Answer::Buffer`] sends; empty at the start.
    pub buffer: &'a mut Vec<u8>,
    pub(super) responder: &'a Responder,
    pub(super) region: &'a Arc<Region>,
    pub(super) slot: &'a InFlightSlot,
    pub(super) earlier: Option<BegunRequest>,
}

impl Exchange<'_> {
    /// Records that the request may have been executed from here on. If this process dies, its successor gets the record from
    /// [`earlier`](Self::earlier). A predecessor's record of this request stays unchanged.
    pub fn begin(&self, note: u64) {
        if self.earlier.is_none() {
            self.slot.begin(None, note);
        }
    }

    /// As [`begin`](Self::begin), for a request that removes or renames `file`.
    pub fn begin_with(&self, note: u64, file: FileMark) {
        if self.earlier.is_none() {
            self.slot.begin_with(note, file);
        }
    }

    /// As [`begin`](Self::begin), with a new note, when a predecessor has not executed the request. The record keeps the time of
    /// the first attempt.
    pub fn begin_anew(&self, note: u64) {
        self.slot.begin(self.earlier.map(|earlier| earlier.at), note);
    }

    /// The record of a predecessor that had begun this very request. It may have executed the request or not.
    pub fn earlier(&self) -> Option<BegunRequest> {
        self.earlier
    }

    /// The request's number, as [`Request::number`](super::Request::number).
    pub fn number(&self) -> u64 {
        self.responder.unique & !UNIQUE_RESEND
    }

    /// Whether a predecessor has read the request.
    pub fn is_resent(&self) -> bool {
        self.responder.unique & UNIQUE_RESEND != 0
    }

    /// Takes over the answer. The service then returns [`Answer::Later`].
    pub fn defer(&self) -> DeferredAnswer {
        let place = self.region.waits().add(self.number());
        DeferredAnswer { responder: self.responder.clone(), region: Arc::clone(self.region), place }
    }

    /// Answers with these bytes at once, without a copy of them.
    pub fn send(&self, bytes: &[u8]) -> Answer {
        // The write fails if the request was aborted: no caller waits then.
        let _ = self.responder.write(0, bytes, &[]);
        Answer::Later
    }
}

/// An entry of a directory, as READDIR lists it.
#[derive(Clone, Copy, Debug)]
pub struct ReaddirEntry<'a> {
    /// The inode number of the file.
    pub ino: u64,
    /// The offset of the next entry.
    pub next: u64,
    /// `DT_*` of `readdir(3)`.
    pub kind: u8,
    /// Its name.
    pub name: &'a OsStr,
}

impl ReaddirEntry<'_> {
    /// Bytes that the entry takes; the next entry begins at a multiple of 8.
    pub fn length(self) -> usize {
        (size_of::<Dirent>() + self.name.len()).next_multiple_of(8)
    }

    /// Appends the entry to an answer.
    pub fn push(self, buffer: &mut Vec<u8>) {
        let end = buffer.len() + self.length();
        let Self { ino, next: off, kind, name } = self;
        let header = Dirent { ino, off, namelen: name.len() as u32, typ: kind.into() };
        buffer.extend_from_slice(header.as_bytes());
        buffer.extend_from_slice(name.as_encoded_bytes());
        buffer.resize(end, 0);
    }
}

/// Sends notifications to the kernel.
#[derive(Clone, Debug)]
pub struct Notifier {
    pub(super) device: Arc<OwnedFd>,
}

impl Notifier {
    /// Lets the kernel drop its cached pages and attributes of a node. This waits for pages that are being read, and no
    /// signal ends the wait: see [`PageInvalidator`](super::PageInvalidator).
    ///
    /// # Errors
    /// When the kernel does not know the node, or the file system is unmounted.
    pub(super) fn drop_content(&self, node: NodeId) -> io::Result<()> {
        let kernel = Responder::of_device(&self.device, 0);
        kernel.write(NOTIFY_INVAL_INODE, NotifyInvalInodeOut { ino: node, off: 0, len: 0 }.as_bytes(), &[])
    }

    /// Lets the kernel ask for a node's attributes when it needs them next. This waits for no page, so any thread may do
    /// it (a negative offset means no content).
    ///
    /// # Errors
    /// When the kernel does not know the node, or the file system is unmounted.
    pub fn drop_attributes(&self, node: NodeId) -> io::Result<()> {
        let kernel = Responder::of_device(&self.device, 0);
        kernel.write(NOTIFY_INVAL_INODE, NotifyInvalInodeOut { ino: node, off: -1, len: 0 }.as_bytes(), &[])
    }

    /// Lets the kernel forget nodes of regular files unless a caller, an open file or a mapping uses them. The kernel waits
    /// for nothing here, so any thread may do it.
    ///
    /// # Errors
    /// `EINVAL` before Linux 6.18, and any error when the file system is unmounted.
    pub fn prune(&self, nodes: &[NodeId]) -> io::Result<()> {
        let kernel = Responder::of_device(&self.device, 0);
        let count = u32::try_from(nodes.len()).map_err(io::Error::other)?;
        let header = NotifyPruneOut { count, ..Default::default() };
        kernel.write(NOTIFY_PRUNE, header.as_bytes(), nodes.as_bytes())
    }
}

/// An answer that is sent later, perhaps by another thread. The region records the request, for a successor of this process.
pub struct DeferredAnswer {
    pub(super) responder: Responder,
    pub(super) region: Arc<Region>,
    /// The item in the region's waits that records this request; `None` if there was no free one.
    pub(super) place: Option<usize>,
}

impl DeferredAnswer {
    /// The number of the request, as INTERRUPT names it.
    pub fn number(&self) -> u64 {
        self.responder.unique & !UNIQUE_RESEND
    }

    /// Answers.
    ///
    /// # Errors
    /// When no caller waits any more: the request was aborted, or the file system unmounted.
    pub fn send(self, outcome: Result<Answer, Errno>) -> io::Result<()> {
        self.region.counts().answer(&outcome);
        self.responder.send(outcome)
    }

    /// Answers with these bytes, without a copy of them.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_bytes(self, bytes: &[u8]) -> io::Result<()> {
        self.responder.write(0, bytes, &[])
    }
}

impl Drop for DeferredAnswer {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.region.waits().remove(place);
        }
    }
}

/// Sends the answer to one request, or notifications.
#[derive(Clone, Debug)]
pub(super) struct Responder {
    route: AnswerRoute,
    pub(super) unique: u64,
}

/// The device or ring that a request came from, which takes its answer.
#[derive(Clone, Debug)]
enum AnswerRoute {
    Device(Arc<OwnedFd>),
    Ring(RingReply),
}

impl Responder {
    /// For a request that was read from `device`. With the number 0, for notifications.
    pub(super) fn of_device(device: &Arc<OwnedFd>, unique: u64) -> Self {
        Self { route: AnswerRoute::Device(Arc::clone(device)), unique }
    }

    /// For a request that came into an entry of a ring.
    pub(super) fn of_ring(reply: RingReply, unique: u64) -> Self {
        Self { route: AnswerRoute::Ring(reply), unique }
    }

    pub(super) fn send(&self, outcome: Result<Answer, Errno>) -> io::Result<()> {
        self.send_with(outcome, &[])
    }

    pub(super) fn send_with(&self, outcome: Result<Answer, Errno>, buffer: &[u8]) -> io::Result<()> {
        let answer = match outcome {
            Ok(answer) => answer,
            Err(errno) => return self.write(-errno.raw_os_error(), &[], &[]),
        };
        match answer {
            Answer::Silence | Answer::Later => Ok(()),
            Answer::Done => self.write(0, &[], &[]),
            Answer::Entry(entry) => self.send_body(&entry),
            Answer::Attributes(attributes) => self.send_body(&attributes),
            Answer::Statx(attributes) => self.send_body(&*attributes),
            Answer::Open(open) => self.send_body(&open),
            Answer::Created(entry, open) => self.write(0, entry.as_bytes(), open.as_bytes()),
            Answer::Written(size) => self.send_body(&WriteOut { size, padding: 0 }),
            Answer::Buffer => self.write(0, buffer, &[]),
            Answer::XattrSize(size) => self.send_body(&GetxattrOut { size, padding: 0 }),
            Answer::FileSystem(status) => self.send_body(&status),
            Answer::Lock(lock) => self.send_body(&lock),
            Answer::Offset(offset) => self.send_body(&LseekOut { offset }),
            Answer::Copied(bytes_copied) => self.send_body(&CopyFileRangeOut { bytes_copied }),
        }
    }

    pub(super) fn send_body(&self, body: &(impl IntoBytes + Immutable)) -> io::Result<()> {
        self.write(0, body.as_bytes(), &[])
    }

    pub(super) fn write(&self, error: i32, body: &[u8], more: &[u8]) -> io::Result<()> {
        let device = match &self.route {
            AnswerRoute::Device(device) => device,
            AnswerRoute::Ring(reply) => return reply.write(error, body, more),
        };
        let len = size_of::<OutHeader>() + body.len() + more.len();
        let len = u32::try_from(len).map_err(io::Error::other)?;
        let header = OutHeader { len, error, unique: self.unique };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(body), IoSlice::new(more)];
        // The kernel takes an answer whole or not at all.
        Ok(rustix::io::writev(&**device, &parts).map(drop)?)
    }
}
