//! The state of a server that all connections to it share: its address, and since when it is silent.
//!
//! There are two times. The time for which a call has been waiting decides whether another call is worth making; a call that was
//! given up does not wait. The time for which the server has been silent goes to the [observers](SilenceObserver): a call that ends
//! without an answer, given up or cancelled, does not end the silence, and neither does a pause between calls. Only bytes from the
//! server do.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tracing::{info, warn};

/// A call that was cancelled sooner than this does not count as silence of the server.
const SILENCE_DELAY: Duration = Duration::from_millis(250);

/// Gets reports on the silence of a server. Each volume of the server has an observer.
pub trait SilenceObserver {
    /// Reports since when the server has been silent: since it sent its last bytes, or since the first unanswered call. `None`
    /// if no call is unanswered.
    fn silent_since(&self, since: Option<Instant>);
}

/// A server. Its connections share this state. Callers read whether the server answers at all.
#[derive(Debug)]
pub struct Peer {
    name: String,
    address: Cell<SocketAddr>,
    /// Since when calls have been in flight and the server has sent nothing; `None` while no call is in flight.
    waiting_since: Cell<Option<Instant>>,
    /// Since when the server has sent nothing although it got a call, whether or not a caller still waits for the answer.
    silent_since: Cell<Option<Instant>>,
    observers: RefCell<Vec<Weak<dyn SilenceObserver>>>,
    /// The log has a warning that the server does not answer.
    is_silence_logged: Cell<bool>,
    /// The log has a warning that the server sends garbage.
    is_garbage_logged: Cell<bool>,
    connected: Cell<usize>,
    in_flight: Cell<usize>,
    calls: Cell<u64>,
    reconnects: Cell<u64>,
    retransmissions: Cell<u64>,
    failed_attempts: Cell<u32>,
    last_error: RefCell<Option<String>>,
}

