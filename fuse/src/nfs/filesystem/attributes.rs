//! Attributes: the conversion of the NFS server's attributes for the kernel, and back.

use std::time::Duration;

use podfs_nfs::v3::{AttributeChanges, Attributes, Time, TimeChange};

use crate::nfs::file_type::file_type;
use crate::session::NodeId;
use crate::session::abi::{Attr, AttrOut, EntryOut, SetattrIn, fattr};

/// The conversion of the server's attributes for the kernel.
#[derive(Clone, Copy, Debug)]
pub struct AttributeConverter {
    /// The number of the root's file system on the NFS server. Files of other file systems below the root get other
    /// inode numbers, so that no two files have the same.
    pub fsid: u64,
    /// The preferred size of reads and writes, in bytes.
    pub block: u32,
}

impl AttributeConverter {
    /// The attributes for the kernel. A file whose only name is one that podfs gave it has a link count of 0 for
    /// programs.
    pub fn attr(&self, found: &Attributes, is_silly: bool) -> Attr {
        Attr {
            ino: self.ino(found),
            size: found.size,
            blocks: found.used.div_ceil(512),
            atime: found.atime.seconds.into(),
            mtime: found.mtime.seconds.into(),
            ctime: found.ctime.seconds.into(),
            atimensec: found.atime.nanoseconds,
            mtimensec: found.mtime.nanoseconds,
            ctimensec: found.ctime.nanoseconds,
            mode: file_type(found.kind) | (found.mode & 0o7777),
            nlink: found.links.saturating_sub(is_silly.into()),
            uid: found.uid,
            gid: found.gid,
            rdev: device_number(found.device),
            blksize: self.block,
            flags: 0,
        }
    }

    /// The inode number that programs see.
    pub fn ino(&self, found: &Attributes) -> u64 {
        if found.fsid == self.fsid {
            return found.fileid;
        }
        found.fileid ^ found.fsid.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// The answer with a name of `node`, and the cache times of the name and of the attributes.
pub fn entry(node: NodeId, attr: Attr, name_holds: Duration, holds: Duration) -> EntryOut {
    EntryOut {
        nodeid: node,
        generation: 0,
        entry_valid: name_holds.as_secs(),
        attr_valid: holds.as_secs(),
        entry_valid_nsec: name_holds.subsec_nanos(),
        attr_valid_nsec: holds.subsec_nanos(),
        attr,
    }
}

/// The answer with attributes, and their cache time.
pub fn attributes(attr: Attr, holds: Duration) -> AttrOut {
    AttrOut { attr_valid: holds.as_secs(), attr_valid_nsec: holds.subsec_nanos(), dummy: 0, attr }
}

/// The changes that SETATTR requests.
pub fn changes(arguments: &SetattrIn) -> AttributeChanges {
    let has = |bit: u32| arguments.valid & bit != 0;
    let time = |set, now, seconds: u64, nanoseconds| match (has(now), has(set)) {
        (true, _) => TimeChange::ServerTime,
        (false, true) => TimeChange::To(time(seconds, nanoseconds)),
        (false, false) => TimeChange::Keep,
    };
    AttributeChanges {
        mode: has(fattr::MODE).then_some(arguments.mode & 0o7777),
        uid: has(fattr::UID).then_some(arguments.uid),
        gid: has(fattr::GID).then_some(arguments.gid),
        size: has(fattr::SIZE).then_some(arguments.size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, arguments.atime, arguments.atimensec),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, arguments.mtime, arguments.mtimensec),
    }
}

/// The nearest time that the protocol knows: it has the years 1970 to 2106.
fn time(seconds: u64, nanoseconds: u32) -> Time {
    match i64::try_from(seconds) {
        // The kernel's number has a sign: this time is before 1970.
        Err(_) => Time::default(),
        Ok(seconds) => match u32::try_from(seconds) {
            Ok(seconds) => Time { seconds, nanoseconds },
            Err(_) => Time { seconds: u32::MAX, nanoseconds: 999_999_999 },
        },
    }
}

/// `new_encode_dev` of the kernel.
fn device_number((major, minor): (u32, u32)) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The numbers from which [`device_number`] made this one.
pub fn device_of(number: u32) -> (u32, u32) {
    ((number >> 8) & 0xfff, (number & 0xff) | ((number >> 12) & 0x000f_ff00))
}
