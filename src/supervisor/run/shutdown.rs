//! The end of a supervisor.
//!
//! Shutdown loses nothing and leaves nothing behind:
//! 1. The supervisor starts no new work, and waits two seconds for the work under way. If work goes on after that, the
//!    supervisor unmounts the other volumes (step 2), and then kills the server, which ends every call that waits for the server.
//!    The supervisor first kills the programs of FlexVolume drivers that execute a call, with their process groups.
//!    A call that waits for a CSI driver or for a source of the node goes on, and its blocking thread keeps the volume. If it ends
//!    within two seconds, the supervisor unmounts this volume, too. Otherwise it unmounts the recorded mounts, and the thread
//!    ends with the process: the thread cannot make anything after step 5.
//! 2. The supervisor unmounts the volumes while the server still answers, a few at the same time: in each umount(2), the kernel
//!    waits until no CPU uses the mount any more. If the server ends or hangs meanwhile, the supervisor kills it and starts no
//!    successor, so that no unmount waits for it. After two seconds, it continues a server that is stopped, which loses nothing.
//!    After an order to stop, the supervisor deletes the content of emptyDirs. After a failure it keeps the content for the
//!    next podfs.
//! 3. Drivers of other vendors unmount what they have mounted, all at the same time. The supervisor first waits for the answer of a
//!    CSI driver to a call to mount, so that the driver mounts nothing afterwards. What a driver does not unmount stays recorded
//!    for the next podfs of the pod, and for `podfs cleanup`.
//! 4. The supervisor closes the server's socket, so that the server ends by itself, and kills the server if it does not. The
//!    control socket closes.
//! 5. The supervisor removes the server's cgroup and the directories that were made for the volumes, and then gives up the
//!    claim.
//!
//! A system call on a disk that is frozen or fails blocks the supervisor in steps 2 and 5; the log names the path. The supervisor
//! ends when the disk answers again.
//!
//! On the order to leave the volumes (SIGUSR1), a supervisor finishes the work under way and ends without any of these
//! steps. The volumes stay as after a crash, so the next supervisor adopts them.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use podfs_fuse::mount::MountError;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use super::{Supervisor, TIMEOUT};
use crate::driver::{self, DriverHome};
use crate::host::{block, local};
use crate::supervisor::long_step::{REPORT_DELAY, report_end, report_if_long, report_long};
use crate::supervisor::run_dir::mount_points::MountPoints;
use crate::supervisor::status::CounterStore;
use crate::supervisor::volume::driver::{homes, undo_home};
use crate::supervisor::volume::{PodEnd, PodVolume, VolumeContext, VolumeLife};
use crate::volume::{Volume, VolumeSource};

/// How long drivers may take to unmount the volumes of a pod that ends, with all retries.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(123);
/// How many volumes the supervisor unmounts at the same time.
const AT_ONCE: usize = 16;
/// The pause before the supervisor calls a driver that failed once more.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

impl Supervisor {
    /// Ends this process without dropping any value, so that the volumes stay mounted.
    pub(in crate::supervisor) async fn leave(mut self) -> ! {
        let _ = timeout(TIMEOUT, self.finish_all()).await;
        info!("podfs ends; the server serves the volumes until the next podfs of the pod takes them over");
        self.report.leaving();
        self.report.store().counters().finish().await;
        std::process::exit(0)
    }

    /// Unmounts the volumes, and ends the server. Returns false if a volume may still be mounted, because the kernel has not
    /// unmounted it, or because work on it has not ended: its source does not answer.
    pub(in crate::supervisor) async fn shut_down(mut self, end: PodEnd) -> bool {
        info!("unmounting");
        self.report.stopping();
        let mut has_finished = timeout(TIMEOUT, self.finish_all()).await.is_ok();
        if !has_finished && interrupt_drivers(&self.setting).await {
            has_finished = timeout(TIMEOUT, self.finish_all()).await.is_ok();
        }
        let busy = self.busy();
        let mut unmounted = self.unmount_all(end).await;
        if !has_finished {
            // The kill fails no call on the volumes that are unmounted now.
            warn!("work on {} does not end; podfs kills the server", self.names(&busy));
            self.server.kill().await;
            // Without a server, all work ends but the calls that wait for a driver or for a source of the node.
            has_finished = timeout(TIMEOUT, self.finish_all()).await.is_ok();
            if !has_finished {
                let still_busy: Vec<usize> = self.busy().into_iter().filter(|place| busy.contains(place)).collect();
                let names = self.names(&still_busy);
                warn!(
                    "podfs ends without waiting for {names}: a source, a disk or a driver of the node does not answer"
                );
            }
            unmounted &= self.unmount_all(end).await;
        }
        if end == PodEnd::Stopped {
            self.leave_devices().await;
        }
        self.server.stop(TIMEOUT).await;
        if end == PodEnd::Stopped {
            undo_drivers(&self.setting).await;
        }
        // The run directory is removed next.
        self.report.store().counters().finish().await;
        has_finished && unmounted
    }

