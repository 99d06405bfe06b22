//! Takeover: a successor continues with the volumes of a dead server. Adoption: the next supervisor takes over a server.
//!
//! When a server is dead, its successor continues with the same connections to the kernel. Why that is safe:
//!
//! 1. The last server is dead: none of its threads will ever answer again, or change a region or a source. The caller has waited
//!    for its end. Its keeper has all its descriptors open.
//! 2. No process reads the devices. Requests of containers wait in the kernel meanwhile.
//! 3. The supervisor greets the successor, which takes over the descriptors that the regions refer to, each at the number it had.
//!    From here on its own keeper has them too.
//! 4. It loads every volume, without any effect outside. If it dies before the end of this step, the next successor begins again
//!    at 3, with the same keeper: nothing has changed.
//! 5. The supervisor dismisses the keeper of the last server. If the successor dies from here on, its own keeper has everything.
//! 6. It writes FUSE_NOTIFY_RESEND to each device before it reads from it (Linux 6.9): the kernel sends again, once, what the
//!    last server had read and not answered, marked by bit 63 of its number. Only then the successor's threads begin to read.
//! 7. A change that the last server may have made is recorded in the region (passthrough) or in the number of applied steps
//!    (projections): it is not made twice.
//! 8. The supervisor repeats the calls for which it had no answer from the last server. They are idempotent, so it does no harm
//!    if the last server executed them.
//!
//! When the keeper is dead, too, the supervisor waits for its end and [lets it go](LastKeeper::let_go). At 3, the successor then
//! inherits nothing, and first of all erases the numbers of all descriptors from the regions: no process has them any more, and
//! it may open other files under them. If it dies before 5, the next successor does the same. It reopens the open files after 6,
//! as far as it can find them (`passthrough::open_files`). A keeper that dies while it hands descriptors over ends the
//! attempt; the next attempt begins without it.
//!
//! A supervisor that finds a server without a supervisor takes over the state of the first one, as the server describes it. It
//! mounts, unmounts and commits nothing for that.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;

use super::connection::unexpected;
use super::connection::{KeeperLink, ServerConnection};
use super::held::HeldVolume;
use super::identity::name_in;
use super::live::Live;
use super::mounted::MountedVolume;
use super::projection::Projection;
use super::server_client::ServerClient;
use crate::nfs::sockets::SocketSets;
use crate::protocol::{Greeting, ServerReply, ServerRequest, VolumeId};
use crate::region::VolumeKind;
use crate::server::fd_keeper::dismiss;
use crate::server::fd_keeper::successor::{self, StartedSuccessor};

/// The outcome of a takeover.
#[derive(Debug, Default)]
pub struct Succession {
    /// The volumes that the successor could not take over, and why. Their users get `ENOTCONN`; each can be mounted anew.
    pub given_up: Vec<(VolumeId, String)>,
}

/// A server that has answered, and has no volumes yet.
pub struct Successor(ServerConnection);

/// The keeper of a dead server, if it has one. Dropping it leaves the keeper alone.
#[derive(Default)]
pub struct LastKeeper(KeeperLink);

impl LastKeeper {
    /// The keeper's process, while a successor would ask it for descriptors.
    pub fn pid(&self) -> Option<i32> {
        self.0.channel.as_ref().map(|_| self.0.pid)
    }

    /// Lets the keeper start a successor. Gives its process and the way to talk to it; nothing if this keeper cannot start one of
    /// the supervisor's version.
    ///
    /// # Errors
    /// When the keeper does not answer, or there are no more processes.
    pub fn start_successor(&self) -> io::Result<Option<(StartedSuccessor, UnixStream)>> {
        let Some(channel) = self.0.channel.as_ref().filter(|_| self.0.starts_successor) else { return Ok(None) };
        let (ours, theirs) = UnixStream::pair()?;
        let started = successor::request(channel.as_fd(), &theirs.into())?;
        Ok(Some((started, ours)))
    }

    /// Whether the keeper has closed its end of the channel. Then it is dead or dying, because it does nothing else.
    pub fn has_hung_up(&self) -> bool {
        let Some(channel) = &self.0.channel else { return false };
        let mut state = [PollFd::new(channel, PollFlags::empty())];
        matches!(poll(&mut state, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1))
    }

    /// The keeper is dead: the next successor begins without inherited descriptors.
    pub fn let_go(&mut self) {
        self.0.channel = None;
    }
}

/// A volume that was served already.
pub struct AdoptedVolume {
    mounted: MountedVolume,
    /// If it is a projection.
    live: Option<Live>,
}

impl AdoptedVolume {
    /// Its name, if the supervisor before said it.
    pub fn name(&self) -> Option<&str> {
        name_in(self.about())
    }

    /// The record of the previous supervisor about it.
    pub fn about(&self) -> &Value {
        &self.mounted.held.about
    }

    /// Which kind it is of.
    pub fn kind(&self) -> VolumeKind {
        self.mounted.kind()
    }

    /// Whether each open is written down.
    pub fn is_audited(&self) -> bool {
        self.mounted.is_audited()
    }

    /// Whether requests come over io_uring.
    pub fn is_over_io_uring(&self) -> bool {
        self.mounted.is_over_io_uring()
    }

    /// The device number of its file system, as the mount table writes it.
    pub fn device(&self) -> Option<String> {
        self.mounted.device()
    }

    /// The volume as a projection.
    ///
    /// # Errors
    /// The volume, if it is of another kind.
    pub fn into_projection(self) -> Result<Projection, MountedVolume> {
        Projection::adopt(self.mounted, self.live)
    }
}

