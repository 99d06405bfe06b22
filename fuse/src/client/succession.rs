//! Takeover: a successor continues with the volumes of a dead server. Adoption: the next supervisor takes over a server.
//!
//! When a server is dead, its successor continues with the same connections to the kernel. This is safe:
//!
//! 1. The last server is dead: none of its threads will ever answer again, or change a region or a source. The caller has waited
//!    for its end. Its keeper has all its descriptors open.
//! 2. No process reads the devices. Requests of containers wait in the kernel meanwhile.
//! 3. The supervisor greets the successor. The successor takes over the descriptors to which the regions refer, each under its old
//!    number. From here on, the successor's keeper has them, too.
//! 4. The successor loads every volume, without any effect outside. If it dies before the end of this step, the next successor
//!    begins again at 3, with the same keeper: nothing has changed.
//! 5. The supervisor dismisses the keeper of the last server. If the successor dies from here on, its own keeper has everything.
//! 6. The successor writes FUSE_NOTIFY_RESEND to each device before it reads from the device (Linux 6.9). The kernel sends the
//!    requests that the last server had read and not answered once more, with bit 63 in their numbers. Only then the successor's
//!    threads begin to read.
//! 7. A change that the last server may have made is recorded in the region (passthrough) or in the number of applied steps
//!    (projections), so its successor does not make it twice.
//! 8. The supervisor repeats the calls to which the last server did not answer. They are idempotent, so the last server may have
//!    executed them.
//!
//! When the keeper is dead, too, the supervisor waits for its end and [lets it go](LastFdKeeper::let_go). At 3, the successor then
//! inherits no descriptors. First, it erases their numbers from the regions: it may open other files under them. If it dies before
//! 5, the next successor does the same. It reopens the open files after 6, as far as it can find them (`passthrough::open_files`).
//! A keeper that dies while it hands descriptors over ends the attempt; the next attempt begins without it.
//!
//! A new supervisor that finds a server without a supervisor takes over the state from the server's description. To do so, it does
//! not mount, unmount or commit.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;

use super::connection::unexpected;
use super::connection::{FdKeeperLink, ServerConnection};
use super::held::HeldVolume;
use super::live::LiveMount;
use super::mounted::MountedVolume;
use super::projection::ProjectionMount;
use super::server_client::ServerClient;
use crate::label::name_in;
use crate::nfs::sockets::SocketSets;
use crate::protocol::{Greeting, ServerReply, ServerRequest, VolumeNumber};
use crate::region::VolumeKind;
use crate::server::fd_keeper::dismiss;
use crate::server::fd_keeper::successor::{self, StartedSuccessor};
use crate::shortage::is_shortage;

/// The outcome of a takeover.
#[derive(Debug, Default)]
pub struct TakeoverOutcome {
    /// The volumes that the successor could not take over, and why. Their users get `ENOTCONN`; each can be mounted anew.
    pub given_up: Vec<(VolumeNumber, String)>,
}

/// What the supervisor does with a volume that a successor cannot load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnloadableVolume {
    /// It gives up the volume: no other server could load it.
    GivenUp,
    /// It ends the takeover, because a server of another version can load the volume.
    EndsTakeover,
}

/// A server that has answered the greeting, and has no volumes yet.
pub struct Successor(ServerConnection);

/// The keeper of a dead server, if it has one. To drop this does not end the keeper.
#[derive(Default)]
pub struct LastFdKeeper(FdKeeperLink);

impl LastFdKeeper {
    /// The keeper's process id, unless it was [let go](Self::let_go).
    pub fn pid(&self) -> Option<i32> {
        self.0.channel.as_ref().map(|_| self.0.pid)
    }

    /// Makes the keeper start a successor. Returns its process and its socket; `None` if this keeper cannot start one of the
    /// supervisor's version.
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

    /// Notes that the keeper is dead, so the next successor begins without inherited descriptors.
    pub fn let_go(&mut self) {
        self.0.channel = None;
    }
}

/// A volume of a server whose supervisor has ended.
pub struct AdoptedVolume {
    mounted: MountedVolume,
    /// The live parts, if it is a projection that has some.
    live: Option<LiveMount>,
}

impl AdoptedVolume {
    /// The name of the volume, if the record has one.
    pub fn name(&self) -> Option<&str> {
        name_in(self.about())
    }

    /// Whether the volume was mounted after the other one.
    pub fn is_newer_than(&self, other: &AdoptedVolume) -> bool {
        self.mounted.volume > other.mounted.volume
    }

    /// The record of the previous supervisor about the volume.
    pub fn about(&self) -> &Value {
        &self.mounted.held.about
    }

    /// The kind of the volume.
    pub fn kind(&self) -> VolumeKind {
        self.mounted.kind()
    }

    /// Whether the volume has an access log.
    pub fn is_audited(&self) -> bool {
        self.mounted.is_audited()
    }

    /// Whether requests arrive over io_uring.
    pub fn is_over_io_uring(&self) -> bool {
        self.mounted.is_over_io_uring()
    }

    /// The device number of its file system, in the format of the mount table.
    pub fn device(&self) -> Option<String> {
        self.mounted.device()
    }

    /// The volume as a projection.
    ///
    /// # Errors
    /// The volume, if it is of another kind.
    pub fn into_projection(self) -> Result<ProjectionMount, MountedVolume> {
        ProjectionMount::adopt(self.mounted, self.live)
    }
}

impl ServerClient {
    /// Notes that the server is dead. Calls wait until [a successor](Self::succeed) serves.
    pub fn mark_dead(&self) -> LastFdKeeper {
        let Some(connection) = self.lose() else { return LastFdKeeper::default() };
        let mut keeper = connection.take_keeper();
        keeper.starts_successor &= connection.program() == self.greeting.program;
        LastFdKeeper(keeper)
    }

