//! A manifest file that was changed while the pod runs. The volumes of a running pod do not change with it: containers use them.
//!
//! 1. The supervisor refuses to upgrade, because the new program would read the file.
//! 2. The record has the definitions of the volumes. The next `podfs run` serves those that are still mounted as they were.
//! 3. The manifest decides about volumes that are not mounted, and where an agent writes it: for volumes that the agent has published,
//!    for volumes that are missing in the manifest of `podfs run --push`, and for all supervisors of `podfs node`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use tracing::{debug, warn};

use super::Supervisor;
use crate::manifest::pod::{Pod, PodIdentity};
use crate::source::Source;
use crate::supervisor::run_dir::defined_volume::DefinedVolume;
use crate::supervisor::run_dir::site::Site;
use crate::volume::Volume;

impl Supervisor {
    /// Warns if the manifest has other volumes than the pod. The pod's volumes change when an agent publishes or
    /// unpublishes volumes, and not with the manifest. If an agent pushes objects, there is no warning: the agent
    /// writes the manifest for the next supervisor.
    pub(super) fn warn_of_other_volumes(&self, pod: &Pod) {
        let is_known = |volume: &Volume| self.volumes.values().any(|known| known == volume);
        let is_same = pod.volumes.len() == self.volumes.len() && pod.volumes.iter().all(is_known);
        match &self.source {
            _ if is_same => {}
            Source::Push(_) => debug!("the manifest has other volumes than were published"),
            Source::Files(_) | Source::Api(_) => warn!(
                "the volumes of a pod do not change with its manifest while it runs; the new ones take effect when \
                 podfs is stopped by SIGTERM and started again, or when an agent publishes them"
            ),
        }
    }

    /// Why a podfs that started now would not serve this pod with these volumes, in one sentence: its manifest file was changed.
    /// `podfs node` gives its supervisors the volumes themselves, so their file does not count.
    pub(super) fn changed_manifest(&self) -> Option<String> {
        let manifest = self.source.manifest().filter(|_| !self.setting.keep_empty_dirs)?;
        if manifest.identity != self.identity {
            let described = |pod: &PodIdentity| format!("{pod} (uid {})", pod.uid);
            let (changed, served) = (described(&manifest.identity), described(&self.identity));
            return Some(format!("the manifest file now describes pod {changed}, and podfs serves {served}"));
        }
        let changed = changed_volumes(self.volumes.values(), &manifest.volumes);
        (!changed.is_empty()).then(|| {
            let names: Vec<_> = changed.iter().map(|name| format!("{name:?}")).collect();
            format!("podfs does not serve these volumes as the manifest file has them now: {}", names.join(", "))
        })
    }

    /// Records the definitions of the volumes that the pod has now. Does so later if a thread has the mount points locked, because
    /// that thread may wait for a disk. If it fails, the next podfs after a crash serves the volumes as its manifest has them.
    pub(super) fn record_definitions(&mut self) {
        let is_served = |defined: &DefinedVolume| {
            self.volumes.values().any(|volume| volume.name.as_str() == defined.definition.name())
        };
        self.definitions.retain(is_served);
        let definitions = self.definitions.iter().filter_map(|defined| serde_json::to_value(defined).ok()).collect();
        let recorded = self.setting.mount_points.try_lock().map(|mut points| points.define_volumes(definitions));
        self.are_definitions_recorded = recorded.is_ok();
        if let Ok(Err(error)) = recorded {
            warn!("podfs cannot record the definitions of the volumes: {error}");
        }
    }
}

/// The names of the volumes that are only in one of the lists, or whose mount would not fit the definition in the other one.
fn changed_volumes<'a>(served: impl Iterator<Item = &'a Volume> + Clone, manifest: &'a [Volume]) -> BTreeSet<&'a str> {
    let is_served = |volume: &&Volume| served.clone().any(|known| known.name == volume.name && known.fits(volume));
    let is_in_manifest = |known: &&Volume| manifest.iter().any(|volume| volume.name == known.name);
    let changed = manifest.iter().filter(|volume| !is_served(volume));
    changed.chain(served.clone().filter(|known| !is_in_manifest(known))).map(|volume| volume.name.as_str()).collect()
}

