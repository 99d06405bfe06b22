//! Hidden volumes: their path does not show them, because another process has unmounted them or mounted a file system
//! over them.
//!
//! 1. The supervisor looks for the volume's mount in the mount table. It never accesses the path: the call may wait for
//!    the server that the supervisor has to replace.
//! 2. podfs replaces a mount that is gone by another clone of the volume's private mount. So containers that still use
//!    the old mount see the same files as containers that start later, and every refresh reaches both. podfs mounts a
//!    bind mount anew from its source.
//! 3. podfs does not unmount what another process has mounted over a volume. When that is unmounted, the volume is
//!    visible again.
//! 4. Each unmount within a minute of the unmount before doubles the pause before podfs mounts the volume again, up to
//!    30 s. So a process that unmounts a volume in a loop does not fill the log.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use podfs_fuse::mount::table::MountTableEntry;
use podfs_fuse::mount::visible::{Presence, VisibleMount};
use tracing::info;

use super::{PodVolume, RETRY, VolumeLife};

/// The longest time between two unmounts of one series.
const SERIES_GAP: Duration = Duration::from_secs(60);

/// Why the path of a volume does not show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum HiddenReason {
    /// The volume is not mounted, for this cause. `failure` is why podfs could not mount it again, once podfs has
    /// tried.
    Unmounted { cause: String, failure: Option<String> },
    /// Another process has mounted a file system over the volume. The sentence names it.
    Covered(String),
}

impl HiddenReason {
    fn unmounted(cause: String) -> HiddenReason {
        HiddenReason::Unmounted { cause, failure: None }
    }

    /// The reason, as a sentence for the status.
    pub(super) fn reason(&self) -> String {
        match self {
            HiddenReason::Unmounted { cause, failure: None } => format!("{cause}; podfs mounts it again"),
            HiddenReason::Unmounted { cause, failure: Some(failure) } => {
                format!("{cause}, and podfs cannot mount it again yet: {failure}")
            }
            HiddenReason::Covered(reason) => reason.clone(),
        }
    }
}

/// The current series of unmounts by other processes.
#[derive(Default)]
pub(super) struct UnmountSeries {
    count: u32,
    last: Option<Instant>,
}

impl UnmountSeries {
    /// Counts one more unmount. Returns the pause before podfs mounts the volume again.
    fn pause(&mut self, now: Instant) -> Duration {
        if self.last.replace(now).is_none_or(|last| now.saturating_duration_since(last) > SERIES_GAP) {
            self.count = 0;
        }
        self.count = self.count.saturating_add(1);
        match self.count {
            1 => Duration::ZERO,
            count => RETRY.after(count - 2),
        }
    }
}

impl PodVolume {
    /// Looks for the volume's mount in the mount table. If the volume's path shows something else than at the last
    /// look, changes the state of the volume, and returns the pause before its next refresh.
    pub(in crate::supervisor) fn check_visibility(&mut self, table: &[MountTableEntry]) -> Option<Duration> {
        let _span = self.enter_span();
        let visible = self.visible()?;
        let (path, presence) = (visible.path().display().to_string(), visible.presence(table));
        let hidden = match (presence, &self.hidden) {
            (Presence::Visible, None) | (Presence::Gone, Some(HiddenReason::Unmounted { .. })) => return None,
            (Presence::Visible, Some(_)) => {
                self.hidden = None;
                return Some(Duration::ZERO);
            }
            (Presence::Covered(fs_type), _) => {
                HiddenReason::Covered(format!("another process mounted {fs_type} over it at {path}; unmount that"))
            }
            (Presence::Gone, _) => {
                self.visible()?.lose();
                HiddenReason::unmounted(format!("another process unmounted {path}"))
            }
        };
        if self.hidden.as_ref() == Some(&hidden) {
            return None;
        }
        let is_unmounted = matches!(hidden, HiddenReason::Unmounted { .. });
        let reason = hidden.reason();
        self.hidden = Some(hidden);
        if let (Some(shown), false) = (self.mounter.shown(), matches!(self.state, VolumeLife::Waiting(_))) {
            self.last_error = Some(reason.clone());
            self.enter(VolumeLife::Hidden(shown, reason));
        }
        Some(if is_unmounted { self.unmounts.pause(Instant::now()) } else { Duration::ZERO })
    }

    /// Notes if an adopted volume is not mounted: the earlier supervisor was killed before it mounted the volume, or
    /// another process has unmounted the volume since. The first refresh mounts the volume, before the pod is ready.
    pub(super) fn expect_to_be_mounted(&mut self) {
        if let Some(lost) = self.visible().filter(|visible| visible.is_lost()) {
            let cause =
                format!("the podfs before did not mount {}, or another process unmounted it", lost.path().display());
            self.hidden = Some(HiddenReason::unmounted(cause));
        }
    }

    /// Whether another process had unmounted the volume at the last look at the mount table.
    pub(super) fn is_unmounted(&self) -> bool {
        matches!(self.hidden, Some(HiddenReason::Unmounted { .. }))
    }

    /// The path from which another process has unmounted the volume, if one has. podfs does not unmount the volume
    /// again when it ends.
    pub(in crate::supervisor) fn unmounted_from(&mut self, table: &[MountTableEntry]) -> Option<PathBuf> {
        let visible = self.visible().filter(|visible| visible.presence(table) == Presence::Gone)?;
        visible.lose();
        Some(visible.path().to_owned())
    }

    /// Mounts the volume again if another process has unmounted it.
    pub(super) fn show_again(&mut self) {
        let Some(HiddenReason::Unmounted { cause, .. }) = self.hidden.clone() else { return };
        let path = self.visible().map(|visible| visible.path().display().to_string()).unwrap_or_default();
        match self.mounter.show_again() {
            Ok(()) => {
                self.hidden = None;
                // A bind mount, and a volume that a takeover has given up, are not mounted yet: the refresh mounts them
                // anew.
                let is_mounted = self.visible().is_some_and(|visible| !visible.is_lost());
                if let Some(shown) = self.mounter.shown().filter(|_| is_mounted) {
                    info!("volume {:?} is mounted at {path} again", self.spec.name.as_str());
                    self.state = VolumeLife::Live(shown);
                }
                self.last_error = Some(format!("{cause}; podfs mounted it again"));
            }
            Err(failure) => {
                self.hidden = Some(HiddenReason::Unmounted { cause, failure: Some(failure.to_string()) });
            }
        }
    }

    /// The volume's mount, once it is mounted.
    pub(super) fn visible(&mut self) -> Option<&mut VisibleMount> {
        self.mounter.visible()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_unmounts_are_answered_with_growing_pauses() {
        let (mut unmounts, start) = (UnmountSeries::default(), Instant::now());
        let pauses: Vec<_> = (0..4).map(|_| unmounts.pause(start).as_millis()).collect();
        assert_eq!(pauses, [0, 100, 200, 400]);
        let last = (0..20).map(|_| unmounts.pause(start + SERIES_GAP)).last();
        assert_eq!(last, Some(RETRY.longest()));
        assert_eq!(unmounts.pause(start + 3 * SERIES_GAP), Duration::ZERO);
    }
}
