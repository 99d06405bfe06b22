//! NFS servers. All exports of a server share its connections.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard};

use crate::rpc::dial::{Dialer, inode};
use crate::rpc::{NfsServerHealth, Peer, Pool, RpcConnection, SilenceObserver};
use crate::v3::NfsFileHandle;

/// Most connections to a server, as with Linux.
pub const MAX_CONNECTIONS: usize = 16;

/// The servers of a thread.
#[derive(Debug, Default)]
pub struct Servers {
    pool: Pool,
    known: RefCell<HashMap<(SocketAddr, bool), Weak<NfsServer>>>,
    /// Servers that got their sockets from another process, by the inode number of the first socket.
    given: RefCell<HashMap<u64, Weak<NfsServer>>>,
}

/// A server of NFS.
#[derive(Debug)]
pub struct NfsServer {
    peer: Rc<Peer>,
    pool: Pool,
    reserved_port: bool,
    /// The connections so far. An export that wants more connections adds them.
    connections: RefCell<Vec<Rc<RpcConnection>>>,
    /// The local ports of the connections of the process before this one.
    inherited_ports: RefCell<Vec<u16>>,
    /// The unused sockets for its connections, if this process may not make sockets.
    given: Option<RefCell<VecDeque<OwnedFd>>>,
    /// The socket for other services, if this process may not make sockets. One service uses it at a time.
    spare: Option<Mutex<OwnedFd>>,
}

impl Servers {
    /// The server for these `sockets`, which another process has [bound](crate::rpc::dial::bound): one for each connection, and
    /// `spare` for the server's mountd. Exports that come with copies of the same sockets get the same server. An export may come
    /// with more sockets than the exports before it.
    ///
    /// # Errors
    /// When there are no sockets.
    pub fn given(
        &self,
        name: &str,
        address: SocketAddr,
        sockets: Vec<OwnedFd>,
        spare: OwnedFd,
    ) -> io::Result<Rc<NfsServer>> {
        let none = || io::Error::new(io::ErrorKind::InvalidData, "no socket was given for an NFS server");
        let first = inode(sockets.first().ok_or_else(none)?)?;
        let mut known = self.given.borrow_mut();
        known.retain(|_, server| server.strong_count() > 0);
        if let Some(server) = known.get(&first).and_then(Weak::upgrade) {
            server.give(sockets);
            return Ok(server);
        }
        let server = Rc::new(NfsServer {
            peer: Rc::new(Peer::new(name.to_owned(), address)),
            pool: self.pool.clone(),
            reserved_port: false,
            connections: RefCell::default(),
            inherited_ports: RefCell::default(),
            given: Some(RefCell::new(sockets.into())),
            spare: Some(Mutex::new(spare)),
        });
        known.insert(first, Rc::downgrade(&server));
        Ok(server)
    }

    /// The server whose first socket has this [inode], if an export uses it.
    pub fn with_socket(&self, inode: u64) -> Option<Rc<NfsServer>> {
        self.given.borrow().get(&inode).and_then(Weak::upgrade)
    }

    /// The server at `address`, called `name` in messages. With `reserved_port`, its connections come from a port below 1024, if
    /// this process may use such a port.
    pub fn server(&self, name: &str, address: SocketAddr, reserved_port: bool) -> Rc<NfsServer> {
        let mut known = self.known.borrow_mut();
        known.retain(|_, server| server.strong_count() > 0);
        if let Some(server) = known.get(&(address, reserved_port)).and_then(Weak::upgrade) {
            return server;
        }
        let server = Rc::new(NfsServer {
            peer: Rc::new(Peer::new(name.to_owned(), address)),
            pool: self.pool.clone(),
            reserved_port,
            connections: RefCell::default(),
            inherited_ports: RefCell::default(),
            given: None,
            spare: None,
        });
        known.insert((address, reserved_port), Rc::downgrade(&server));
        server
    }

    /// A connection for a few calls, such as to a mountd.
    pub(crate) fn passing_connection(&self, name: &str, address: SocketAddr, reserved_port: bool) -> RpcConnection {
        let peer = Rc::new(Peer::new(name.to_owned(), address));
        RpcConnection::new(peer, Dialer::new(reserved_port, None), self.pool.clone(), random())
    }
}

