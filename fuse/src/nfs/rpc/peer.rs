//! A server as all connections to it see it: where it is, and how it does.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::region::{Moment, Region};

/// A server. It is shared by its connections, and read by who wants to know whether to ask it at all.
#[derive(Debug)]
pub struct Peer {
    name: String,
    address: Cell<SocketAddr>,
    /// Since when there was something to answer, and nothing came. None while there is nothing to answer.
    waiting_since: Cell<Option<Instant>>,
    /// Where this is told to other processes: a region for each volume that shares the server.
    regions: RefCell<Vec<Weak<Region>>>,
    /// The log says that it does not answer.
    told: Cell<bool>,
    /// The log says that it sends garbage.
    told_garbage: Cell<bool>,
    connected: Cell<usize>,
    in_flight: Cell<usize>,
    calls: Cell<u64>,
    reconnects: Cell<u64>,
    retransmissions: Cell<u64>,
    failed_attempts: Cell<u32>,
    last_error: RefCell<Option<String>>,
}

/// How a server does, at a moment.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Health {
    /// For so long it owes answers, and has sent nothing at all. Zero while there is nothing to answer.
    pub silent: Duration,
    /// It has not answered a call for as long as the mount's options say, nor any other since.
    pub gone: bool,
    /// Connections to it.
    pub connected: usize,
    /// Calls that it has not answered.
    pub in_flight: usize,
    /// Calls so far.
    pub calls: u64,
    /// How often a connection to it was made again.
    pub reconnects: u64,
    /// How often a call was sent again.
    pub retransmissions: u64,
    /// Attempts to connect that failed, since the last that did not.
    pub failed_attempts: u32,
    /// Why the last connection or attempt ended.
    pub last_error: Option<String>,
}

impl Peer {
    /// The server `name`, at `address`.
    pub fn new(name: String, address: SocketAddr) -> Self {
        Self {
            name,
            address: Cell::new(address),
            waiting_since: Cell::default(),
            regions: RefCell::default(),
            told: Cell::default(),
            told_garbage: Cell::default(),
            connected: Cell::default(),
            in_flight: Cell::default(),
            calls: Cell::default(),
            reconnects: Cell::default(),
            retransmissions: Cell::default(),
            failed_attempts: Cell::default(),
            last_error: RefCell::default(),
        }
    }

    /// From now on, `region` tells since when it owes answers, as the regions of other volumes do.
    pub fn tell(&self, region: &Arc<Region>) {
        region.silence().set(self.waiting_since.get().map(Moment::of));
        let mut regions = self.regions.borrow_mut();
        regions.retain(|other| other.strong_count() > 0);
        regions.push(Arc::downgrade(region));
    }

    /// What it is called in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.address.get()
    }

    /// From the next connection on, it is elsewhere: see [`Connection::cut`](super::Connection::cut).
    pub fn move_to(&self, address: SocketAddr) {
        self.address.set(address);
    }

    /// How it does.
    pub fn health(&self) -> Health {
        Health {
            silent: self.silent(),
            gone: self.told.get(),
            connected: self.connected.get(),
            in_flight: self.in_flight.get(),
            calls: self.calls.get(),
            reconnects: self.reconnects.get(),
            retransmissions: self.retransmissions.get(),
            failed_attempts: self.failed_attempts.get(),
            last_error: self.last_error.borrow().clone(),
        }
    }

    /// For so long it owes answers, and has sent nothing at all.
    pub fn silent(&self) -> Duration {
        self.waiting_since.get().map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// How often a connection to it was made again.
    pub fn reconnects(&self) -> u64 {
        self.reconnects.get()
    }

    /// A call begins.
    pub(super) fn call_begins(&self, now: Instant) {
        self.calls.set(self.calls.get() + 1);
        self.in_flight.set(self.in_flight.get() + 1);
        if self.waiting_since.get().is_none() {
            self.waits_since(Some(now));
        }
    }

    /// A call is answered, or given up.
    pub(super) fn call_ends(&self) {
        self.in_flight.set(self.in_flight.get() - 1);
        if self.in_flight.get() == 0 {
            self.waits_since(None);
        }
    }

    /// Something came from it. Called after the calls have ended that were answered.
    pub(super) fn heard(&self) {
        if self.in_flight.get() > 0 {
            self.waits_since(Some(Instant::now()));
        }
        self.told_garbage.set(false);
        if self.told.replace(false) {
            info!(server = self.name, "NFS server {} answers again", self.name);
        }
    }

    /// A call has not been answered in its time.
    pub(super) fn is_silent(&self, goes_on: bool) {
        if !self.told.replace(true) {
            let then = if goes_on { "still trying" } else { "giving up" };
            let why = self.last_error.borrow();
            let why = why.as_deref().map(|why| format!(" (last error: {why})")).unwrap_or_default();
            warn!(server = self.name, "NFS server {} does not answer; {then}{why}", self.name);
        }
    }

    /// What it sent cannot be understood.
    pub(super) fn sends_garbage(&self, what: &str) {
        if !self.told_garbage.replace(true) {
            warn!(server = self.name, "NFS server {}: {what}; the connection is made anew", self.name);
        }
    }

    pub(super) fn connected(&self, again: bool) {
        self.connected.set(self.connected.get() + 1);
        self.failed_attempts.set(0);
        if again {
            self.reconnects.set(self.reconnects.get() + 1);
        }
    }

    pub(super) fn disconnected(&self) {
        self.connected.set(self.connected.get() - 1);
    }

    pub(super) fn attempt_failed(&self) {
        self.failed_attempts.set(self.failed_attempts.get().saturating_add(1));
    }

    /// Remembers why a connection ended, or was not made.
    pub(super) fn note(&self, error: String) {
        *self.last_error.borrow_mut() = Some(error);
    }

    pub(super) fn retransmitted(&self) {
        self.retransmissions.set(self.retransmissions.get() + 1);
    }

    fn waits_since(&self, since: Option<Instant>) {
        self.waiting_since.set(since);
        // Asked of the clock once for all volumes: every call comes by here.
        let moment = since.map(Moment::of);
        self.regions.borrow().iter().filter_map(Weak::upgrade).for_each(|region| region.silence().set(moment));
    }
}
