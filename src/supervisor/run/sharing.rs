//! Volumes of one pod that name the same claim: they are the same PersistentVolume, and so one mount (PV-03).

use std::collections::BTreeMap;

use crate::manifest::pod::PodIdentity;
use crate::volume::{Claim, Volume, VolumeSource};

/// Which volume of the pod has the mount of which other volume.
#[derive(Default)]
pub(in crate::supervisor) struct Sharing {
    /// By place: the place of the volume that is mounted, the leader.
    leaders: BTreeMap<usize, usize>,
}

impl Sharing {
    /// Finds the volumes that share a claim; the first one leads. Its mount has the options of all: it is read-only if
    /// one of them is.
    pub(in crate::supervisor) fn of(volumes: &[Volume], pod: &PodIdentity) -> (Sharing, Vec<(usize, Volume)>) {
        let mut sharing = Sharing::default();
        let mut mounted: Vec<(usize, Volume)> = Vec::new();
        for (place, volume) in volumes.iter().enumerate() {
            let leader = mounted.iter_mut().find(|(_, other)| is_shared(volume, other, pod));
            match leader {
                Some((leader, other)) => {
                    sharing.leaders.insert(place, *leader);
                    merge(other, volume);
                }
                None => {
                    sharing.leaders.insert(place, place);
                    mounted.push((place, volume.clone()));
                }
            }
        }
        (sharing, mounted)
    }

    /// The places of all volumes that have the mount of `leader`.
    pub(in crate::supervisor) fn places(&self, leader: usize) -> impl Iterator<Item = usize> {
        self.leaders.iter().filter(move |(_, other)| **other == leader).map(|(place, _)| *place)
    }

    /// The place of the volume that is mounted for this one.
    pub(in crate::supervisor) fn leader(&self, place: usize) -> usize {
        self.leaders.get(&place).copied().unwrap_or(place)
    }

    /// Adds a volume that is published later. Its leader may be the volume itself.
    pub(in crate::supervisor) fn add(&mut self, place: usize, leader: usize) {
        self.leaders.insert(place, leader);
    }

    /// Removes a volume.
    pub(in crate::supervisor) fn remove(&mut self, place: usize) {
        self.leaders.remove(&place);
    }
}

/// Whether two volumes name the same claim.
pub(in crate::supervisor) fn is_shared(volume: &Volume, other: &Volume, pod: &PodIdentity) -> bool {
    let name = volume.claim_name(&pod.name);
    name.is_some() && other.claim_name(&pod.name) == name
}

/// Whether the mount of `leader` suits `volume`, too.
pub(in crate::supervisor) fn can_share(leader: &Volume, volume: &Volume) -> bool {
    let mut merged = leader.clone();
    merge(&mut merged, volume);
    merged == *leader
}

fn merge(leader: &mut Volume, other: &Volume) {
    leader.preferences.served_by = leader.preferences.served_by.or(other.preferences.served_by);
    if let (VolumeSource::Claim(claim), VolumeSource::Claim(more)) = (&mut leader.source, &other.source) {
        let Claim { reference: _, read_only, usage } = more;
        claim.read_only |= read_only;
        claim.usage.mounted |= usage.mounted;
        claim.usage.device |= usage.device;
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::manifest::parse_bare;
    use crate::volume::{VolumeFields, VolumeUses};

    fn volume(name: &str, source: &str) -> Volume {
        let yaml = format!("{{name: {name}, {source}}}");
        let volume = parse_bare(Path::new("volume.yaml"), yaml.as_bytes()).expect(source);
        Volume::parse(&volume, &VolumeFields::default(), &VolumeUses::default()).expect(source)
    }

    #[test]
    fn pv_03_volumes_of_one_claim_are_one_mount() {
        let volumes = [
            volume("a", "persistentVolumeClaim: {claimName: data}"),
            volume("b", "emptyDir: {}"),
            volume("c", "persistentVolumeClaim: {claimName: data, readOnly: true}"),
            volume("d", "persistentVolumeClaim: {claimName: podfs-e}"),
            volume("e", "ephemeral: {volumeClaimTemplate: {spec: {}}}"),
            volume("f", "emptyDir: {}"),
        ];
        let (sharing, mounted) = Sharing::of(&volumes, &PodIdentity::placeholder());
        let places: Vec<usize> = mounted.iter().map(|(place, _)| *place).collect();
        assert_eq!(places, [0, 1, 3, 5]);
        assert_eq!(sharing.places(0).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(sharing.places(3).collect::<Vec<_>>(), [3, 4]);
        let VolumeSource::Claim(claim) = &mounted[0].1.source else { panic!("a claim") };
        assert!(claim.read_only);
    }
}
