//! The thread that forwards bytes: it waits for sockets, for orders, and for the time at which delayed bytes are due.

use std::io::{ErrorKind, Read, Result, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::Linger;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::flow::{Disturbance, End, Flow, Item};
use super::traffic::{CarriedCall, Traffic};
use super::{Direction, Order};
use crate::nfs_rig::xdr::Reader;

/// The most bytes in a direction's queue: with more, the proxy reads no further bytes.
const MOST: usize = 64 << 20;

/// The state of the network.
pub struct Pump {
    pub listener: Option<TcpListener>,
    pub server: SocketAddr,
    pub frozen: bool,
    pub traffic: Traffic,
    calls: Disturbance,
    replies: Disturbance,
    wakeups: UnixStream,
    links: Vec<Link>,
    buffer: Vec<u8>,
}

/// A connection of a client and the one to its server.
struct Link {
    client: TcpStream,
    server: TcpStream,
    port: u16,
    calls: Flow,
    replies: Flow,
    /// How the connection is to end, once it is to end.
    end: Option<End>,
}

impl Pump {
    pub fn new(listener: TcpListener, server: SocketAddr, wakeups: UnixStream) -> Self {
        wakeups.set_nonblocking(true).expect("a socket");
        let (calls, replies) = Default::default();
        let (links, buffer) = (Vec::new(), vec![0; 1 << 18]);
        Self {
            listener: Some(listener),
            server,
            frozen: false,
            traffic: Traffic::default(),
            calls,
            replies,
            wakeups,
            links,
            buffer,
        }
    }

    /// Forwards bytes and carries out orders until the proxy closes its end of `wakeups`.
    pub fn run(&mut self, orders: &Receiver<Order>) {
        loop {
            self.wait();
            let mut bytes = [0; 64];
            if matches!(self.wakeups.read(&mut bytes), Ok(0)) {
                return;
            }
            orders.try_iter().for_each(|order| order(self));
            if self.frozen {
                continue;
            }
            self.accept();
            let mut links = std::mem::take(&mut self.links);
            links.retain_mut(|link| self.forward(link));
            self.links = links;
        }
    }

    pub fn disturbance(&mut self, direction: Direction) -> &mut Disturbance {
        match direction {
            Direction::Calls => &mut self.calls,
            Direction::Replies => &mut self.replies,
        }
    }

    pub fn connections(&self) -> usize {
        self.links.len()
    }

    pub fn cut(&mut self, end: End) {
        self.links.drain(..).for_each(|link| link.end(end));
    }

    /// Waits for a wakeup, for a socket, or until an item is due.
    fn wait(&self) {
        let mut sockets = vec![PollFd::new(&self.wakeups, PollFlags::IN)];
        let mut next = None;
        if !self.frozen {
            sockets.extend(self.listener.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
            let now = Instant::now();
            for Link { client, server, calls, replies, .. } in &self.links {
                for (socket, from, to) in [(client, calls, replies), (server, replies, calls)] {
                    let mut events = PollFlags::empty();
                    events.set(PollFlags::IN, !from.ended && from.waiting < MOST);
                    events.set(PollFlags::OUT, to.due(now).is_some());
                    // poll(2) reports the end of a stream even without requested events, which would make this thread
                    // spin.
                    if !events.is_empty() {
                        sockets.push(PollFd::new(socket, events));
                    }
                    if to.due(now).is_none() {
                        next = next.into_iter().chain(to.next()).min();
                    }
                }
            }
        }
        let timeout = next.map(|next| Timespec::try_from(next.saturating_duration_since(Instant::now())));
        let timeout = timeout.map(|timeout| timeout.expect("a short time"));
        // An error such as EINTR just makes the loop turn once more.
        let _ = poll(&mut sockets, timeout.as_ref());
    }

    fn accept(&mut self) {
        while let Some(Ok((client, from))) = self.listener.as_ref().map(TcpListener::accept) {
            self.traffic.ports.push(from.port());
            match TcpStream::connect(self.server) {
                Ok(server) => self.links.push(Link::new(client, server, from.port())),
                Err(_) => reset(&client),
            }
        }
    }

    /// Forwards the available bytes. Returns whether the connection goes on.
    fn forward(&mut self, link: &mut Link) -> bool {
        let result = self.forward_calls(link).and_then(|()| self.forward_replies(link));
        let end = match result {
            Err(_) => Some(End::Rst),
            Ok(()) if link.calls.is_done() && link.replies.is_done() => Some(End::Fin),
            Ok(()) => link.end,
        };
        if let Some(end) = end {
            link.end(end);
        }
        end.is_none()
    }

    fn forward_calls(&mut self, link: &mut Link) -> Result<()> {
        let (traffic, port) = (&mut self.traffic, link.port);
        let procedure = |head: &[u8]| {
            let call = CarriedCall::read(head, port)?;
            traffic.calls.push(call);
            Some(call.procedure)
        };
        read(&link.client, &mut link.calls, &mut self.calls, &mut self.buffer, procedure)?;
        write(&link.server, &mut link.calls, &mut link.end)
    }

    fn forward_replies(&mut self, link: &mut Link) -> Result<()> {
        let (traffic, needs_procedure) = (&mut self.traffic, self.replies.only.is_some());
        let procedure = |head: &[u8]| {
            traffic.replies += 1;
            // The search for the call is slow, so do it only if a fault needs the procedure.
            Reader::new(head).u32().filter(|_| needs_procedure).and_then(|xid| traffic.procedure(xid))
        };
        read(&link.server, &mut link.replies, &mut self.replies, &mut self.buffer, procedure)?;
        write(&link.client, &mut link.replies, &mut link.end)
    }
}

impl Link {
    fn new(client: TcpStream, server: TcpStream, port: u16) -> Self {
        for socket in [&client, &server] {
            socket.set_nonblocking(true).expect("a socket");
            socket.set_nodelay(true).expect("a socket");
        }
        Self { client, server, port, calls: Flow::default(), replies: Flow::default(), end: None }
    }

    fn end(&self, end: End) {
        for socket in [&self.client, &self.server] {
            match end {
                End::Fin => finish(socket),
                End::Rst => reset(socket),
            }
        }
    }
}

/// Reads the available bytes into the flow.
fn read(
    mut from: &TcpStream,
    flow: &mut Flow,
    disturbance: &mut Disturbance,
    buffer: &mut [u8],
    mut procedure: impl FnMut(&[u8]) -> Option<u32>,
) -> Result<()> {
    while !flow.ended && flow.waiting < MOST {
        match from.read(buffer) {
            Ok(0) => flow.ended = true,
            Ok(count) => flow.add(&buffer[..count], disturbance, &mut procedure),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    flow.release(Instant::now(), disturbance);
    Ok(())
}

/// Writes the due bytes.
fn write(mut to: &TcpStream, flow: &mut Flow, end: &mut Option<End>) -> Result<()> {
    let now = Instant::now();
    while let Some(item) = flow.due(now) {
        match item {
            Item::End(kind) => {
                *end = Some(*kind);
                return Ok(());
            }
            Item::Bytes(bytes) => match to.write(bytes) {
                Ok(count) => flow.remove_written(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            },
        }
    }
    if flow.is_done() {
        // Only this direction ends: the other direction may go on.
        let _ = to.shutdown(Shutdown::Write);
    }
    Ok(())
}

/// Ends the stream of the connection, and reads all available bytes: the kernel resets a connection that is closed with
/// unread bytes.
fn finish(mut socket: &TcpStream) {
    let _ = socket.shutdown(Shutdown::Write);
    let mut buffer = [0; 4096];
    while socket.read(&mut buffer).is_ok_and(|count| count > 0) {}
}

/// Makes the kernel reset the connection when it is closed.
fn reset(socket: &TcpStream) {
    let _ = setsockopt(socket, Linger, &libc::linger { l_onoff: 1, l_linger: 0 });
}
