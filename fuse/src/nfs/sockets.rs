//! The sockets of connections to NFS servers, which the volumes of a pod share.
//!
//! 1. The supervisor makes the sockets, because the server process of the pod has no network. The server process has copies of
//!    them, one set for each volume, and connects them. It sees by the sockets which volumes have the same set.
//! 2. A set is for one NFS server: for the name in the volumes, and the address of that name. Volumes that name a server
//!    differently have another set, because the other name may come to mean another machine.
//! 3. A set lives as long as a volume that uses it. Code that looks for a set, or makes one, holds the lock of all sets; so two
//!    volumes that begin at the same time get the same set.
//! 4. An NFS server that has moved keeps its set. The set has the server's new address for all volumes that use the set, also for
//!    volumes that are just starting.
//! 5. A set only grows. Sockets that a volume began to use keep their positions in the set, also after the volume has ended.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use podfs_nfs::rpc::dial::{bound, inode};
use podfs_nfs::server::MAX_CONNECTIONS;
use rustix::net::getsockname;

use super::options::{ExportOptions, NfsAddress};

/// The first port that needs no privilege to bind.
const UNPRIVILEGED: u16 = 1024;

/// The sets of a pod.
#[derive(Debug, Default)]
pub struct SocketSets(Mutex<Vec<Weak<SocketSet>>>);

/// The sockets of a volume: one for each of its connections, and one for its server's mountd.
#[derive(Clone, Debug)]
pub struct NfsSockets {
    set: Arc<SocketSet>,
    connections: usize,
}

/// All sockets for a server.
#[derive(Debug)]
struct SocketSet {
    server: String,
    /// The address at which the server was first found.
    nfs: SocketAddr,
    /// The server's new addresses, if it has moved.
    moved: Mutex<Option<NfsAddress>>,
    reserved: bool,
    connections: Mutex<Vec<OwnedFd>>,
    spare: OwnedFd,
}

impl SocketSets {
    /// The sockets for `connections` connections to the server of `options` (`nconnect`). With `reserved` (`resvport`), they have
    /// ports below 1024, if this process may use such ports. A set with fewer sockets gets more; calls of other volumes stay on
    /// the connections that they had.
    ///
    /// # Errors
    /// When there are no descriptors or ports left.
    pub fn join(&self, options: &ExportOptions, connections: usize, reserved: bool) -> io::Result<NfsSockets> {
        let wanted = connections.clamp(1, MAX_CONNECTIONS);
        let mut sets = self.lock();
        let is_same = |set: &Arc<SocketSet>| {
            (&set.server, set.nfs(), set.reserved) == (&options.export.server, options.nfs, reserved)
        };
        let set = match sets.iter().filter_map(Weak::upgrade).find(is_same) {
            Some(set) => set,
            None => {
                let spare = bound(options.nfs, reserved)?;
                add(&mut sets, SocketSet::new(options, reserved, Vec::new(), spare))
            }
        };
        let mut known = set.connections();
        while known.len() < wanted {
            known.push(bound(options.nfs, reserved)?);
        }
        drop(known);
        Ok(NfsSockets { set, connections: wanted })
    }

    /// Takes over the sockets of a volume that is served already. Volumes that shared sockets share them again.
    ///
    /// # Errors
    /// When sockets are missing, or descriptors are no sockets.
    pub(crate) fn adopt(&self, options: &ExportOptions, mut sockets: Vec<OwnedFd>) -> io::Result<NfsSockets> {
        let spare = sockets.pop();
        let connections = sockets.len();
        let (Some(first), Some(spare)) = (sockets.first(), spare) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "an NFS volume has two sockets at least"));
        };
        let inode = inode(first)?;
        let mut sets = self.lock();
        let is_same = |set: &Arc<SocketSet>| {
            set.connections().first().is_some_and(|one| podfs_nfs::rpc::dial::inode(one).ok() == Some(inode))
        };
        let set = match sets.iter().filter_map(Weak::upgrade).find(is_same) {
            Some(set) => {
                let mut known = set.connections();
                let more = sockets.into_iter().skip(known.len());
                known.extend(more);
                drop(known);
                set
            }
            None => {
                let reserved = port(first)? < UNPRIVILEGED;
                add(&mut sets, SocketSet::new(options, reserved, sockets, spare))
            }
        };
        Ok(NfsSockets { set, connections })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<SocketSet>>> {
        let mut sets = self.0.lock().expect("a thread that panics ends the process");
        sets.retain(|set| set.strong_count() > 0);
        sets
    }
}

impl NfsSockets {
    /// Records that the server has moved, for all volumes that share the sockets.
    pub(crate) fn move_to(&self, place: NfsAddress) {
        *self.set.moved() = Some(place);
    }

    /// The options of a volume that uses the sockets, with the server's current addresses: `options` may be older.
    pub(crate) fn current(&self, options: &ExportOptions) -> ExportOptions {
        let options = options.clone();
        match *self.set.moved() {
            Some(place) => options.at(place),
            None => options,
        }
    }

    /// Whether both are sockets of the same set.
    pub(crate) fn is_shared_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.set, &other.set)
    }

    /// Copies of the sockets: one for each connection, and then the one for the mountd.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub(crate) fn copies(&self) -> io::Result<Vec<OwnedFd>> {
        let known = self.set.connections();
        let all = known.iter().take(self.connections).chain([&self.set.spare]);
        all.map(|one| one.as_fd().try_clone_to_owned()).collect()
    }
}

fn add(sets: &mut Vec<Weak<SocketSet>>, set: SocketSet) -> Arc<SocketSet> {
    let set = Arc::new(set);
    sets.push(Arc::downgrade(&set));
    set
}

impl SocketSet {
    fn new(options: &ExportOptions, reserved: bool, connections: Vec<OwnedFd>, spare: OwnedFd) -> Self {
        let (server, nfs) = (options.export.server.clone(), options.nfs);
        Self { server, nfs, moved: Mutex::default(), reserved, connections: Mutex::new(connections), spare }
    }

    fn nfs(&self) -> SocketAddr {
        self.moved().map_or(self.nfs, |place| place.nfs)
    }

    fn moved(&self) -> MutexGuard<'_, Option<NfsAddress>> {
        self.moved.lock().expect("a thread that panics ends the process")
    }

    fn connections(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        self.connections.lock().expect("a thread that panics ends the process")
    }
}

fn port(socket: &OwnedFd) -> io::Result<u16> {
    Ok(SocketAddr::try_from(getsockname(socket)?).map_err(io::Error::from)?.port())
}
