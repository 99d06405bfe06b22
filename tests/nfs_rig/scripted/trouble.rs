//! Rules for faults that several tests use. A rule with a number of `times` concerns the next calls up to this number.

use super::{Gate, Handle, ReceivedCall, Reply, Rule, procedures};
use crate::nfs_rig::protocol::procedure::{COMMIT, READ, READDIR, READDIRPLUS, WRITE};
use crate::nfs_rig::protocol::{NFS, error};
use crate::nfs_rig::rpc;
use crate::nfs_rig::xdr::Writer;

/// The number of `times` of a rule without end.
pub const ALWAYS: usize = usize::MAX;

/// The cookies on the pages of an endless directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cookies {
    /// Each page has only the cookie of the request.
    Same,
    /// Each cookie is a new one.
    New,
}

impl ReceivedCall {
    /// Whether the call is of this procedure of NFS.
    pub fn is(&self, procedure: u32) -> bool {
        (self.call.program, self.call.procedure) == (NFS.0, procedure)
    }
}

/// The server does not execute the procedure, and sends this reply.
pub fn instead(procedure: u32, times: usize, reply: impl Fn(&ReceivedCall) -> Reply + Send + 'static) -> impl Rule {
    let mut remaining = times;
    move |received, _| {
        let applies = received.is(procedure) && remaining > 0;
        remaining -= usize::from(applies);
        applies.then(|| reply(received))
    }
}

/// The server executes the procedure, and then sends this reply.
pub fn executed_but(procedure: u32, times: usize, reply: Reply) -> impl Rule {
    let mut rule = instead(procedure, times, move |_| reply.clone());
    move |received, files| {
        let reply = rule(received, files)?;
        procedures::answer(received, files, 0);
        Some(reply)
    }
}

/// The server executes the procedure, and sends changed results.
pub fn changed_results(procedure: u32, change: impl Fn(Vec<u8>) -> Vec<u8> + Send + 'static) -> impl Rule {
    move |received, files| {
        let answer = received.is(procedure).then(|| procedures::answer(received, files, 0))?;
        Some(match answer {
            Reply::Results(results) => Reply::Results(change(results)),
            reply => reply,
        })
    }
}

/// The server does not execute the procedure, and replies with this error.
pub fn fails(procedure: u32, error: u32, times: usize) -> impl Rule {
    instead(procedure, times, move |_| Reply::Error(error))
}

/// The server executes the next call of the procedure before the gate or behind it, and replies when the gate is open.
pub fn held(procedure: u32, gate: &Gate, executed_first: bool) -> impl Rule {
    let gate = gate.clone();
    instead(procedure, 1, move |_| Reply::Held { gate: gate.clone(), executed_first })
}

/// The server replies that it is busy and that the client should try later (`NFS3ERR_JUKEBOX`).
pub fn jukebox(procedure: u32, times: usize) -> impl Rule {
    fails(procedure, error::JUKEBOX, times)
}

/// The server neither executes nor answers the procedure.
pub fn silent(procedure: u32, times: usize) -> impl Rule {
    instead(procedure, times, |_| Reply::Nothing)
}

/// The handle is stale, in every procedure whose first argument it is.
pub fn stale(handle: Handle) -> impl Rule {
    move |received, _| (received.handle == handle).then_some(Reply::Error(error::STALE))
}

/// The server denies the call because of its credential, for this reason (`auth_stat`).
pub fn denied(procedure: u32, reason: u32, times: usize) -> impl Rule {
    instead(procedure, times, move |received| Reply::Record(rpc::denied(received.call.xid, reason)))
}

/// The server does not execute the call, and replies with an error of RPC (`accept_stat`): 1 no such program, 3 no such
/// procedure, 4 invalid arguments, 5 an error of the server.
pub fn not_executed(procedure: u32, status: u32, times: usize) -> impl Rule {
    instead(procedure, times, move |received| Reply::Record(rpc::accepted(received.call.xid, status, &[])))
}

/// The reply has the xid of a call that the client has never sent.
pub fn wrong_xid(procedure: u32, times: usize) -> impl Rule {
    instead(procedure, times, |received| Reply::Record(rpc::accepted(!received.call.xid, 0, &[0; 64])))
}

/// The reply is a record of meaningless bytes.
pub fn garbage(procedure: u32, times: usize) -> impl Rule {
    instead(procedure, times, |_| Reply::Record((0..100_u8).map(|byte| byte.wrapping_mul(37)).collect()))
}

/// The server sends the header of a record of this length, and nothing more.
pub fn header_only(procedure: u32, length: u32, times: usize) -> impl Rule {
    instead(procedure, times, move |_| Reply::Bytes(rpc::header(length as usize, true).to_vec()))
}

/// The results end after this number of bytes.
pub fn cut_short(procedure: u32, bytes: usize) -> impl Rule {
    changed_results(procedure, move |mut results| {
        results.truncate(bytes);
        results
    })
}

/// READ claims to have read four GiB, but sends only 64 bytes.
pub fn huge_read() -> impl Rule {
    instead(READ, ALWAYS, |_| {
        let claimed = Writer::default().u32(0).u32(0).u32(u32::MAX).u32(0).u32(u32::MAX);
        Reply::Results(claimed.fixed(&[0; 64]).bytes())
    })
}

/// READ returns more data than requested; its count is the requested one.
pub fn generous_read() -> impl Rule {
    instead(READ, ALWAYS, |received| {
        let count = u32::from_be_bytes(*received.call.arguments.last_chunk().expect("the count is the last argument"));
        let data = vec![b'x'; count as usize + 512];
        Reply::Results(Writer::default().u32(0).u32(0).u32(count).u32(0).opaque(&data).bytes())
    })
}

/// Every directory is endless: no page is the last one.
pub fn endless(cookies: Cookies) -> impl Rule {
    move |received, _| {
        let plus = received.is(READDIRPLUS);
        if !plus && !received.is(READDIR) {
            return None;
        }
        let step = if cookies == Cookies::New { 1 } else { 0 };
        let mut page = Writer::default().u32(0).u32(0).u64(0);
        for number in 1..=10 {
            let cookie = received.at + step * number;
            page = page.u32(1).u64(1000 + number).opaque(format!("name-{cookie}-{number}").as_bytes()).u64(cookie);
            page = if plus { page.u32(0).u32(0) } else { page };
        }
        Some(Reply::Results(page.u32(0).u32(0).bytes()))
    }
}

/// The server crashes before each WRITE and COMMIT, so that each reply has another verifier.
pub fn restless() -> impl Rule {
    |received, files| {
        if received.is(WRITE) || received.is(COMMIT) {
            files.lose_uncommitted();
        }
        None
    }
}
