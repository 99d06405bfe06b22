//! The plan, in every state to which kills and people can lead.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::entries::DiskEntry;
use super::super::identity::DiskIdentity;
use super::*;

const ENTRIES: usize = 3;

fn node() -> NodeNames {
    NodeNames { name: "n1".to_owned(), hostname: "n1".to_owned() }
}

fn path(entry: usize) -> PathBuf {
    PathBuf::from(format!("/mnt/fast/{entry}"))
}

fn name(entry: usize) -> String {
    volume::name("n1", "fast", &path(entry))
}

fn identity(entry: usize) -> DiskIdentity {
    let json = format!(r#"{{"boot": "b", "device": "0:{entry}", "root": "/"}}"#);
    serde_json::from_str(&json).expect("an identity")
}

/// A node and an API server, in which every effect of a step is one change.
struct Cluster {
    scan: DirectoryScan,
    volumes: BTreeMap<String, LocalVolume>,
    classes: BTreeMap<String, OfferedClass>,
    records: BTreeMap<String, Option<ErasureRecord>>,
    /// Whose data each entry has: the uid of a claim.
    data: [Option<String>; ENTRIES],
    /// Where a person has asked to keep the data.
    kept: BTreeSet<usize>,
    uids: u32,
}

impl Cluster {
    fn new(reclaim: Reclaim) -> Cluster {
        let entry = DiskEntry { class: "fast".to_owned(), mode: Ok(VolumeMode::Filesystem) };
        let scan = DirectoryScan {
            entries: (0..ENTRIES).map(|index| (path(index), entry.clone())).collect(),
            read: [PathBuf::from("/mnt/fast")].into(),
            unread: Vec::new(),
        };
        let classes = [("fast".to_owned(), OfferedClass { reclaim, mount_options: Vec::new() })].into();
        let (volumes, records) = (BTreeMap::new(), BTreeMap::new());
        Cluster { scan, volumes, classes, records, data: Default::default(), kept: BTreeSet::new(), uids: 0 }
    }

    fn plan(&self) -> Vec<DiskStep> {
        let Cluster { scan, volumes, classes, records, .. } = self;
        plan(World { node: &node(), scan, volumes, classes, records })
    }

    fn uid(&mut self) -> String {
        self.uids += 1;
        self.uids.to_string()
    }

    fn entry_of(path: &Path) -> usize {
        path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok()).expect("an entry")
    }

    /// Does a step; podfs may be killed after any of its `effects`.
    fn perform(&mut self, step: DiskStep, effects: u32) {
        match step {
            DiskStep::Forget(name) => drop(self.records.remove(&name)),
            DiskStep::Delete { volume, uid } | DiskStep::Withdraw { volume, uid, .. } => {
                assert_eq!(self.volumes[&volume].uid, uid);
                self.volumes.remove(&volume);
            }
            DiskStep::Clean(mut record) => {
                let entry = Self::entry_of(&record.path);
                let owner = self.data[entry].as_ref();
                assert!(owner.is_none_or(|owner| *owner == record.claim), "the data of another user would be erased");
                assert!(!self.kept.contains(&entry), "data that is to be kept would be erased");
                self.records.insert(record.volume.clone(), Some(record.clone()));
                if effects > 1 {
                    // A part of the data would still be the user's: the model knows only whole erasures.
                    self.data[entry] = None;
                }
                if effects > 2 {
                    record.is_done = true;
                    self.records.insert(record.volume.clone(), Some(record));
                }
            }
            DiskStep::Offer { volume, path, mode, class } => {
                let entry = Self::entry_of(&path);
                assert!(
                    self.data[entry].is_none() || self.kept.contains(&entry),
                    "a user would see another one's data"
                );
                let uid = self.uid();
                let offered = LocalVolume {
                    name: volume.clone(),
                    version: uid.clone(),
                    uid,
                    phase: Phase::Free,
                    claimed: false,
                    claim: None,
                    reclaim: Some(self.classes[&class].reclaim),
                    class,
                    mode,
                    own: Some(identity(entry)),
                    path: Some(path),
                    is_here: true,
                    deleting: false,
                };
                assert!(self.volumes.insert(volume, offered).is_none(), "the name is taken");
            }
        }
    }

    /// What a user, a person or the controller does to an entry's volume.
    fn disturb(&mut self, entry: usize, event: u32) {
        let claim = self.uid();
        let Some(volume) = self.volumes.get_mut(&name(entry)) else { return };
        match event {
            // Bound, and written to.
            0 if volume.phase == Phase::Free => {
                (volume.phase, volume.claimed, volume.claim) = (Phase::Other, true, Some(claim.clone()));
                self.data[entry] = Some(claim);
                self.kept.remove(&entry);
            }
            1 if volume.phase == Phase::Other => volume.phase = Phase::Released,
            // A person deletes the volume of a user that is gone. Where nothing was begun, that hands the entry over as it is.
            2 if volume.phase == Phase::Released => {
                if !self.records.contains_key(&name(entry)) {
                    self.kept.insert(entry);
                }
                self.volumes.remove(&name(entry));
            }
            // A person wants to keep the data after all.
            3 if volume.phase == Phase::Released => volume.reclaim = Some(Reclaim::Retain),
            _ => {}
        }
    }
}

