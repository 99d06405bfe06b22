//! Ports that stay reserved while no process listens on them, so that a server can restart with the same port.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};

/// The range is below the ports that the kernel gives to outgoing connections (`ip_local_port_range` begins at 32768). With a
/// higher port, an outgoing connection could take the port of a server that restarts.
const RANGE: std::ops::Range<u16> = 12_000..32_000;

/// A TCP port. The reservation is a bound UDP socket of the same port number, which no server here uses: the kernel lets one
/// socket have it at a time, and closes the socket with the test program.
pub struct Port {
    address: SocketAddr,
    _reserved: UdpSocket,
}

impl Port {
    /// A port of 127.0.0.1.
    pub fn reserve() -> Self {
        Self::reserve_at(Ipv4Addr::LOCALHOST.into())
    }

    pub fn reserve_at(ip: IpAddr) -> Self {
        let start = RandomState::new().build_hasher().finish() as usize % RANGE.len();
        let mut numbers = RANGE.cycle().skip(start).take(RANGE.len());
        numbers.find_map(|number| Self::try_reserve((ip, number).into())).expect("a free port")
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn try_reserve(address: SocketAddr) -> Option<Self> {
        let reserved = UdpSocket::bind(address).ok()?;
        TcpListener::bind(address).ok()?;
        Some(Self { address, _reserved: reserved })
    }
}
