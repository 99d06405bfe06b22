//! Volumes that an agent adds and removes while the pod runs: it publishes and unpublishes them on the control socket.
//!
//! 1. The supervisor publishes a manifest as a whole or not at all. It mounts the new volumes like those that the pod had at its
//!    start. It does not touch volumes that are mounted already, even if the manifest does not have them. Only emptyDirs get new
//!    size limits.
//! 2. If the new volumes need a server with more privileges, the supervisor replaces the current server by such a server, with an
//!    ordinary takeover, before it mounts the first of them.
//! 3. A blocking thread unmounts a volume that is unpublished. The supervisor knows the volume until that is done, and then
//!    answers the client.
//! 4. The supervisor may be killed at any moment. It records in advance what it mounts. The next supervisor, with the
//!    manifest that the agent wrote for it, adopts the volumes in the manifest and unmounts the others.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use podfs_fuse::mount::visible::take_away;
use tokio::task::JoinError;
use tracing::{info, warn};

use super::Supervisor;
use super::profile::profile;
use super::sharing::{Sharing, can_share, is_shared};
use super::shutdown::UnmountOutcome;
use crate::host::empty_dir;
use crate::manifest::PodView;
use crate::manifest::pod::{Pod, PodIdentity};
use crate::supervisor::control::{ControlAnswer, PendingClient, RequestedChange, VolumeNames};
use crate::supervisor::run_dir::defined_volume::DefinedVolume;
use crate::supervisor::volume::driver;
use crate::supervisor::volume::removal_error::{RemovalCause, RemovalError};
use crate::supervisor::volume::{PodVolume, VolumeContext};
use crate::volume::{Volume, VolumeSource};

/// A volume that a blocking thread has unmounted, or a leftover of an earlier supervisor that the thread has removed.
pub(super) struct UnmountedVolume {
    /// The place of the volume; `None` for a leftover.
    place: Option<usize>,
    unmounted: UnmountOutcome<RemovalError>,
}

impl UnmountedVolume {
    /// A leftover of this name that a thread has removed, or has not.
    fn leftover(name: String, outcome: Result<(), RemovalError>) -> Self {
        Self { place: None, unmounted: UnmountOutcome { name, plugin: String::new(), took: None, outcome } }
    }
}

/// The volumes that the supervisor unmounts while the pod goes on, and the clients that wait for that.
#[derive(Default)]
pub(super) struct PendingUnmounts {
    /// The places of the leaders whose mounts the supervisor removes.
    leaders: BTreeSet<usize>,
    waiting: Vec<PendingUnmount>,
}

/// A client that waits until its volumes are unmounted.
struct PendingUnmount {
    client: PendingClient,
    /// The names of the volumes, for the answer.
    volumes: Vec<String>,
    /// The places of the leaders whose mounts are not removed yet.
    remaining: BTreeSet<usize>,
    errors: Vec<String>,
}

impl Supervisor {
    /// Makes a change that an agent asked for, and answers the agent.
    pub(super) async fn change(&mut self, change: RequestedChange, client: PendingClient) {
        let answer = match change {
            RequestedChange::Publish(pod) => self.publish(&pod).await.unwrap_or_else(|refusal| refusal),
            RequestedChange::Unpublish(volumes) => match self.places_of(&volumes) {
                Ok(places) => return self.unpublish(volumes, &places, client),
                Err(refusal) => refusal,
            },
            RequestedChange::Remount(volumes) => match self.places_of(&volumes) {
                Ok(places) => {
                    self.remount(&places);
                    ControlAnswer::Remounting(VolumeNames { volumes })
                }
                Err(refusal) => refusal,
            },
        };
        client.answer(&answer);
    }

    /// Adds the volumes of the manifest that the pod does not have yet. Returns the answer with their names, or a refusal.
    async fn publish(&mut self, pod: &Arc<Pod>) -> Result<ControlAnswer, ControlAnswer> {
        if let Some(reason) = self.identity.refuse_rename(&pod.identity) {
            return Err(ControlAnswer::Refused(reason));
        }
        if pod.identity != self.identity {
            let described = |pod: &PodIdentity| format!("{pod} (uid {})", pod.uid);
            let (published, served) = (described(&pod.identity), described(&self.identity));
            return Err(ControlAnswer::Refused(format!(
                "the manifest is that of pod {published}, and podfs serves {served}; publish it to the podfs of that pod"
            )));
        }
        let added = self.new_volumes(&pod.volumes)?;
        let wider = profile(self.volumes.values().chain(&added), self.setting.io_uring);
        self.server.widen(wider).await.map_err(|error| ControlAnswer::Busy(error.to_string()))?;
        self.report_server();
        self.source.publish(pod).map_err(|error| ControlAnswer::Refused(error.to_string()))?;
        let volumes: Vec<_> = added.iter().map(|volume| volume.name.to_string()).collect();
        self.view = Arc::new(PodView { facts: pod.facts.clone(), ..(*self.view).clone() });
        self.containers.pod = Some(Arc::clone(pod));
        self.add(added);
        self.define_published(pod, &volumes);
        self.take_size_limits(&pod.volumes);
        self.announce_volumes();
        // Facts of the pod may have changed with its manifest.
        self.version += 1;
        if !volumes.is_empty() {
            info!("volumes were published: {}", volumes.join(", "));
        }
        Ok(ControlAnswer::Published(VolumeNames { volumes }))
    }

