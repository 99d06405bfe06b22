//! Sockets to servers, from the same port again if possible.
//!
//! A server remembers its answers by xid *and* by the client's address and port. So a connection that replaces an earlier one
//! comes from the same port. Three things make that possible: `SO_REUSEADDR` and `SO_REUSEPORT` let the port be
//! bound while the old socket still exists, `SO_LINGER` of zero lets a socket end without `TIME_WAIT`, also when its
//! process is killed, and a [`Stream`] ends its connection before its socket is closed: a child process that is just being
//! started has a copy of the socket, and would keep the connection.
//!
//! A process that may make no sockets gets one that is [bound] already, and uses it for every connection. A successor continues
//! with a copy of it from another process.

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::net::sockopt;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use tracing::warn;

/// Ports that only a privileged process can bind. Those below are left to well-known services, as Linux does.
const RESERVED: std::ops::RangeInclusive<u16> = 665..=1023;
/// Longest duration of an attempt to connect. The next attempt may find the server running, or at another address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The kernel's probes of a connection without traffic: the time before the first one, the interval, and their number.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(10), 6);
/// Data that the server has not acknowledged after this time ends the connection. The client then connects again.
const ACKNOWLEDGEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// A TCP connection. Dropping it ends the connection.
#[derive(Debug)]
pub struct Stream {
    stream: TcpStream,
    /// Other processes have copies of the socket. A successor may have connected its copy anew before this is dropped, so the drop
    /// must not end the connection: the next connect ends it.
    is_given: bool,
}

impl Deref for Stream {
    type Target = TcpStream;

    fn deref(&self) -> &TcpStream {
        &self.stream
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.is_given {
            // This fails on a connection that is lost already.
            let _ = rustix::net::connect_unspec(&self.stream);
        }
    }
}

/// The source of a connection's socket and local port.
#[derive(Debug)]
pub struct Dialer {
    reserved: Cell<bool>,
    /// The local port of the last connection.
    port: Cell<Option<u16>>,
    /// The only socket that this dialer may use, if this process may not make sockets.
    given: Option<OwnedFd>,
}

impl Dialer {
    /// `reserved` asks for a port below 1024, which many servers want; `port` is tried first.
    pub fn new(reserved: bool, port: Option<u16>) -> Self {
        Self { reserved: Cell::new(reserved), port: Cell::new(port), given: None }
    }

    /// A dialer that uses this [`bound`] socket for each connection. The socket may be in any state.
    pub fn given(socket: OwnedFd) -> Self {
        Self { reserved: Cell::new(false), port: Cell::new(None), given: Some(socket) }
    }

    /// The port of the last connection.
    pub fn port(&self) -> Option<u16> {
        self.port.get()
    }

    /// Connects to `address`.
    ///
    /// # Errors
    /// When nothing listens there, or nothing answers in time.
    pub async fn dial(&self, address: SocketAddr) -> io::Result<Stream> {
        let dialed = async {
            match &self.given {
                Some(socket) => dial_anew(socket, address).await,
                None => self.dial_from_some_port(address).await,
            }
        };
        let connected = timeout(CONNECT_TIMEOUT, dialed).await;
        let stream = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
        let stream = Stream { stream, is_given: self.given.is_some() };
        self.port.set(Some(stream.local_addr()?.port()));
        Ok(stream)
    }

    async fn dial_from_some_port(&self, address: SocketAddr) -> io::Result<TcpStream> {
        if let Some(port) = self.port.get() {
            match from_port(address, port).await {
                Err(error) if is_taken(&error) || error.kind() == io::ErrorKind::PermissionDenied => {}
                outcome => return outcome,
            }
        }
        if self.reserved.get() {
            for port in reserved_ports() {
                match from_port(address, port).await {
                    Err(error) if is_taken(&error) => {}
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                        self.reserved.set(false);
                        warn!("{NOT_RESERVED}");
                        break;
                    }
                    outcome => return outcome,
                }
            }
        }
        socket(address)?.connect(address).await
    }
}

const NOT_RESERVED: &str = "this process may not use ports below 1024 (CAP_NET_BIND_SERVICE); a server that insists on \
    them refuses it";

