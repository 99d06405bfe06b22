//! One call of NFSv3: its options, and its repetition while the server answers `NFS3ERR_JUKEBOX`.

use std::time::Instant;

use tokio::time::sleep;

use crate::backoff::Backoff;
use crate::error::Error;
use crate::rpc::{Credential, Persistence, Policy, Procedure, RETRY, Reply, RpcCall, RpcConnection, RpcError, Slice};
use crate::v3::{self, NfsStatus, ProcedureNumber};
use crate::xdr::{Malformed, XdrReader, XdrWriter};

/// The options of a call.
#[derive(Clone, Copy)]
pub struct CallOptions<'a> {
    /// The user and groups of the call.
    pub credential: &'a Credential,
    /// The timeout and retries of the call; `None` means the mount's options.
    pub policy: Option<Policy>,
    /// Called with the xid before the call is sent, each time that the call gets another xid.
    pub announce: Option<&'a dyn Fn(u32)>,
    /// The xid with which the process before this may have sent the call.
    pub earlier_xid: Option<u32>,
}

impl<'a> CallOptions<'a> {
    /// Options with this credential, and otherwise with the mount's options.
    pub fn new(credential: &'a Credential) -> Self {
        Self { credential, policy: None, announce: None, earlier_xid: None }
    }
}

/// A call that the client may have to make more than once.
pub(super) struct RepeatableCall<'a, A> {
    pub(super) options: CallOptions<'a>,
    pub(super) number: ProcedureNumber,
    pub(super) arguments: A,
    pub(super) payload: Option<&'a Slice>,
}

impl<A: Fn(&mut XdrWriter)> RepeatableCall<'_, A> {
    /// Makes the call, and repeats it while the server answers `NFS3ERR_JUKEBOX`. `policy` is that of the mount.
    ///
    /// # Errors
    /// [`Error`]
    pub(super) async fn complete<T>(
        &self,
        connection: &RpcConnection,
        policy: Policy,
        results: impl FnOnce(&mut XdrReader<'_>, &Reply) -> Result<T, Malformed>,
    ) -> Result<T, Error> {
        let policy = self.options.policy.unwrap_or(policy);
        let mut earlier_xid = self.options.earlier_xid;
        let mut delay: Option<(Instant, Backoff)> = None;
        loop {
            let reply = self.send(connection, policy, earlier_xid.take()).await?;
            let mut reader = reply.reader();
            match NfsStatus(reader.u32().map_err(RpcError::from)?) {
                NfsStatus::OK => return Ok(results(&mut reader, &reply).map_err(RpcError::from)?),
                NfsStatus::JUKEBOX => {
                    let (since, backoff) = delay.get_or_insert_with(|| (Instant::now(), RETRY.backoff()));
                    let pause = backoff.fail();
                    match policy.persistence {
                        Persistence::Hard => {}
                        _ if since.elapsed() + pause <= policy.budget() => {}
                        Persistence::Soft => return Err(RpcError::NoAnswer.into()),
                        Persistence::SoftErr => return Err(RpcError::NoAnswerInTime.into()),
                    }
                    sleep(pause).await;
                }
                status => return Err(Error::Refused { status, retransmitted: reply.retransmitted }),
            }
        }
    }

    /// Makes the call once.
    ///
    /// # Errors
    /// [`RpcError`]
    pub(super) async fn send(
        &self,
        connection: &RpcConnection,
        policy: Policy,
        earlier_xid: Option<u32>,
    ) -> Result<Reply, RpcError> {
        // It hardly ever happens that another call in flight has the xid of the process before this one.
        let xid = earlier_xid.filter(|xid| !connection.is_in_use(*xid)).unwrap_or_else(|| connection.next_xid());
        if let Some(announce) = self.options.announce {
            announce(xid);
        }
        let procedure = Procedure { program: v3::PROGRAM, version: v3::VERSION, number: self.number as u32 };
        let payload = self.payload.cloned();
        let message = RpcCall::call_with(xid, procedure, self.options.credential, &self.arguments, payload);
        connection.call(xid, message, policy, earlier_xid.is_some()).await
    }
}