/// A connection to a server's mountd. If this process may not make sockets, there is only one at a time, because all of them
/// use the same socket.
pub struct MountdConnection<'a> {
    /// The connection. It ends before another connection begins.
    pub connection: RpcConnection,
    _turn: Option<MutexGuard<'a, OwnedFd>>,
}

impl NfsServer {
    /// Its name in messages.
    pub fn name(&self) -> &str {
        self.peer.name()
    }

    /// Returns the server's address.
    pub fn address(&self) -> SocketAddr {
        self.peer.address()
    }

    /// Records that the server has moved. The client connects to the new address, and all calls continue.
    pub fn move_to(&self, address: SocketAddr) {
        self.peer.move_to(address);
        self.connections.borrow().iter().for_each(|connection| connection.cut());
    }

    /// Returns whether the server answers, with counters.
    pub fn health(&self) -> NfsServerHealth {
        self.peer.health()
    }

    /// Returns the time for which the server owes answers and has sent nothing at all.
    pub fn silent(&self) -> Duration {
        self.peer.silent()
    }

    /// Adds an observer, which learns since when the server has been silent.
    pub fn add_observer(&self, observer: Arc<dyn SilenceObserver>) {
        self.peer.add_observer(&observer);
    }

    /// Returns how many times a connection to the server was made again.
    pub fn reconnects(&self) -> u64 {
        self.peer.reconnects()
    }

    /// A connection for a few calls to its mountd at `address`. Waits until no other export uses the socket for it.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub async fn to_mountd(&self, address: SocketAddr) -> io::Result<MountdConnection<'_>> {
        let (dialer, turn) = match &self.spare {
            Some(spare) => {
                let spare = spare.lock().await;
                (Dialer::given(spare.try_clone()?), Some(spare))
            }
            None => (Dialer::new(self.reserved_port, None), None),
        };
        let peer = Rc::new(Peer::new(self.name().to_owned(), address));
        Ok(MountdConnection { connection: RpcConnection::new(peer, dialer, self.pool.clone(), random()), _turn: turn })
    }

    /// Takes copies of the server's sockets. The sockets that the server does not have yet are for further connections.
    fn give(&self, sockets: Vec<OwnedFd>) {
        let Some(given) = &self.given else { return };
        let mut given = given.borrow_mut();
        let known = self.connections.borrow().len() + given.len();
        given.extend(sockets.into_iter().skip(known));
    }

    /// The ports that its connections come from, for the successor. Zero for a connection that has never connected.
    pub fn local_ports(&self) -> Vec<u16> {
        self.connections.borrow().iter().map(|connection| connection.local_port().unwrap_or(0)).collect()
    }

    /// Makes the connections come from these ports, as in the process before this one. Must be called before there are connections.
    pub fn inherit_ports(&self, ports: &[u16]) {
        *self.inherited_ports.borrow_mut() = ports.to_vec();
    }

    /// The connection for calls about `file`, one of `count`. It is always the same one, so that the calls arrive in order.
    pub fn connection(&self, file: &NfsFileHandle, count: usize) -> Rc<RpcConnection> {
        let slot = if count > 1 { (file.hash() % count as u64) as usize } else { 0 };
        let mut connections = self.connections.borrow_mut();
        while connections.len() <= slot {
            let port = self.inherited_ports.borrow().get(connections.len()).copied().filter(|port| *port != 0);
            let given = self.given.as_ref().map(|given| given.borrow_mut().pop_front());
            let dialer = match given {
                Some(Some(socket)) => Dialer::given(socket),
                // No socket is left for another connection.
                Some(None) => break,
                None => Dialer::new(self.reserved_port, port),
            };
            connections.push(Rc::new(RpcConnection::new(
                Rc::clone(&self.peer),
                dialer,
                self.pool.clone(),
                // A random first xid is far from the xids of the process before this one.
                random(),
            )));
        }
        Rc::clone(&connections[slot.min(connections.len() - 1)])
    }
}

/// A number that another process hardly has.
fn random() -> u32 {
    let mut bytes = [0; 4];
    // getrandom(2) always returns all bytes if they are at most 256.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u32::from_ne_bytes(bytes)
}
