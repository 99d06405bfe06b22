//! Arbitrary values of the protocol, and the same values in the types of another implementation.

use nfs3_types::nfs3 as theirs;
use nfs3_types::nfs3::{Nfs3Option, diropargs3, nfs_fh3, nfstime3, sattr3};
use nfs3_types::xdr_codec::{Opaque, Pack, Unpack};
use proptest::prelude::*;

use super::super::*;
use crate::rpc::{Credential, Slice};
use crate::xdr::XdrWriter;

pub(super) fn ours(write: impl FnOnce(&mut XdrWriter)) -> Vec<u8> {
    let mut writer = XdrWriter::default();
    write(&mut writer);
    writer.into_bytes()
}

pub(super) fn packed(message: &impl Pack) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.pack(&mut bytes).expect("memory takes it");
    bytes
}

pub(super) fn their_handle(handle: &NfsFileHandle) -> nfs_fh3 {
    nfs_fh3 { data: Opaque::owned(handle.as_bytes().to_vec()) }
}

pub(super) fn their_name<'a>(directory: &NfsFileHandle, name: &'a [u8]) -> diropargs3<'a> {
    diropargs3 { dir: their_handle(directory), name: name.into() }
}

pub(super) fn their_option<T: Pack + Unpack>(value: Option<T>) -> Nfs3Option<T> {
    value.map_or(Nfs3Option::None, Nfs3Option::Some)
}

pub(super) fn their_time(time: Time) -> nfstime3 {
    nfstime3 { seconds: time.seconds, nseconds: time.nanoseconds }
}

pub(super) fn their_changes(changes: &AttributeChanges) -> sattr3 {
    sattr3 {
        mode: their_option(changes.mode),
        uid: their_option(changes.uid),
        gid: their_option(changes.gid),
        size: their_option(changes.size),
        atime: match changes.atime {
            TimeChange::Keep => theirs::set_atime::DONT_CHANGE,
            TimeChange::ServerTime => theirs::set_atime::SET_TO_SERVER_TIME,
            TimeChange::To(time) => theirs::set_atime::SET_TO_CLIENT_TIME(their_time(time)),
        },
        mtime: match changes.mtime {
            TimeChange::Keep => theirs::set_mtime::DONT_CHANGE,
            TimeChange::ServerTime => theirs::set_mtime::SET_TO_SERVER_TIME,
            TimeChange::To(time) => theirs::set_mtime::SET_TO_CLIENT_TIME(their_time(time)),
        },
    }
}

pub(super) fn their_attributes(attributes: &Attributes) -> theirs::fattr3 {
    theirs::fattr3 {
        type_: match attributes.kind {
            FileType::File => theirs::ftype3::NF3REG,
            FileType::Directory => theirs::ftype3::NF3DIR,
            FileType::Block => theirs::ftype3::NF3BLK,
            FileType::Character => theirs::ftype3::NF3CHR,
            FileType::Symlink => theirs::ftype3::NF3LNK,
            FileType::Socket => theirs::ftype3::NF3SOCK,
            FileType::Pipe => theirs::ftype3::NF3FIFO,
        },
        mode: attributes.mode,
        nlink: attributes.links,
        uid: attributes.uid,
        gid: attributes.gid,
        size: attributes.size,
        used: attributes.used,
        rdev: theirs::specdata3 { specdata1: attributes.device.0, specdata2: attributes.device.1 },
        fsid: attributes.fsid,
        fileid: attributes.fileid,
        atime: their_time(attributes.atime),
        mtime: their_time(attributes.mtime),
        ctime: their_time(attributes.ctime),
    }
}

pub(super) fn their_around(around: &WccData) -> theirs::wcc_data {
    let before = around.before.map(|before| theirs::wcc_attr {
        size: before.size,
        mtime: their_time(before.mtime),
        ctime: their_time(before.ctime),
    });
    theirs::wcc_data { before: their_option(before), after: their_option(around.after.as_ref().map(their_attributes)) }
}

pub(super) fn bytes(most: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..=most)
}

pub(super) fn handle() -> impl Strategy<Value = NfsFileHandle> {
    bytes(64).prop_map(|bytes| NfsFileHandle::new(&bytes).expect("short enough"))
}

pub(super) fn time() -> impl Strategy<Value = Time> {
    (any::<u32>(), 0..1_000_000_000u32).prop_map(|(seconds, nanoseconds)| Time { seconds, nanoseconds })
}

pub(super) fn time_change() -> impl Strategy<Value = TimeChange> {
    prop_oneof![Just(TimeChange::Keep), Just(TimeChange::ServerTime), time().prop_map(TimeChange::To)]
}

pub(super) fn changes() -> impl Strategy<Value = AttributeChanges> {
    let numbers = (any::<Option<u32>>(), any::<Option<u32>>(), any::<Option<u32>>(), any::<Option<u64>>());
    (numbers, time_change(), time_change()).prop_map(|((mode, uid, gid, size), atime, mtime)| AttributeChanges {
        mode,
        uid,
        gid,
        size,
        atime,
        mtime,
    })
}

pub(super) fn kind() -> impl Strategy<Value = FileType> {
    use FileType::{Block, Character, Directory, File, Pipe, Socket, Symlink};
    prop::sample::select(vec![File, Directory, Block, Character, Symlink, Socket, Pipe])
}

pub(super) fn attributes() -> impl Strategy<Value = Attributes> {
    let times = (time(), time(), time());
    (kind(), any::<[u32; 6]>(), any::<[u64; 4]>(), times).prop_map(
        |(kind, [mode, links, uid, gid, major, minor], [size, used, fsid, fileid], (atime, mtime, ctime))| Attributes {
            kind,
            mode,
            links,
            uid,
            gid,
            size,
            used,
            device: (major, minor),
            fsid,
            fileid,
            atime,
            mtime,
            ctime,
        },
    )
}

pub(super) fn around() -> impl Strategy<Value = WccData> {
    let before = (any::<u64>(), time(), time()).prop_map(|(size, mtime, ctime)| WccAttributes { size, mtime, ctime });
    (prop::option::of(before), prop::option::of(attributes())).prop_map(|(before, after)| WccData { before, after })
}

pub(super) fn credential() -> impl Strategy<Value = Credential> {
    let user = (any::<u32>(), any::<u32>(), prop::collection::vec(any::<u32>(), 0..20));
    prop_oneof![Just(Credential::Anonymous), user.prop_map(|(uid, gid, groups)| Credential::User { uid, gid, groups }),]
}

/// Returns ranges of `bytes` as slices, as of a reply.
pub(super) fn cutting(bytes: &[u8]) -> impl Fn(std::ops::Range<usize>) -> Slice {
    let all = Slice::from(bytes.to_vec());
    move |range| all.part(range)
}
