//! The state of an NFS volume that a successor needs, cell by cell.
//!
//! The server writes a cell before the cell counts, and changes it only in ways that a kill cannot interrupt: it stores one word,
//! or replaces the cell by another one.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

use podfs_nfs::rpc::Credential;
use podfs_nfs::rpc::credential::MAX_GROUPS;
use podfs_nfs::v3::{Attributes, FileType, Time};
use rustix::io::Errno;

use crate::region::cells::CellContent;
use crate::region::shared::shared;

/// Words of the longest file handle.
pub const HANDLE_WORDS: usize = 8;
/// Bytes of a name in one cell.
pub const NAME_BYTES: usize = 8 * NAME_WORDS;
const NAME_WORDS: usize = 13;
/// Bits of a node's `form` that tell the length of its handle in bytes; the others are `S_IFMT` of its mode.
pub const HANDLE_LENGTH: u32 = 0xfff;
/// Of a node: its only name is one that podfs gave it when it was removed while it was open.
pub const SILLY: u64 = 1 << 0;
/// Of an open file: it is a directory.
pub const DIRECTORY: u32 = 1 << 0;
/// Of an open file: the kernel knows it.
pub const KNOWN: u32 = 1 << 1;
/// Of an open file: it is closed, and data is still to be written through it.
pub const CLOSED: u32 = 1 << 2;

shared! {
    /// A node.
    pub(crate) struct NfsNodeCell {
        tag: AtomicU32,
        /// `S_IFMT` of its mode, and [`HANDLE_LENGTH`].
        form: AtomicU32,
        /// Its number.
        id: AtomicU64,
        /// Lookups of the node that the kernel has not forgotten (FUSE `nlookup`).
        lookups: AtomicU64,
        /// The server's number for the file.
        fileid: AtomicU64,
        /// The first cell of its name; 0 for none.
        name: AtomicU64,
        /// [`SILLY`].
        flags: AtomicU64,
        handle: [AtomicU64; HANDLE_WORDS],
    }
    /// A part of the name of a node.
    pub(crate) struct NameCell {
        tag: AtomicU32,
        /// Bytes of the whole name.
        length: AtomicU32,
        /// The directory it is in.
        parent: AtomicU64,
        /// The cell with the next part; 0 for none.
        next: AtomicU64,
        bytes: [AtomicU64; NAME_WORDS],
    }
    /// An open file or directory.
    pub(crate) struct NfsOpenCell {
        tag: AtomicU32,
        /// [`DIRECTORY`], [`KNOWN`], [`CLOSED`].
        flags: AtomicU32,
        /// The kernel's number for it.
        handle: AtomicU64,
        /// The node it is open on.
        node: AtomicU64,
        /// The request that opened it.
        unique: AtomicU64,
        /// Of a directory, the cookie verifier for the next READDIR.
        verifier: AtomicU64,
        /// The credential of its open.
        identity: IdentityRecord,
    }
    /// A call that may not be made twice, and may have been made.
    pub(crate) struct CallCell {
        tag: AtomicU32,
        xid: AtomicU32,
        /// The request it is made for.
        unique: AtomicU64,
        /// The number of the call among the calls of the request.
        step: AtomicU32,
        /// The time at which the call was first made, with `seconds`.
        nanoseconds: AtomicU32,
        seconds: AtomicU64,
        /// The credential that it is made with.
        identity: IdentityRecord,
    }
    /// The root's attributes and figures, for answers while the server is silent.
    pub(crate) struct RootCell {
        tag: AtomicU32,
        spare: AtomicU32,
        words: [AtomicU64; ROOT_WORDS],
    }
    /// The credential of calls.
    pub(crate) struct IdentityRecord {
        uid: AtomicU32,
        gid: AtomicU32,
        /// The number of valid `groups`; [`ANONYMOUS`] for AUTH_NONE.
        count: AtomicU32,
        groups: [AtomicU32; MAX_GROUPS],
    }
}

/// Words of attributes.
const ROOT_WORDS: usize = 11;
/// In the place of the number of groups: the credential is AUTH_NONE.
const ANONYMOUS: u32 = u32::MAX;

impl CellContent for NfsNodeCell {
    const TAG: u32 = 16;
}

impl CellContent for NameCell {
    const TAG: u32 = 17;
}

impl CellContent for NfsOpenCell {
    const TAG: u32 = 18;
}

