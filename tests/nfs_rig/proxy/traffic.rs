//! The proxy's list of the connections, calls and replies that it has carried.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::nfs_rig::rpc::CALL;
use crate::nfs_rig::xdr::Reader;

/// The connections, calls and replies that the proxy has carried.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    /// The client's port of each connection, in the order in which they came.
    pub ports: Vec<u16>,
    /// All calls that the proxy has read from clients, in this order, with those that it has dropped.
    pub calls: Vec<CarriedCall>,
    /// The number of replies that the proxy has read from the server, with those that it has dropped.
    pub replies: usize,
}

/// A call that a client has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CarriedCall {
    pub xid: u32,
    pub program: u32,
    pub procedure: u32,
    /// The client's port.
    pub port: u16,
    /// A digest of the first 256 bytes of the call: it is equal for a call and its retransmission.
    pub digest: u64,
}

impl Traffic {
    /// The number of calls with the xid of an earlier call.
    pub fn retransmissions(&self) -> usize {
        let distinct: std::collections::HashSet<_> = self.calls.iter().map(|call| call.xid).collect();
        self.calls.len() - distinct.len()
    }

    /// The calls with the xid of an earlier call, but with another digest.
    pub fn altered(&self) -> Vec<CarriedCall> {
        let mut first = HashMap::new();
        let differs = |call: &&CarriedCall| *first.entry(call.xid).or_insert(call.digest) != call.digest;
        self.calls.iter().filter(differs).copied().collect()
    }

    /// The procedure of the call with this xid.
    pub fn procedure(&self, xid: u32) -> Option<u32> {
        self.calls.iter().rev().find(|call| call.xid == xid).map(|call| call.procedure)
    }
}

impl CarriedCall {
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
