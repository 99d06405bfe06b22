//! ONC RPC over TCP (RFC 5531): many calls at a time on a connection. The client connects again whenever the connection
//! is lost.
//!
//! | module | owns |
//! |---|---|
//! | [`connection`] | a connection, for the code that makes calls |
//! | `pending` | calls in flight, sent again until they are answered |
//! | `driver` | the socket: connecting, reading, and writing the bytes that the socket did not take at once |
//! | `deadlines` | calls that are not answered in time |
//! | [`peer`] | the state of a server that all its connections share |
//! | [`policy`] | how long a call may take, and how often it is sent |
//! | [`dial`] | sockets, from the same port again |
//! | [`message`] | the encoding of calls, the parsing of replies |
//! | [`credential`] | the user and groups that a call is made with |
//! | [`failure`] | why a call has no results |
//! | [`record`] | a stream cut into messages |
//! | [`pool`] | buffers that are used again |
//! | [`slice`](mod@slice) | bytes with a common owner |
//!
//! All of it runs on one thread, in a [`LocalSet`](tokio::task::LocalSet), so that a reply reaches its caller without
//! waking another thread. There are no locks, and no cell stays borrowed across an `await`.

#![forbid(unsafe_code)]

pub mod connection;
pub mod credential;
mod deadlines;
pub mod dial;
mod driver;
pub mod failure;
pub mod message;
pub mod peer;
mod pending;
pub mod policy;
pub mod pool;
pub mod record;
pub mod slice;

pub use connection::RpcConnection;
pub use credential::Credential;
pub use failure::{Denial, RpcError};
pub use message::{Procedure, RpcCall};
pub use peer::{NfsServerHealth, Peer, SilenceObserver};
pub use pending::{PendingReply, Reply};
pub use policy::{Persistence, Policy, RETRY};
pub use pool::Pool;
pub use slice::Slice;
