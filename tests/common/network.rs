//! Network namespaces, in which a test can use any port and address without conflicts with other tests.

use std::io::Error;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::resume_unwind;
use std::thread;

use libc::{c_char, c_int, c_short};
use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::eventually;

/// A second address of the loopback interface. With `127.0.0.1` alone, the C library finds no IPv4 address for a program that
/// requests only addresses of configured families (`AI_ADDRCONFIG`).
const SOME: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The number of the loopback interface: it is the first one everywhere.
const LOOPBACK: c_int = 1;

/// Runs a test in a network namespace that has only the loopback interface, with these addresses besides its usual ones.
/// Processes and threads that the test starts are in the namespace, too.
#[track_caller]
pub fn in_own_network(addresses: &[Ipv6Addr], test: impl FnOnce() + Send) {
    thread::scope(|scope| {
        let inside = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network");
            start_loopback();
            addresses.iter().for_each(|address| add(*address));
            test();
        });
        inside.join().unwrap_or_else(|panic| resume_unwind(panic));
    });
}

fn start_loopback() {
    let socket = any_socket(AddressFamily::Inet);
    let mut started = interface("lo");
    started.ifr_ifru.ifru_flags = libc::IFF_UP as c_short;
    // SAFETY: the kernel reads a name and flags.
    let outcome = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const started) };
    assert_eq!(outcome, 0, "the loopback interface is started: {}", Error::last_os_error());
    let mut added = interface("lo:1");
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(SOME.octets()) },
        sin_zero: [0; 8],
    };
    // SAFETY: both are addresses of the same length, and the first field says of which kind.
    added.ifr_ifru.ifru_addr = unsafe { std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(address) };
    // SAFETY: the kernel reads a name and an address.
    let outcome = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw const added) };
    assert_eq!(outcome, 0, "{SOME} is added: {}", Error::last_os_error());
}

fn add(address: Ipv6Addr) {
    let socket = any_socket(AddressFamily::Inet6);
    let ifr6_addr = libc::in6_addr { s6_addr: address.octets() };
    let added = libc::in6_ifreq { ifr6_addr, ifr6_prefixlen: 128, ifr6_ifindex: LOOPBACK };
    // SAFETY: the kernel reads an address, its length and the interface's number.
    let outcome = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw const added) };
    assert_eq!(outcome, 0, "{address} is added: {}", Error::last_os_error());
    eventually("the address is in use", || UdpSocket::bind((address, 0)).is_ok());
}

fn any_socket(family: AddressFamily) -> OwnedFd {
    socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).expect("a socket")
}

fn interface(name: &str) -> libc::ifreq {
    // SAFETY: a structure of numbers may be zero.
    let mut interface: libc::ifreq = unsafe { std::mem::zeroed() };
    interface.ifr_name.iter_mut().zip(name.bytes()).for_each(|(place, byte)| *place = byte as c_char);
    interface
}
