//! The errors that the kernel has counted on the disk of a file system.
//!
//! Where the kernel reads and writes a source by itself, no request shows podfs that the disk fails. These counters do, and to read them
//! sends nothing to the disk, so a disk that hangs delays no reader:
//!
//! | counter | file | counts |
//! |---|---|---|
//! | `ext4` | `/sys/fs/ext4/DEVICE/errors_count` | damage that ext4 has found, and metadata that it could not read or write, since the last check of the file system |
//! | `btrfs` | `/sys/fs/btrfs/UUID/devinfo/*/error_stats` | reads, writes and flushes that failed, and wrong checksums, since `btrfs device stats --reset` |
//! | `device` | `/sys/block/DEVICE/device/ioerr_cnt` | commands that a SCSI or SATA disk has failed, since the kernel found the disk |
//!
//! XFS and NVMe have no such counter. podfs does not read the disk itself to find out: such a read may hang, and would keep the supervisor
//! from ending.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};

/// The counters of one disk.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct DiskErrorCounters(Vec<(&'static str, PathBuf)>);

impl DiskErrorCounters {
    /// The counters of the file system of type `fs_type` on the block device `device`.
    pub fn of(fs_type: &str, device: u64) -> Self {
        Self::below(Path::new("/sys"), fs_type, device)
    }

    fn below(sys: &Path, fs_type: &str, device: u64) -> Self {
        let mut counters = Vec::new();
        let place = sys.join(format!("dev/block/{}:{}", major(device), minor(device)));
        let Ok(place) = fs::canonicalize(place) else { return Self::default() };
        if let Some(name) = place.file_name() {
            match fs_type {
                "ext2" | "ext3" | "ext4" => {
                    counters.push(("ext4", sys.join("fs/ext4").join(name).join("errors_count")));
                }
                "btrfs" => {
                    let of_device = |system: &PathBuf| system.join("devices").join(name).exists();
                    let system = entries(&sys.join("fs/btrfs")).into_iter().find(of_device);
                    let members = system.map(|system| entries(&system.join("devinfo"))).unwrap_or_default();
                    counters.extend(members.into_iter().map(|member| ("btrfs", member.join("error_stats"))));
                }
                _ => {}
            }
        }
        // One disk may be below several members.
        let disks: BTreeSet<_> = disks(&place).into_iter().collect();
        counters.extend(disks.into_iter().map(|disk| ("device", disk.join("device/ioerr_cnt"))));
        counters.retain(|(_, file)| file.exists());
        Self(counters)
    }

    /// Whether the kernel counts no errors of this disk.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The present sums by counter. Leaves out counters that are zero.
    pub fn read(&self) -> BTreeMap<String, u64> {
        let mut sums: BTreeMap<String, u64> = BTreeMap::new();
        for (counter, file) in &self.0 {
            let count = fs::read_to_string(file).map_or(0, |text| sum(&text));
            if count > 0 {
                *sums.entry((*counter).to_owned()).or_default() += count;
            }
        }
        sums
    }
}

/// Counts in words: `EIO 3, ENOTCONN 1`.
pub fn in_words(counts: &BTreeMap<String, u64>) -> String {
    counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
}

/// The disks of a block device: itself, the disk of a partition, and the members of a device of the device mapper or of md.
fn disks(device: &Path) -> Vec<PathBuf> {
    let whole = match device.parent() {
        Some(parent) if device.join("partition").exists() => parent.to_owned(),
        _ => device.to_owned(),
    };
    let members = entries(&whole.join("slaves"));
    let members = members.iter().filter_map(|member| fs::canonicalize(member).ok());
    let mut found: Vec<_> = members.flat_map(|member| disks(&member)).collect();
    found.push(whole);
    found
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// The sum of the numbers in a file: `3`, `0x3`, or lines such as `read_errs 3`.
fn sum(text: &str) -> u64 {
    let number = |word: &str| match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    };
    text.lines().filter_map(|line| number(line.split_whitespace().last()?)).sum()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::makedev;

    use super::*;

    fn write(path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::write(path, text).expect("written");
    }

    #[test]
    fn counters_of_a_partition_and_of_the_disks_below_a_mapped_device_are_read() {
        let sys = tempfile::tempdir().expect("a directory");
        let at = |path: &str| sys.path().join(path);
        fs::create_dir_all(at("dev/block")).expect("made");
        write(at("devices/sda/sda1/partition"), "1\n");
        write(at("devices/sda/device/ioerr_cnt"), "0x1f\n");
        write(at("fs/ext4/sda1/errors_count"), "2\n");
        symlink(at("devices/sda/sda1"), at("dev/block/8:1")).expect("a link");
        let counters = DiskErrorCounters::below(sys.path(), "ext4", makedev(8, 1));
        assert_eq!(counters.read(), BTreeMap::from([("device".to_owned(), 31), ("ext4".to_owned(), 2)]));
        fs::create_dir_all(at("devices/dm-0/slaves")).expect("made");
        symlink(at("devices/sda/sda1"), at("devices/dm-0/slaves/sda1")).expect("a link");
        write(at("devices/sda/sda2/partition"), "2\n");
        symlink(at("devices/sda/sda2"), at("devices/dm-0/slaves/sda2")).expect("a link");
        symlink(at("devices/dm-0"), at("dev/block/253:0")).expect("a link");
        fs::create_dir_all(at("fs/btrfs/uuid/devices/dm-0")).expect("made");
        write(at("fs/btrfs/uuid/devinfo/1/error_stats"), "write_errs 1\nread_errs 4\nflush_errs 0\n");
        write(at("fs/btrfs/other/devinfo/1/error_stats"), "read_errs 9\n");
        let counters = DiskErrorCounters::below(sys.path(), "btrfs", makedev(253, 0));
        assert_eq!(counters.read(), BTreeMap::from([("btrfs".to_owned(), 5), ("device".to_owned(), 31)]));
        assert!(DiskErrorCounters::below(sys.path(), "xfs", makedev(7, 0)).is_empty());
    }
}
