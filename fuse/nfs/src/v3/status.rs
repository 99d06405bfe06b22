//! The status of a reply (`nfsstat3`).

use rustix::io::Errno;

/// The status of a reply.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct NfsStatus(pub u32);

impl NfsStatus {
    /// The server has executed the call.
    pub const OK: Self = Self(0);
    /// There is no such name.
    pub const NOENT: Self = Self(2);
    /// There is such a name already.
    pub const EXIST: Self = Self(17);
    /// The file of the handle does not exist any more.
    pub const STALE: Self = Self(70);
    /// The handle is not one of this server.
    pub const BADHANDLE: Self = Self(10001);
    /// SETATTR: the attributes have changed since the client read them.
    pub const NOT_SYNC: Self = Self(10002);
    /// The place in a directory does not exist any more.
    pub const BAD_COOKIE: Self = Self(10003);
    /// The server does not support the procedure.
    pub const NOTSUPP: Self = Self(10004);
    /// The server has begun to execute the call, and the client has to repeat the call later.
    pub const JUKEBOX: Self = Self(10008);

    /// The errno that a program gets.
    pub fn errno(self) -> Errno {
        match self.0 {
            1 => Errno::PERM,
            2 => Errno::NOENT,
            6 => Errno::NXIO,
            13 => Errno::ACCESS,
            17 => Errno::EXIST,
            18 => Errno::XDEV,
            19 => Errno::NODEV,
            20 => Errno::NOTDIR,
            21 => Errno::ISDIR,
            22 => Errno::INVAL,
            27 => Errno::FBIG,
            28 => Errno::NOSPC,
            30 => Errno::ROFS,
            31 => Errno::MLINK,
            63 => Errno::NAMETOOLONG,
            66 => Errno::NOTEMPTY,
            69 => Errno::DQUOT,
            70 | 10001 => Errno::STALE,
            71 => Errno::REMOTE,
            10004 | 10007 => Errno::OPNOTSUPP,
            10008 => Errno::AGAIN,
            // IO, SERVERFAULT, and statuses that callers handle before: NOT_SYNC, BAD_COOKIE, TOOSMALL.
            _ => Errno::IO,
        }
    }
}
