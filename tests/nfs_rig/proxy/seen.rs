//! The network's record of the calls that it has carried.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::nfs_rig::rpc::CALL;
use crate::nfs_rig::xdr::Reader;

/// The connections, calls and replies that the proxy has carried.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The client's port of each connection, in the order in which they came.
    pub ports: Vec<u16>,
    /// All calls that were read from clients, in this order, lost ones too.
    pub calls: Vec<Sent>,
    /// The number of replies read from the server, lost ones included.
    pub replies: usize,
}

/// A call that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    pub xid: u32,
    pub program: u32,
    pub procedure: u32,
    /// The client's port.
    pub port: u16,
    /// Two calls with the same beginning, 256 bytes, have the same one.
    pub digest: u64,
}

impl Seen {
    /// The number of calls with the xid of an earlier call.
    pub fn retransmissions(&self) -> usize {
        let distinct: std::collections::HashSet<_> = self.calls.iter().map(|call| call.xid).collect();
        self.calls.len() - distinct.len()
    }

    /// Calls that had the xid of an earlier one, and were not the same.
    pub fn altered(&self) -> Vec<Sent> {
        let mut first = HashMap::new();
        let digests = |call: &&Sent| *first.entry(call.xid).or_insert(call.digest) != call.digest;
        self.calls.iter().filter(digests).copied().collect()
    }

    /// The procedure of the call with this xid.
    pub fn procedure(&self, xid: u32) -> Option<u32> {
        self.calls.iter().rev().find(|call| call.xid == xid).map(|call| call.procedure)
    }
}

impl Sent {
    /// Parses the head of a record, if it is a call.
    pub fn read(head: &[u8], port: u16) -> Option<Self> {
        let mut reader = Reader::new(head);
        let xid = reader.u32()?;
        if reader.u32()? != CALL {
            return None;
        }
        let (_rpc, program, _version, procedure) = (reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?);
        let mut hasher = DefaultHasher::new();
        head.hash(&mut hasher);
        Some(Self { xid, program, procedure, port, digest: hasher.finish() })
    }
}
