//! The MOUNT protocol, version 3 (RFC 1813, appendix I): it turns the path of an export into the handle of the root.

use crate::rpc::{Credential, Policy, Procedure, Reply, RpcCall, RpcConnection, RpcError};
use crate::v3::handle::NfsFileHandle;
use crate::xdr::{Malformed, XdrReader, XdrWriter};

/// The number of the program.
pub const PROGRAM: u32 = 100_005;
/// The version that goes with NFSv3.
pub const VERSION: u32 = 3;
const MNT: u32 = 1;
const UMNT: u32 = 3;

/// Most bytes of an export's path.
pub const MAX_PATH: usize = 1024;
/// Most kinds of credentials that a server may name.
const MAX_FLAVORS: u32 = 64;

/// The answer of the mountd about an export.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MountReply {
    /// The root's handle.
    pub root: NfsFileHandle,
    /// The kinds of credentials that the export accepts; empty if the server names none.
    pub flavors: Vec<u32>,
}

/// Why the mountd returns no root.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MountdError {
    /// The call has no results.
    #[error(transparent)]
    Rpc(#[from] RpcError),
    /// The server's mountd answers with an error (`mountstat3`).
    #[error("{}", sentence(*.0))]
    Status(u32),
}

/// Asks the mountd for the root of an export. `path` has at most [`MAX_PATH`] bytes.
///
/// # Errors
/// [`MountdError`]
pub async fn mount(
    connection: &RpcConnection,
    path: &[u8],
    credential: &Credential,
    policy: Policy,
) -> Result<MountReply, MountdError> {
    let reply = call(connection, MNT, credential, policy, |arguments| {
        arguments.opaque(path);
    });
    let reply = reply.await?;
    let mut results = reply.reader();
    match results.u32().map_err(RpcError::from)? {
        0 => Ok(mounted(&mut results).map_err(RpcError::from)?),
        status => Err(MountdError::Status(status)),
    }
}

/// Reports to the server that an export is no longer mounted. The server keeps a list of clients, on which nothing depends.
///
/// # Errors
/// When there is no answer.
pub async fn unmount(
    connection: &RpcConnection,
    path: &[u8],
    credential: &Credential,
    policy: Policy,
) -> Result<(), RpcError> {
    let reply = call(connection, UMNT, credential, policy, |arguments| {
        arguments.opaque(path);
    });
    reply.await.map(|_nothing| ())
}

async fn call(
    connection: &RpcConnection,
    number: u32,
    credential: &Credential,
    policy: Policy,
    arguments: impl FnOnce(&mut XdrWriter),
) -> Result<Reply, RpcError> {
    let xid = connection.next_xid();
    let message = RpcCall::call(xid, Procedure { program: PROGRAM, version: VERSION, number }, credential, arguments);
    connection.call(xid, message, policy, false).await
}

/// Parses the result of a successful MNT, after its status.
///
/// # Errors
/// [`Malformed`]
pub fn mounted(results: &mut XdrReader<'_>) -> Result<MountReply, Malformed> {
    let root = NfsFileHandle::read(results)?;
    let count = results.u32()?;
    let flavors = (0..count.min(MAX_FLAVORS)).map(|_| results.u32()).collect::<Result<_, _>>()?;
    Ok(MountReply { root, flavors })
}

/// The sentence for a `mountstat3`.
fn sentence(status: u32) -> String {
    match status {
        1 => "the server allows that to its superuser only",
        2 => "the server has no such directory",
        5 => "the server cannot read its disk",
        13 => "the server has no such export, or does not export it to this machine",
        20 => "the export is no directory",
        22 => "the server takes the path for invalid",
        63 => "the path is too long for the server",
        10004 => "the server does not support mounting",
        10006 => "the server has an error of its own",
        other => return format!("the server refuses with the error {other}"),
    }
    .to_owned()
}
