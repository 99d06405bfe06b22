//! Requests: bytes from the kernel into operations.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::abi::{
    AccessIn, BatchForgetIn, CopyFileRangeIn, CreateIn, FallocateIn, FlushIn, ForgetIn, ForgetOne, FsyncIn, GETATTR_FH,
    GetattrIn, GetxattrIn, InHeader, InitIn, InterruptIn, LinkIn, LkIn, LseekIn, MkdirIn, MknodIn, OpenIn, ReadIn,
    ReleaseIn, Rename2In, RenameIn, SetattrIn, SetxattrIn, StatxIn, UNIQUE_RESEND, WriteIn,
};
use super::ids::{HandleId, NodeId};
use crate::caller::Caller;

/// A request from the kernel.
#[derive(Debug)]
pub struct Request<'a> {
    /// The number that the kernel gave it, and that its answer must carry. If the kernel sends it again, the number has a mark.
    pub unique: u64,
    /// The node it is about.
    pub node: NodeId,
    /// The calling process.
    pub caller: Caller,
    /// The kernel's number of the operation.
    pub opcode: u32,
    /// The operation.
    pub operation: FuseOperation<'a>,
}

impl Request<'_> {
    /// Its number without the mark of a request that is sent again.
    pub fn number(&self) -> u64 {
        self.unique & !UNIQUE_RESEND
    }

    /// Whether a server has read it before, and died before it was answered.
    pub fn is_resent(&self) -> bool {
        self.unique & UNIQUE_RESEND != 0
    }

    /// The operation's name; `UNKNOWN` if podfs does not know it, or if it is malformed.
    pub fn name(&self) -> &'static str {
        match self.operation {
            FuseOperation::Unknown { .. } => UNKNOWN,
            _ => operation_name(self.opcode),
        }
    }
}