impl CellContent for CallCell {
    const TAG: u32 = 19;
}

impl CellContent for RootCell {
    const TAG: u32 = 20;
}

impl IdentityRecord {
    /// Records a credential.
    pub fn set(&self, credential: &Credential) {
        let Credential::User { uid, gid, groups } = credential else {
            return self.count.store(ANONYMOUS, Relaxed);
        };
        self.uid.store(*uid, Relaxed);
        self.gid.store(*gid, Relaxed);
        let groups = &groups[..groups.len().min(MAX_GROUPS)];
        self.groups.iter().zip(groups).for_each(|(place, group)| place.store(*group, Relaxed));
        self.count.store(groups.len() as u32, Relaxed);
    }

    /// The recorded value.
    pub fn get(&self) -> Credential {
        match self.count.load(Relaxed) {
            ANONYMOUS => Credential::Anonymous,
            count => {
                let groups = self.groups.iter().take(count as usize).map(|group| group.load(Relaxed)).collect();
                Credential::User { uid: self.uid.load(Relaxed), gid: self.gid.load(Relaxed), groups }
            }
        }
    }
}

impl RootCell {
    /// Records attributes.
    pub fn set(&self, found: &Attributes) {
        let time = |time: Time| (u64::from(time.seconds) << 32) | u64::from(time.nanoseconds);
        let words = [
            found.mode.into(),
            found.links.into(),
            found.uid.into(),
            found.gid.into(),
            found.size,
            found.used,
            found.fsid,
            found.fileid,
            time(found.atime),
            time(found.mtime),
            time(found.ctime),
        ];
        self.words.iter().zip(words).for_each(|(place, word)| place.store(word, Relaxed));
    }

    /// The recorded value.
    pub fn get(&self) -> Attributes {
        let word = |index: usize| self.words[index].load(Relaxed);
        let time =
            |index| Time { seconds: (word(index) >> 32) as u32, nanoseconds: (word(index) as u32).min(999_999_999) };
        Attributes {
            kind: FileType::Directory,
            mode: word(0) as u32,
            links: word(1) as u32,
            uid: word(2) as u32,
            gid: word(3) as u32,
            size: word(4),
            used: word(5),
            device: (0, 0),
            fsid: word(6),
            fileid: word(7),
            atime: time(8),
            mtime: time(9),
            ctime: time(10),
        }
    }
}

/// Records bytes, as many as fit.
pub fn write_bytes(words: &[AtomicU64], bytes: &[u8]) {
    for (word, part) in words.iter().zip(bytes.chunks(8)) {
        let mut whole = [0; 8];
        whole[..part.len()].copy_from_slice(part);
        word.store(u64::from_ne_bytes(whole), Relaxed);
    }
}

/// The first `length` bytes of the record, or as many as there is room for.
pub fn read_bytes(words: &[AtomicU64], length: usize) -> Vec<u8> {
    words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).take(length).collect()
}

