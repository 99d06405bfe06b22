//! NFS version 3 (RFC 1813): the content of its calls and replies.
//!
//! | module | owns |
//! |---|---|
//! | [`arguments`] | the arguments of each procedure |
//! | [`results`] | the results of each procedure |
//! | [`attributes`] | attributes of files |
//! | [`handle`] | file handles |
//! | [`listing`] | pages of directories |
//! | [`status`] | errors, and the errno that a program gets |

#![forbid(unsafe_code)]

pub mod arguments;
pub mod attributes;
pub mod handle;
pub mod listing;
pub mod results;
pub mod status;

pub use arguments::{Creation, SpecialFile, Stability};
pub use attributes::{AttributeChanges, Attributes, FileType, Time, TimeChange, WccAttributes, WccData};
pub use handle::NfsFileHandle;
pub use listing::{DirectoryPage, ListedEntry};
pub use results::{
    AccessReply, CommitReply, CreateReply, FsInfo, FsStat, LinkReply, LinkTarget, LookupReply, PathConf, ReadReply,
    WriteReply,
};
pub use status::NfsStatus;

/// The number of the program.
pub const PROGRAM: u32 = 100_003;
/// The version.
pub const VERSION: u32 = 3;
/// The usual port of NFS servers.
pub const PORT: u16 = 2049;
/// Most bytes of a name.
pub const MAX_NAME: usize = 255;
/// Most bytes of the target of a symbolic link.
pub const MAX_LINK: usize = 4096;

/// The numbers of the procedures.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
#[expect(missing_docs, reason = "they are called so in RFC 1813, which says what they do")]
pub enum ProcedureNumber {
    Null = 0,
    Getattr = 1,
    Setattr = 2,
    Lookup = 3,
    Access = 4,
    Readlink = 5,
    Read = 6,
    Write = 7,
    Create = 8,
    Mkdir = 9,
    Symlink = 10,
    Mknod = 11,
    Remove = 12,
    Rmdir = 13,
    Rename = 14,
    Link = 15,
    Readdir = 16,
    Readdirplus = 17,
    Fsstat = 18,
    Fsinfo = 19,
    Pathconf = 20,
    Commit = 21,
}

/// The rights that ACCESS can check.
pub mod access {
    /// Read a file, or list a directory.
    pub const READ: u32 = 0x01;
    /// Look a name up.
    pub const LOOKUP: u32 = 0x02;
    /// Change existing data.
    pub const MODIFY: u32 = 0x04;
    /// Add new data or entries.
    pub const EXTEND: u32 = 0x08;
    /// Remove a name.
    pub const DELETE: u32 = 0x10;
    /// Run a file.
    pub const EXECUTE: u32 = 0x20;
}

#[cfg(test)]
mod tests;
