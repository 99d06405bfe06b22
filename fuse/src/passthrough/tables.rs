//! The state of a volume's file system, and how it begins for a new volume. `inherit` reads the state that a dead server left.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use rustix::fs::FileType;

use super::attributes::{attributes_of, bytes_taken, kind};
use super::data_path::DataPath;
use super::mounts::SourceMounts;
use super::nodes::{NewNode, Nodes};
use super::open_files::OpenFiles;
use super::options::PassthroughOptions;
use super::share::Share;
use super::space::file_system_usage;
use super::usage::{QuotaUsage, growth_of};
use crate::mount::table::MountTable;
use crate::region::Region;
use crate::session::Session;
use crate::session::abi::Kstatfs;

/// The state of a file system.
pub struct FilesystemTables {
    /// Whether the kernel or the server reads and writes files.
    pub data_path: DataPath,
    /// Mounts.
    pub mounts: SourceMounts,
    /// Nodes.
    pub nodes: Nodes,
    /// Open files and directories.
    pub files: OpenFiles,
    /// The account of used space, for a volume with a limit.
    pub usage: Option<QuotaUsage>,
    /// The share of the process's descriptors that the volume may have.
    pub share: Share,
    /// The last result of `statfs(2)` on the source, if the source may become unreachable.
    pub status: Kstatfs,
}

impl FilesystemTables {
    /// The state of a new volume: its root, on which `source` is open. `table` is the mount table that lists the source's mounts.
    ///
    /// # Errors
    /// When the source cannot be read.
    pub fn of_source(
        source: OwnedFd,
        table: Arc<MountTable>,
        session: &Session,
        options: &PassthroughOptions,
        region: &Arc<Region>,
    ) -> io::Result<FilesystemTables> {
        let mounts = SourceMounts::new(Arc::clone(region), table, std::iter::empty());
        let found = attributes_of(source.as_fd())?;
        let (identity, mount) = mounts.identify(source.as_fd(), None)?;
        let measure = |limit| QuotaUsage::measure(source.as_fd(), limit, Arc::clone(region));
        let usage = options.limit.map(measure).transpose()?;
        // A limit is counted by the server, so the server has to see every write. Waits for another machine must happen in the
        // server, where the stall guard can see them.
        let by_server = usage.is_some() || options.remote.is_some();
        let data_path = if by_server { DataPath::Server } else { DataPath::probe(session) };
        let status = if options.remote.is_some() { file_system_usage(source.as_fd())? } else { Kstatfs::default() };
        let charge = match kind(&found) {
            FileType::Directory => growth_of(source.as_fd())?,
            _ => bytes_taken(&found),
        };
        let found = NewNode { identity, mount, kind: kind(&found), charge };
        let share = Share::new(options.name.as_str());
        let nodes = Nodes::new(Arc::clone(region), found, source, &share)?;
        region.header().counters.data_path.store(data_path.to_word(), Release);
        Ok(FilesystemTables {
            data_path,
            mounts,
            nodes,
            files: OpenFiles::new(Arc::clone(region)),
            usage,
            share,
            status,
        })
    }
}