    /// The places of the volumes that blocking threads work on.
    fn busy(&self) -> Vec<usize> {
        self.volumes.keys().copied().filter(|place| !self.idle.contains_key(&self.sharing.leader(*place))).collect()
    }

    /// Volumes for the log: `volume "data" (/srv/data)`.
    fn names(&self, places: &[usize]) -> String {
        let names: Vec<_> = places.iter().map(|place| self.name_with_source(&self.volumes[place])).collect();
        if names.is_empty() { "the mounts of a container".to_owned() } else { names.join(", ") }
    }

    /// The step that unmounts a volume, for the log. `None` if that needs no disk: only a server that hangs can delay such an
    /// unmount, until the supervisor kills the server.
    fn step(&self, volume: &Volume) -> Option<String> {
        let name = volume.name.as_str();
        match (&volume.source, self.setting.site.home(name)) {
            (VolumeSource::Projection(_), _) => None,
            (VolumeSource::EmptyDir(_), Some(home)) => {
                Some(format!("unmount volume {name:?} and to delete its content in {}", home.display()))
            }
            _ => Some(format!("unmount {}", self.name_with_source(volume))),
        }
    }

    /// The name of a volume, with the directory of the node that it shows, for the log.
    fn name_with_source(&self, volume: &Volume) -> String {
        let source = match &volume.source {
            VolumeSource::HostPath(source) => Some(source.path.clone()),
            VolumeSource::EmptyDir(_) => self.setting.site.home(volume.name.as_str()),
            _ => None,
        };
        let name = volume.name.as_str();
        source.map_or(format!("volume {name:?}"), |source| format!("volume {name:?} ({})", source.display()))
    }

    /// Releases the block devices that an earlier podfs of the pod has mounted or linked for it, also those that the pod's
    /// manifest no longer has.
    async fn leave_devices(&self) {
        let site = &self.containers.site;
        let (Some(root), Some(uid)) = (site.root(), site.uid()) else { return };
        let leave = spawn_blocking(move || {
            let mut left = local::leave_all(&root, &uid);
            left.extend(block::unmap_all(&root, &uid));
            left
        });
        // Another process may hold the lock of a device while it formats the device, so this has a time limit. The next podfs
        // that uses the device finds what stays.
        if let Ok(Ok(left)) = timeout(TIMEOUT, leave).await {
            left.iter().for_each(|(place, error)| warn!("{} stays: {error}", place.display()));
        }
    }

    /// Unmounts all idle volumes. Returns whether the kernel has unmounted them all.
    async fn unmount_all(&mut self, end: PodEnd) -> bool {
        let mut waiting = std::mem::take(&mut self.idle).into_values();
        let (mut unmounting, mut all) = (JoinSet::new(), true);
        let mut of_server = BTreeSet::new();
        let mut look_at_server = Some(Instant::now() + REPORT_DELAY);
        loop {
            for volume in waiting.by_ref().take(AT_ONCE - unmounting.len()) {
                let step = self.step(volume.spec());
                if step.is_none() {
                    of_server.insert(volume.spec().name.to_string());
                }
                unmounting.spawn(unmount(step, volume, end));
            }
            match waiting.len() + unmounting.len() {
                0 => return all,
                remaining => self.report.unmounting(remaining),
            }
            tokio::select! {
                Some(unmounted) = unmounting.join_next() => {
                    let unmounted = unmounted.expect("no task panics or is cancelled");
                    if of_server.remove(&unmounted.name) {
                        look_at_server = Some(Instant::now() + REPORT_DELAY);
                    }
                    all &= self.note_unmounted(unmounted);
                }
                () = sleep_until(look_at_server.unwrap_or_else(Instant::now)), if look_at_server.is_some() => {
                    look_at_server = None;
                    self.report_wait_for_server(&of_server);
                }
                () = self.server.wait_until_lost() => {
                    warn!("the server ended while podfs unmounts the volumes");
                    self.server.kill().await;
                }
            }
        }
    }

    /// Reports that the server does not answer for these volumes, which need no disk, and continues a server that is stopped.
    fn report_wait_for_server(&self, volumes: &BTreeSet<String>) {
        let names: Vec<_> = volumes.iter().map(|name| format!("{name:?}")).collect();
        match (self.server.continue_if_stopped(), names.is_empty()) {
            (Some(pid), _) => {
                warn!(
                    "podfs still waits to unmount volumes, because their server (pid {pid}) is stopped; podfs continues it"
                )
            }
            (None, false) => warn!(
                "podfs still waits to unmount {}, because their server does not answer; podfs kills it if that lasts",
                names.join(", ")
            ),
            (None, true) => {}
        }
    }