    /// The volumes that the pod does not have yet.
    fn new_volumes(&self, volumes: &[Volume]) -> Result<Vec<Volume>, ControlAnswer> {
        let mut added: Vec<Volume> = Vec::new();
        for volume in volumes {
            let name = volume.name.as_str();
            match self.volumes.iter().find(|(_, known)| known.name == volume.name) {
                Some((place, _)) if self.is_unmounting(self.sharing.leader(*place)) => {
                    return Err(ControlAnswer::Busy(format!(
                        "volume {name:?} is just being unmounted; publish it again when that is done"
                    )));
                }
                Some((_, known)) if !known.fits(volume) => {
                    return Err(ControlAnswer::Refused(format!(
                        "volume {name:?} is mounted with another definition; unpublish it first, or publish the new one \
                         under another name"
                    )));
                }
                Some(_) => {}
                None => {
                    if let Some(other) = self.conflicting_volume_of_claim(volume) {
                        return Err(ControlAnswer::Refused(format!(
                            "volume {name:?} names the claim of volume {other:?}, which is mounted in another way; unpublish \
                             that first"
                        )));
                    }
                    added.push(volume.clone());
                }
            }
        }
        Ok(added)
    }

    /// Records the definitions of volumes that were published just now. The supervisor has not mounted them yet.
    fn define_published(&mut self, pod: &Pod, volumes: &[String]) {
        // podfs node gives the next supervisor the pod.
        if self.setting.keep_empty_dirs || volumes.is_empty() {
            return;
        }
        let is_published = |defined: &DefinedVolume| volumes.iter().any(|name| name == defined.definition.name());
        self.definitions.retain(|defined| !is_published(defined));
        self.definitions.extend(DefinedVolume::of_manifest(pod, true).filter(is_published));
        self.record_definitions();
    }

    /// The place of the leader of the volumes that name this volume's claim.
    fn leader_of_claim(&self, volume: &Volume) -> Option<usize> {
        let other = self.volumes.iter().find(|(_, other)| is_shared(volume, other, &self.identity));
        other.map(|(place, _)| self.sharing.leader(*place))
    }

    /// Changes the size limits of mounted emptyDirs, from their next refresh on.
    fn take_size_limits(&mut self, volumes: &[Volume]) {
        for volume in volumes.iter().filter(|volume| matches!(volume.source, VolumeSource::EmptyDir(_))) {
            let known = self.volumes.values_mut().find(|known| known.name == volume.name);
            known.into_iter().for_each(|known| known.source.clone_from(&volume.source));
        }
    }

    /// The name of a mounted volume of the same claim, if its mount does not suit this volume.
    fn conflicting_volume_of_claim(&self, volume: &Volume) -> Option<String> {
        let leader = self.leader_of_claim(volume)?;
        let spec = self.idle.get(&leader).map(PodVolume::spec).or_else(|| self.volumes.get(&leader))?;
        let can_share = !self.is_unmounting(leader) && can_share(spec, volume);
        (!can_share).then(|| spec.name.to_string())
    }

    /// Adds volumes to the pod.
    fn add(&mut self, added: Vec<Volume>) {
        let first = self.next_place;
        self.next_place += added.len();
        let (sharing, mounted) = Sharing::of(&added, &self.identity);
        for (number, spec) in mounted {
            let place = first + number;
            let leader = self.leader_of_claim(&spec);
            for other in sharing.places(number) {
                self.sharing.add(first + other, leader.unwrap_or(place));
                self.report.add(first + other, &added[other]);
            }
            let volume = match leader {
                None => PodVolume::published(spec, self.setting.clone()),
                Some(leader) => match self.idle.remove(&leader) {
                    Some(volume) => volume,
                    // A blocking thread works on the leader. The supervisor reports the volume when that work has ended.
                    None => continue,
                },
            };
            let leader = leader.unwrap_or(place);
            for place in self.sharing.places(leader) {
                if let Some(spec) = place.checked_sub(first).and_then(|number| added.get(number)) {
                    self.report.record_before_refresh(place, spec, &volume);
                }
            }
            self.idle.insert(leader, volume);
        }
        self.volumes.extend((first..).zip(added));
    }

