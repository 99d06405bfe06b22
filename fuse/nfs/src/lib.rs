//! A client of NFS version 3, with the parts of RPC, MOUNT and the portmapper that it needs. It is independent of FUSE: the file
//! system that shows an export is in the crate podfs-fuse.
//!
//! | module | owns |
//! |---|---|
//! | [`address`] | a server and a path, as volumes and messages have them |
//! | [`mount`] | from a server's address and a path to an [`Export`] |
//! | [`export`] | the calls on an export |
//! | [`server`] | servers and their connections, which exports share |
//! | [`error`] | why a call failed |
//! | [`v3`] | the content of calls and replies of NFSv3 |
//! | [`mountd`], [`portmap`] | the two services that mounting needs |
//! | [`rpc`] | calls and replies over TCP; the client connects again when a connection is lost |
//! | [`xdr`] | numbers and bytes in messages |
//! | `squash` | whether a server takes all users for one |
//! | `backoff` | pauses between attempts |
//!
//! The [`Policy`](rpc::Policy) of a call says whether the call waits for a server that does not answer. It comes from the mount's
//! options.
//!
//! The client runs on one thread, in a [`LocalSet`](tokio::task::LocalSet):
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use podfs_nfs::export::CallOptions;
//! use podfs_nfs::ExportAddress;
//! use podfs_nfs::mount::{MountRequest, mount};
//! use podfs_nfs::rpc::Credential;
//! use podfs_nfs::server::Servers;
//!
//! let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
//! let local = tokio::task::LocalSet::new();
//! local.block_on(&runtime, async {
//!     let servers = Servers::default();
//!     let address = ExportAddress::parse("nfs.example", "/export")?;
//!     let request = MountRequest::new(address, "192.0.2.1".parse()?, Duration::from_secs(30));
//!     let export = mount(&servers, &request).await?;
//!
//!     let alice = Credential::User { uid: 1000, gid: 1000, groups: vec![27] };
//!     let file = export.lookup(CallOptions::new(&alice), &export.root(), b"hello").await?;
//!     let read = export.read(CallOptions::new(&alice), &file.handle, 0, export.limits().read).await?;
//!     println!("{} bytes", read.data.len());
//!     Ok::<(), Box<dyn std::error::Error>>(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Export`]: export::Export

pub mod address;
mod backoff;
pub mod error;
pub mod export;
pub mod mount;
pub mod mountd;
pub mod portmap;
pub mod rpc;
pub mod server;
mod squash;
pub mod v3;
pub mod xdr;

pub use address::ExportAddress;
pub use backoff::{Backoff, DoublingPause};
pub use error::Error;
pub use export::{CallOptions, Export, Limits};
