//! A network between a client and a server on one machine. The proxy forwards connections from its own port to the server's
//! port, and can delay bytes, break connections, or drop, repeat and reorder records.
//!
//! The proxy parses records and the heads of calls, but nothing of NFS. It simulates a bad network, or a server behind a load
//! balancer. It does not simulate lost packets, which TCP repairs before a program sees them, nor low bandwidth: delayed bytes
//! arrive all at once. If the server is down, the proxy first accepts a connection and then resets it, while a real network
//! would refuse it.
//!
//! One thread does all the work (`pump`). The methods here send orders to this thread, and return when the order is in effect.
//! `flow` is one direction of a connection, with its faults; `records` finds the records in its bytes; `traffic` counts calls
//! and replies.

mod flow;
mod pump;
mod records;
mod traffic;

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::ports::Port;

pub use flow::{Disturbance, End};
use pump::Pump;
pub use traffic::{CarriedCall, Traffic};

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    Calls,
    /// From the server to the client.
    Replies,
}

/// The network. Dropping it ends it with all its connections.
pub struct Proxy {
    port: Port,
    orders: Sender<Order>,
    /// A byte in this socket wakes the pump, which then looks at its orders.
    waker: UnixStream,
    thread: Option<JoinHandle<()>>,
}

/// An order to the pump.
type Order = Box<dyn FnOnce(&mut Pump) + Send>;

impl Proxy {
    /// A network without faults, from a port of 127.0.0.1 to this server.
    pub fn start(server: SocketAddr) -> Self {
        Self::start_at(Ipv4Addr::LOCALHOST.into(), server)
    }

    /// A network without faults, from a port of another address, such as `::1`.
    pub fn start_at(from: IpAddr, server: SocketAddr) -> Self {
        let port = Port::reserve_at(from);
        let (order_sender, orders) = channel();
        let (waker, wakeups) = UnixStream::pair().expect("a socket pair");
        let listener = listen(port.address());
        let mut pump = Pump::new(listener, server, wakeups);
        let thread = thread::spawn(move || pump.run(&orders));
        Self { port, orders: order_sender, waker, thread: Some(thread) }
    }

    /// The address to which clients connect.
    pub fn address(&self) -> SocketAddr {
        self.port.address()
    }

    /// Changes the faults of this direction, from now on.
    pub fn disturb(&self, direction: Direction, change: impl FnOnce(&mut Disturbance) + Send + 'static) {
        self.order(move |pump| change(pump.disturbance(direction)));
    }

    /// Delays all bytes, in each direction.
    pub fn delay(&self, each_way: Duration) {
        for direction in [Direction::Calls, Direction::Replies] {
            self.disturb(direction, move |disturbance| disturbance.delay = each_way);
        }
    }

    /// Ends all connections, on both sides. Bytes in flight are lost. The proxy still accepts new connections.
    pub fn cut(&self, end: End) {
        self.order(move |pump| pump.cut(end));
    }

    /// Stops all bytes: the kernel still accepts connections, but their bytes wait until [`Self::thaw`].
    pub fn freeze(&self) {
        self.order(|pump| pump.frozen = true);
    }

    pub fn thaw(&self) {
        self.order(|pump| pump.frozen = false);
    }

    /// Makes the kernel refuse new connections. Existing connections go on.
    pub fn refuse(&self) {
        self.order(|pump| pump.listener = None);
    }

    /// Accepts new connections again.
    pub fn accept(&self) {
        let listener = listen(self.address());
        self.order(move |pump| pump.listener = Some(listener));
    }

    /// Forwards new connections to another server.
    pub fn redirect(&self, server: SocketAddr) {
        self.order(move |pump| pump.server = server);
    }

    /// The number of present connections.
    pub fn connections(&self) -> usize {
        self.order(|pump| pump.connections())
    }

    /// The connections, calls and replies so far.
    pub fn traffic(&self) -> Traffic {
        self.order(|pump| pump.traffic.clone())
    }

    /// Forgets the connections, calls and replies so far.
    pub fn forget(&self) {
        self.order(|pump| pump.traffic = Traffic::default());
    }

    fn order<T: Send + 'static>(&self, order: impl FnOnce(&mut Pump) -> T + Send + 'static) -> T {
        let (result_sender, result) = channel();
        let order = move |pump: &mut Pump| drop(result_sender.send(order(pump)));
        self.orders.send(Box::new(order)).expect("the pump runs until the proxy is dropped");
        std::io::Write::write_all(&mut &self.waker, &[0]).expect("the pump reads");
        result.recv().expect("the pump carries out every order")
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The pump ends when this socket is closed.
        let _ = self.waker.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Listens at a reserved port. The port may be in use for a moment after the listener was closed: a process that another test
/// starts has a copy of the listener until its exec.
fn listen(address: SocketAddr) -> TcpListener {
    let deadline = Instant::now() + Duration::from_secs(10);
    let listener = loop {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(1));
            }
            listener => break listener.expect("the reserved port is free"),
        }
    };
    listener.set_nonblocking(true).expect("a socket");
    listener
}
