//! Results as a server encodes them (RFC 1813). Fields that podfs ignores are zero.

use podfs_nfs::mountd::MountReply;
use podfs_nfs::v3::{
    AccessReply, Attributes, CommitReply, CreateReply, DirectoryPage, FsInfo, FsStat, LinkReply, LinkTarget,
    ListedEntry, LookupReply, NfsFileHandle, PathConf, ReadReply, WccData, WriteReply,
};
use podfs_nfs::xdr::XdrWriter;

/// `fattr3`
pub fn attributes(to: &mut XdrWriter, value: &Attributes) {
    to.u32(value.kind.number()).u32(value.mode).u32(value.links).u32(value.uid).u32(value.gid);
    to.u64(value.size).u64(value.used).u32(value.device.0).u32(value.device.1).u64(value.fsid).u64(value.fileid);
    value.atime.write(to);
    value.mtime.write(to);
    value.ctime.write(to);
}

/// `post_op_attr`
fn known(to: &mut XdrWriter, value: &Option<Attributes>) {
    to.optional(value.as_ref(), attributes);
}

/// `post_op_fh3`
fn handle(to: &mut XdrWriter, value: &Option<NfsFileHandle>) {
    to.optional(value.as_ref(), |to, handle| handle.write(to));
}

/// `wcc_data`
pub fn around(to: &mut XdrWriter, value: &WccData) {
    to.optional(value.before, |to, before| {
        before.mtime.write(to.u64(before.size));
        before.ctime.write(to);
    });
    known(to, &value.after);
}

/// The results of LOOKUP.
pub fn lookup(to: &mut XdrWriter, value: &LookupReply) {
    value.handle.write(to);
    known(to, &value.attributes);
    known(to, &value.directory);
}

/// The results of ACCESS.
pub fn access(to: &mut XdrWriter, value: &AccessReply) {
    known(to, &value.attributes);
    to.u32(value.granted);
}

/// The results of READLINK.
pub fn readlink(to: &mut XdrWriter, value: &LinkTarget) {
    known(to, &value.attributes);
    to.opaque(&value.target);
}

/// The results of READ.
pub fn read(to: &mut XdrWriter, value: &ReadReply) {
    known(to, &value.attributes);
    to.length(value.data.len()).flag(value.is_end).opaque(&value.data);
}

/// The results of WRITE.
pub fn write(to: &mut XdrWriter, value: &WriteReply) {
    around(to, &value.file);
    to.u32(value.count).u32(value.stability as u32).fixed(&value.verifier);
}

/// The results of COMMIT.
pub fn commit(to: &mut XdrWriter, value: &CommitReply) {
    around(to, &value.file);
    to.fixed(&value.verifier);
}

/// The results of CREATE, MKDIR, SYMLINK and MKNOD.
pub fn created(to: &mut XdrWriter, value: &CreateReply) {
    handle(to, &value.handle);
    known(to, &value.attributes);
    around(to, &value.directory);
}

/// The results of LINK.
pub fn link(to: &mut XdrWriter, value: &LinkReply) {
    known(to, &value.attributes);
    around(to, &value.directory);
}

/// The results of RENAME.
pub fn rename(to: &mut XdrWriter, value: &(WccData, WccData)) {
    around(to, &value.0);
    around(to, &value.1);
}

/// The results of FSSTAT.
pub fn fsstat(to: &mut XdrWriter, value: &FsStat) {
    known(to, &value.attributes);
    to.u64(value.total_bytes).u64(value.free_bytes).u64(value.available_bytes);
    to.u64(value.total_files).u64(value.free_files).u64(value.available_files);
    to.u32(0);
}

/// The results of FSINFO.
pub fn fsinfo(to: &mut XdrWriter, value: &FsInfo) {
    known(to, &value.attributes);
    to.u32(value.read_max).u32(0).u32(0);
    to.u32(value.write_max).u32(0).u32(0);
    to.u32(0).u64(value.file_max);
    // The step is a time, too, but any value is valid.
    to.u32(value.time_step.seconds).u32(value.time_step.nanoseconds);
    to.u32(value.properties);
}

/// The results of PATHCONF.
pub fn pathconf(to: &mut XdrWriter, value: &PathConf) {
    known(to, &value.attributes);
    to.u32(value.links_max).u32(value.name_max);
    to.flag(value.refuses_long_names).flag(value.restricts_chown).flag(false).flag(false);
}

/// The results of READDIR, or of READDIRPLUS if `plus`.
pub fn listing(to: &mut XdrWriter, value: &DirectoryPage, plus: bool) {
    known(to, &value.directory);
    to.fixed(&value.verifier);
    for ListedEntry { fileid, name, cookie, attributes, handle: of_entry } in value.entries() {
        to.flag(true).u64(fileid).opaque(name).u64(cookie);
        if plus {
            known(to, &attributes);
            handle(to, &of_entry);
        }
    }
    to.flag(false).flag(value.is_last);
}

/// The results of MNT.
pub fn mounted(to: &mut XdrWriter, value: &MountReply) {
    value.root.write(to);
    to.length(value.flavors.len());
    for flavor in &value.flavors {
        to.u32(*flavor);
    }
}
