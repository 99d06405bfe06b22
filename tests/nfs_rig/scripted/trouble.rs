//! Rules for failures that many tests share. Rules that take a number of `times` cause no failure afterwards.

use super::{Asked, Handle, Reply, Rule, procedures};
use crate::nfs_rig::protocol::procedure::{COMMIT, READ, READDIR, READDIRPLUS, WRITE};
use crate::nfs_rig::protocol::{NFS, error};
use crate::nfs_rig::rpc;
use crate::nfs_rig::xdr::Writer;

/// Every time.
pub const ALWAYS: usize = usize::MAX;

/// The cookies on the pages of an endless directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cookies {
    /// The last cookie is the one of the request.
    Same,
    /// Each cookie is new, for ever.
    New,
}

impl Asked {
    /// It is this procedure of NFS.
    pub fn is(&self, procedure: u32) -> bool {
        (self.call.program, self.call.procedure) == (NFS.0, procedure)
    }
}

/// The procedure is answered with this instead of being done.
pub fn instead(procedure: u32, times: usize, reply: impl Fn(&Asked) -> Reply + Send + 'static) -> impl Rule {
    let mut left = times;
    move |asked, _| {
        let is_meant = asked.is(procedure) && left > 0;
        left -= usize::from(is_meant);
        is_meant.then(|| reply(asked))
    }
}

/// The procedure is done, and then answered with this.
pub fn done_but(procedure: u32, times: usize, reply: Reply) -> impl Rule {
    let mut rule = instead(procedure, times, move |_| reply.clone());
    move |asked, files| {
        let reply = rule(asked, files)?;
        procedures::answer(asked, files, 0);
        Some(reply)
    }
}

/// The procedure is done, and its results are changed.
pub fn amended(procedure: u32, change: impl Fn(Vec<u8>) -> Vec<u8> + Send + 'static) -> impl Rule {
    move |asked, files| {
        let answer = asked.is(procedure).then(|| procedures::answer(asked, files, 0))?;
        Some(match answer {
            Reply::Results(results) => Reply::Results(change(results)),
            other => other,
        })
    }
}

/// The procedure fails with this error.
pub fn fails(procedure: u32, error: u32, times: usize) -> impl Rule {
    instead(procedure, times, move |_| Reply::Error(error))
}

/// The server has no time for the procedure.
pub fn jukebox(procedure: u32, times: usize) -> impl Rule {
    fails(procedure, error::JUKEBOX, times)
}

/// The server does not answer the procedure.
pub fn silent(procedure: u32, times: usize) -> impl Rule {
    instead(procedure, times, |_| Reply::Nothing)
}

/// This handle is stale, in every procedure that begins with it.
pub fn stale(handle: Handle) -> impl Rule {
    move |asked, _| (asked.handle == handle).then_some(Reply::Error(error::STALE))
}

/// The caller is not believed (`auth_stat`).
pub fn denied(procedure: u32, reason: u32, times: usize) -> impl Rule {
    instead(procedure, times, move |asked| Reply::Record(rpc::denied(asked.call.xid, reason)))
}

/// The call is not done for a reason of RPC (`accept_stat`): 1 no such program, 3 no such procedure, 4 nonsense, 5 broken.
pub fn not_done(procedure: u32, status: u32, times: usize) -> impl Rule {
    instead(procedure, times, move |asked| Reply::Record(rpc::accepted(asked.call.xid, status, &[])))
}

/// The reply has the xid of a call that was never sent.
pub fn wrong_xid(procedure: u32, times: usize) -> impl Rule {
    instead(procedure, times, |asked| Reply::Record(rpc::accepted(!asked.call.xid, 0, &[0; 64])))
}

/// The reply is a record of bytes without sense.
pub fn garbage(procedure: u32, times: usize) -> impl Rule {
    instead(procedure, times, |_| Reply::Record((0..100_u8).map(|byte| byte.wrapping_mul(37)).collect()))
}

/// The reply is announced as so many bytes, and does not come.
pub fn announced(procedure: u32, length: u32, times: usize) -> impl Rule {
    instead(procedure, times, move |_| Reply::Bytes(rpc::header(length as usize, true).to_vec()))
}

/// The results end after so many bytes.
pub fn cut_short(procedure: u32, bytes: usize) -> impl Rule {
    amended(procedure, move |mut results| {
        results.truncate(bytes);
        results
    })
}

/// READ says that it has read four GiB, and has not.
pub fn huge_read() -> impl Rule {
    instead(READ, ALWAYS, |_| {
        let claimed = Writer::default().u32(0).u32(0).u32(u32::MAX).u32(0).u32(u32::MAX);
        Reply::Results(claimed.fixed(&[0; 64]).bytes())
    })
}

/// READ returns more data than requested; its count is the requested one.
pub fn generous_read() -> impl Rule {
    instead(READ, ALWAYS, |asked| {
        let count = u32::from_be_bytes(*asked.call.arguments.last_chunk().expect("the count is its last argument"));
        let data = vec![b'x'; count as usize + 512];
        Reply::Results(Writer::default().u32(0).u32(0).u32(count).u32(0).opaque(&data).bytes())
    })
}

/// Every directory goes on for ever.
pub fn endless(cookies: Cookies) -> impl Rule {
    move |asked, _| {
        let plus = asked.is(READDIRPLUS);
        if !plus && !asked.is(READDIR) {
            return None;
        }
        let step = if cookies == Cookies::New { 1 } else { 0 };
        let mut page = Writer::default().u32(0).u32(0).u64(0);
        for number in 1..=10 {
            let cookie = asked.at + step * number;
            page = page.u32(1).u64(1000 + number).opaque(format!("name-{cookie}-{number}").as_bytes()).u64(cookie);
            page = if plus { page.u32(0).u32(0) } else { page };
        }
        Some(Reply::Results(page.u32(0).u32(0).bytes()))
    }
}

/// The server crashes before each WRITE and COMMIT: the verifier is never the same.
pub fn restless() -> impl Rule {
    |asked, files| {
        if asked.is(WRITE) || asked.is(COMMIT) {
            files.lose_uncommitted();
        }
        None
    }
}
