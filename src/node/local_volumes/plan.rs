//! A pure function from the entries, PersistentVolumes and records to the next steps, so that tests can try every
//! state that a kill can leave.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::entries::DirectoryScan;
use super::record::{DIRECTORY, ErasureRecord, SUFFIX};
use super::volume::{self, LocalVolume, NodeNames, Phase, Reclaim};
use crate::manifest::objects::VolumeMode;

/// A StorageClass, with the fields that podfs uses here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OfferedClass {
    pub(super) reclaim: Reclaim,
    pub(super) mount_options: Vec<String>,
}

/// The input of a plan.
#[derive(Clone, Copy)]
pub(super) struct World<'a> {
    pub(super) node: &'a NodeNames,
    pub(super) scan: &'a DirectoryScan,
    /// All PersistentVolumes, by name.
    pub(super) volumes: &'a BTreeMap<String, LocalVolume>,
    /// The StorageClasses that exist, by name.
    pub(super) classes: &'a BTreeMap<String, OfferedClass>,
    /// The records of erasures that have begun; `None` for a record that podfs cannot read.
    pub(super) records: &'a BTreeMap<String, Option<ErasureRecord>>,
}

/// A step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DiskStep {
    /// Removes the record of this PersistentVolume, which is deleted, or which podfs must not erase any more.
    Forget(String),
    /// Deletes a PersistentVolume that is erased.
    Delete { volume: String, uid: String },
    /// Deletes a PersistentVolume whose entry is gone, if it still has this version: in this version, no claim has it.
    Withdraw { volume: String, uid: String, version: String },
    /// Erases the data of a user.
    Clean(ErasureRecord),
    /// Creates the PersistentVolume of an entry.
    Offer { volume: String, class: String, path: PathBuf, mode: VolumeMode },
}

impl DiskStep {
    /// The PersistentVolume of the step.
    pub(super) fn volume(&self) -> &str {
        match self {
            DiskStep::Forget(volume) | DiskStep::Delete { volume, .. } | DiskStep::Withdraw { volume, .. } => volume,
            DiskStep::Offer { volume, .. } => volume,
            DiskStep::Clean(record) => &record.volume,
        }
    }
}

/// Plans the next steps. No two of them concern one PersistentVolume, or one entry.
pub(super) fn plan(world: World<'_>) -> Vec<DiskStep> {
    let World { node, scan, volumes, classes, records } = world;
    let mut steps = Vec::new();
    for (name, record) in records {
        // podfs cannot know what an unreadable record said: it leaves the record and its entry to the operator.
        let Some(record) = record else { continue };
        let volume = volumes.get(name);
        let is_wanted = volume.is_none_or(|volume| is_to_be_cleaned(volume) && is_about(record, volume));
        steps.extend(match (is_wanted, record.is_done, volume) {
            (false, ..) | (true, true, None) => Some(DiskStep::Forget(name.clone())),
            (true, true, Some(volume)) if volume.deleting => None,
            (true, true, Some(volume)) => Some(DiskStep::Delete { volume: name.clone(), uid: volume.uid.clone() }),
            (true, false, _) => may_clean(world, record).then(|| DiskStep::Clean(record.clone())),
        });
    }
    for volume in volumes.values().filter(|volume| !records.contains_key(&volume.name) && volume.is_here) {
        if is_to_be_cleaned(volume) {
            steps.extend(ErasureRecord::of(volume).filter(|record| may_clean(world, record)).map(DiskStep::Clean));
        } else if has_lost_its_entry(volume, scan) {
            let LocalVolume { name, uid, version, .. } = volume;
            let (volume, uid, version) = (name.clone(), uid.clone(), version.clone());
            steps.push(DiskStep::Withdraw { volume, uid, version });
        }
    }
    for (path, entry) in &scan.entries {
        let (Ok(mode), true) = (&entry.mode, classes.contains_key(&entry.class)) else { continue };
        let name = volume::name(&node.name, &entry.class, path);
        let is_named = volumes.contains_key(&name) || volumes.values().any(|volume| volume.names(path));
        if !is_named && !has_record(records, &name, path) {
            let (class, path) = (entry.class.clone(), path.clone());
            steps.push(DiskStep::Offer { volume: name, class, path, mode: *mode });
        }
    }
    steps
}

