//! The arguments of each procedure. Their bytes depend on the arguments alone: a call that another process repeats has the same
//! bytes.

use super::attributes::{AttributeChanges, FileType, Time};
use super::handle::NfsFileHandle;
use crate::xdr::XdrWriter;

/// The way in which CREATE handles a name that exists.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Creation {
    /// The server opens the existing file.
    Unchecked(AttributeChanges),
    /// The server refuses the call.
    Guarded(AttributeChanges),
    /// The server refuses the call, unless the same call has created the file with this number before. A server that crashes may
    /// have created the file without recording the number.
    Exclusive([u8; 8]),
}

/// The type of file that MKNOD makes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SpecialFile {
    /// A block device with its major and minor number.
    Block(u32, u32),
    /// A character device with its major and minor number.
    Character(u32, u32),
    /// A socket.
    Socket,
    /// A named pipe.
    Pipe,
}

/// The place that data of a WRITE must reach, or has reached, when the server answers (`stable_how`).
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
#[repr(u32)]
pub enum Stability {
    /// Into the server's memory.
    Unstable = 0,
    /// To its disk, with the metadata that is needed to find it again.
    DataSync = 1,
    /// To its disk, with all attributes.
    FileSync = 2,
}

/// A name in a directory (`diropargs3`).
pub fn name(writer: &mut XdrWriter, directory: &NfsFileHandle, name: &[u8]) {
    directory.write(writer);
    writer.opaque(name);
}

/// SETATTR. With `guard`, the server executes it only if the file's ctime equals `guard`.
pub fn setattr(writer: &mut XdrWriter, file: &NfsFileHandle, changes: &AttributeChanges, guard: Option<Time>) {
    file.write(writer);
    changes.write(writer);
    writer.optional(guard, |writer, time| time.write(writer));
}

/// ACCESS
pub fn access(writer: &mut XdrWriter, file: &NfsFileHandle, wanted: u32) {
    file.write(writer);
    writer.u32(wanted);
}

/// READ
pub fn read(writer: &mut XdrWriter, file: &NfsFileHandle, offset: u64, count: u32) {
    file.write(writer);
    writer.u64(offset).u32(count);
}

/// WRITE, up to the data, which follows as opaque bytes.
pub fn write(writer: &mut XdrWriter, file: &NfsFileHandle, offset: u64, count: u32, stability: Stability) {
    file.write(writer);
    writer.u64(offset).u32(count).u32(stability as u32);
}

/// CREATE
pub fn create(writer: &mut XdrWriter, directory: &NfsFileHandle, file: &[u8], creation: &Creation) {
    name(writer, directory, file);
    match creation {
        Creation::Unchecked(changes) => changes.write(writer.u32(0)),
        Creation::Guarded(changes) => changes.write(writer.u32(1)),
        Creation::Exclusive(verifier) => {
            writer.u32(2).fixed(verifier);
        }
    }
}

/// MKDIR
pub fn mkdir(writer: &mut XdrWriter, parent: &NfsFileHandle, directory: &[u8], changes: &AttributeChanges) {
    name(writer, parent, directory);
    changes.write(writer);
}

/// SYMLINK
pub fn symlink(
    writer: &mut XdrWriter,
    directory: &NfsFileHandle,
    link: &[u8],
    target: &[u8],
    changes: &AttributeChanges,
) {
    name(writer, directory, link);
    changes.write(writer);
    writer.opaque(target);
}

/// MKNOD
pub fn mknod(
    writer: &mut XdrWriter,
    directory: &NfsFileHandle,
    node: &[u8],
    device: SpecialFile,
    changes: &AttributeChanges,
) {
    name(writer, directory, node);
    let (kind, numbers) = match device {
        SpecialFile::Block(major, minor) => (FileType::Block, Some((major, minor))),
        SpecialFile::Character(major, minor) => (FileType::Character, Some((major, minor))),
        SpecialFile::Socket => (FileType::Socket, None),
        SpecialFile::Pipe => (FileType::Pipe, None),
    };
    changes.write(writer.u32(kind.number()));
    if let Some((major, minor)) = numbers {
        writer.u32(major).u32(minor);
    }
}

/// RENAME
pub fn rename(writer: &mut XdrWriter, from: (&NfsFileHandle, &[u8]), to: (&NfsFileHandle, &[u8])) {
    name(writer, from.0, from.1);
    name(writer, to.0, to.1);
}

/// LINK
pub fn link(writer: &mut XdrWriter, file: &NfsFileHandle, directory: &NfsFileHandle, link: &[u8]) {
    file.write(writer);
    name(writer, directory, link);
}

/// READDIR, with room for `count` bytes of results.
pub fn readdir(writer: &mut XdrWriter, directory: &NfsFileHandle, cookie: u64, verifier: [u8; 8], count: u32) {
    directory.write(writer);
    writer.u64(cookie).fixed(&verifier).u32(count);
}

/// READDIRPLUS, with room for `names` bytes of names and cookies, and for `count` bytes of results.
pub fn readdirplus(
    writer: &mut XdrWriter,
    directory: &NfsFileHandle,
    cookie: u64,
    verifier: [u8; 8],
    names: u32,
    count: u32,
) {
    directory.write(writer);
    writer.u64(cookie).fixed(&verifier).u32(names).u32(count);
}

/// COMMIT. With a `count` of zero, the range goes to the end of the file.
pub fn commit(writer: &mut XdrWriter, file: &NfsFileHandle, offset: u64, count: u32) {
    read(writer, file, offset, count);
}
