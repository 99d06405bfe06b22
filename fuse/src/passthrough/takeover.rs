//! Taking over a volume whose server died.
//!
//! First the successor reads the whole state, which changes nothing outside this process: if that fails, it leaves the volume to
//! the next successor. Then:
//!
//! 1. It erases cells that are unusable. The numbers of descriptors that no process has any more are erased already: that comes
//!    before the successor opens any file, because a new file may get such a number.
//! 2. It completes a change of the account that the dead server had begun.
//! 3. It resumes the session: the requests of the dead threads are kept for replay.
//! 4. It closes the backing files that no open file uses. No thread may open a backing file meanwhile.
//! 5. It makes the kernel send the unanswered requests again, and threads answer them.
//!
//! Each step can be done twice, so after a kill in between the next successor does all of them again.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use super::data_path::DataPath;
use super::inherit::{InheritedTables, LostObjects, TakeoverError};
use super::open_node::{BackingId, give_back_unowned};
use super::options::PassthroughOptions;
use super::{locks, state};
use crate::mount::table::MountTable;
use crate::region::{Region, VolumeKind};
use crate::session::Session;
use crate::session::ring_memory::RingMemory;
use crate::trace::Trace;

/// A volume that is about to be taken over.
pub struct LoadedVolume {
    region: Arc<Region>,
    rings: Option<Arc<RingMemory>>,
    inheritance: InheritedTables,
    options: PassthroughOptions,
    trace: Arc<Trace>,
    resend: bool,
}

/// Reads the state that a dead server left in `region`. The descriptors that [`descriptors`](super::descriptors) names are open
/// in this process under the same numbers, without an owner. The result owns them; this function closes the others. The caller
/// has [removed](super::forget_descriptors) the numbers of lost descriptors from the region before. `source` is the directory
/// that the volume shows. `table` lists its mounts. `rings` is the memory that the dead server had for requests over io_uring.
///
/// # Errors
/// When the state cannot be taken over. The volume is then unchanged.
pub fn load(
    region: Arc<Region>,
    rings: Option<Arc<RingMemory>>,
    source: Option<OwnedFd>,
    table: Arc<MountTable>,
    options: PassthroughOptions,
    trace: Arc<Trace>,
) -> Result<LoadedVolume, TakeoverError> {
    if region.kind() != VolumeKind::Passthrough {
        return Err(TakeoverError::OtherKind);
    }
    let asked_again = rings.iter().flat_map(|rings| rings.unanswered()).collect();
    let inheritance = InheritedTables::read(&region, asked_again, source, table, &options)?;
    Ok(LoadedVolume { region, rings, inheritance, options, trace, resend: true })
}

impl LoadedVolume {
    /// The files and locks that the successor could not recover.
    pub fn losses(&self) -> LostObjects {
        self.inheritance.losses
    }

    /// Lets all unanswered requests end with an error, as on a kernel that cannot send requests again.
    pub fn without_resend(self) -> Self {
        Self { resend: false, ..self }
    }

    /// Serves the kernel behind `device`, whose file system `mount` shows. The predecessor and all its threads are dead.
    ///
    /// # Errors
    /// When the descriptor is not a FUSE device, or no thread can be started.
    pub fn start(self, device: OwnedFd, mount: Option<BorrowedFd<'_>>) -> io::Result<DataPath> {
        let Self { region, rings, inheritance, options, trace, resend } = self;
        let InheritedTables { tables, root, lost, unused, losses } = inheritance;
        locks::catch_wake_signal()?;
        region.take_over();
        region.cells().erase(&lost);
        state::finish_change(&region);
        if let Some(source) = root.held() {
            root.record.held.store(source.as_raw_fd().cast_unsigned(), Release);
        }
        let session = Session::resume_on(device, Arc::clone(&region), rings)?;
        let session = if resend { session } else { session.without_resend() };
        let device = session.device();
        give_back_unowned(&device, &region);
        for node in &unused {
            if let Some(backing) = BackingId::recorded(&node.record) {
                backing.close_for(&device, node);
            }
        }
        if losses != LostObjects::default() {
            let LostObjects { files, locks, nodes } = losses;
            tracing::warn!(
                volume = options.name.as_str(),
                "volume {:?}: the server's successor lacks {nodes} nodes of file systems without file handles, {files} open \
                 files and {locks} locks, because their descriptors are gone; calls with them fail with ESTALE",
                options.name.as_str()
            );
        }
        super::run(session, mount, region, tables, options, trace)
    }
}
