//! The numbers of programs, procedures, errors and kinds of files (RFC 1813, RFC 1833).

/// The number and the version of an RPC program.
pub const PORTMAP: (u32, u32) = (100_000, 2);
pub const NFS: (u32, u32) = (100_003, 3);
pub const MOUNT: (u32, u32) = (100_005, 3);

/// Procedures of NFS.
pub mod procedure {
    pub const NULL: u32 = 0;
    pub const GETATTR: u32 = 1;
    pub const SETATTR: u32 = 2;
    pub const LOOKUP: u32 = 3;
    pub const ACCESS: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const READ: u32 = 6;
    pub const WRITE: u32 = 7;
    pub const CREATE: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const SYMLINK: u32 = 10;
    pub const MKNOD: u32 = 11;
    pub const REMOVE: u32 = 12;
    pub const RMDIR: u32 = 13;
    pub const RENAME: u32 = 14;
    pub const LINK: u32 = 15;
    pub const READDIR: u32 = 16;
    pub const READDIRPLUS: u32 = 17;
    pub const FSSTAT: u32 = 18;
    pub const FSINFO: u32 = 19;
    pub const PATHCONF: u32 = 20;
    pub const COMMIT: u32 = 21;
    /// Procedures of the program MOUNT.
    pub const MNT: u32 = 1;
    pub const UMNT: u32 = 3;
    pub const EXPORT: u32 = 5;
    /// A procedure of the port mapper.
    pub const GETPORT: u32 = 3;
}

/// Errors of NFS; MOUNT uses the same numbers.
pub mod error {
    pub const NOENT: u32 = 2;
    pub const IO: u32 = 5;
    pub const ACCES: u32 = 13;
    pub const EXIST: u32 = 17;
    pub const NOTDIR: u32 = 20;
    pub const ISDIR: u32 = 21;
    pub const INVAL: u32 = 22;
    pub const NOSPC: u32 = 28;
    pub const ROFS: u32 = 30;
    pub const NAMETOOLONG: u32 = 63;
    pub const NOTEMPTY: u32 = 66;
    pub const DQUOT: u32 = 69;
    pub const STALE: u32 = 70;
    pub const BADHANDLE: u32 = 10_001;
    pub const BAD_COOKIE: u32 = 10_003;
    pub const NOTSUPP: u32 = 10_004;
    pub const TOOSMALL: u32 = 10_005;
    pub const SERVERFAULT: u32 = 10_006;
    pub const JUKEBOX: u32 = 10_008;
}

/// Kinds of files.
pub mod kind {
    pub const FILE: u32 = 1;
    pub const DIRECTORY: u32 = 2;
    pub const LINK: u32 = 5;
}