proptest! {
    /// Users come and go, people interfere, and podfs is killed after any effect of any step.
    #[test]
    fn no_data_is_lost_or_shown_to_another_user_however_podfs_is_killed(
        retains in any::<bool>(),
        events in prop::collection::vec((0..ENTRIES, 0u32..4, 0u32..4, any::<prop::sample::Index>()), 1..120),
    ) {
        let reclaim = if retains { Reclaim::Retain } else { Reclaim::Delete };
        let mut cluster = Cluster::new(reclaim);
        for (entry, event, effects, which) in events {
            cluster.disturb(entry, event);
            let steps = cluster.plan();
            let about: BTreeSet<_> = steps.iter().map(DiskStep::volume).collect();
            prop_assert_eq!(about.len(), steps.len(), "two steps are about one volume: {:?}", steps);
            if retains {
                let is_harmless = |step: &DiskStep| matches!(step, DiskStep::Offer { .. });
                prop_assert!(steps.iter().all(is_harmless), "{:?}", steps);
            }
            if effects > 0 && !steps.is_empty() {
                cluster.perform(which.get(&steps).clone(), effects);
            }
        }
        // Left alone, it comes to an end, and everything that may be is offered.
        for _ in 0..100 {
            let Some(step) = cluster.plan().into_iter().next() else { break };
            cluster.perform(step, 3);
        }
        prop_assert!(cluster.plan().is_empty());
        prop_assert!(cluster.records.is_empty());
        for entry in 0..ENTRIES {
            prop_assert!(cluster.volumes.contains_key(&name(entry)), "entry {} has no volume", entry);
        }
    }
}

fn offered(cluster: &mut Cluster) {
    while let Some(step) = cluster.plan().into_iter().next() {
        cluster.perform(step, 3);
    }
}

#[test]
fn an_entry_that_another_volume_names_is_not_offered() {
    let mut cluster = Cluster::new(Reclaim::Delete);
    offered(&mut cluster);
    let mut other = cluster.volumes.remove(&name(0)).expect("offered");
    (other.name, other.own) = ("by-hand".to_owned(), None);
    for path in ["/mnt/fast/0", "/mnt/fast/0/part"] {
        other.path = Some(PathBuf::from(path));
        cluster.volumes.insert(other.name.clone(), other.clone());
        assert_eq!(cluster.plan(), [], "{path}");
    }
    other.is_here = false;
    cluster.volumes.insert(other.name.clone(), other);
    assert!(matches!(&cluster.plan()[..], [DiskStep::Offer { .. }]), "it is of another node");
}

#[test]
fn a_released_volume_whose_entry_another_one_names_is_not_cleaned() {
    let mut cluster = Cluster::new(Reclaim::Delete);
    offered(&mut cluster);
    cluster.disturb(0, 0);
    cluster.disturb(0, 1);
    assert!(matches!(&cluster.plan()[..], [DiskStep::Clean(_)]));
    let mut other = cluster.volumes[&name(1)].clone();
    (other.name, other.own) = ("by-hand".to_owned(), None);
    for path in ["/mnt/fast/0", "/mnt/fast/0/part", "/mnt/fast"] {
        other.path = Some(PathBuf::from(path));
        cluster.volumes.insert(other.name.clone(), other.clone());
        assert_eq!(cluster.plan(), [], "{path}");
    }
}

#[test]
fn an_offer_is_withdrawn_when_its_entry_is_gone_and_a_bound_one_is_not() {
    let mut cluster = Cluster::new(Reclaim::Delete);
    offered(&mut cluster);
    cluster.disturb(1, 0);
    for entry in [0, 1] {
        cluster.scan.entries.remove(&path(entry));
    }
    assert!(matches!(&cluster.plan()[..], [DiskStep::Withdraw { volume, .. }] if *volume == name(0)));
    cluster.scan.read.clear();
    assert_eq!(cluster.plan(), [], "the directory cannot be read at the moment");
}

#[test]
fn a_record_that_cannot_be_read_keeps_its_entry_from_being_offered() {
    let mut cluster = Cluster::new(Reclaim::Delete);
    cluster.records.insert(name(0), None);
    let steps = cluster.plan();
    assert_eq!(steps.len(), ENTRIES - 1);
    assert!(steps.iter().all(|step| step.volume() != name(0)));
    let Cluster { scan, volumes, classes, records, .. } = &cluster;
    let remarks = remarks(World { node: &node(), scan, volumes, classes, records });
    assert!(remarks[&name(0)].contains("podfs cannot read the record"), "{remarks:?}");
}