    /// Gives the source the current list of volumes, whose objects it has to follow.
    fn announce_volumes(&mut self) {
        let volumes = self.volumes.values().cloned().collect();
        if let Some(snapshot) = self.source.want(volumes) {
            self.take_snapshot(snapshot);
        }
    }

    /// The places of the volumes of these names, or a refusal.
    fn places_of(&self, names: &[String]) -> Result<BTreeSet<usize>, ControlAnswer> {
        let place = |name: &String| {
            let volume = self.volumes.iter().find(|(_, volume)| volume.name.as_str() == name);
            volume.map(|(place, _)| *place).ok_or_else(|| {
                let known: Vec<_> = self.volumes.values().map(|volume| volume.name.as_str()).collect();
                let known = if known.is_empty() { "no volumes".to_owned() } else { known.join(", ") };
                ControlAnswer::Refused(format!("pod {} has no volume {name:?}; it has {known}", self.identity))
            })
        };
        names.iter().map(place).collect()
    }

    /// Refreshes volumes now. Mounts the volumes again that another process has unmounted, without a pause.
    fn remount(&mut self, places: &BTreeSet<usize>) {
        // The path is for `podfs mount`, which has no control socket.
        let _path = self.look_at_mounts();
        for leader in places.iter().map(|place| self.sharing.leader(*place)).collect::<BTreeSet<_>>() {
            self.refresh_now(leader);
        }
    }

    /// Starts to unmount volumes. The supervisor answers the client when that is done.
    fn unpublish(&mut self, volumes: Vec<String>, places: &BTreeSet<usize>, client: PendingClient) {
        let mut remaining = BTreeSet::new();
        for place in places {
            let leader = self.sharing.leader(*place);
            if self.sharing.places(leader).any(|other| !places.contains(&other)) && !self.is_unmounting(leader) {
                // A volume that the pod keeps shares the mount: the mount stays.
                self.forget(*place);
                continue;
            }
            remaining.insert(leader);
            if self.pending_unmounts.leaders.insert(leader)
                && let Some(volume) = self.idle.remove(&leader)
            {
                self.start_unmount(leader, volume);
            }
        }
        self.pending_unmounts.waiting.push(PendingUnmount { client, volumes, remaining, errors: Vec::new() });
        self.answer_unpublished();
    }

    /// Whether the supervisor unmounts the volume at this place while the pod goes on.
    pub(super) fn is_unmounting(&self, leader: usize) -> bool {
        self.pending_unmounts.leaders.contains(&leader)
    }

    /// Unmounts a volume on a blocking thread.
    pub(super) fn start_unmount(&mut self, place: usize, volume: PodVolume) {
        self.unmounting.spawn_blocking(move || UnmountedVolume {
            place: Some(place),
            unmounted: UnmountOutcome::of(volume, PodVolume::unpublish),
        });
    }

    /// Forgets a volume that a blocking thread has unmounted, also if that failed.
    pub(super) fn finish_unmount(&mut self, unmounted: Result<UnmountedVolume, JoinError>) {
        let unmounted = unmounted.expect("a blocking thread that panics ends the process");
        let UnmountedVolume { place, unmounted: UnmountOutcome { name, plugin, took, outcome } } = unmounted;
        if let Some(took) = took {
            self.report.operated("volume_unmount", &plugin, outcome.is_ok(), took);
        }
        match &outcome {
            Ok(()) => info!(volume = name, "volume is unmounted; the pod goes on without it"),
            Err(error) => warn!(volume = name, "{error}"),
        }
        let Some(leader) = place else { return };
        self.pending_unmounts.leaders.remove(&leader);
        for place in self.sharing.places(leader).collect::<Vec<_>>() {
            self.forget(place);
        }
        self.refresh_times.remove(&leader);
        for pending in &mut self.pending_unmounts.waiting {
            if pending.remaining.remove(&leader)
                && let Err(error) = &outcome
            {
                pending.errors.push(error.to_string());
            }
        }
        self.announce_volumes();
        self.answer_unpublished();
    }

    /// Answers the clients whose volumes are all unmounted.
    fn answer_unpublished(&mut self) {
        let is_over = |pending: &mut PendingUnmount| pending.remaining.is_empty();
        for pending in self.pending_unmounts.waiting.extract_if(.., is_over) {
            let PendingUnmount { client, volumes, errors, .. } = pending;
            client.answer(&match errors.is_empty() {
                true => ControlAnswer::Unpublished(VolumeNames { volumes }),
                false => ControlAnswer::Refused(errors.join("; ")),
            });
        }
    }