/// The volumes to serve after a crash, and their definitions: those of the manifest, but a volume of the podfs before stays as it
/// was if it is mounted, and its mount does not fit the manifest. If the manifest no longer has the volume, it stays unless
/// `agent_decides`, or an agent has published it. `mounted` has the paths below the site at which something is mounted.
pub(in crate::supervisor) fn volumes_after_crash(
    pod: &Pod,
    before: &[DefinedVolume],
    mounted: &[PathBuf],
    site: &Site,
    agent_decides: bool,
) -> (Vec<Volume>, Vec<DefinedVolume>) {
    let (mut volumes, mut definitions) =
        (pod.volumes.clone(), DefinedVolume::of_manifest(pod, false).collect::<Vec<_>>());
    let served: Vec<(&DefinedVolume, Volume)> =
        before.iter().filter_map(|served| Some((served, parse(served)?))).collect();
    let own_paths: Vec<PathBuf> = served.iter().filter_map(|(_, volume)| own_path(volume, site)).collect();
    for (served, volume) in &served {
        let name = served.definition.name();
        let new = volumes.iter_mut().find(|new| new.name == volume.name);
        match new {
            Some(new) if volume.fits(new) && volume.is_block_device() == new.is_block_device() => {
                let definition = definitions.iter_mut().find(|definition| definition.definition.name() == name);
                definition.into_iter().for_each(|definition| definition.published = served.published);
                continue;
            }
            _ if !may_be_mounted(volume, mounted, &own_paths, site) => continue,
            Some(new) => {
                warn!(
                    volume = name,
                    "volume {name:?} stays as it was mounted; its definition in the manifest takes effect when podfs run is \
                     stopped by SIGTERM and started again"
                );
                *new = volume.clone();
            }
            None if agent_decides || served.published => continue,
            None => {
                warn!(
                    volume = name,
                    "volume {name:?} stays, although the manifest no longer has it, until podfs run is stopped by SIGTERM"
                );
                volumes.push(volume.clone());
            }
        }
        definitions.retain(|definition| definition.definition.name() != name);
        definitions.push((*served).clone());
    }
    (volumes, definitions)
}

fn parse(served: &DefinedVolume) -> Option<Volume> {
    let name = served.definition.name();
    let unreadable =
        |error: &_| warn!(volume = name, "podfs cannot read the recorded definition of volume {name:?}: {error}");
    served.definition.parse().inspect_err(unreadable).ok()
}

/// Whether the podfs before may have mounted the volume.
fn may_be_mounted(volume: &Volume, mounted: &[PathBuf], own_paths: &[PathBuf], site: &Site) -> bool {
    match own_path(volume, site) {
        Some(path) => mounted.contains(&path),
        // The path of a claim's mount has the name of its PersistentVolume. A block device has no mount.
        None => volume.is_block_device() || mounted.iter().any(|path| !own_paths.contains(path)),
    }
}

/// Where a volume of this kind is mounted, if that depends on nothing but its name.
fn own_path(volume: &Volume, site: &Site) -> Option<PathBuf> {
    Some(site.volume(volume.kind.directory?, volume.name.as_str()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::manifest::parse_documents;

    fn pod(volumes: &str) -> Pod {
        let yaml = format!("{{apiVersion: v1, kind: Pod, metadata: {{name: web}}, spec: {{volumes: [{volumes}]}}}}");
        let document = parse_documents(Path::new("pod.yaml"), yaml.as_bytes()).expect(&yaml).remove(0);
        Pod::parse(document).expect(&yaml)
    }

    #[test]
    fn an_agent_decides_which_volumes_stay_and_not_what_they_are() {
        let before = pod(
            "{name: kept, emptyDir: {}}, {name: changed, emptyDir: {}}, {name: gone, emptyDir: {}}, {name: typo, emptyDir: {}}",
        );
        let now =
            pod("{name: kept, emptyDir: {}}, {name: changed, emptyDir: {medium: Memory}}, {name: new, emptyDir: {}}");
        let site = Site::of_pod(Path::new("/root"), &before.identity.uid);
        let mounts: Vec<_> =
            ["kept", "changed", "gone"].map(|name| site.volume("kubernetes.io~empty-dir", name)).into();
        let names = |is_published: bool, agent_decides: bool| {
            let definitions: Vec<_> = DefinedVolume::of_manifest(&before, is_published).collect();
            let (volumes, definitions) = volumes_after_crash(&now, &definitions, &mounts, &site, agent_decides);
            assert_eq!(volumes[1], before.volumes[1], "the mounted one");
            let published =
                definitions.iter().filter(|defined| defined.published).map(|defined| defined.definition.name());
            assert_eq!(published.collect::<Vec<_>>(), if is_published { vec!["kept", "changed"] } else { vec![] });
            assert_eq!(definitions.len(), volumes.len());
            volumes.iter().map(|volume| volume.name.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(names(false, false), ["kept", "changed", "new", "gone"], "nothing was mounted of the volume `typo`");
        assert_eq!(names(true, false), ["kept", "changed", "new"]);
        assert_eq!(names(false, true), ["kept", "changed", "new"]);
    }
}
