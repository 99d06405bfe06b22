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
use super::seen::{Seen, Sent};
use super::{Direction, Order};
use crate::nfs_rig::xdr::Reader;

/// So many bytes may wait in a direction before no more are read.
const MOST: usize = 64 << 20;

/// The state of the network.
pub struct Pump {
    pub listener: Option<TcpListener>,
    pub to: SocketAddr,
    pub frozen: bool,
    pub seen: Seen,
    calls: Disturbance,
    replies: Disturbance,
    rings: UnixStream,
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
    /// It is to end, and how.
    end: Option<End>,
}

impl Pump {
    pub fn new(listener: TcpListener, to: SocketAddr, rings: UnixStream) -> Self {
        rings.set_nonblocking(true).expect("a socket");
        let (calls, replies) = Default::default();
        let (links, buffer) = (Vec::new(), vec![0; 1 << 18]);
        Self {
            listener: Some(listener),
            to,
            frozen: false,
            seen: Seen::default(),
            calls,
            replies,
            rings,
            links,
            buffer,
        }
    }

    /// Carries until the other end of the bell is gone.
    pub fn run(&mut self, orders: &Receiver<Order>) {
        loop {
            self.wait();
            let mut rings = [0; 64];
            if matches!(self.rings.read(&mut rings), Ok(0)) {
                return;
            }
            orders.try_iter().for_each(|order| order(self));
            if self.frozen {
                continue;
            }
            self.accept();
            let mut links = std::mem::take(&mut self.links);
            links.retain_mut(|link| self.carry(link));
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

    /// Waits until there may be something to do.
    fn wait(&self) {
        let mut all = vec![PollFd::new(&self.rings, PollFlags::IN)];
        let mut next = None;
        if !self.frozen {
            all.extend(self.listener.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
            let now = Instant::now();
            for Link { client, server, calls, replies, .. } in &self.links {
                for (socket, from, to) in [(client, calls, replies), (server, replies, calls)] {
                    let mut events = PollFlags::empty();
                    events.set(PollFlags::IN, !from.ended && from.waiting < MOST);
                    events.set(PollFlags::OUT, to.due(now).is_some());
                    // A socket of which nothing is wanted would still tell of its end, again and again.
                    if !events.is_empty() {
                        all.push(PollFd::new(socket, events));
                    }
                    if to.due(now).is_none() {
                        next = next.into_iter().chain(to.next()).min();
                    }
                }
            }
        }
        let timeout = next.map(|next| Timespec::try_from(next.saturating_duration_since(Instant::now())));
        let timeout = timeout.map(|timeout| timeout.expect("a short time"));
        // A signal is a reason to look around, too.
        let _ = poll(&mut all, timeout.as_ref());
    }

    fn accept(&mut self) {
        while let Some(Ok((client, from))) = self.listener.as_ref().map(TcpListener::accept) {
            self.seen.ports.push(from.port());
            match TcpStream::connect(self.to) {
                Ok(server) => self.links.push(Link::new(client, server, from.port())),
                Err(_) => reset(&client),
            }
        }
    }

    /// Moves the available bytes. Returns whether the connection goes on.
    fn carry(&mut self, link: &mut Link) -> bool {
        let carried = self.carry_calls(link).and_then(|()| self.carry_replies(link));
        let end = match carried {
            Err(_) => Some(End::Rst),
            Ok(()) if link.calls.is_done() && link.replies.is_done() => Some(End::Fin),
            Ok(()) => link.end,
        };
        if let Some(end) = end {
            link.end(end);
        }
        end.is_none()
    }

    fn carry_calls(&mut self, link: &mut Link) -> Result<()> {
        let (seen, port) = (&mut self.seen, link.port);
        let procedure = |head: &[u8]| {
            let call = Sent::read(head, port)?;
            seen.calls.push(call);
            Some(call.procedure)
        };
        read(&link.client, &mut link.calls, &mut self.calls, &mut self.buffer, procedure)?;
        write(&link.server, &mut link.calls, &mut link.end)
    }

    fn carry_replies(&mut self, link: &mut Link) -> Result<()> {
        let (seen, only) = (&mut self.seen, self.replies.only.is_some());
        let procedure = |head: &[u8]| {
            seen.replies += 1;
            // The calls are searched only where it matters.
            Reader::new(head).u32().filter(|_| only).and_then(|xid| seen.procedure(xid))
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
            Ok(count) => flow.take(&buffer[..count], disturbance, &mut procedure),
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
            Item::End(how) => {
                *end = Some(*how);
                return Ok(());
            }
            Item::Bytes(bytes) => match to.write(bytes) {
                Ok(count) => flow.written(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            },
        }
    }
    if flow.is_done() {
        // The other direction may still go on.
        let _ = to.shutdown(Shutdown::Write);
    }
    Ok(())
}

/// Lets the connection end with its stream when it is closed: with unread bytes the kernel would reset it.
fn finish(mut socket: &TcpStream) {
    let _ = socket.shutdown(Shutdown::Write);
    let mut rest = [0; 4096];
    while socket.read(&mut rest).is_ok_and(|count| count > 0) {}
}

/// Lets the connection end by a reset when it is closed.
fn reset(socket: &TcpStream) {
    let _ = setsockopt(socket, Linger, &libc::linger { l_onoff: 1, l_linger: 0 });
}
