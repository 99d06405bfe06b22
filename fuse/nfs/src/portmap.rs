//! The portmapper, version 2 (RFC 1833): it knows the port on which an RPC program listens.

use crate::rpc::{Credential, Policy, Procedure, RpcCall, RpcConnection, RpcError};
use crate::xdr::{Malformed, XdrReader};

/// The port of portmappers.
pub const PORT: u16 = 111;
const PROGRAM: u32 = 100_000;
const VERSION: u32 = 2;
const GETPORT: u32 = 3;
const TCP: u32 = 6;

/// The TCP port of a version of a program, if it is registered. `connection` is one to the portmapper.
///
/// # Errors
/// When there is no portmapper that answers.
pub async fn port_of(
    connection: &RpcConnection,
    program: u32,
    version: u32,
    policy: Policy,
) -> Result<Option<u16>, RpcError> {
    let xid = connection.next_xid();
    let procedure = Procedure { program: PROGRAM, version: VERSION, number: GETPORT };
    let message = RpcCall::call(xid, procedure, &Credential::Anonymous, |arguments| {
        arguments.u32(program).u32(version).u32(TCP).u32(0);
    });
    let reply = connection.call(xid, message, policy, false).await?;
    Ok(port(&mut reply.reader())?)
}

/// Reads the port of a program. Zero, or a number that is no port, means that the program is not registered.
///
/// # Errors
/// [`Malformed`]
pub fn port(results: &mut XdrReader<'_>) -> Result<Option<u16>, Malformed> {
    Ok(u16::try_from(results.u32()?).ok().filter(|port| *port != 0))
}
