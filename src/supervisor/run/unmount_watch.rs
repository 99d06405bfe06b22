//! Notices that another process has unmounted a volume.
//!
//! The supervisor reads the mount table when that has changed. It never accesses a mount itself: the call may wait for
//! the server that the supervisor has to replace. If an agent watches the table for all pods of the node, the
//! supervisor does not: while a hundred pods start one after the other, the watches of their supervisors would take a
//! quarter of a CPU.

use std::future::pending;
use std::path::PathBuf;

use podfs_fuse::mount::table::mounts;
use tokio::time::Instant;
use tracing::warn;

use super::Supervisor;
use super::table_watch::TableWatch;
use crate::supervisor::run_dir::site::Site;

/// When the supervisor looks at the mount table.
pub(in crate::supervisor) struct UnmountWatch {
    watch: TableWatch,
    /// Whether podfs ends when another process unmounts its only volume (`podfs mount`).
    is_end: bool,
    /// Whether a blocking thread worked on a volume during the last look, so that the look missed this volume.
    missed: bool,
}

impl UnmountWatch {
    /// Watches for unmounts. The first look also finds earlier unmounts. With `by_agent`, an agent asks for the later
    /// looks. `None` if the table cannot be watched: podfs serves the volumes all the same.
    pub(in crate::supervisor) fn of(site: &Site, by_agent: bool) -> Option<Self> {
        let watch = match by_agent {
            true => Ok(TableWatch::on_demand()),
            false => TableWatch::open(),
        };
        let watch =
            watch.inspect_err(|error| warn!("podfs cannot notice unmounts by other processes: {error}")).ok()?;
        Some(Self { watch, is_end: matches!(site, Site::Exactly(_)), missed: false })
    }
}

/// Waits until a look is due; forever without a watch. Cancel-safe.
pub(in crate::supervisor) async fn look_is_due(unmounts: Option<&mut UnmountWatch>) {
    match unmounts {
        Some(unmounts) => unmounts.watch.look_is_due().await,
        None => pending().await,
    }
}

impl Supervisor {
    /// Compares the idle volumes with the mount table, and schedules a refresh for each volume whose path shows
    /// something else than before. If another process has unmounted the volume with which podfs ends, returns the path
    /// of its mount point.
    pub(in crate::supervisor) fn look_at_mounts(&mut self) -> Option<PathBuf> {
        let table = mounts().inspect_err(|error| warn!("podfs cannot read the mount table: {error}")).ok()?;
        let is_end = self.unmount_watch.as_mut().is_some_and(|watch| {
            watch.missed = !self.working.is_empty();
            watch.is_end
        });
        let mut changed = Vec::new();
        for (place, volume) in &mut self.idle {
            if is_end {
                return volume.unmounted_from(&table);
            }
            let Some(pause) = volume.check_visibility(&table) else { continue };
            self.refresh_times.entry(*place).or_default().retry_at = Some(Instant::now() + pause);
            changed.push(*place);
        }
        let idle = std::mem::take(&mut self.idle);
        changed.iter().filter_map(|place| Some((*place, idle.get(place)?))).for_each(|(place, volume)| {
            self.report_volume(place, volume);
        });
        self.idle = idle;
        None
    }

    /// Makes a look due if the last look missed a volume, because a blocking thread worked on it.
    pub(in crate::supervisor) fn look_again(&mut self) {
        if let Some(unmounts) = self.unmount_watch.as_mut().filter(|unmounts| unmounts.missed) {
            unmounts.missed = false;
            unmounts.watch.look_soon();
        }
    }
}
