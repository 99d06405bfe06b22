//! The supervisor's end of the control socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use rustix::thread::Pid;

use super::affinity::{Affinity, Together};
use super::protocol::{Reply, Request, VolumeId, receive, send};
use crate::passthrough::{DataPath, Options};
use crate::projection::steps::Step;
use crate::projection::tree::Root;
use crate::projection::{GenerationName, Image};

/// A server, as its supervisor sees it. Calls block until the server has answered; any thread may make
/// them, one is under way at a time.
pub struct Server {
    control: Mutex<UnixStream>,
    next: AtomicU32,
    affinity: Affinity,
}

/// The server's threads that take part in a commit, as far as they are known.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Answering {
    session: Option<Pid>,
    control: Option<Pid>,
}

impl Server {
    /// Talks to the server at the other end of `control`.
    pub fn new(control: UnixStream) -> Self {
        Self { control: Mutex::new(control), next: AtomicU32::new(0), affinity: Affinity::current() }
    }

    /// Lets the server answer for a new, empty projection on `device`.
    ///
    /// # Errors
    /// When the server is gone or the kernel's handshake fails.
    pub fn serve(&self, device: BorrowedFd<'_>, root: &Root, trace: bool) -> io::Result<VolumeId> {
        let volume = VolumeId(self.next.fetch_add(1, Ordering::Relaxed));
        self.done(&Request::Serve { volume, root: root.clone(), trace }, &[device])?;
        Ok(volume)
    }

    /// Lets the server show what `source` is open on, on `device`.
    ///
    /// # Errors
    /// When the server is gone, the kernel's handshake fails, or the source cannot be looked at.
    pub(crate) fn pass(
        &self,
        device: BorrowedFd<'_>,
        source: BorrowedFd<'_>,
        options: &Options,
    ) -> io::Result<(VolumeId, DataPath)> {
        let volume = VolumeId(self.next.fetch_add(1, Ordering::Relaxed));
        match self.ask(&Request::Pass { volume, options: options.clone() }, &[device, source])? {
            Reply::Passing(data_path) => Ok((volume, data_path)),
            other => Err(unexpected(other)),
        }
    }

    /// Lets the calling thread share its CPU with those who answer it, until the guard is dropped.
    pub(crate) fn together(&self, answering: Answering) -> Together<'_> {
        self.affinity.together([answering.session, answering.control].into_iter().flatten())
    }

    /// Announces the next changes of a volume, and hands over the generation they attach.
    ///
    /// # Errors
    /// When the server is gone.
    pub(crate) fn announce(
        &self,
        volume: VolumeId,
        steps: &[Step],
        staged: Option<(&GenerationName, &Image)>,
        time: SystemTime,
    ) -> io::Result<Answering> {
        let (name, image) = staged.unzip();
        let request = Request::Announce { volume, steps: steps.to_vec(), staged: name.cloned(), time };
        match self.ask(&request, image.map(Image::as_fd).as_slice())? {
            Reply::Announced { session, control } => {
                if let Some(image) = image {
                    image.disown();
                }
                Ok(Answering { session: session.and_then(Pid::from_raw), control: Pid::from_raw(control) })
            }
            other => Err(unexpected(other)),
        }
    }

    /// Closes a generation; gives the indexes of the nodes that the kernel knows.
    ///
    /// # Errors
    /// When the server is gone or has no such generation.
    pub fn close(&self, volume: VolumeId, generation: &GenerationName) -> io::Result<Vec<u32>> {
        match self.ask(&Request::Close { volume, generation: generation.clone() }, &[])? {
            Reply::Known(known) => Ok(known),
            other => Err(unexpected(other)),
        }
    }

    /// Number of FUSE requests served for a volume so far.
    ///
    /// # Errors
    /// When the server is gone.
    pub fn requests(&self, volume: VolumeId) -> io::Result<u64> {
        match self.ask(&Request::Requests { volume }, &[])? {
            Reply::Requests(count) => Ok(count),
            other => Err(unexpected(other)),
        }
    }

    /// Tells the server to forget a volume that is unmounted.
    ///
    /// # Errors
    /// When the server is gone.
    pub fn remove(&self, volume: VolumeId) -> io::Result<()> {
        self.done(&Request::Remove { volume }, &[])
    }

    fn done(&self, request: &Request, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        match self.ask(request, descriptors)? {
            Reply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    fn ask(&self, request: &Request, descriptors: &[BorrowedFd<'_>]) -> io::Result<Reply> {
        let control = self.control.lock().expect("a thread that panics ends the process");
        send(&control, request, descriptors)?;
        let gone = || io::Error::new(io::ErrorKind::BrokenPipe, "the server is gone");
        match receive(&control)?.ok_or_else(gone)? {
            (Reply::Failed(reason), _) => Err(io::Error::other(reason)),
            (reply, _) => Ok(reply),
        }
    }
}

fn unexpected(reply: Reply) -> io::Error {
    io::Error::other(format!("the server gave an answer to another question: {reply:?}"))
}