    /// Greets the server at the other end of `control`, which will replace the present one.
    ///
    /// # Errors
    /// When it does not answer, or its protocol is incompatible.
    pub fn greet(&self, control: UnixStream) -> io::Result<Successor> {
        ServerConnection::open(control, &self.greeting).map(Successor)
    }

    /// Makes a new server take over from the one that was [marked dead](Self::mark_dead).
    ///
    /// # Errors
    /// When the new server fails, or cannot load a volume that [ends the takeover](UnloadableVolume::EndsTakeover). The caller has
    /// to kill the server, and may try with another one.
    pub fn succeed(
        &self,
        successor: Successor,
        keeper: &mut LastFdKeeper,
        unloadable: UnloadableVolume,
    ) -> io::Result<TakeoverOutcome> {
        let Successor(connection) = successor;
        let _joining = self.joining.lock().expect("a thread that panics ends the process");
        let volumes: Vec<(VolumeNumber, Arc<HeldVolume>)> =
            self.volumes().iter().map(|(volume, held)| (*volume, Arc::clone(held))).collect();
        inherit(&connection, &volumes, keeper)?;
        let mut succession = TakeoverOutcome::default();
        for (volume, held) in &volumes {
            match resume(&connection, *volume, held) {
                Ok(()) => {}
                Err(error) if connection.is_broken(&error) || is_shortage(&error) => return Err(error),
                Err(error) if unloadable == UnloadableVolume::EndsTakeover => {
                    let name = name_in(&held.about).unwrap_or("of an older record");
                    return Err(io::Error::other(format!("it cannot load the volume {name}: {error}")));
                }
                Err(error) => succession.given_up.extend(self.give_up(*volume, error.to_string())),
            }
        }
        // The successor's keeper has all descriptors now, so the last keeper can end.
        if let Some(last) = std::mem::replace(&mut keeper.0, connection.take_keeper()).channel {
            dismiss(last);
        }
        if let Some(socket) = &*self.listener.lock().expect("a thread that panics ends the process") {
            expect_done(&connection, &ServerRequest::Listen, &[socket.as_fd()])?;
        }
        let failed = match connection.ask(&ServerRequest::Start, &[])? {
            (ServerReply::Done, _) => Vec::new(),
            (ServerReply::Started { failed }, _) => failed,
            (other, _) => return Err(unexpected(&other)),
        };
        succession.given_up.extend(failed.into_iter().filter_map(|(volume, reason)| self.give_up(volume, reason)));
        connection.trust()?;
        connection.set_keeper(std::mem::take(&mut keeper.0));
        let connection = Arc::new(connection);
        self.join_link(Arc::clone(&connection));
        // Volumes that were removed while there was no server. From here on, the thread that removes a volume asks the successor.
        let has_left = |volume: &VolumeNumber| !self.volumes().contains_key(volume);
        for volume in volumes.iter().map(|(volume, _)| *volume).filter(has_left) {
            // An error means that the successor is dead, and with it its state of the volume.
            let _ = connection.ask(&ServerRequest::Remove { volume }, &[]);
        }
        Ok(succession)
    }

    /// Gives up a volume with which no server can continue. Returns its number and `reason`; `None` if it was removed meanwhile.
    fn give_up(&self, volume: VolumeNumber, reason: String) -> Option<(VolumeNumber, String)> {
        let held = self.volumes().remove(&volume)?;
        held.give_up();
        Some((volume, reason))
    }

    /// Takes over the volumes of a server whose supervisor has ended, each with that supervisor's record.
    ///
    /// # Errors
    /// When the server does not answer, or it serves another pod. [`io::ErrorKind::Unsupported`] when only another version of podfs can
    /// take over: the server and its volumes are as before.
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
        let server = Arc::new(Self::with_connection(connection, greeting, nfs_sockets));
        let next = volumes.iter().map(|(volume, _)| volume.0.saturating_add(1)).max().unwrap_or(0);
        server.next.store(next, Ordering::Relaxed);
        server.volumes().extend(volumes.iter().map(|(volume, held)| (*volume, Arc::clone(held))));
        let (mut live, mut others): (BTreeMap<VolumeNumber, LiveMount>, Vec<MountedVolume>) = Default::default();
        for (volume, held) in volumes {
            match LiveMount::adopt(MountedVolume { server: Arc::clone(&server), volume, held }) {
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
    volumes: &[(VolumeNumber, Arc<HeldVolume>)],
    keeper: &LastFdKeeper,
) -> io::Result<()> {
    let with_files = volumes.iter().filter(|(_, held)| held.kind().has_open_files());
    let regions = with_files.map(|(_, held)| held.region.as_fd());
    let descriptors: Vec<_> = keeper.0.channel.iter().map(AsFd::as_fd).chain(regions).collect();
    let (reply, _) = connection.ask(&ServerRequest::Inherit { keeper: keeper.pid().is_some() }, &descriptors)?;
    if matches!(reply, ServerReply::Done) { Ok(()) } else { Err(unexpected(&reply)) }
}

fn resume(connection: &ServerConnection, volume: VolumeNumber, held: &HeldVolume) -> io::Result<()> {
    let (description, images) = held.describe(volume);
    let descriptors = held.descriptors()?;
    let images = images.iter().map(|image| image.as_fd());
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).chain(images).collect();
    expect_done(connection, &ServerRequest::Resume(description), &descriptors)
}

fn expect_done(
    connection: &ServerConnection,
    request: &ServerRequest,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    match connection.ask(request, descriptors)? {
        (ServerReply::Done, _) => Ok(()),
        (other, _) => Err(unexpected(&other)),
    }
}