impl ServerClient {
    /// The server is dead. Calls wait until [there is another one](Self::succeed).
    pub fn mark_dead(&self) -> LastKeeper {
        let Some(connection) = self.lose() else { return LastKeeper::default() };
        let mut keeper = connection.take_keeper();
        keeper.starts_successor &= connection.program() == self.greeting.program;
        LastKeeper(keeper)
    }

    /// Greets the server at the other end of `control`, which is going to replace the current server.
    ///
    /// # Errors
    /// When it does not answer, or speaks another language.
    pub fn greet(&self, control: UnixStream) -> io::Result<Successor> {
        ServerConnection::open(control, &self.greeting).map(Successor)
    }

    /// Lets a new server take over from the one that was [marked dead](Self::mark_dead).
    ///
    /// # Errors
    /// When the new server cannot. It is to be killed then, and another one may try.
    pub fn succeed(&self, successor: Successor, keeper: &mut LastKeeper) -> io::Result<Succession> {
        let Successor(connection) = successor;
        let _joining = self.joining.lock().expect("a thread that panics ends the process");
        let volumes: Vec<(VolumeId, Arc<HeldVolume>)> =
            self.volumes().iter().map(|(volume, held)| (*volume, Arc::clone(held))).collect();
        inherit(&connection, &volumes, keeper)?;
        let mut succession = Succession::default();
        for (volume, held) in &volumes {
            match resume(&connection, *volume, held) {
                Ok(()) => {}
                Err(error) if connection.is_broken(&error) => return Err(error),
                Err(error) => {
                    self.volumes().remove(volume);
                    held.give_up();
                    succession.given_up.push((*volume, error.to_string()));
                }
            }
        }
        // The own keeper has everything now; the last one has had its day.
        if let Some(last) = std::mem::replace(&mut keeper.0, connection.take_keeper()).channel {
            dismiss(last);
        }
        if let Some(socket) = &*self.listener.lock().expect("a thread that panics ends the process") {
            done(&connection, &ServerRequest::Listen, &[socket.as_fd()])?;
        }
        done(&connection, &ServerRequest::Start, &[])?;
        connection.trust()?;
        connection.set_keeper(std::mem::take(&mut keeper.0));
        self.join_link(connection);
        Ok(succession)
    }

    /// Takes over the volumes of a server whose supervisor is gone, each with what that supervisor said about it.
    ///
    /// # Errors
    /// When the server does not answer, speaks another language or serves another pod.
    pub fn adopt(control: UnixStream, greeting: Greeting) -> io::Result<(Arc<Self>, Vec<AdoptedVolume>)> {
        let connection = ServerConnection::open(control, &greeting)?;
        let (reply, _) = connection.ask(&ServerRequest::Volumes, &[])?;
        let ServerReply::Volumes(numbers) = reply else { return Err(unexpected(&reply)) };
        let mut volumes = Vec::new();
        let nfs_sockets = SocketSets::default();
        for volume in numbers {
            let (reply, descriptors) = connection.ask(&ServerRequest::Describe { volume }, &[])?;
            let ServerReply::Described(description) = reply else { return Err(unexpected(&reply)) };
            volumes.push((volume, Arc::new(HeldVolume::adopt(description, descriptors, &nfs_sockets)?)));
        }
        connection.trust()?;
        let server = Arc::new(Self::over(connection, greeting, nfs_sockets));
        let next = volumes.iter().map(|(volume, _)| volume.0.saturating_add(1)).max().unwrap_or(0);
        server.next.store(next, Ordering::Relaxed);
        server.volumes().extend(volumes.iter().map(|(volume, held)| (*volume, Arc::clone(held))));
        let (mut live, mut others): (BTreeMap<VolumeId, Live>, Vec<MountedVolume>) = Default::default();
        for (volume, held) in volumes {
            match Live::adopt(MountedVolume { server: Arc::clone(&server), volume, held }) {
                Ok((projection, parts)) => drop(live.insert(projection, parts)),
                Err(other) => others.push(other),
            }
        }
        let adopted = |mounted: MountedVolume| AdoptedVolume { live: live.remove(&mounted.volume), mounted };
        let adopted = others.into_iter().map(adopted).collect();
        Ok((server, adopted))
    }
}

fn inherit(
    connection: &ServerConnection,
    volumes: &[(VolumeId, Arc<HeldVolume>)],
    keeper: &LastKeeper,
) -> io::Result<()> {
    let with_files = volumes.iter().filter(|(_, held)| held.kind().has_open_files());
    let regions = with_files.map(|(_, held)| held.region.as_fd());
    let descriptors: Vec<_> = keeper.0.channel.iter().map(AsFd::as_fd).chain(regions).collect();
    let (reply, _) = connection.ask(&ServerRequest::Inherit { keeper: keeper.pid().is_some() }, &descriptors)?;
    if matches!(reply, ServerReply::Done) { Ok(()) } else { Err(unexpected(&reply)) }
}

fn resume(connection: &ServerConnection, volume: VolumeId, held: &HeldVolume) -> io::Result<()> {
    let (description, images) = held.describe(volume);
    let descriptors = held.descriptors()?;
    let images = images.iter().map(|image| image.as_fd());
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).chain(images).collect();
    done(connection, &ServerRequest::Resume(description), &descriptors)
}

fn done(connection: &ServerConnection, request: &ServerRequest, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    match connection.ask(request, descriptors)? {
        (ServerReply::Done, _) => Ok(()),
        (other, _) => Err(unexpected(&other)),
    }
}
