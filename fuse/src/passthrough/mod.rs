//! Passthrough volumes: directories of the host, and single files, shown as they are.
//!
//! The file system keeps only the state that the kernel refers to: nodes, and open files. This state is in the volume's region, so
//! that another server can take the volume over. The server reads names, attributes and data from the source, with one system call
//! or a few for each request. The server does not see the bytes of files if the kernel can read and write the source by itself
//! (`FUSE_PASSTHROUGH`).
//!
//! | module | owns |
//! |---|---|
//! | `options` | how a volume is served |
//! | `filesystem` | requests, each a few system calls on the source |
//! | `tables` | the state of the file system, and how it begins for a new volume |
//! | `inherit` | reading the state that a dead server left |
//! | `takeover` | continuing with the state of a dead server |
//! | `state` | the format of the state in the region |
//! | `node` | a file that the kernel knows, and its identity |
//! | `nodes` | all nodes, by number and by identity |
//! | `hashing` | hashes of numbers and identities |
//! | `descriptor` | opening the file of a descriptor once more |
//! | `handle` | file handles, which open a node without keeping it open |
//! | `source_mount` | a mount of the source: its anchor, its restrictions |
//! | `mounts` | the mounts that requests have reached, and which file of which mount a descriptor or a name leads to |
//! | `open_files` | open files and directories |
//! | `data_path` | whether the kernel reads and writes files by itself |
//! | `open_node` | state that the open files of one node share: its backing file, its locks |
//! | `pruner` | making the kernel forget files that may have been mapped |
//! | `locks` | locks of callers, waits for them, and their records for a successor, which has to lock the same again |
//! | `listing` | reading a directory |
//! | `unopened` | the read positions in directories that the kernel opens without OPENDIR |
//! | `cached_listings` | whether the kernel may use its cached listing of a directory again |
//! | `share` | how many descriptors a volume may have |
//! | `replaced` | files and directories whose names get others while callers look for them |
//! | `readdirplus` | whether the server sends attributes with the names of a directory |
//! | `acting` | acting with the caller's uid, gid and umask |
//! | `attributes` | attributes, and how long they hold |
//! | `extents` | where a file has blocks |
//! | `usage` | a limit on the space of the volume |
//! | `space` | the free space of the volume |
//!
//! A thread takes the locks of this program in this order: a listing, then a node's open files, then any of the tables (nodes,
//! open files, mounts, directories, listings, waits). It holds the lock of a table for moments, and never during a system call on
//! the source. A thread that holds the lock on a node's open files may lock the account of `usage`, and a thread that holds the
//! lock on the account may lock a table.

mod acting;
mod attributes;
mod cached_listings;
mod data_path;
mod descriptor;
mod devices;
mod extents;
mod filesystem;
mod handle;
mod hashing;
mod inherit;
mod lasting_handles;
mod listing;
mod locks;
mod mounts;
mod node;
mod node_names;
mod nodes;
mod open_files;
mod open_node;
mod options;
mod pruner;
mod readdirplus;
mod replaced;
mod share;
mod source_mount;
mod space;
mod state;
mod tables;
mod takeover;
mod unopened;
mod usage;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

pub use data_path::DataPath;
pub use inherit::TakeoverError;
pub use options::{CacheMode, PassthroughOptions, SESSION_THREADS};
pub use space::SpaceUsage;
pub use state::{descriptors, forget_descriptors};
pub use takeover::{LoadedVolume, load};

use crate::mount::table::MountTable;
use crate::region::Region;
use crate::session::Session;
use crate::session::ring_memory::RingMemory;
use crate::trace::Trace;
use filesystem::PassthroughFilesystem;
use tables::FilesystemTables;

/// The requests of `ioctl(2)` that this module makes.
pub(crate) const IOCTLS: [libc::Ioctl; 3] = [open_node::BACKING_OPEN, open_node::BACKING_CLOSE, extents::FS_IOC_FIEMAP];

/// Serves the directory or file that `source` is open on, to the kernel behind `device`, whose file system `mount` shows. `table`
/// is the mount table that lists the mounts of the source. `region` is new. `rings` is new memory, if requests come over io_uring.
///
/// # Errors
/// When the kernel's handshake fails, or the source cannot be read.
#[allow(clippy::too_many_arguments, reason = "a volume is made of these")]
pub(crate) fn serve(
    device: OwnedFd,
    mount: Option<BorrowedFd<'_>>,
    source: OwnedFd,
    table: Arc<MountTable>,
    options: PassthroughOptions,
    region: Arc<Region>,
    rings: Option<Arc<RingMemory>>,
    trace: Arc<Trace>,
) -> io::Result<DataPath> {
    locks::catch_wake_signal()?;
    // The supervisor made the region, and no server has used it.
    region.cells().keep_only(&[]);
    region.take_over();
    // A source on another machine may not answer for long, so more requests may be under way than a ring has entries.
    let rings = rings.filter(|_| options.remote.is_none());
    let session = Session::open_on(device, filesystem::wanted(&source, &options), Arc::clone(&region), rings)?;
    let tables = FilesystemTables::of_source(source, table, &session, &options, &region)?;
    run(session, mount, region, tables, options, trace)
}

/// Starts the threads of the session. The session wakes requests that waited for this server through `mount`.
fn run(
    session: Session,
    mount: Option<BorrowedFd<'_>>,
    region: Arc<Region>,
    tables: FilesystemTables,
    options: PassthroughOptions,
    trace: Arc<Trace>,
) -> io::Result<DataPath> {
    let threads = options.threads.map_or(SESSION_THREADS, usize::from).max(1);
    let data_path = tables.data_path;
    let session = session.labelled(options.name.clone());
    let filesystem = Arc::new(PassthroughFilesystem::new(&session, region, tables, options, trace));
    filesystem.start_reopening();
    session.run_waking(filesystem, threads, mount)?;
    Ok(data_path)
}

#[cfg(test)]
mod tests;
