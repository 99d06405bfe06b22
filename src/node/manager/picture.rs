//! The published state of one pod, computed from the two worlds.

use std::collections::BTreeSet;

use super::pods::KnownPod;
use crate::manifest::pod::PodUid;
use crate::node::state::{ContainerEntry, PodEntry, VolumeEntry, VolumeMount};
use crate::node::world::VolumeId;
use crate::node::world::actual::{ActualVolume, ActualWorld};
use crate::node::world::desired::{DesiredVolume, DesiredWorld};

/// What is known of a pod. A pod that is not `known` has left directories or a supervisor.
pub(super) fn of_pod(
    uid: &PodUid,
    known: Option<&KnownPod>,
    desired: &DesiredWorld,
    actual: &ActualWorld,
    supervisor: Option<u32>,
    containers: &[ContainerEntry],
) -> PodEntry {
    let identity = known.map(|known| &known.pod.pod.identity);
    let wanted = desired.pod(uid);
    let described = known.filter(|known| known.described);
    PodEntry {
        namespace: identity.map(|identity| identity.namespace.clone()),
        name: identity.map(|identity| identity.name.clone()),
        uid: uid.to_string(),
        origin: described.map(|known| known.pod.origin.clone()),
        stage: described.map(|known| known.pod.stage),
        released: known.is_some_and(|known| known.released),
        processed: wanted.is_some_and(|wanted| wanted.is_processed()),
        volumes: volumes(uid, known, desired, actual),
        errors: wanted.map(|wanted| wanted.errors.iter().map(str::to_owned).collect()).unwrap_or_default(),
        supervisor,
        containers: containers.to_vec(),
    }
}

fn volumes(uid: &PodUid, known: Option<&KnownPod>, desired: &DesiredWorld, actual: &ActualWorld) -> Vec<VolumeEntry> {
    let wanted = desired.pod(uid).into_iter().flat_map(|pod| pod.volumes.keys().cloned());
    let there = actual.of_pod(uid).map(|(id, _)| id.volume.clone());
    let names: BTreeSet<String> = wanted.chain(there).collect();
    let place = |name: &String| {
        let volumes = known.map(|known| known.pod.pod.volumes.as_slice()).unwrap_or_default();
        volumes.iter().position(|volume| volume.name.as_str() == name).unwrap_or(usize::MAX)
    };
    let mut names: Vec<_> = names.into_iter().collect();
    names.sort_by_key(place);
    let entries = names.into_iter().map(|name| {
        let id = VolumeId { pod: uid.clone(), volume: name };
        let (wanted, there) = (desired.volume(&id), actual.volume(&id));
        entry(id, known, wanted, there)
    });
    entries.collect()
}

fn entry(
    id: VolumeId,
    known: Option<&KnownPod>,
    wanted: Option<&DesiredVolume>,
    there: Option<&ActualVolume>,
) -> VolumeEntry {
    let (there, default) = (there.cloned(), ActualVolume::default());
    let there = there.unwrap_or(default);
    let plugin = there.seen.plugin.clone().or_else(|| wanted.map(|wanted| wanted.plugin.to_owned()));
    let label = known.and_then(|known| known.pod.pod.facts.selinux_label.clone());
    VolumeEntry {
        unique_name: wanted.map_or_else(|| format!("{}-{}", id.pod, id.volume), |wanted| wanted.unique_name.clone()),
        plugin: plugin.unwrap_or_else(|| "unknown".to_owned()),
        kind: wanted.map_or_else(|| "unknown".to_owned(), |wanted| wanted.volume.word().to_owned()),
        name: id.volume,
        desired: wanted.is_some(),
        mount: there.mount,
        path: there.seen.path,
        read_only: there.seen.read_only,
        selinux: label.filter(|_| there.mount == VolumeMount::Mounted),
        group: there.seen.group,
        remount_required: there.remount_required,
        reason: there.reason,
    }
}
