//! A connection to a server, which continues when the server comes back, as its users have it. `pending` owns its
//! calls. One task connects and reads (`driver`), another one watches the time (`deadlines`).

use std::rc::Rc;

use tokio::task::{AbortHandle, spawn_local};

use super::dial::Dialer;
use super::message::RpcCall;
use super::peer::Peer;
use super::pending::{PendingReply, SharedConnection};
use super::policy::Policy;
use super::pool::Pool;
use super::{deadlines, driver};

/// A connection to a server. Dropping it ends it.
#[derive(Debug)]
pub struct RpcConnection {
    shared: Rc<SharedConnection>,
    tasks: [AbortHandle; 2],
}

impl RpcConnection {
    /// A connection to `peer`, which is made when there is something to ask. The first call that asks for one gets the
    /// xid `first_xid`. To be called in a [`LocalSet`](tokio::task::LocalSet) of a runtime with time and I/O.
    pub fn new(peer: Rc<Peer>, dialer: Dialer, pool: Pool, first_xid: u32) -> Self {
        let shared = Rc::new(SharedConnection::new(peer, dialer, pool, first_xid));
        let driver = spawn_local(driver::drive(Rc::clone(&shared))).abort_handle();
        let deadlines = spawn_local(deadlines::watch(Rc::clone(&shared))).abort_handle();
        Self { shared, tasks: [driver, deadlines] }
    }

    /// An xid for a call. None is in use twice at a time.
    pub fn next_xid(&self) -> u32 {
        self.shared.next_xid()
    }

    /// Whether a call with this xid is in flight.
    pub fn is_in_use(&self, xid: u32) -> bool {
        self.shared.is_in_use(xid)
    }

    /// Gives up the stream that there is, or the attempt to have one: the next goes to where the server is now.
    pub fn cut(&self) {
        self.shared.cut.notify_waiters();
    }

    /// The port that the connection comes from, if there has been one.
    pub fn local_port(&self) -> Option<u16> {
        self.shared.dialer.port()
    }

    /// The server at its other end.
    pub fn peer(&self) -> &Peer {
        &self.shared.peer
    }

    /// Makes the call `message`, which has the xid `xid`. With `again` it may have been made before, by another process.
    /// Dropping the future takes the call back, as far as it has not been sent.
    ///
    /// # Errors
    /// When the server does not do it, or `policy` ends the wait for it.
    ///
    /// # Panics
    /// When the xid [is in use](Self::is_in_use).
    pub fn call(&self, xid: u32, message: RpcCall, policy: Policy, again: bool) -> PendingReply<'_> {
        self.shared.call(xid, message, policy, again)
    }
}

impl Drop for RpcConnection {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        if self.shared.stream.take().is_some() {
            self.shared.peer.disconnected();
        }
    }
}