/// The operation of a request. Fields are as in [`abi`](super::abi), except where they have a type of their own.
#[derive(Debug)]
#[allow(missing_docs, reason = "the operations are the kernel's, explained in fuse(4) and libfuse's fuse_lowlevel.h")]
pub enum FuseOperation<'a> {
    Lookup {
        name: &'a OsStr,
    },
    Forget {
        lookups: u64,
    },
    BatchForget {
        nodes: &'a [ForgetOne],
    },
    GetAttr {
        handle: Option<HandleId>,
    },
    Statx {
        handle: Option<HandleId>,
    },
    SetAttr(&'a SetattrIn),
    ReadLink,
    Symlink {
        name: &'a OsStr,
        target: &'a OsStr,
    },
    MkNod {
        name: &'a OsStr,
        arguments: &'a MknodIn,
    },
    MkDir {
        name: &'a OsStr,
        arguments: &'a MkdirIn,
    },
    Unlink {
        name: &'a OsStr,
    },
    RmDir {
        name: &'a OsStr,
    },
    Rename {
        name: &'a OsStr,
        new_parent: NodeId,
        new_name: &'a OsStr,
        flags: u32,
    },
    Link {
        node: NodeId,
        name: &'a OsStr,
    },
    Open {
        flags: u32,
    },
    Create {
        name: &'a OsStr,
        arguments: &'a CreateIn,
    },
    TmpFile {
        arguments: &'a CreateIn,
    },
    Read(&'a ReadIn),
    Write {
        arguments: &'a WriteIn,
        data: &'a [u8],
    },
    StatFs,
    Release(&'a ReleaseIn),
    FSync(&'a FsyncIn),
    Flush(&'a FlushIn),
    SetXattr {
        name: &'a OsStr,
        value: &'a [u8],
        arguments: &'a SetxattrIn,
    },
    GetXattr {
        name: &'a OsStr,
        size: u32,
    },
    ListXattr {
        size: u32,
    },
    RemoveXattr {
        name: &'a OsStr,
    },
    Init(&'a InitIn),
    OpenDir,
    ReadDir(&'a ReadIn),
    ReadDirPlus(&'a ReadIn),
    ReleaseDir(&'a ReleaseIn),
    FSyncDir(&'a FsyncIn),
    GetLock(&'a LkIn),
    SetLock {
        arguments: &'a LkIn,
        wait: bool,
    },
    /// `unique`: the number of the request, without a mark.
    Interrupt {
        unique: u64,
    },
    Destroy,
    FAllocate(&'a FallocateIn),
    Seek(&'a LseekIn),
    /// `wide`: the answer has 64 bits.
    CopyFileRange {
        arguments: &'a CopyFileRangeIn,
        wide: bool,
    },
    /// The caller asks for its rights (`access(2)`, `chdir(2)`). The mask is that of `access(2)`. The kernel sends it only for mounts
    /// without `default_permissions`.
    Access {
        mask: u32,
    },
    /// A call of `ioctl(2)`. No file system of podfs has requests of its own, so the answer is always `ENOTTY`.
    IoCtl,
    /// An operation that no file system of podfs offers.
    NotOffered,
    /// An operation that podfs does not know.
    Unknown {
        opcode: u32,
    },
}

impl<'a> Request<'a> {
    /// Parses what one `read(2)` of the device gave; none if the kernel broke its own protocol.
    pub fn parse(bytes: &'a [u8]) -> Option<Request<'a>> {
        let mut body = UnparsedBody(bytes);
        let header: &InHeader = body.take()?;
        // Extensions stand at the end of the request; none is negotiated.
        let end = (header.len as usize).checked_sub(size_of::<InHeader>() + usize::from(header.total_extlen) * 8)?;
        body.0 = body.0.get(..end)?;
        Some(Request {
            unique: header.unique,
            node: header.nodeid,
            caller: Caller { uid: header.uid, gid: header.gid, pid: header.pid },
            opcode: header.opcode,
            // A malformed request is refused like an unknown one; its caller must not wait for ever.
            operation: parse_operation(header.opcode, body).unwrap_or(FuseOperation::Unknown { opcode: header.opcode }),
        })
    }
}

fn parse_operation(opcode: u32, mut body: UnparsedBody<'_>) -> Option<FuseOperation<'_>> {
    Some(match opcode {
        1 => FuseOperation::Lookup { name: body.name()? },
        2 => FuseOperation::Forget { lookups: body.take::<ForgetIn>()?.nlookup },
        3 => {
            let arguments: &GetattrIn = body.take()?;
            FuseOperation::GetAttr { handle: handle(arguments.getattr_flags, arguments.fh) }
        }
        4 => FuseOperation::SetAttr(body.take()?),
        5 => FuseOperation::ReadLink,
        6 => FuseOperation::Symlink { name: body.name()?, target: body.name()? },
        8 => FuseOperation::MkNod { arguments: body.take()?, name: body.name()? },
        9 => FuseOperation::MkDir { arguments: body.take()?, name: body.name()? },
        10 => FuseOperation::Unlink { name: body.name()? },
        11 => FuseOperation::RmDir { name: body.name()? },
        12 => {
            let new_parent = body.take::<RenameIn>()?.newdir;
            FuseOperation::Rename { new_parent, flags: 0, name: body.name()?, new_name: body.name()? }
        }
        13 => FuseOperation::Link { node: body.take::<LinkIn>()?.oldnodeid, name: body.name()? },
        14 => FuseOperation::Open { flags: body.take::<OpenIn>()?.flags },
        15 => FuseOperation::Read(body.take()?),
        16 => FuseOperation::Write { arguments: body.take()?, data: body.0 },
        17 => FuseOperation::StatFs,
        18 => FuseOperation::Release(body.take()?),
        20 => FuseOperation::FSync(body.take()?),
        21 => FuseOperation::SetXattr { arguments: body.take()?, name: body.name()?, value: body.0 },
        22 => FuseOperation::GetXattr { size: body.take::<GetxattrIn>()?.size, name: body.name()? },
        23 => FuseOperation::ListXattr { size: body.take::<GetxattrIn>()?.size },
        24 => FuseOperation::RemoveXattr { name: body.name()? },
        25 => FuseOperation::Flush(body.take()?),
        26 => FuseOperation::Init(body.take()?),
        27 => FuseOperation::OpenDir,
        28 => FuseOperation::ReadDir(body.take()?),
        29 => FuseOperation::ReleaseDir(body.take()?),
        30 => FuseOperation::FSyncDir(body.take()?),
        31 => FuseOperation::GetLock(body.take()?),
        32 => FuseOperation::SetLock { arguments: body.take()?, wait: false },
        33 => FuseOperation::SetLock { arguments: body.take()?, wait: true },
        35 => FuseOperation::Create { arguments: body.take()?, name: body.name()? },
        // The number has the mark if the kernel had marked the request for resending when a thread read the interrupt.
        36 => FuseOperation::Interrupt { unique: body.take::<InterruptIn>()?.unique & !UNIQUE_RESEND },
        38 => FuseOperation::Destroy,
        39 => FuseOperation::IoCtl,
        34 => FuseOperation::Access { mask: body.take::<AccessIn>()?.mask },
        37 | 40 | 41 | 48..=50 => FuseOperation::NotOffered,
        42 => {
            let count = body.take::<BatchForgetIn>()?.count as usize;
            FuseOperation::BatchForget { nodes: <[ForgetOne]>::ref_from_prefix_with_elems(body.0, count).ok()?.0 }
        }
        43 => FuseOperation::FAllocate(body.take()?),
        44 => FuseOperation::ReadDirPlus(body.take()?),
        45 => {
            let Rename2In { newdir: new_parent, flags, .. } = *body.take()?;
            FuseOperation::Rename { new_parent, flags, name: body.name()?, new_name: body.name()? }
        }
        46 => FuseOperation::Seek(body.take()?),
        47 => FuseOperation::CopyFileRange { arguments: body.take()?, wide: false },
        51 => FuseOperation::TmpFile { arguments: body.take()? },
        52 => {
            let arguments: &StatxIn = body.take()?;
            FuseOperation::Statx { handle: handle(arguments.getattr_flags, arguments.fh) }
        }
        53 => FuseOperation::CopyFileRange { arguments: body.take()?, wide: true },
        _ => return None,
    })
}

fn handle(flags: u32, handle: HandleId) -> Option<HandleId> {
    (flags & GETATTR_FH != 0).then_some(handle)
}

/// The part of a request that is not parsed yet.
struct UnparsedBody<'a>(&'a [u8]);

impl<'a> UnparsedBody<'a> {
    fn take<T: FromBytes + KnownLayout + Immutable>(&mut self) -> Option<&'a T> {
        let (taken, rest) = T::ref_from_prefix(self.0).ok()?;
        self.0 = rest;
        Some(taken)
    }

    fn name(&mut self) -> Option<&'a OsStr> {
        let end = self.0.iter().position(|byte| *byte == 0)?;
        let (name, rest) = self.0.split_at(end);
        self.0 = &rest[1..];
        Some(OsStr::from_bytes(name))
    }
}

/// The name of all other operations.
const UNKNOWN: &str = "UNKNOWN";

/// The name of the operation with this number, from the kernel's header. Two forms of one operation have the same name.
pub fn operation_name(opcode: u32) -> &'static str {
    match opcode {
        1 => "LOOKUP",
        2 => "FORGET",
        3 => "GETATTR",
        4 => "SETATTR",
        5 => "READLINK",
        6 => "SYMLINK",
        8 => "MKNOD",
        9 => "MKDIR",
        10 => "UNLINK",
        11 => "RMDIR",
        12 | 45 => "RENAME",
        13 => "LINK",
        14 => "OPEN",
        15 => "READ",
        16 => "WRITE",
        17 => "STATFS",
        18 => "RELEASE",
        20 => "FSYNC",
        21 => "SETXATTR",
        22 => "GETXATTR",
        23 => "LISTXATTR",
        24 => "REMOVEXATTR",
        25 => "FLUSH",
        26 => "INIT",
        27 => "OPENDIR",
        28 => "READDIR",
        29 => "RELEASEDIR",
        30 => "FSYNCDIR",
        31 => "GETLK",
        32 => "SETLK",
        33 => "SETLKW",
        34 => "ACCESS",
        35 => "CREATE",
        36 => "INTERRUPT",
        37 => "BMAP",
        38 => "DESTROY",
        39 => "IOCTL",
        40 => "POLL",
        41 => "NOTIFY_REPLY",
        42 => "BATCH_FORGET",
        43 => "FALLOCATE",
        44 => "READDIRPLUS",
        46 => "LSEEK",
        47 | 53 => "COPY_FILE_RANGE",
        48 => "SETUPMAPPING",
        49 => "REMOVEMAPPING",
        50 => "SYNCFS",
        51 => "TMPFILE",
        52 => "STATX",
        _ => UNKNOWN,
    }
}

impl FuseOperation<'_> {
    /// The name in the request's node that the operation is about, if there is one.
    pub fn entry(&self) -> Option<&OsStr> {
        match self {
            Self::Lookup { name }
            | Self::Symlink { name, .. }
            | Self::MkNod { name, .. }
            | Self::MkDir { name, .. }
            | Self::Unlink { name }
            | Self::RmDir { name }
            | Self::Rename { name, .. }
            | Self::Link { name, .. }
            | Self::Create { name, .. } => Some(name),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    fn request(opcode: u32, body: &[u8]) -> Vec<u8> {
        let len = (size_of::<InHeader>() + body.len()) as u32;
        let header =
            InHeader { len, opcode, unique: 7, nodeid: NodeId(1), uid: 2, gid: 3, pid: 4, ..Default::default() };
        // The parser needs aligned bytes: see `aligned`.
        [header.as_bytes(), body].concat()
    }

    /// Copies `bytes` to memory that is aligned like the buffer of a request.
    fn aligned(bytes: &[u8]) -> Vec<u64> {
        bytes
            .chunks(8)
            .map(|chunk| {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_ne_bytes(word)
            })
            .collect()
    }

    #[test]
    fn a_request_has_a_caller_and_an_operation() {
        let words = aligned(&request(12, &[5_u64.as_bytes(), b"old\0new\0"].concat()));
        let request = Request::parse(&words.as_bytes()[..56]).expect("a request");
        assert_eq!((request.unique, request.node, request.caller), (7, NodeId(1), Caller { uid: 2, gid: 3, pid: 4 }));
        let FuseOperation::Rename { name, new_parent: NodeId(5), new_name, flags: 0 } = request.operation else {
            panic!("{request:?}")
        };
        assert_eq!((name, new_name), (OsStr::new("old"), OsStr::new("new")));
    }

    #[test]
    fn a_truncated_request_is_not_parsed() {
        let whole = request(12, &[5_u64.as_bytes(), b"old\0new\0"].concat());
        for length in 0..whole.len() {
            let words = aligned(&whole[..length]);
            assert!(Request::parse(&words.as_bytes()[..length]).is_none(), "{length}");
        }
    }

    #[test]
    fn each_operation_that_the_kernel_may_send_has_its_own_name() {
        // FUSE_FORGET to FUSE_COPY_FILE_RANGE_64 of Linux 6.18, without the numbers that were never given out.
        let given_out = (1..=53).filter(|number| ![7, 19].contains(number));
        let unnamed: Vec<u32> = given_out.filter(|number| operation_name(*number) == UNKNOWN).collect();
        assert!(unnamed.is_empty(), "{unnamed:?}");
        for opcode in [34, 37, 39, 40, 41, 48, 49, 50] {
            let bytes = request(opcode, &[0; 64]);
            let words = aligned(&bytes);
            let request = Request::parse(&words.as_bytes()[..bytes.len()]).expect("a request");
            assert_eq!(request.name(), operation_name(opcode));
        }
    }

    #[test]
    fn unknown_and_malformed_requests_are_distinguished() {
        // An operation of the future, and a LOOKUP whose name does not end.
        for (opcode, body) in [(999, &b""[..]), (1, b"name")] {
            let bytes = request(opcode, body);
            let words = aligned(&bytes);
            let request = Request::parse(&words.as_bytes()[..bytes.len()]).expect("a request");
            assert!(matches!(request.operation, FuseOperation::Unknown { opcode: unknown } if unknown == opcode));
        }
    }
}
