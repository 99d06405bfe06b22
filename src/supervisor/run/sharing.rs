//! Volumes of one pod that name the same PersistentVolumeClaim. They are the same PersistentVolume, so podfs mounts it
//! once (PV-03).

use std::collections::BTreeMap;

use crate::manifest::pod::PodIdentity;
use crate::volume::{Claim, Volume, VolumeSource};

/// Which volumes of the pod share a mount. The leader of such volumes is the one that podfs mounts.
#[derive(Default)]
pub(crate) struct Sharing {
    /// The place of the leader of each volume, by the place of the volume. A volume that shares no mount is its own
    /// leader.
    leaders: BTreeMap<usize, usize>,
}

impl Sharing {
    /// Finds the volumes that name the same claim; the first of them is the leader. Its mount has the options of all of
    /// them: it is read-only if one of them is. Returns the leaders, with their places, as the volumes to mount.
    pub(crate) fn of(volumes: &[Volume], pod: &PodIdentity) -> (Sharing, Vec<(usize, Volume)>) {
        let mut sharing = Sharing::default();
        let mut mounted: Vec<(usize, Volume)> = Vec::new();
        for (place, volume) in volumes.iter().enumerate() {
            let leader = mounted.iter_mut().find(|(_, leader)| is_shared(volume, leader, pod));
            match leader {
                Some((leader_place, leader)) => {
                    sharing.leaders.insert(place, *leader_place);
                    merge(leader, volume);
                }
                None => {
                    sharing.leaders.insert(place, place);
                    mounted.push((place, volume.clone()));
                }
            }
        }
        (sharing, mounted)
    }

    /// The places of all volumes that share the mount of `leader`, its own place included.
    pub(in crate::supervisor) fn places(&self, leader: usize) -> impl Iterator<Item = usize> {
        self.leaders.iter().filter(move |(_, of_place)| **of_place == leader).map(|(place, _)| *place)
    }

    /// The place of the leader of the volume at this place.
    pub(in crate::supervisor) fn leader(&self, place: usize) -> usize {
        self.leaders.get(&place).copied().unwrap_or(place)
    }

    /// Adds a volume that an agent publishes later. Its leader may be the volume itself.
    pub(in crate::supervisor) fn add(&mut self, place: usize, leader: usize) {
        self.leaders.insert(place, leader);
    }

    /// Removes a volume.
    pub(in crate::supervisor) fn remove(&mut self, place: usize) {
        self.leaders.remove(&place);
    }
}

/// Whether two volumes name the same claim.
pub(crate) fn is_shared(volume: &Volume, other: &Volume, pod: &PodIdentity) -> bool {
    let name = volume.claim_name(&pod.name);
    name.is_some() && other.claim_name(&pod.name) == name
}

/// Whether the mount of `leader` suits `volume`, too.
pub(crate) fn can_share(leader: &Volume, volume: &Volume) -> bool {
    let mut merged = leader.clone();
    merge(&mut merged, volume);
    merged == *leader
}

/// Adds the options of `volume` to its leader.
fn merge(leader: &mut Volume, volume: &Volume) {
    leader.preferences.served_by = leader.preferences.served_by.or(volume.preferences.served_by);
    if let (VolumeSource::Claim(claim), VolumeSource::Claim(added)) = (&mut leader.source, &volume.source) {
        let Claim { reference: _, read_only, usage } = added;
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
