//! Volumes of one pod that name the same claim: they are the same PersistentVolume, and so one mount (PV-03).

use crate::manifest::pod::PodIdentity;
use crate::volume::{Claim, Volume, VolumeSource};

/// Which volume is mounted in the place of which.
pub(in crate::supervisor) struct Sharing {
    /// By place in the manifest: the place of the volume that is mounted.
    leaders: Vec<usize>,
}

impl Sharing {
    /// Finds the volumes that share a claim; the first one leads. What any of them asks for is asked for all: the mount
    /// is read-only if one wants it so.
    pub(in crate::supervisor) fn of(volumes: &[Volume], pod: &PodIdentity) -> (Sharing, Vec<(usize, Volume)>) {
        let mut leaders = Vec::new();
        let mut mounted: Vec<(usize, Volume)> = Vec::new();
        for (place, volume) in volumes.iter().enumerate() {
            let name = volume.claim_name(&pod.name);
            let leader = mounted.iter_mut().find(|(_, other)| name.is_some() && other.claim_name(&pod.name) == name);
            match leader {
                Some((leader, other)) => {
                    leaders.push(*leader);
                    merge(other, volume);
                }
                None => {
                    leaders.push(place);
                    mounted.push((place, volume.clone()));
                }
            }
        }
        (Sharing { leaders }, mounted)
    }

    /// The place of the volume that is mounted for the one at this place.
    pub(super) fn leader(&self, place: usize) -> Option<usize> {
        self.leaders.get(place).copied()
    }

    /// The places of all volumes that `leader` is mounted for.
    pub(in crate::supervisor) fn places(&self, leader: usize) -> impl Iterator<Item = usize> {
        self.leaders.iter().enumerate().filter(move |(_, other)| **other == leader).map(|(place, _)| place)
    }
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
    use crate::volume::{Containers, Fields};

    fn volume(name: &str, source: &str) -> Volume {
        let yaml = format!("{{name: {name}, {source}}}");
        let volume = parse_bare(Path::new("volume.yaml"), yaml.as_bytes()).expect(source);
        Volume::parse(&volume, &Fields::default(), &Containers::default()).expect(source)
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
        let (sharing, mounted) = Sharing::of(&volumes, &PodIdentity::stand_in());
        let places: Vec<usize> = mounted.iter().map(|(place, _)| *place).collect();
        assert_eq!(places, [0, 1, 3, 5]);
        assert_eq!(sharing.places(0).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(sharing.places(3).collect::<Vec<_>>(), [3, 4]);
        let VolumeSource::Claim(claim) = &mounted[0].1.source else { panic!("a claim") };
        assert!(claim.read_only);
    }
}
