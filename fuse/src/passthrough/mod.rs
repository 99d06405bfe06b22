//! Passthrough volumes: directories of the host, and single files, shown as they are.
//!
//! The file system has no state but what the kernel was told: which nodes it knows, and what is open. Names,
//! attributes and data are the source's, asked for with one system call or a few for each request; the bytes of files
//! do not come through here at all where the kernel can read and write the source by itself (`FUSE_PASSTHROUGH`).
//!
//! | module | owns |
//! |---|---|
//! | [`mounted`] | the supervisor's side: mounting a source, and how it is to be served |
//! | `filesystem` | requests, each a few system calls on the source |
//! | `node` | the files that the kernel knows, and what each is identified by |
//! | `handle` | file handles, which open a node without keeping it open |
//! | `mounts` | the source's mount, and those below it |
//! | `open_files` | open files and directories |
//! | `open_node` | what the open files of one node share: its backing file, its locks |
//! | `locks` | locks of callers, and waits for them |
//! | `listing` | reading a directory |
//! | `foresight` | whether attributes go along with names |
//! | `attributes` | attributes, and how long they hold |
//! | `caller` | acting with the caller's uid, gid and umask |
//! | `extents` | where a file has blocks |
//! | `usage` | a limit on what the volume takes |
//!
//! Locks of this program are taken in this order: a listing, then a node's open files, then any of the tables (nodes,
//! open files, mounts, directories, waits), which are held for moments and never while a system call on the source is
//! made. The account of `usage` may be taken while holding a node's open files, and the tables while holding it.

mod attributes;
mod caller;
mod extents;
mod filesystem;
mod foresight;
mod handle;
mod listing;
mod locks;
pub mod mounted;
mod mounts;
mod node;
mod open_files;
mod open_node;
mod usage;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use mounted::{Cache, DataPath, Options, Passthrough};

use crate::server::activity::Activity;
use crate::server::trace::Trace;
use crate::session::Session;
use filesystem::PassthroughFilesystem;

/// Serves what `source` is open on, on `device`, whose file system is mounted.
///
/// # Errors
/// When the kernel's handshake fails, or the source cannot be looked at.
pub(crate) fn serve(
    device: OwnedFd,
    source: OwnedFd,
    options: Options,
    activity: Arc<Activity>,
    trace: Option<Trace>,
) -> io::Result<DataPath> {
    locks::catch_wake_signal()?;
    let threads = options.threads.map_or(mounted::SESSION_THREADS, usize::from).max(1);
    let session = Session::open(device, filesystem::wanted(&source, &options))?;
    let filesystem = PassthroughFilesystem::new(source, &session, options, activity, trace)?;
    let data_path = filesystem.data_path();
    session.run(Arc::new(filesystem), threads)?;
    Ok(data_path)
}
