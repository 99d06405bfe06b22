//! The devices of a mount, and the inode numbers that the volume shows.
//!
//! The files of one mount may have several device numbers (`st_dev`), and each device has inode numbers of its own: the subvolumes and
//! snapshots of btrfs, the layers of an overlayfs with `xino=off`. All files of a volume have one device number, so two files with the
//! same inode number would count as one: `find` takes a subvolume for a loop, `tar` takes the second file for a hard link. So the
//! shown number contains the volume's number for mount and device.
//!
//! 1. The first device of a mount has the number of the mount. Each further device gets the next free number of the volume, when a
//!    request first meets a file of it. No number is used again.
//! 2. The cell of a device is complete before an answer shows a number with it, so a successor shows the same numbers.
//! 3. The numbers end with the mount's [`SourceMount`](super::source_mount::SourceMount). The mount of the source stays as long as the
//!    volume. A removed subvolume leaves its number to the next one that gets the same `st_dev`.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, PoisonError, RwLock};

use rustix::fs::Statx;

use super::hashing::HashKey;
use super::state::DeviceCell;
use crate::region::Region;
use crate::region::cells::OwnedCell;

/// A shown inode number has the lowest bits of the number for mount and device from this bit on.
const INDEX_SHIFT: u32 = 48;

/// The devices of one mount.
#[derive(Debug)]
pub struct MountDevices {
    /// The volume's number for the mount, and for its first device.
    index: u64,
    /// The first device; 0 as long as no file of the mount is known.
    first: AtomicU64,
    all: RwLock<HashMap<u64, NumberedDevice, HashKey>>,
}

/// The volume's number for a device.
#[derive(Debug)]
struct NumberedDevice {
    index: u64,
    /// `None` if there was no memory for a cell: then a successor gives another number.
    _record: Option<OwnedCell<DeviceCell>>,
}

impl MountDevices {
    /// The devices of the mount that the volume numbers `index`. None is known yet.
    pub fn new(index: u64) -> Self {
        Self { index, first: AtomicU64::new(0), all: RwLock::default() }
    }

    /// Takes over a device that a dead server left.
    pub fn inherit(&self, record: OwnedCell<DeviceCell>) {
        let (device, index) = (record.device.load(Relaxed), record.index.load(Relaxed));
        self.write().insert(device, NumberedDevice { index, _record: Some(record) });
        if index == self.index {
            self.first.store(device, Release);
        }
    }

    /// Whether files of the mount have more than one device.
    pub fn are_several(&self) -> bool {
        self.all.read().unwrap_or_else(PoisonError::into_inner).len() > 1
    }

    /// The inode number that the volume shows for the file `ino` of `device`, which is on this mount.
    pub fn shown(&self, device: u64, ino: u64, region: &Arc<Region>) -> u64 {
        if device == self.first.load(Acquire) {
            return shown(self.index, ino);
        }
        let known = self.all.read().unwrap_or_else(PoisonError::into_inner).get(&device).map(|known| known.index);
        shown(known.unwrap_or_else(|| self.number(device, region)), ino)
    }

    /// The inode number that the volume shows for the file `ino` of the first device.
    pub fn shown_of_first(&self, ino: u64) -> u64 {
        shown(self.index, ino)
    }

