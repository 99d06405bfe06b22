//! Encoding and setting attributes.

use super::files::{Files, Node, now};
use crate::nfs_rig::protocol::kind;
use crate::nfs_rig::xdr::{Reader, Writer};

/// The attributes that a call sets (`sattr3`).
#[derive(Default)]
pub struct Settings {
    mode: Option<u32>,
    uid: Option<u32>,
    gid: Option<u32>,
    size: Option<u64>,
    atime: Option<(u32, u32)>,
    mtime: Option<(u32, u32)>,
}

impl Settings {
    pub fn read(reader: &mut Reader) -> Option<Self> {
        let mode = optional(reader, Reader::u32)?;
        let (uid, gid) = (optional(reader, Reader::u32)?, optional(reader, Reader::u32)?);
        let size = optional(reader, Reader::u64)?;
        Some(Self { mode, uid, gid, size, atime: time(reader)?, mtime: time(reader)? })
    }

    pub fn apply(&self, node: &mut Node) {
        node.mode = self.mode.unwrap_or(node.mode);
        node.uid = self.uid.unwrap_or(node.uid);
        node.gid = self.gid.unwrap_or(node.gid);
        if let Some(size) = self.size {
            let size = usize::try_from(size).expect("a small file");
            node.content.resize(size, 0);
            node.committed.resize(size, 0);
            node.mtime = now();
        }
        node.atime = self.atime.unwrap_or(node.atime);
        node.mtime = self.mtime.unwrap_or(node.mtime);
        node.ctime = now();
    }
}

/// Writes all attributes of a node (`fattr3`).
pub fn full(writer: Writer, node: &Node) -> Writer {
    let size = node.size.unwrap_or(node.content.len() as u64);
    let head = writer.u32(node.kind).u32(node.mode).u32(node.links).u32(node.uid).u32(node.gid);
    let head = head.u64(size).u64(size).u64(0).u64(1).u64(node.fileid);
    [node.atime, node.mtime, node.ctime].iter().fold(head, |writer, time| writer.u32(time.0).u32(time.1))
}

/// Writes the attributes of a node after an operation (`post_op_attr`).
pub fn after(writer: Writer, files: &mut Files, number: u64) -> Writer {
    if files.sparse { writer.u32(0) } else { full(writer.u32(1), files.get(number)) }
}

/// Writes the attributes of a node after a change (`wcc_data`, without the attributes before the change).
pub fn changes(writer: Writer, files: &mut Files, number: u64) -> Writer {
    after(writer.u32(0), files, number)
}

/// The results of a call that creates a node: its handle, its attributes, and the changes of its directory.
pub fn created(files: &mut Files, number: u64, directory: u64) -> Writer {
    let head = Writer::default().u32(0);
    let handle = files.handle_of(number);
    let handle = if files.sparse { head.u32(0) } else { head.u32(1).opaque(&handle) };
    let attributes = after(handle, files, number);
    changes(attributes, files, directory)
}

/// Whether a node is a directory.
pub fn is_directory(node: &Node) -> bool {
    node.kind == kind::DIRECTORY
}

fn optional<'a, T>(reader: &mut Reader<'a>, read: impl Fn(&mut Reader<'a>) -> Option<T>) -> Option<Option<T>> {
    if reader.u32()? == 1 { read(reader).map(Some) } else { Some(None) }
}

/// A time to set (`set_atime` and `set_mtime`): none, the server's present time, or the client's time.
fn time(reader: &mut Reader) -> Option<Option<(u32, u32)>> {
    match reader.u32()? {
        0 => Some(None),
        1 => Some(Some(now())),
        _ => Some(Some((reader.u32()?, reader.u32()?))),
    }
}
