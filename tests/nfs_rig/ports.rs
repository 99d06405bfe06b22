//! Ports that stay reserved while no process listens on them, so that a server can come back at the same one.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};

/// Below the ports that the kernel gives to outgoing connections: one of those would be in the way of a server that comes
/// back (`ip_local_port_range` begins at 32768).
const RANGE: std::ops::Range<u16> = 12_000..32_000;

/// A TCP port. It is reserved by the UDP port of the same number, which no server here wants: the kernel gives it to one
/// test program at a time, and takes it back however that ends.
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
        let mut all = RANGE.cycle().skip(start).take(RANGE.len());
        all.find_map(|number| Self::try_reserve((ip, number).into())).expect("a free port")
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