    /// Gives a number to a device.
    fn number(&self, device: u64, region: &Arc<Region>) -> u64 {
        let mut all = self.write();
        if let Some(known) = all.get(&device) {
            return known.index;
        }
        let is_first = all.is_empty();
        let index = if is_first { self.index } else { next_index(region) };
        let record = OwnedCell::new(region, |cell: &DeviceCell| {
            cell.mount.store(self.index, Relaxed);
            cell.device.store(device, Relaxed);
            cell.index.store(index, Relaxed);
        });
        all.insert(device, NumberedDevice { index, _record: record.ok() });
        if is_first {
            self.first.store(device, Release);
        }
        index
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<u64, NumberedDevice, HashKey>> {
        self.all.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the volume's next number for a mount or device. The counter grows before the number is used, so that no server uses the number
/// again.
pub fn next_index(region: &Region) -> u64 {
    region.header().counters.next_mount.fetch_add(1, AcqRel)
}

/// The device of a file, as one number.
pub fn device_of(found: &Statx) -> u64 {
    (u64::from(found.stx_dev_major) << 32) | u64::from(found.stx_dev_minor)
}

/// The inode number that the volume shows for the file `ino` of the mount or device `index`.
///
/// The lowest 16 bits of `index` take the highest 16 bits of the number. Further bits take the bits from 47 downwards, the lowest bit
/// first. So two files of the volume never show the same number as long as the source's inode numbers do not reach down to the bits that
/// the devices need: 48 bits for 65 536 mounts and devices, one bit less for each doubling.
fn shown(index: u64, ino: u64) -> u64 {
    ino ^ (index << INDEX_SHIFT) ^ ((index >> (u64::BITS - INDEX_SHIFT)).reverse_bits() >> (u64::BITS - INDEX_SHIFT))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use std::os::fd::AsFd;

    use super::*;
    use crate::region::VolumeKind;
    use crate::region::cells::{CellContent, CellRef};
    use crate::region::golden::{self, golden};
    use crate::region::shared::assert_layout;

    const DEVICE: u64 = 0x2b;

    fn region() -> Arc<Region> {
        Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"))
    }

    #[test]
    fn the_first_device_of_the_source_keeps_its_inode_numbers() {
        let region = region();
        let devices = MountDevices::new(next_index(&region));
        assert_eq!(devices.shown(DEVICE, 256, &region), 256);
        assert!(!devices.are_several());
        assert_ne!(devices.shown(DEVICE + 1, 256, &region), 256);
        assert_eq!(devices.shown(DEVICE, 256, &region), 256);
        assert!(devices.are_several());
    }

    #[test]
    fn more_devices_than_sixteen_bits_show_different_numbers() {
        let region = region();
        let devices = MountDevices::new(next_index(&region));
        let mut seen = HashSet::new();
        for device in 1..=(3 << 16) {
            for ino in [256, 257, (1 << 46) - 1] {
                assert!(seen.insert(devices.shown(device, ino, &region)), "{device}, {ino}");
            }
        }
    }

    #[test]
    fn a_successor_shows_the_same_numbers() {
        let region = region();
        let _of_the_source = next_index(&region);
        let devices = MountDevices::new(next_index(&region));
        let before: Vec<_> = (DEVICE..DEVICE + 3).map(|device| devices.shown(device, 256, &region)).collect();
        std::mem::forget(devices);
        let successor = MountDevices::new(1);
        for (cell, tag) in region.cells().tagged() {
            assert_eq!(tag, DeviceCell::TAG);
            successor.inherit(OwnedCell::of(&region, cell));
        }
        assert_eq!(successor.shown(DEVICE + 3, 256, &region), 256 ^ (4 << INDEX_SHIFT));
        let after: Vec<_> = (DEVICE..DEVICE + 3).map(|device| successor.shown(device, 256, &region)).collect();
        assert_eq!(after, before);
    }

    #[test]
    fn a_device_has_the_bytes_that_other_versions_read() {
        assert_layout::<DeviceCell>("tag 0, spare 4, mount 8, device 16, index 24; 32 bytes");
        let region = golden::region(VolumeKind::Passthrough);
        let made = CellRef::new(&region, |cell: &DeviceCell| {
            let words = [&cell.mount, &cell.device, &cell.index];
            words.into_iter().zip(50..).for_each(|(word, value)| word.store(value, Relaxed));
        });
        made.map(|cell| cell.id()).expect("memory");
        let recorded = golden!("region-devices.bin");
        golden::assert_golden("region-devices.bin", recorded, &golden::content((*region).as_fd()));
        let adopted = golden::adopted(recorded, VolumeKind::Passthrough);
        let cells: Vec<_> = adopted.cells().tagged().collect();
        assert_eq!(
            cells.iter().map(|(_, tag)| *tag).collect::<Vec<_>>(),
            [6],
            "other versions know the cell by this tag"
        );
        let cell = adopted.cells().find::<DeviceCell>(cells[0].0).expect("a device");
        assert_eq!([&cell.mount, &cell.device, &cell.index].map(|word| word.load(Relaxed)), [50, 51, 52]);
    }
}