/// The state of a server at one moment, with counters.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NfsServerHealth {
    /// The time for which the server owes answers and has sent nothing at all. Zero while no call waits for an answer.
    pub silent: Duration,
    /// The server has not answered a call within the time of the mount's options, and has sent nothing since.
    pub gone: bool,
    /// Connections to the server.
    pub connected: usize,
    /// Calls that the server has not answered.
    pub in_flight: usize,
    /// Calls so far.
    pub calls: u64,
    /// How many times a connection to the server was made again.
    pub reconnects: u64,
    /// How many times a call was sent again.
    pub retransmissions: u64,
    /// Attempts to connect that failed since the last one that succeeded.
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
            silent_since: Cell::default(),
            observers: RefCell::default(),
            is_silence_logged: Cell::default(),
            is_garbage_logged: Cell::default(),
            connected: Cell::default(),
            in_flight: Cell::default(),
            calls: Cell::default(),
            reconnects: Cell::default(),
            retransmissions: Cell::default(),
            failed_attempts: Cell::default(),
            last_error: RefCell::default(),
        }
    }

    /// Adds an observer, which gets a report now and at each change, for as long as it lives.
    pub fn add_observer(&self, observer: &Arc<dyn SilenceObserver>) {
        observer.silent_since(self.silent_since.get());
        let mut observers = self.observers.borrow_mut();
        observers.retain(|other| other.strong_count() > 0);
        observers.push(Arc::downgrade(observer));
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the server's address.
    pub fn address(&self) -> SocketAddr {
        self.address.get()
    }

    /// The next connection goes to `address`: see [`RpcConnection::cut`](super::RpcConnection::cut).
    pub fn move_to(&self, address: SocketAddr) {
        self.address.set(address);
        if self.in_flight.get() == 0 {
            // No call has been sent to the new address yet.
            self.silent_from(None);
        }
    }

    /// Returns the state of the server.
    pub fn health(&self) -> NfsServerHealth {
        NfsServerHealth {
            silent: self.silent(),
            gone: self.is_silence_logged.get(),
            connected: self.connected.get(),
            in_flight: self.in_flight.get(),
            calls: self.calls.get(),
            reconnects: self.reconnects.get(),
            retransmissions: self.retransmissions.get(),
            failed_attempts: self.failed_attempts.get(),
            last_error: self.last_error.borrow().clone(),
        }
    }

    /// Returns the time for which the server owes answers and has sent nothing at all.
    pub fn silent(&self) -> Duration {
        self.waiting_since.get().map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Returns how many times a connection to the server was made again.
    pub fn reconnects(&self) -> u64 {
        self.reconnects.get()
    }

    /// Records that a call begins.
    pub(super) fn call_begins(&self, now: Instant) {
        self.calls.set(self.calls.get() + 1);
        self.in_flight.set(self.in_flight.get() + 1);
        if self.waiting_since.get().is_none() {
            self.waiting_since.set(Some(now));
        }
        if self.silent_since.get().is_none() {
            self.silent_from(Some(now));
        }
    }

    /// Records that the server has answered a call.
    pub(super) fn call_answered(&self) {
        if self.call_ends() {
            self.silent_from(None);
        }
    }

    /// Records that a call has reached the end of its time.
    pub(super) fn call_given_up(&self) {
        self.call_ends();
    }

    /// Records that the caller has cancelled a call.
    pub(super) fn call_cancelled(&self) {
        if self.call_ends() && self.silent_since.get().is_some_and(|since| since.elapsed() < SILENCE_DELAY) {
            self.silent_from(None);
        }
    }

    /// Counts a call as ended. Returns whether it was the last one in flight.
    fn call_ends(&self) -> bool {
        self.in_flight.set(self.in_flight.get() - 1);
        let was_last = self.in_flight.get() == 0;
        if was_last {
            self.waiting_since.set(None);
        }
        was_last
    }

    /// Records that bytes came from the server. Called after the calls that they answer have ended.
    pub(super) fn note_received(&self) {
        if self.in_flight.get() > 0 {
            let now = Some(Instant::now());
            self.waiting_since.set(now);
            self.silent_from(now);
        } else if self.silent_since.get().is_some() {
            // The server answers a call that was given up.
            self.silent_from(None);
        }
        self.is_garbage_logged.set(false);
        if self.is_silence_logged.replace(false) {
            info!(server = self.name, "NFS server {} answers again", self.name);
        }
    }

    /// Logs once that the server has not answered a call in the call's time. `goes_on`: the client does not give the call up.
    pub(super) fn log_silence(&self, goes_on: bool) {
        if !self.is_silence_logged.replace(true) {
            let then = if goes_on { "still trying" } else { "giving up" };
            let error = self.last_error.borrow();
            let error = error.as_deref().map(|error| format!(" (last error: {error})")).unwrap_or_default();
            warn!(server = self.name, "NFS server {} does not answer; {then}{error}", self.name);
        }
    }

    /// Logs once that the server has sent a message that cannot be parsed.
    pub(super) fn log_garbage(&self, error: &str) {
        if !self.is_garbage_logged.replace(true) {
            warn!(server = self.name, "NFS server {}: {error}; podfs connects again", self.name);
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

    /// Records why a connection ended, or was not made.
    pub(super) fn set_last_error(&self, error: String) {
        *self.last_error.borrow_mut() = Some(error);
    }

    pub(super) fn retransmitted(&self) {
        self.retransmissions.set(self.retransmissions.get() + 1);
    }

    fn silent_from(&self, since: Option<Instant>) {
        self.silent_since.set(since);
        let observers = self.observers.borrow();
        observers.iter().filter_map(Weak::upgrade).for_each(|observer| observer.silent_since(since));
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Mutex;

    use super::*;

    const LONG: Duration = Duration::from_secs(10);

    /// The last report to a volume.
    #[derive(Debug, Default)]
    struct LastReport(Mutex<Option<Instant>>);

    impl LastReport {
        fn since(&self) -> Option<Instant> {
            *self.0.lock().expect("no panic")
        }
    }

    impl SilenceObserver for LastReport {
        fn silent_since(&self, since: Option<Instant>) {
            *self.0.lock().expect("no panic") = since;
        }
    }

    fn observe(peer: &Peer) -> Arc<LastReport> {
        let observed = Arc::new(LastReport::default());
        let observer: Arc<dyn SilenceObserver> = Arc::<LastReport>::clone(&observed);
        peer.add_observer(&observer);
        observed
    }

    /// A server that two volumes share.
    fn peer() -> (Peer, [Arc<LastReport>; 2]) {
        let peer = Peer::new("the-server".to_owned(), (Ipv4Addr::LOCALHOST, 2049).into());
        let volumes = [(); 2].map(|()| observe(&peer));
        (peer, volumes)
    }

    fn long_ago() -> Instant {
        Instant::now().checked_sub(LONG).expect("the machine has run for longer")
    }

    /// Whether the server has been silent for at least [`LONG`]. Checks that all volumes report the same.
    #[track_caller]
    fn is_silent_for_long(volumes: &[Arc<LastReport>]) -> bool {
        let since = volumes[0].since();
        assert!(volumes.iter().all(|volume| volume.since() == since));
        since.is_some_and(|since| since.elapsed() >= LONG)
    }

    #[track_caller]
    fn has_answered_all(volumes: &[Arc<LastReport>]) -> bool {
        !is_silent_for_long(volumes) && volumes[0].since().is_none()
    }

    #[test]
    fn abandoned_calls_are_one_silence_until_the_server_answers() {
        let (peer, volumes) = peer();
        peer.call_begins(long_ago());
        peer.call_given_up();
        assert!(is_silent_for_long(&volumes));
        assert_eq!(peer.silent(), Duration::ZERO, "no call waits");
        peer.call_begins(Instant::now());
        assert!(is_silent_for_long(&volumes));
        assert!(peer.silent() < LONG, "whoever waits has not been waiting for long");
        peer.call_given_up();
        let late = observe(&peer);
        assert!(is_silent_for_long(&[&volumes[..], &[late]].concat()));
        peer.call_begins(Instant::now());
        peer.call_answered();
        peer.note_received();
        assert!(has_answered_all(&volumes));
    }

    #[test]
    fn a_late_answer_to_a_call_that_was_given_up_ends_the_silence() {
        let (peer, volumes) = peer();
        peer.call_begins(long_ago());
        peer.call_given_up();
        peer.note_received();
        assert!(has_answered_all(&volumes));
        assert_eq!(peer.silent(), Duration::ZERO);
    }

    #[test]
    fn a_server_that_answers_others_is_not_silent() {
        let (peer, volumes) = peer();
        peer.call_begins(long_ago());
        peer.call_begins(Instant::now());
        peer.call_answered();
        peer.note_received();
        assert!(!is_silent_for_long(&volumes) && volumes[0].since().is_some());
        peer.call_answered();
        assert!(has_answered_all(&volumes), "also when the answers after that cannot be understood");
    }

    #[test]
    fn a_cancelled_call_counts_as_silence_only_after_a_moment() {
        let (peer, volumes) = peer();
        // The call begins in the future, so that it is cancelled soon however slowly this test runs.
        peer.call_begins(Instant::now() + LONG);
        peer.call_cancelled();
        assert!(has_answered_all(&volumes));
        peer.call_begins(long_ago());
        peer.call_cancelled();
        assert!(is_silent_for_long(&volumes));
        peer.call_begins(Instant::now());
        peer.call_cancelled();
        assert!(is_silent_for_long(&volumes));
    }

    #[test]
    fn a_moved_server_is_not_silent_about_abandoned_calls() {
        let elsewhere = (Ipv4Addr::new(127, 0, 0, 2), 2049).into();
        let (peer, volumes) = peer();
        peer.call_begins(long_ago());
        peer.move_to(elsewhere);
        assert!(is_silent_for_long(&volumes));
        peer.call_given_up();
        peer.move_to(elsewhere);
        assert!(has_answered_all(&volumes));
    }
}