/// The inode number of a socket, which all its copies share and no other socket has.
///
/// # Errors
/// Those of fstat(2).
pub fn inode(socket: &OwnedFd) -> io::Result<u64> {
    Ok(fstat(socket)?.st_ino)
}

/// A socket for [`Dialer::given`] that can be connected to `address`. With `reserved`, it has a port below 1024, if this process
/// may use such a port. The socket keeps its port for as long as it exists, whatever happens to its connections.
///
/// # Errors
/// When there are no descriptors or ports left.
pub fn bound(address: SocketAddr, reserved: bool) -> io::Result<OwnedFd> {
    if reserved {
        for port in reserved_ports() {
            match bound_to(address, port) {
                Err(error) if is_taken(&error) => {}
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    warn!("{NOT_RESERVED}");
                    break;
                }
                outcome => return outcome,
            }
        }
    }
    // The kernel releases a port that it chose itself when the connection ends. It keeps a port that `bind(2)` named.
    let chosen = socket(address)?;
    chosen.bind(SocketAddr::new(unspecified(address), 0))?;
    bound_to(address, chosen.local_addr()?.port())
}

fn bound_to(address: SocketAddr, port: u16) -> io::Result<OwnedFd> {
    let socket = socket(address)?;
    socket.bind(SocketAddr::new(unspecified(address), port))?;
    socket.as_fd().try_clone_to_owned()
}

/// Connects a socket that may be connected already: first ends its connection. The local address stays.
async fn dial_anew(socket: &OwnedFd, address: SocketAddr) -> io::Result<TcpStream> {
    // On a socket that was never connected, this changes nothing.
    let _ = rustix::net::connect_unspec(socket);
    match rustix::net::connect(socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(errno) => return Err(errno.into()),
    }
    // tokio gets a copy of the socket for this connection alone, so that the next connection does not begin with its readiness.
    let stream = TcpStream::from_std(socket.try_clone()?.into())?;
    stream.writable().await?;
    match stream.take_error()? {
        None => Ok(stream),
        Some(error) => Err(error),
    }
}

/// All reserved ports in order, beginning at a random one.
fn reserved_ports() -> impl Iterator<Item = u16> {
    let mut random = [0; 2];
    // Without random bytes, the ports begin at the first one.
    let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::NONBLOCK);
    let (first, count) = (*RESERVED.start(), RESERVED.end() - RESERVED.start() + 1);
    let begin = u16::from_ne_bytes(random) % count;
    (0..count).map(move |step| first + (begin + step) % count)
}

/// Whether the port is in use, so that another port may succeed.
fn is_taken(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable)
}

async fn from_port(address: SocketAddr, port: u16) -> io::Result<TcpStream> {
    let socket = socket(address)?;
    socket.bind(SocketAddr::new(unspecified(address), port))?;
    socket.connect(address).await
}

fn unspecified(address: SocketAddr) -> IpAddr {
    if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

fn socket(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(true)?;
    socket.set_nodelay(true)?;
    socket.set_keepalive(true)?;
    let (idle, interval, count) = KEEPALIVE;
    sockopt::set_tcp_keepidle(&socket, idle)?;
    sockopt::set_tcp_keepintvl(&socket, interval)?;
    sockopt::set_tcp_keepcnt(&socket, count)?;
    sockopt::set_tcp_user_timeout(&socket, u32::try_from(ACKNOWLEDGEMENT_TIMEOUT.as_millis()).unwrap_or(u32::MAX))?;
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_connection_ends_although_another_process_has_a_copy_of_its_socket() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
        let address = listener.local_addr().expect("an address");
        let dialer = Dialer::new(false, None);
        let stream = dialer.dial(address).await.expect("a connection");
        let (mut accepted, _) = listener.accept().expect("a connection");
        accepted.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
        let _copy = stream.as_fd().try_clone_to_owned().expect("a copy");
        drop(stream);
        let end = accepted.read(&mut [0]).map_err(|error| error.kind());
        assert!(matches!(end, Ok(0) | Err(io::ErrorKind::ConnectionReset)), "the connection has ended: {end:?}");
    }
}
