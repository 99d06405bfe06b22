//! The encoding of calls, and the parsing of replies (RFC 5531, section 9).

use std::io::IoSlice;

use super::credential::Credential;
use super::failure::{Denial, RpcError};
use super::slice::Slice;
use crate::xdr::{Malformed, XdrReader, XdrWriter, padding};

const CALL: u32 = 0;
const REPLY: u32 = 1;
const RPC_VERSION: u32 = 2;
/// The bit of a fragment's length that says that no other follows.
const LAST: u32 = 1 << 31;
/// Most bytes of a verifier.
const MAX_VERIFIER: usize = 400;

/// The procedure of a call.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Procedure {
    /// The number of the program.
    pub program: u32,
    /// The version of the program.
    pub version: u32,
    /// The number of the procedure.
    pub number: u32,
}

/// A call as it is sent, a record of one fragment.
#[derive(Debug)]
pub struct RpcCall {
    head: Vec<u8>,
    payload: Option<Slice>,
}

impl RpcCall {
    /// Encodes a call. `arguments` writes the arguments. The bytes depend only on the parameters of this function.
    pub fn call(
        xid: u32,
        procedure: Procedure,
        credential: &Credential,
        arguments: impl FnOnce(&mut XdrWriter),
    ) -> Self {
        Self::call_with(xid, procedure, credential, arguments, None)
    }

    /// A call whose arguments end with `payload`, as opaque bytes.
    pub fn call_with(
        xid: u32,
        procedure: Procedure,
        credential: &Credential,
        arguments: impl FnOnce(&mut XdrWriter),
        payload: Option<Slice>,
    ) -> Self {
        let mut writer = XdrWriter::with_capacity(256);
        // The first number becomes the fragment's length.
        writer.u32(0).u32(xid).u32(CALL).u32(RPC_VERSION);
        writer.u32(procedure.program).u32(procedure.version).u32(procedure.number);
        credential.write(&mut writer);
        arguments(&mut writer);
        let mut padded_payload = 0;
        if let Some(payload) = &payload {
            writer.length(payload.len());
            padded_payload = payload.len() + padding(payload.len());
        }
        let mut head = writer.into_bytes();
        let length = u32::try_from(head.len() - 4 + padded_payload).expect("messages are far shorter than 2 GiB");
        head[..4].copy_from_slice(&(length | LAST).to_be_bytes());
        Self { head, payload }
    }

    /// The number of bytes that are sent.
    pub(crate) fn len(&self) -> usize {
        let payload = self.payload.as_ref().map_or(0, |payload| payload.len());
        self.head.len() + payload + padding(payload)
    }

    /// The bytes to send, from the byte `skip` on: up to three parts.
    pub fn parts(&self, mut skip: usize) -> impl Iterator<Item = IoSlice<'_>> {
        let payload = self.payload.as_deref().unwrap_or_default();
        let parts = [&self.head[..], payload, &[0; 3][..padding(payload.len())]];
        parts.into_iter().filter_map(move |part| {
            let from = skip.min(part.len());
            skip -= from;
            (from < part.len()).then(|| IoSlice::new(&part[from..]))
        })
    }
}

/// The kind of a received record.
#[derive(Debug, Eq, PartialEq)]
pub enum RecordKind {
    /// The reply to the call `xid`. Its results begin at the byte `results`.
    Reply {
        /// The xid of the call.
        xid: u32,
        /// The outcome of the call, and where its results begin.
        results: Result<usize, RpcError>,
    },
    /// A call of the server. A client of NFSv3 does not answer calls.
    Call,
}

/// Parses the header of a record.
///
/// # Errors
/// When it is no message of RPC.
pub fn receive(record: &[u8]) -> Result<RecordKind, Malformed> {
    let mut reader = XdrReader::new(record);
    let xid = reader.u32()?;
    match reader.u32()? {
        CALL => Ok(RecordKind::Call),
        REPLY => {
            let outcome = outcome(&mut reader)?;
            Ok(RecordKind::Reply { xid, results: outcome.map(|()| reader.position()) })
        }
        _ => crate::xdr::unknown(),
    }
}

fn outcome(reader: &mut XdrReader<'_>) -> Result<Result<(), RpcError>, Malformed> {
    const ACCEPTED: u32 = 0;
    const DENIED: u32 = 1;
    match reader.u32()? {
        ACCEPTED => {
            let _flavor = reader.u32()?;
            reader.opaque(MAX_VERIFIER)?;
            accepted(reader)
        }
        DENIED => denied(reader).map(Err),
        _ => crate::xdr::unknown(),
    }
}

fn accepted(reader: &mut XdrReader<'_>) -> Result<Result<(), RpcError>, Malformed> {
    Ok(match reader.u32()? {
        0 => Ok(()),
        1 => Err(RpcError::ProgramUnavailable),
        2 => Err(RpcError::VersionUnsupported { lowest: reader.u32()?, highest: reader.u32()? }),
        3 => Err(RpcError::ProcedureUnavailable),
        4 => Err(RpcError::GarbageArguments),
        5 => Err(RpcError::SystemError),
        _ => return crate::xdr::unknown(),
    })
}

fn denied(reader: &mut XdrReader<'_>) -> Result<RpcError, Malformed> {
    const RPC_MISMATCH: u32 = 0;
    const AUTH_ERROR: u32 = 1;
    match reader.u32()? {
        RPC_MISMATCH => {
            let (_lowest, _highest) = (reader.u32()?, reader.u32()?);
            Ok(RpcError::OtherRpc)
        }
        AUTH_ERROR => Ok(RpcError::Denied(match reader.u32()? {
            1 | 2 => Denial::Credential,
            3 | 4 => Denial::Verifier,
            5 => Denial::TooWeak,
            _ => Denial::Other,
        })),
        _ => crate::xdr::unknown(),
    }
}
