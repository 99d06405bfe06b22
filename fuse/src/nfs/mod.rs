//! NFS exports as volumes: a client of NFS version 3, and a file system that shows what it finds.
//!
//! | module | owns |
//! |---|---|
//! | [`sockets`] | the sockets of connections, which the volumes of a pod share |
//! | [`options`] | how an export is served |
//! | [`thread`] | the one thread that serves all exports of a process |
//! | `awake` | whether that thread sleeps between two calls |
//! | `volume` | the requests of one volume: read, answered, interrupted |
//! | `filesystem` | requests in, calls to the server, answers out |
//! | `client_state` | nodes, open files and calls under way, as a successor finds them |
//! | `callers` | the credentials of callers |
//! | [`writeback`] | data that was accepted, until the server has it on disk |
//!
//! The client waits for its server, or does not, as the mount's options say:
//!
//! | module | owns |
//! |---|---|
//! | [`mount`] | from a server's address and a path to an [`Export`] |
//! | [`export`] | the calls on an export |
//! | [`server`] | servers and their connections, which exports share |
//! | [`error`] | why a call failed |
//! | [`v3`] | the calls and replies of NFSv3 |
//! | [`mountd`], [`portmap`] | the two services that mounting needs |
//! | [`rpc`] | calls and replies over connections that come back |
//! | [`xdr`] | numbers and bytes in messages |
//!
//! It runs on one thread, in a [`LocalSet`](tokio::task::LocalSet):
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use podfs_fuse::nfs::export::How;
//! use podfs_fuse::nfs::mount::{Options, mount};
//! use podfs_fuse::nfs::rpc::Credential;
//! use podfs_fuse::nfs::server::Servers;
//!
//! let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
//! let local = tokio::task::LocalSet::new();
//! local.block_on(&runtime, async {
//!     let servers = Servers::default();
//!     let options = Options::new("nfs.example", "192.0.2.1".parse()?, b"/export", Duration::from_secs(30));
//!     let export = mount(&servers, &options).await?;
//!
//!     let alice = Credential::User { uid: 1000, gid: 1000, groups: vec![27] };
//!     let file = export.lookup(How::new(&alice), &export.root(), b"hello").await?;
//!     let read = export.read(How::new(&alice), &file.handle, 0, export.limits().read).await?;
//!     println!("{} bytes", read.data.len());
//!     Ok::<(), Box<dyn std::error::Error>>(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Export`]: export::Export

mod awake;
pub(crate) mod callers;
mod client_state;
pub mod error;
pub mod export;
mod filesystem;
pub mod mount;
pub mod mountd;
pub mod options;
pub mod portmap;
pub mod rpc;
pub mod server;
pub mod sockets;
pub mod thread;
pub mod v3;
mod volume;
pub mod writeback;
pub mod xdr;

pub use error::Error;
pub use export::{Export, How, Limits};
