//! The file systems whose file handles open a file as long as the file exists.
//!
//! Other file systems make handles that end with the kernel's inode: those of FUSE, FAT and exFAT. A server of FUSE may even give the
//! same handle to another file afterwards. One trial does not show the difference, because the inode of an open file stays. So podfs
//! decides by the type, and a type that it does not know counts as one that forgets.

use std::os::fd::BorrowedFd;

use rustix::fs::fstatfs;

/// File systems whose handles last: the name in the mount table, and the number that `statfs(2)` returns.
const LASTING: [(&str, u64); 25] = [
    ("ext4", 0xef53),
    ("ext3", 0xef53),
    ("ext2", 0xef53),
    ("xfs", 0x5846_5342),
    ("btrfs", 0x9123_683e),
    ("f2fs", 0xf2f5_2010),
    ("tmpfs", 0x0102_1994),
    ("devtmpfs", 0x0102_1994),
    ("overlay", 0x794c_7630),
    ("nfs", 0x6969),
    ("nfs4", 0x6969),
    ("ceph", 0x00c3_6400),
    ("zfs", 0x2fc1_2fc1),
    ("bcachefs", 0xca45_1a4e),
    ("ocfs2", 0x7461_636f),
    ("gfs2", 0x0116_1970),
    ("jfs", 0x3153_464a),
    ("nilfs2", 0x3434),
    ("udf", 0x1501_3346),
    ("iso9660", 0x9660),
    ("squashfs", 0x7371_7368),
    ("erofs", 0xe0f5_e1e2),
    ("sysfs", 0x6265_6572),
    ("cgroup2", 0x6367_7270),
    ("cgroup", 0x0027_e0eb),
];

/// Whether handles of the file system last that `file` is on. `name` is its type in the mount table, if the mount is there: then the
/// file system gets no request.
pub fn lasts(name: Option<&str>, file: BorrowedFd<'_>) -> bool {
    match name {
        Some(name) => LASTING.iter().any(|(known, _)| *known == name),
        None => fstatfs(file).is_ok_and(|found| {
            // The type of the field depends on the processor.
            let number = u64::from(found.f_type as u32);
            LASTING.iter().any(|(_, known)| *known == number)
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn names_and_numbers_decide_alike() {
        let opened = |path: &str| File::open(path).expect("it opens");
        let (lasting, forgetful) = (opened("/sys"), opened("/proc"));
        for (name, number) in [(Some("sysfs"), None), (Some("xfs"), Some("ext4"))] {
            assert!(lasts(name, lasting.as_fd()) && lasts(number, lasting.as_fd()));
        }
        for name in [Some("fuse"), Some("fuse.bindfs"), Some("virtiofs"), Some("vfat"), Some("of-tomorrow"), None] {
            assert!(!lasts(name, forgetful.as_fd()), "{name:?}");
        }
    }
}
