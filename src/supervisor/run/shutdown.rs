//! The end of a supervisor.
//!
//! Shutdown loses nothing and leaves nothing:
//! 1. The supervisor starts no new work, and waits two seconds for work under way. Then it kills the server, which ends
//!    every call that waits for the server. A call that waits for a source of the host stays behind with its volume. If the
//!    source answers again while the other volumes are unmounted, this volume follows them; otherwise podfs unmounts what
//!    is recorded, and its thread ends with the process: it cannot make anything after step 5.
//! 2. It unmounts the volumes while the server still answers, a few at the same time: in each umount(2), the kernel
//!    waits until no CPU uses the mount any more. It kills a server that ends or hangs meanwhile, so that no unmount
//!    waits for it. After an order to stop, podfs deletes the content of emptyDirs; after a failure the next podfs
//!    finds it again.
//! 3. Drivers of other vendors unmount what they have mounted, all at the same time. What a driver does not unmount
//!    stays recorded for the next podfs of the pod, and for `podfs cleanup`.
//! 4. The supervisor closes the server's socket; the server ends by itself, and is killed if it does not. The control
//!    socket closes.
//! 5. The supervisor removes the server's cgroup and the directories made for the volumes, and then gives up the claim.
//!
//! A system call on a disk that is frozen or fails blocks the supervisor in steps 2 and 5; the log names the path. The supervisor
//! ends when the disk answers again.
//!
//! On the order to leave the volumes (SIGUSR1), a supervisor finishes the work under way and ends without any of these
//! steps. The volumes stay as after a crash, so the next supervisor adopts them.

use std::sync::Mutex;
use std::time::Duration;

use podfs_fuse::mount::MountError;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::{Supervisor, TIMEOUT};
use crate::driver::DriverHome;
use crate::host::{block, local};
use crate::supervisor::long_step::{LONG, report_end, report_if_long, report_long};
use crate::supervisor::run_dir::mount_points::MountPoints;
use crate::supervisor::status::CounterStore;
use crate::supervisor::volume::driver::{homes, undo_home};
use crate::supervisor::volume::{PodEnd, PodVolume, VolumeContext, VolumeLife};
use crate::volume::{Volume, VolumeSource};

/// How long drivers may take to unmount the volumes of a pod that ends, with all retries.
const DRIVERS: Duration = Duration::from_secs(123);
/// How many volumes are unmounted at the same time.
const AT_ONCE: usize = 16;
/// The pause before podfs calls a driver again that failed.
const AGAIN: Duration = Duration::from_millis(500);

impl Supervisor {
    /// Ends this process without dropping anything, so that the volumes stay mounted.
    pub(in crate::supervisor) async fn leave(mut self) -> ! {
        let _ = timeout(TIMEOUT, self.finish_all()).await;
        info!("podfs ends; the server serves the volumes until the next podfs of the pod takes them over");
        self.report.leaving();
        self.report.store().counters().finish().await;
        std::process::exit(0)
    }

    /// Unmounts the volumes, and ends the server. Returns whether all are unmounted; a volume whose source does not answer
    /// may not be.
    pub(in crate::supervisor) async fn shut_down(mut self, end: PodEnd) -> bool {
        info!("unmounting");
        self.report.stopping();
        let mut has_finished = timeout(TIMEOUT, self.finish_all()).await.is_ok();
        if !has_finished {
            warn!("work on {} does not end; podfs kills the server", self.at_work());
            self.server.kill().await;
            // This does not end calls that wait for a source of the host.
            has_finished = timeout(TIMEOUT, self.finish_all()).await.is_ok();
        }
        let at_work = self.at_work();
        self.unmount_all(end).await;
        if !has_finished {
            has_finished = timeout(TIMEOUT, self.finish_all()).await.is_ok();
            if !has_finished {
                warn!("podfs ends without waiting for {at_work}: a source or a disk of the node does not answer");
            }
            self.unmount_all(end).await;
        }
        if end == PodEnd::Clean {
            self.leave_devices().await;
        }
        self.server.stop(TIMEOUT).await;
        if end == PodEnd::Clean {
            undo_drivers(&self.setting).await;
        }
        // The run directory is removed next.
        self.report.store().counters().finish().await;
        has_finished
    }

    /// What threads work on, for the log: `volume "data" (/srv/data)`.
    fn at_work(&self) -> String {
        let of_threads =
            self.volumes.iter().filter(|(place, _)| !self.idle.contains_key(&self.sharing.leader(**place)));
        let names: Vec<_> = of_threads.map(|(_, volume)| self.name_with_source(volume)).collect();
        if names.is_empty() { "the mounts of a container".to_owned() } else { names.join(", ") }
    }