    /// Removes the volume at this place from the pod.
    fn forget(&mut self, place: usize) {
        self.volumes.remove(&place);
        self.sharing.remove(place);
        self.report.remove(place);
        if !self.definitions.is_empty() {
            self.record_definitions();
        }
    }

    /// Gives the server the rights that all volumes need. An adopted server may lack the rights for a volume that it has never
    /// served.
    pub(super) async fn allow_all_volumes(&mut self) {
        if let Err(error) = self.server.widen(profile(self.volumes.values(), self.setting.io_uring)).await {
            warn!("the pod's server lacks the rights that its volumes need: {error}");
        }
        self.report_server();
    }

    /// Removes what an earlier supervisor made for volumes that the pod no longer has: subPath mounts, bind mounts (which no
    /// server serves), mounts of drivers, and the content of emptyDirs.
    pub(super) fn remove_leftovers(&mut self) {
        let Some(homes) = self.setting.site.homes() else { return };
        let VolumeContext { site, .. } = &self.setting;
        let volumes = || self.volumes.values();
        let path_of = |volume: &Volume| volume.kind.directory.map(|kind| site.volume(kind, volume.name.as_str()));
        let paths: HashSet<PathBuf> = volumes().filter_map(path_of).collect();
        // podfs knows the mount point of a claim only when the claim is bound, and that of a FlexVolume depends on the driver. So
        // if the pod has such volumes, a recorded mount may belong to one of them.
        let has_claims = volumes().any(|volume| volume.kind.directory.is_none());
        let is_empty_dir = |volume: &&Volume| matches!(volume.source, VolumeSource::EmptyDir(_));
        let wanted: HashSet<_> =
            volumes().filter(is_empty_dir).map(|volume| homes.join(volume.name.as_str())).collect();
        let (mounts, made) = {
            let mut mount_points = self.setting.mount_points();
            if let Some(top) = site.sub_paths() {
                let directory =
                    |target: PathBuf| target.strip_prefix(&top).ok()?.iter().next().map(|name| top.join(name));
                let directories = mount_points.targets_below(&top).into_iter().filter_map(directory);
                let is_wanted = |directory: &PathBuf| volumes().any(|volume| directory.ends_with(volume.name.as_str()));
                for directory in directories.filter(|directory| !is_wanted(directory)).collect::<BTreeSet<_>>() {
                    mount_points.remove_targets(&directory, &top).unwrap_or_else(|error| warn!("{error}"));
                }
            }
            let is_unwanted = |path: &&PathBuf| !has_claims && !paths.contains(*path);
            (
                mount_points.unadopted().iter().filter(is_unwanted).cloned().collect::<Vec<_>>(),
                mount_points.made_in(&homes),
            )
        };
        let of_drivers = driver::homes(site).into_iter();
        let of_drivers = of_drivers.filter(|(home, name)| {
            let is_kept = |volume: &PodVolume| volume.path().is_some_and(|path| driver::is_home_of(home, path));
            !volumes().any(|volume| volume.name.as_str() == name) && !self.idle.values().any(is_kept)
        });
        for (home, name) in of_drivers.collect::<Vec<_>>() {
            let setting = self.setting.clone();
            self.unmounting.spawn_blocking(move || {
                let outcome = driver::undo_home(&setting, &home).map_err(RemovalError::from);
                UnmountedVolume::leftover(name, outcome)
            });
        }
        let homes = made.into_iter().filter(|home| !wanted.contains(home));
        let leftovers: BTreeMap<PathBuf, bool> =
            mounts.into_iter().map(|path| (path, false)).chain(homes.map(|home| (home, true))).collect();
        for (path, is_home) in leftovers {
            let setting = self.setting.clone();
            self.unmounting.spawn_blocking(move || {
                let name = path.file_name().unwrap_or_default().display().to_string();
                let outcome = remove_leftover(&setting, &path, is_home);
                UnmountedVolume::leftover(name, outcome)
            });
        }
    }
}

/// Removes what an earlier supervisor left at a path: the home of an emptyDir, or a mount.
fn remove_leftover(setting: &VolumeContext, path: &Path, is_home: bool) -> Result<(), RemovalError> {
    let at = |cause: RemovalCause| RemovalError::OfEarlier { path: path.to_owned(), cause };
    if is_home && path.exists() {
        let undeleted = empty_dir::remove(path).map_err(|error| at(error.into()))?;
        if !undeleted.is_empty() {
            return Err(at(RemovalCause::Content(undeleted.to_string())));
        }
    } else {
        take_away(path).map_err(|error| at(error.into()))?;
    }
    setting.mount_points().forget(path, is_home.then_some(path), setting.site.path()).map_err(|error| at(error.into()))
}
