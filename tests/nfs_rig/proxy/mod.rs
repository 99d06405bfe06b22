//! A network between a client and a server, on one machine: it carries connections from a port of its own to the server's,
//! and can be slow, torn, or wrong about whole messages.
//!
//! It knows records and the heads of calls, nothing of NFS. It stands for what a client sees of a bad network or of a server
//! behind a load balancer. It does not stand for lost packets, which TCP repairs before a program sees them, nor for narrow
//! links: delayed bytes are many at a time. If the server is down, the proxy accepts a connection first and then resets it.
//!
//! One thread does all the work (`pump`). The methods here send it orders, which are in effect when the methods return. `flow`
//! is a direction of a connection, with its faults; `records` finds the records in its bytes; `seen` counts calls and replies.

mod flow;
mod pump;
mod records;
mod seen;

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::ports::Port;

pub use flow::{Disturbance, End};
use pump::Pump;
pub use seen::{Seen, Sent};

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    Calls,
    Replies,
}

/// The network; it ends, with all its connections, when it is dropped.
pub struct Proxy {
    port: Port,
    orders: Sender<Order>,
    /// A byte here makes the pump look at its orders.
    bell: UnixStream,
    thread: Option<JoinHandle<()>>,
}

/// An order to the pump.
type Order = Box<dyn FnOnce(&mut Pump) + Send>;

impl Proxy {
    /// A network that carries everything as it is, from a port of 127.0.0.1.
    pub fn start(to: SocketAddr) -> Self {
        Self::start_at(Ipv4Addr::LOCALHOST.into(), to)
    }

    /// From a port of another address, such as `::1`.
    pub fn start_at(from: IpAddr, to: SocketAddr) -> Self {
        let port = Port::reserve_at(from);
        let (orders, received) = channel();
        let (bell, rings) = UnixStream::pair().expect("a socket pair");
        let listener = listen(port.address());
        let mut pump = Pump::new(listener, to, rings);
        let thread = thread::spawn(move || pump.run(&received));
        Self { port, orders, bell, thread: Some(thread) }
    }

    /// The address to which clients connect.
    pub fn address(&self) -> SocketAddr {
        self.port.address()
    }

    /// Changes the treatment of bytes in this direction, from now on.
    pub fn disturb(&self, direction: Direction, change: impl FnOnce(&mut Disturbance) + Send + 'static) {
        self.ask(move |pump| change(pump.disturbance(direction)));
    }

    /// Holds all bytes for so long, in each direction.
    pub fn delay(&self, each_way: Duration) {
        for direction in [Direction::Calls, Direction::Replies] {
            self.disturb(direction, move |disturbance| disturbance.delay = each_way);
        }
    }

    /// Ends all connections, on both sides; bytes in flight are lost. New connections are accepted.
    pub fn cut(&self, end: End) {
        self.ask(move |pump| pump.cut(end));
    }

    /// Stops all bytes: connections are accepted, and their bytes wait until the proxy moves them again.
    pub fn freeze(&self) {
        self.ask(|pump| pump.frozen = true);
    }

    pub fn thaw(&self) {
        self.ask(|pump| pump.frozen = false);
    }

    /// New connections are refused. Those that are there stay.
    pub fn refuse(&self) {
        self.ask(|pump| pump.listener = None);
    }

    /// New connections are accepted again.
    pub fn accept(&self) {
        let listener = listen(self.address());
        self.ask(move |pump| pump.listener = Some(listener));
    }

    /// New connections go to another server.
    pub fn lead_to(&self, to: SocketAddr) {
        self.ask(move |pump| pump.to = to);
    }

    /// Connections that are there now.
    pub fn connections(&self) -> usize {
        self.ask(|pump| pump.connections())
    }

    /// The connections, calls and replies so far.
    pub fn seen(&self) -> Seen {
        self.ask(|pump| pump.seen.clone())
    }

    /// Forgets the connections, calls and replies so far.
    pub fn forget(&self) {
        self.ask(|pump| pump.seen = Seen::default());
    }

    fn ask<T: Send + 'static>(&self, order: impl FnOnce(&mut Pump) -> T + Send + 'static) -> T {
        let (result, done) = channel();
        let order = move |pump: &mut Pump| drop(result.send(order(pump)));
        self.orders.send(Box::new(order)).expect("the pump runs until it is dropped");
        std::io::Write::write_all(&mut &self.bell, &[0]).expect("it listens");
        done.recv().expect("every order is done")
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The pump ends when its socket for orders is closed.
        let _ = self.bell.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Listens at a reserved port. A process that another test starts has, until its exec, the listener that was closed just now.
fn listen(at: SocketAddr) -> TcpListener {
    let until = Instant::now() + Duration::from_secs(10);
    let listener = loop {
        match TcpListener::bind(at) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < until => {
                thread::sleep(Duration::from_millis(1));
            }
            bound => break bound.expect("a port that is ours"),
        }
    };
    listener.set_nonblocking(true).expect("a socket");
    listener
}