    /// Reports the outcome of an unmount. Returns whether the kernel has unmounted the volume.
    fn note_unmounted(&mut self, unmounted: UnmountOutcome<MountError>) -> bool {
        let UnmountOutcome { name, plugin, took, outcome } = unmounted;
        if let Some(took) = took {
            self.report.operated("volume_unmount", &plugin, outcome.is_ok(), took);
        }
        outcome.inspect_err(|error| warn!(volume = name, "volume {name:?}: {error}")).is_ok()
    }
}

/// Removes the mount points and the pod's files, and gives up the claim. `unmounted` says whether all volumes are unmounted.
/// `step` describes this for the log, if it takes long.
pub(super) fn remove_files(mount_points: &Mutex<MountPoints>, counters: &CounterStore, step: &str, unmounted: bool) {
    let remove = || {
        counters.wait_for_disk();
        // This waits while another thread holds the lock and waits for the disk of a mount point.
        mount_points.lock().map(|mut mount_points| mount_points.take_back(unmounted))
    };
    let _poisoned = report_if_long(step, remove);
}

/// Unmounts a volume on a blocking thread. Logs `step` if that takes long.
async fn unmount(step: Option<String>, volume: PodVolume, end: PodEnd) -> UnmountOutcome<MountError> {
    let mut unmounting = spawn_blocking(move || UnmountOutcome::of(volume, |volume| volume.take_down(end)));
    let unmounted = match timeout(REPORT_DELAY, &mut unmounting).await {
        Ok(unmounted) => unmounted,
        Err(_) => {
            step.iter().for_each(|step| report_long(step));
            let unmounted = unmounting.await;
            step.iter().for_each(|step| report_end(step));
            unmounted
        }
    };
    unmounted.expect("a blocking thread that panics ends the process")
}

/// The outcome of an unmount.
pub(super) struct UnmountOutcome<E> {
    pub(super) name: String,
    pub(super) plugin: String,
    /// How long the unmount took, if the volume was mounted.
    pub(super) took: Option<Duration>,
    pub(super) outcome: Result<(), E>,
}

impl<E> UnmountOutcome<E> {
    /// Unmounts a volume by `unmount`.
    pub(super) fn of(volume: PodVolume, unmount: impl FnOnce(PodVolume) -> Result<(), E>) -> Self {
        let (name, plugin, began) = (volume.spec().name.to_string(), volume.plugin(), Instant::now());
        let was_mounted = !matches!(volume.state(), VolumeLife::Waiting(_));
        let outcome = unmount(volume);
        UnmountOutcome { name, plugin, took: was_mounted.then(|| began.elapsed()), outcome }
    }
}

/// Makes the drivers unmount what they have mounted for the pod. A driver that hangs delays no other driver.
async fn undo_drivers(setting: &VolumeContext) {
    let mut undoing: JoinSet<()> =
        homes(&setting.site).into_iter().map(|home| undo_until_done(setting.clone(), home)).collect();
    if timeout(UNMOUNT_TIMEOUT, async { while undoing.join_next().await.is_some() {} }).await.is_err() {
        interrupt_drivers(setting).await;
        for (home, volume) in homes(&setting.site) {
            warn!(
                volume,
                "volume {volume:?}: the driver has not unmounted {}; the next podfs of the pod, or podfs cleanup, calls it again",
                home.target().display()
            );
        }
    }
}

/// Kills the programs of FlexVolume drivers that execute a call for the pod. Returns whether there are any.
async fn interrupt_drivers(setting: &VolumeContext) -> bool {
    // A killed program ends late while it waits for a disk, so no driver waits for another one.
    let mut interrupting = JoinSet::new();
    for (home, volume) in homes(&setting.site) {
        interrupting.spawn_blocking(move || {
            let interrupted = driver::interrupt(&home);
            interrupted.inspect_err(|error| warn!(volume, "volume {volume:?}: {error}")).unwrap_or(false)
        });
    }
    interrupting.join_all().await.into_iter().any(|interrupted| interrupted)
}

/// Calls a driver until it has unmounted the volume.
async fn undo_until_done(setting: VolumeContext, (home, volume): (DriverHome, String)) {
    let mut last_error = None;
    loop {
        let (setting, home) = (setting.clone(), home.clone());
        let undone = spawn_blocking(move || undo_home(&setting, &home)).await;
        match undone.expect("a blocking thread that panics ends the process") {
            Ok(()) => return,
            Err(error) if last_error.as_ref() == Some(&error.to_string()) => {}
            Err(error) => {
                warn!(volume, "{error}; the driver is called again");
                last_error = Some(error.to_string());
            }
        }
        sleep(RETRY_PAUSE).await;
    }
}
