//! A connection to a server, for the code that makes calls. It survives restarts of the server. `pending` owns its calls. One
//! task connects and reads (`driver`), another task handles timeouts (`deadlines`).

use std::rc::Rc;

use tokio::task::{AbortHandle, spawn_local};

use super::dial::Dialer;
use super::message::RpcCall;
use super::peer::Peer;
use super::pending::{PendingReply, SharedConnection};
use super::policy::Policy;
use super::pool::Pool;
use super::{deadlines, driver};

/// A connection to a server. Dropping it closes the connection.
#[derive(Debug)]
pub struct RpcConnection {
    shared: Rc<SharedConnection>,
    tasks: [AbortHandle; 2],
}

impl RpcConnection {
    /// A connection to `peer`. It connects when there is a call. [`Self::next_xid`] begins at `first_xid`. Must be called in a
    /// [`LocalSet`](tokio::task::LocalSet) of a runtime with time and I/O.
    pub fn new(peer: Rc<Peer>, dialer: Dialer, pool: Pool, first_xid: u32) -> Self {
        let shared = Rc::new(SharedConnection::new(peer, dialer, pool, first_xid));
        let driver = spawn_local(driver::drive(Rc::clone(&shared))).abort_handle();
        let deadlines = spawn_local(deadlines::watch(Rc::clone(&shared))).abort_handle();
        Self { shared, tasks: [driver, deadlines] }
    }

    /// An xid that no call in flight has.
    pub fn next_xid(&self) -> u32 {
        self.shared.next_xid()
    }

    /// Whether a call with this xid is in flight.
    pub fn is_in_use(&self, xid: u32) -> bool {
        self.shared.is_in_use(xid)
    }

    /// Closes the stream, or ends the attempt to connect. The next attempt goes to the server's current address.
    pub fn cut(&self) {
        self.shared.cut.notify_waiters();
    }

    /// The port that the connection comes from, if there has been one.
    pub fn local_port(&self) -> Option<u16> {
        self.shared.dialer.port()
    }

    /// The server.
    pub fn peer(&self) -> &Peer {
        &self.shared.peer
    }

    /// Makes the call `message`, which has the xid `xid`. `again` says that another process may have sent the call before. Dropping
    /// the future cancels the call; a message whose writing has begun is still written to its end.
    ///
    /// # Errors
    /// When the server refuses the call, or `policy` ends the wait for the answer.
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