/// Whether podfs has made this PersistentVolume on this node, its user has released it, and podfs has to erase it.
pub(super) fn is_to_be_cleaned(volume: &LocalVolume) -> bool {
    let is_released = volume.phase == Phase::Released && volume.claim.is_some();
    volume.own.is_some() && volume.is_here && is_released && volume.reclaim == Some(Reclaim::Delete)
}

/// Whether a record belongs to this PersistentVolume and its last claim.
pub(super) fn is_about(record: &ErasureRecord, volume: &LocalVolume) -> bool {
    record.uid == volume.uid && Some(&record.claim) == volume.claim.as_ref()
}

/// Whether podfs watches the directory of the entry, and no other PersistentVolume names the entry.
fn may_clean(world: World<'_>, record: &ErasureRecord) -> bool {
    let is_watched = record.path.parent().is_some_and(|directory| world.scan.read.contains(directory));
    let overlaps = |other: &&LocalVolume| {
        let is_above = other.path.as_ref().is_some_and(|path| record.path.starts_with(path) && path != Path::new("/"));
        other.name != record.volume && (other.names(&record.path) || other.is_here && is_above)
    };
    is_watched && !world.volumes.values().any(|other| overlaps(&other))
}

/// Whether a PersistentVolume has no claim, and its entry is gone. A user would fill the disk below the mount point.
fn has_lost_its_entry(volume: &LocalVolume, scan: &DirectoryScan) -> bool {
    let is_free = volume.phase == Phase::Free && !volume.claimed && !volume.deleting;
    let (Some(_), Some(path)) = (&volume.own, &volume.path) else { return false };
    let is_watched = path.parent().is_some_and(|directory| scan.read.contains(directory));
    let is_there = scan.entries.get(path).is_some_and(|entry| entry.mode.as_ref() == Ok(&volume.mode));
    is_free && is_watched && !is_there
}

fn has_record(records: &BTreeMap<String, Option<ErasureRecord>>, name: &str, path: &Path) -> bool {
    records.contains_key(name) || records.values().flatten().any(|record| record.path.starts_with(path))
}

/// Problems for the operator, one sentence each, by subject.
pub(super) fn remarks(world: World<'_>) -> BTreeMap<String, String> {
    let World { scan, volumes, classes, records, .. } = world;
    let mut remarks = BTreeMap::new();
    for sentence in &scan.unread {
        remarks.insert(sentence.clone(), sentence.clone());
    }
    for (path, entry) in &scan.entries {
        let path = path.display().to_string();
        if let Err(reason) = &entry.mode {
            remarks.insert(path.clone(), format!("{path} is not offered: it {reason}"));
        } else if !classes.contains_key(&entry.class) {
            let class = &entry.class;
            remarks.insert(format!("class {class}"), format!("entries wait for StorageClass {class}; create it"));
        }
    }
    let unread = records.iter().filter(|(_, record)| record.is_none());
    for (name, _) in unread {
        let sentence = format!(
            "podfs cannot read the record of the erasure of PersistentVolume {name}, {DIRECTORY}/{name}{SUFFIX} below the root \
                 directory, so it neither erases the volume nor offers it again; use the podfs that wrote it, or erase the volume \
                 and then remove the record"
        );
        remarks.insert(name.clone(), sentence);
    }
    let released = volumes.values().filter(|volume| is_to_be_cleaned(volume));
    for record in released.filter_map(ErasureRecord::of).filter(|record| !may_clean(world, record)) {
        let (name, path) = (&record.volume, record.path.display());
        remarks.insert(
            name.clone(),
            format!(
                "PersistentVolume {name} is released and not cleaned: another PersistentVolume names {path}, or no --discover \
                 names its directory"
            ),
        );
    }
    remarks
}

#[cfg(test)]
mod tests;