    /// What podfs does with a volume that is unmounted, for the log. `None` if that needs no disk: only a server that hangs
    /// delays it, until podfs kills the server.
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

    fn name_with_source(&self, volume: &Volume) -> String {
        let source = match &volume.source {
            VolumeSource::HostPath(source) => Some(source.path.clone()),
            VolumeSource::EmptyDir(_) => self.setting.site.home(volume.name.as_str()),
            _ => None,
        };
        let name = volume.name.as_str();
        source.map_or(format!("volume {name:?}"), |source| format!("volume {name:?} ({})", source.display()))
    }

    /// Releases devices that an earlier podfs of the pod has mounted or linked, and that the pod's manifest no longer
    /// has.
    async fn leave_devices(&self) {
        let site = &self.containers.site;
        let (Some(root), Some(uid)) = (site.root(), site.uid()) else { return };
        let leave = spawn_blocking(move || {
            let mut left = local::leave_all(&root, &uid);
            left.extend(block::unmap_all(&root, &uid));
            left
        });
        // Another process may be formatting the device. The next podfs that uses the device finds what stays.
        if let Ok(Ok(left)) = timeout(TIMEOUT, leave).await {
            left.iter().for_each(|(place, error)| warn!("{} stays: {error}", place.display()));
        }
    }

    /// Unmounts all volumes.
    async fn unmount_all(&mut self, end: PodEnd) {
        let mut waiting = std::mem::take(&mut self.idle).into_values();
        let mut unmounting = JoinSet::new();
        loop {
            for volume in waiting.by_ref().take(AT_ONCE - unmounting.len()) {
                let step = self.step(volume.spec());
                unmounting.spawn(unmount(step, volume, end));
            }
            match waiting.len() + unmounting.len() {
                0 => return,
                left => self.report.unmounting(left),
            }
            tokio::select! {
                Some(unmounted) = unmounting.join_next() => {
                    self.note_unmounted(unmounted.expect("no task panics or is cancelled"));
                }
                () = self.server.lost() => {
                    warn!("the server ended while podfs unmounts the volumes");
                    self.server.kill().await;
                }
            }
        }
    }

    fn note_unmounted(&mut self, unmounted: UnmountOutcome) {
        let UnmountOutcome { name, plugin, took, outcome } = unmounted;
        if let Some(took) = took {
            self.report.operated("volume_unmount", &plugin, outcome.is_ok(), took);
        }
        if let Err(error) = outcome {
            warn!(volume = name, "volume {name:?}: {error}");
        }
    }
}

/// Removes the mount points and the pod's files, and gives up the claim. `unmounted` says whether all volumes are unmounted.
/// `step` says that in the log.
pub(super) fn remove_files(mount_points: &Mutex<MountPoints>, counters: &CounterStore, step: &str, unmounted: bool) {
    let remove = || {
        counters.wait_for_disk();
        // A thread that waits for the disk of a mount point holds the lock.
        mount_points.lock().map(|mut mount_points| mount_points.take_back(unmounted))
    };
    let _poisoned = report_if_long(step, remove);
}

/// Unmounts a volume on a blocking thread.
async fn unmount(step: Option<String>, volume: PodVolume, end: PodEnd) -> UnmountOutcome {
    let mut unmounting = spawn_blocking(move || UnmountOutcome::of(volume, end));
    let unmounted = match timeout(LONG, &mut unmounting).await {
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
struct UnmountOutcome {
    name: String,
    plugin: String,
    /// How long it took, if the volume was mounted.
    took: Option<Duration>,
    outcome: Result<(), MountError>,
}

impl UnmountOutcome {
    fn of(volume: PodVolume, end: PodEnd) -> UnmountOutcome {
        let (name, plugin, began) = (volume.spec().name.to_string(), volume.plugin(), Instant::now());
        let was_mounted = !matches!(volume.state(), VolumeLife::Waiting(_));
        let outcome = volume.take_down(end);
        UnmountOutcome { name, plugin, took: was_mounted.then(|| began.elapsed()), outcome }
    }
}

/// Makes the drivers unmount what they have mounted for the pod. A driver that hangs delays no other.
async fn undo_drivers(setting: &VolumeContext) {
    let mut undoing: JoinSet<()> =
        homes(&setting.site).into_iter().map(|home| undo_until_done(setting.clone(), home)).collect();
    if timeout(DRIVERS, async { while undoing.join_next().await.is_some() {} }).await.is_err() {
        for (home, volume) in homes(&setting.site) {
            warn!(
                volume,
                "volume {volume:?}: the driver has not unmounted {}; the next podfs of the pod, or podfs cleanup, calls it again",
                home.target().display()
            );
        }
    }
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
        sleep(AGAIN).await;
    }
}
