//! The published state of one pod, computed from the two worlds.

use std::collections::{BTreeMap, BTreeSet};

use super::pods::KnownPod;
use crate::manifest::pod::PodUid;
use crate::node::backing::Backing;
use crate::node::state::{ContainerEntry, MountState, PodEntry, VolumeEntry};
use crate::node::world::VolumeId;
use crate::node::world::actual::{ActualVolume, ActualWorld};
use crate::node::world::desired::{DesiredVolume, DesiredWorld};
use crate::volume::VolumeSource;

/// The desired and the actual world, and the backings of volumes.
#[derive(Clone, Copy)]
pub(super) struct Worlds<'a> {
    pub(super) desired: &'a DesiredWorld,
    pub(super) actual: &'a ActualWorld,
    pub(super) backings: &'a BTreeMap<VolumeId, Backing>,
}

/// The published state of a pod. If `known` is `None`, the node has only directories or a supervisor of the pod. The pod
/// `is_unknown` while no source has said whether it exists.
pub(super) fn of_pod(
    uid: &PodUid,
    known: Option<&KnownPod>,
    is_unknown: bool,
    worlds: Worlds<'_>,
    supervisor: Option<u32>,
    containers: &[ContainerEntry],
) -> PodEntry {
    let wanted = worlds.desired.pod(uid);
    let pod = wanted.map(|wanted| &wanted.pod).or(known.map(|known| &known.pod));
    let identity = pod.map(|pod| &pod.pod.identity);
    let described = known.filter(|known| known.is_described);
    PodEntry {
        namespace: identity.map(|identity| identity.namespace.clone()),
        name: identity.map(|identity| identity.name.clone()),
        uid: uid.to_string(),
        origin: known.filter(|known| known.is_described || is_unknown).map(|known| known.pod.origin.clone()),
        stage: described.map(|known| known.pod.stage),
        released: known.is_some_and(|known| known.released),
        processed: wanted.is_some_and(|wanted| wanted.is_processed()),
        volumes: volumes(uid, known, worlds),
        errors: wanted.map(|wanted| wanted.errors.iter().map(str::to_owned).collect()).unwrap_or_default(),
        notes: wanted.map(|wanted| wanted.notes.iter().map(str::to_owned).collect()).unwrap_or_default(),
        supervisor,
        containers: containers.to_vec(),
    }
}

fn volumes(uid: &PodUid, known: Option<&KnownPod>, worlds: Worlds<'_>) -> Vec<VolumeEntry> {
    let Worlds { desired, actual, backings } = worlds;
    let wanted = desired.pod(uid).into_iter().flat_map(|pod| pod.volumes.keys().cloned());
    let in_actual = actual.of_pod(uid).map(|(id, _)| id.volume.clone());
    let names: BTreeSet<String> = wanted.chain(in_actual).collect();
    let position_of = |name: &String| {
        let volumes = known.map(|known| known.pod.pod.volumes.as_slice()).unwrap_or_default();
        volumes.iter().position(|volume| volume.name.as_str() == name).unwrap_or(usize::MAX)
    };
    let mut names: Vec<_> = names.into_iter().collect();
    names.sort_by_key(position_of);
    let entries = names.into_iter().map(|name| {
        let id = VolumeId { pod: uid.clone(), volume: name };
        let (wanted, in_actual) = (desired.volume(&id), actual.volume(&id));
        let backing = backings.get(&id);
        entry(id, known, wanted, in_actual, backing)
    });
    entries.collect()
}

fn entry(
    id: VolumeId,
    known: Option<&KnownPod>,
    wanted: Option<&DesiredVolume>,
    in_actual: Option<&ActualVolume>,
    backing: Option<&Backing>,
) -> VolumeEntry {
    let (in_actual, default) = (in_actual.cloned(), ActualVolume::default());
    let in_actual = in_actual.unwrap_or(default);
    let served_by = in_actual.observed.plugin.clone().or_else(|| backing.map(|backing| backing.plugin.clone()));
    let plugin = served_by.or_else(|| wanted.map(|wanted| wanted.plugin.to_owned()));
    let source = wanted.map(|wanted| &wanted.volume.source);
    let unique_name = match (backing, wanted) {
        (Some(backing), _) => backing.unique_name.clone(),
        (None, Some(wanted)) => wanted.unique_name.clone(),
        (None, None) => format!("{}-{}", id.pod, id.volume),
    };
    let reason = in_actual.reason().map(str::to_owned);
    let label = known.and_then(|known| known.pod.pod.facts.selinux_label.clone());
    VolumeEntry {
        unique_name,
        plugin: plugin.unwrap_or_else(|| "unknown".to_owned()),
        kind: wanted.map_or_else(|| "unknown".to_owned(), |wanted| wanted.volume.field().to_owned()),
        name: id.volume,
        desired: wanted.is_some(),
        mount: in_actual.mount,
        path: in_actual.observed.path,
        read_only: in_actual.observed.read_only,
        selinux: label.filter(|_| in_actual.mount == MountState::Mounted),
        group: in_actual.observed.group,
        attachable: match (backing, source) {
            (Some(backing), _) => Some(backing.attachable),
            (None, Some(VolumeSource::Claim(_))) => None,
            (None, Some(VolumeSource::Csi(csi))) if !csi.is_ephemeral() => None,
            (None, Some(_)) => Some(false),
            (None, None) => None,
        },
        size: match (backing, source) {
            (None, Some(VolumeSource::EmptyDir(source))) => source.size_limit,
            (backing, _) => backing.and_then(|backing| backing.size),
        },
        remount_required: in_actual.remount_required,
        reason,
    }
}