/// The errno when there is no memory for a cell.
pub fn no_memory(_: std::io::Error) -> Errno {
    Errno::NOMEM
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use super::*;
    use crate::region::cells::CellRef;
    use crate::region::golden::{self, golden};
    use crate::region::shared::assert_layout;
    use crate::region::{Region, VolumeKind};

    #[test]
    fn cells_have_the_layout_that_other_versions_read() {
        assert_layout::<NfsNodeCell>(
            "tag 0, form 4, id 8, lookups 16, fileid 24, name 32, flags 40, handle 48; 112 bytes",
        );
        assert_layout::<NameCell>("tag 0, length 4, parent 8, next 16, bytes 24; 128 bytes");
        assert_layout::<NfsOpenCell>(
            "tag 0, flags 4, handle 8, node 16, unique 24, verifier 32, identity 40; 120 bytes",
        );
        assert_layout::<CallCell>(
            "tag 0, xid 4, unique 8, step 16, nanoseconds 20, seconds 24, identity 32; 112 bytes",
        );
        assert_layout::<RootCell>("tag 0, spare 4, words 8; 96 bytes");
        assert_layout::<IdentityRecord>("uid 0, gid 4, count 8, groups 12; 76 bytes");
        let tags = [NfsNodeCell::TAG, NameCell::TAG, NfsOpenCell::TAG, CallCell::TAG, RootCell::TAG];
        assert_eq!(tags, [16, 17, 18, 19, 20], "other versions know the cells by these tags");
    }

    fn identity() -> Credential {
        Credential::User { uid: 21, gid: 22, groups: vec![23, 24] }
    }

    fn root_attributes() -> Attributes {
        let time = |seconds| Time { seconds, nanoseconds: 1 };
        Attributes {
            kind: FileType::Directory,
            mode: 0o755,
            links: 25,
            uid: 26,
            gid: 27,
            size: 28,
            used: 29,
            device: (0, 0),
            fsid: 30,
            fileid: 31,
            atime: time(32),
            mtime: time(33),
            ctime: time(34),
        }
    }

    /// A region with a cell of each kind, in which each field has a value.
    fn region() -> Arc<Region> {
        let region = golden::region(VolumeKind::Nfs);
        let name = CellRef::new(&region, |cell: &NameCell| {
            cell.length.store(4, Relaxed);
            cell.parent.store(1, Relaxed);
            cell.next.store(0, Relaxed);
            write_bytes(&cell.bytes, b"name");
        });
        let name = name.expect("memory").id();
        let node = CellRef::new(&region, |cell: &NfsNodeCell| {
            cell.form.store(libc::S_IFREG | 64, Relaxed);
            let words = [&cell.id, &cell.lookups, &cell.fileid, &cell.name, &cell.flags];
            words
                .into_iter()
                .zip([2, 3, 4, name.to_word(), SILLY])
                .for_each(|(word, value)| word.store(value, Relaxed));
            cell.handle.iter().zip(0x11..).for_each(|(word, value)| word.store(value, Relaxed));
        });
        let open = CellRef::new(&region, |cell: &NfsOpenCell| {
            cell.flags.store(KNOWN | CLOSED, Relaxed);
            let words = [&cell.handle, &cell.node, &cell.unique, &cell.verifier];
            words.into_iter().zip([6, 2, 7, 8]).for_each(|(word, value)| word.store(value, Relaxed));
            cell.identity.set(&identity());
        });
        let call = CellRef::new(&region, |cell: &CallCell| {
            [&cell.xid, &cell.step, &cell.nanoseconds]
                .into_iter()
                .zip(9..)
                .for_each(|(word, value)| word.store(value, Relaxed));
            [&cell.unique, &cell.seconds].into_iter().zip(12..).for_each(|(word, value)| word.store(value, Relaxed));
            cell.identity.set(&Credential::Anonymous);
        });
        let root = CellRef::new(&region, |cell: &RootCell| cell.set(&root_attributes()));
        drop((node.expect("memory"), open.expect("memory"), call.expect("memory"), root.expect("memory")));
        region
    }

    #[test]
    fn a_region_has_the_bytes_that_other_versions_read() {
        let recorded = golden!("region-nfs.bin");
        golden::assert_golden("region-nfs.bin", recorded, &golden::content(region().as_fd()));
        let adopted = golden::adopted(recorded, VolumeKind::Nfs);
        let cells: Vec<_> = adopted.cells().tagged().collect();
        let tags: Vec<_> = cells.iter().map(|(_, tag)| *tag).collect();
        assert_eq!(tags, [NameCell::TAG, NfsNodeCell::TAG, NfsOpenCell::TAG, CallCell::TAG, RootCell::TAG]);
        let id = |place: usize| cells[place].0;
        let name = adopted.cells().find::<NameCell>(id(0)).expect("a name");
        assert_eq!(read_bytes(&name.bytes, name.length.load(Relaxed) as usize), b"name");
        let node = adopted.cells().find::<NfsNodeCell>(id(1)).expect("a node");
        assert_eq!((node.name.load(Relaxed), node.handle[7].load(Relaxed)), (id(0).to_word(), 0x18));
        let open = adopted.cells().find::<NfsOpenCell>(id(2)).expect("an open file");
        assert_eq!((open.identity.get(), open.verifier.load(Relaxed)), (identity(), 8));
        let call = adopted.cells().find::<CallCell>(id(3)).expect("a call");
        assert_eq!((call.identity.get(), call.seconds.load(Relaxed)), (Credential::Anonymous, 13));
        assert_eq!(adopted.cells().find::<RootCell>(id(4)).expect("the root").get(), root_attributes());
        golden::assert_unknown_is_refused(recorded);
    }
}
