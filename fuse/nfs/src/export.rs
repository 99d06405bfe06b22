//! An export of a server, and the calls that can be made on it.

mod call;

use std::rc::Rc;

use serde::{Deserialize, Serialize};

pub use call::CallOptions;
use call::RepeatableCall;

use crate::error::Error;
use crate::rpc::{Policy, Reply, RpcConnection, Slice};
use crate::server::NfsServer;
use crate::v3::{
    self, AccessReply, AttributeChanges, Attributes, CommitReply, CreateReply, Creation, DirectoryPage, FsInfo, FsStat,
    LinkReply, LinkTarget, LookupReply, MAX_NAME, NfsFileHandle, PathConf, ProcedureNumber, ReadReply, SpecialFile,
    Stability, Time, WccData, WriteReply, arguments, results,
};
use crate::xdr::{Malformed, XdrReader, XdrWriter};

/// Most bytes of a READ or WRITE: the most that the kernel requests from a FUSE server at once.
pub const MAX_TRANSFER: u32 = 1 << 20;
/// Fewest bytes of a READ or WRITE.
const MIN_TRANSFER: u32 = 4096;
/// Fewest bytes of a page of a directory.
const MIN_LISTING: u32 = 8 << 10;
/// Most bytes of such a page: with the reply's header it fits into a small buffer of the pool. A server may send a longer page
/// all the same, or less than the client asked for (RFC 1813, 3.3.17).
const MAX_LISTING: u32 = 63 << 10;
/// Sizes of transfers are a multiple of this.
const TRANSFER_STEP: u32 = 1024;

/// An export of a server.
#[derive(Clone, Debug)]
pub struct Export {
    server: Rc<NfsServer>,
    root: NfsFileHandle,
    policy: Policy,
    connections: usize,
    limits: Limits,
}

/// The largest READ and WRITE of the server.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Most bytes of a READ.
    pub read: u32,
    /// Most bytes of a WRITE.
    pub write: u32,
    /// Bytes of a page of a directory.
    pub listing: u32,
    /// The largest file, in bytes.
    pub file: u64,
}

impl Limits {
    /// Computes the limits from the server's FSINFO and from the mount's options `rsize` and `wsize`.
    pub fn new(info: &FsInfo, rsize: Option<u32>, wsize: Option<u32>) -> Self {
        let clamp = |wanted: Option<u32>, most: u32| {
            // A server that names no limit accepts at least the 8 KiB of NFSv2.
            let most = if most == 0 { 8192 } else { most.min(MAX_TRANSFER) };
            let size = wanted.unwrap_or(MAX_TRANSFER).max(MIN_TRANSFER).min(most);
            if size > TRANSFER_STEP { size / TRANSFER_STEP * TRANSFER_STEP } else { size }
        };
        Self {
            read: clamp(rsize, info.read_max),
            write: clamp(wsize, info.write_max),
            listing: clamp(None, info.read_max).clamp(MIN_LISTING, MAX_LISTING),
            // As Linux does, podfs takes 0 as a server without a limit.
            file: if info.file_max == 0 { u64::MAX } else { info.file_max },
        }
    }
}

impl Export {
    /// The export with the root `root`, whose calls use `connections` connections. [`mount`](crate::mount::mount) finds all
    /// these values.
    pub fn new(server: Rc<NfsServer>, root: NfsFileHandle, limits: Limits, policy: Policy, connections: usize) -> Self {
        Self { server, root, policy, connections, limits }
    }

    /// The server.
    pub fn server(&self) -> &Rc<NfsServer> {
        &self.server
    }

    /// The root's handle.
    pub fn root(&self) -> NfsFileHandle {
        self.root
    }

    /// The largest READ and WRITE of the server.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns the policy of calls that have none of their own.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// NULL: checks that the server answers.
    ///
    /// # Errors
    /// [`Error`], as everywhere below.
    pub async fn null(&self, options: CallOptions<'_>) -> Result<(), Error> {
        let connection = self.connection(&self.root);
        let call =
            RepeatableCall { options, number: ProcedureNumber::Null, arguments: |_: &mut XdrWriter| {}, payload: None };
        let policy = options.policy.unwrap_or(self.policy);
        call.send(&connection, policy, options.earlier_xid).await.map(|_nothing| ()).map_err(Error::from)
    }

    /// GETATTR
    ///
    /// # Errors
    /// [`Error`]
    pub async fn getattr(&self, options: CallOptions<'_>, file: &NfsFileHandle) -> Result<Attributes, Error> {
        self.call(options, file, ProcedureNumber::Getattr, |to| file.write(to), Attributes::read).await
    }

    /// SETATTR. With `guard`, the server executes it only if the file's ctime equals `guard`; otherwise it answers
    /// [`NfsStatus::NOT_SYNC`](v3::NfsStatus::NOT_SYNC).
    ///
    /// # Errors
    /// [`Error`]
    pub async fn setattr(
        &self,
        options: CallOptions<'_>,
        file: &NfsFileHandle,
        changes: &AttributeChanges,
        guard: Option<Time>,
    ) -> Result<WccData, Error> {
        self.call(
            options,
            file,
            ProcedureNumber::Setattr,
            |to| arguments::setattr(to, file, changes, guard),
            WccData::read,
        )
        .await
    }

    /// LOOKUP
    ///
    /// # Errors
    /// [`Error`]
    pub async fn lookup(
        &self,
        options: CallOptions<'_>,
        directory: &NfsFileHandle,
        name: &[u8],
    ) -> Result<LookupReply, Error> {
        check(name)?;
        self.call(
            options,
            directory,
            ProcedureNumber::Lookup,
            |to| arguments::name(to, directory, name),
            results::lookup,
        )
        .await
    }

    /// ACCESS: asks for the rights in [`v3::access`].
    ///
    /// # Errors
    /// [`Error`]
    pub async fn access(
        &self,
        options: CallOptions<'_>,
        file: &NfsFileHandle,
        wanted: u32,
    ) -> Result<AccessReply, Error> {
        self.call(options, file, ProcedureNumber::Access, |to| arguments::access(to, file, wanted), results::access)
            .await
    }

    /// READLINK
    ///
    /// # Errors
    /// [`Error`]
    pub async fn readlink(&self, options: CallOptions<'_>, link: &NfsFileHandle) -> Result<LinkTarget, Error> {
        self.call_for_data(
            options,
            link,
            ProcedureNumber::Readlink,
            |to| link.write(to),
            |from, reply| results::readlink(from, |range| reply.slice(range)),
        )
        .await
    }

    /// READ of at most `count` bytes, which is at most [`Limits::read`].
    ///
    /// # Errors
    /// [`Error`]
    pub async fn read(
        &self,
        options: CallOptions<'_>,
        file: &NfsFileHandle,
        offset: u64,
        count: u32,
    ) -> Result<ReadReply, Error> {
        self.call_for_data(
            options,
            file,
            ProcedureNumber::Read,
            |to| arguments::read(to, file, offset, count),
            |from, reply| results::read(from, count, |range| reply.slice(range)),
        )
        .await
    }

    /// WRITE of `data`, which is at most [`Limits::write`] bytes. The client sends the bytes without a copy, and holds them until
    /// the server has answered.
    ///
    /// # Errors
    /// [`Error`]
    pub async fn write(
        &self,
        options: CallOptions<'_>,
        file: &NfsFileHandle,
        offset: u64,
        data: &Slice,
        stability: Stability,
    ) -> Result<WriteReply, Error> {
        let count = u32::try_from(data.len()).expect("a WRITE is at most of a megabyte");
        let arguments = |to: &mut XdrWriter| arguments::write(to, file, offset, count, stability);
        let call = RepeatableCall { options, number: ProcedureNumber::Write, arguments, payload: Some(data) };
        call.complete(&self.connection(file), self.policy, |from, _| results::write(from)).await
    }

    /// CREATE
    ///
    /// # Errors
    /// [`Error`]
    pub async fn create(
        &self,
        options: CallOptions<'_>,
        directory: &NfsFileHandle,
        name: &[u8],
        creation: &Creation,
    ) -> Result<CreateReply, Error> {
        check(name)?;
        let arguments = |to: &mut XdrWriter| arguments::create(to, directory, name, creation);
        self.call(options, directory, ProcedureNumber::Create, arguments, results::created).await
    }

    /// MKDIR
    ///
    /// # Errors
    /// [`Error`]
    pub async fn mkdir(
        &self,
        options: CallOptions<'_>,
        directory: &NfsFileHandle,
        name: &[u8],
        changes: &AttributeChanges,
    ) -> Result<CreateReply, Error> {
        check(name)?;
        let arguments = |to: &mut XdrWriter| arguments::mkdir(to, directory, name, changes);
        self.call(options, directory, ProcedureNumber::Mkdir, arguments, results::created).await
    }

    /// SYMLINK
    ///
    /// # Errors
    /// [`Error`]
    pub async fn symlink(
        &self,
        options: CallOptions<'_>,
        directory: &NfsFileHandle,
        name: &[u8],
        target: &[u8],
        changes: &AttributeChanges,
    ) -> Result<CreateReply, Error> {
        check(name)?;
        if target.len() > v3::MAX_LINK {
            return Err(Error::NameTooLong);
        }
        let arguments = |to: &mut XdrWriter| arguments::symlink(to, directory, name, target, changes);
        self.call(options, directory, ProcedureNumber::Symlink, arguments, results::created).await
    }

    /// MKNOD
    ///
    /// # Errors
    /// [`Error`]
    pub async fn mknod(
        &self,
        options: CallOptions<'_>,
        directory: &NfsFileHandle,
        name: &[u8],
        device: SpecialFile,
        changes: &AttributeChanges,
    ) -> Result<CreateReply, Error> {
        check(name)?;
        let arguments = |to: &mut XdrWriter| arguments::mknod(to, directory, name, device, changes);
        self.call(options, directory, ProcedureNumber::Mknod, arguments, results::created).await
    }

    /// REMOVE. Returns the directory's attributes.
    ///
    /// # Errors
    /// [`Error`]
    pub async fn remove(
        &self,
        options: CallOptions<'_>,
        directory: &NfsFileHandle,
        name: &[u8],
    ) -> Result<WccData, Error> {
        check(name)?;
        self.call(options, directory, ProcedureNumber::Remove, |to| arguments::name(to, directory, name), WccData::read)
            .await
    }

    /// RMDIR. Returns the directory's attributes.
    ///
    /// # Errors
    /// [`Error`]
    pub async fn rmdir(
        &self,
        options: CallOptions<'_>,
        directory: &NfsFileHandle,
        name: &[u8],
    ) -> Result<WccData, Error> {
        check(name)?;
        self.call(options, directory, ProcedureNumber::Rmdir, |to| arguments::name(to, directory, name), WccData::read)
            .await
    }

    /// RENAME. Returns the attributes of the old and of the new directory.
    ///
    /// # Errors
    /// [`Error`]
    pub async fn rename(
        &self,
        options: CallOptions<'_>,
        from: (&NfsFileHandle, &[u8]),
        to: (&NfsFileHandle, &[u8]),
    ) -> Result<(WccData, WccData), Error> {
        check(from.1)?;
        check(to.1)?;
        let arguments = |writer: &mut XdrWriter| arguments::rename(writer, from, to);
        self.call(options, from.0, ProcedureNumber::Rename, arguments, results::rename).await
    }

    /// LINK: `file` gets the name `name` in `directory`.
    ///
    /// # Errors
    /// [`Error`]
    pub async fn link(
        &self,
        options: CallOptions<'_>,
        file: &NfsFileHandle,
        directory: &NfsFileHandle,
        name: &[u8],
    ) -> Result<LinkReply, Error> {
        check(name)?;
        self.call(options, file, ProcedureNumber::Link, |to| arguments::link(to, file, directory, name), results::link)
            .await
    }

    /// READDIR: the page after the entry with `cookie`, or the first one for zero.
    ///
    /// # Errors
    /// [`Error`]
    pub async fn readdir(
        &self,
        options: CallOptions<'_>,
        directory: &NfsFileHandle,
        cookie: u64,
        verifier: [u8; 8],
    ) -> Result<DirectoryPage, Error> {
        let count = self.limits.listing;
        let arguments = |to: &mut XdrWriter| arguments::readdir(to, directory, cookie, verifier, count);
        self.call_for_data(options, directory, ProcedureNumber::Readdir, arguments, |from, reply| {
            DirectoryPage::read(from, false, |range| reply.slice(range))
        })
        .await
    }

    /// READDIRPLUS: as [`Self::readdir`], with attributes and handles.
    ///
    /// # Errors
    /// [`Error`]; [`NfsStatus::NOTSUPP`](v3::NfsStatus::NOTSUPP) from servers that have only READDIR.
    pub async fn readdirplus(
        &self,
        options: CallOptions<'_>,
        directory: &NfsFileHandle,
        cookie: u64,
        verifier: [u8; 8],
    ) -> Result<DirectoryPage, Error> {
        let count = self.limits.listing;
        // The limit for names and cookies alone is that of the page, because they are never more than the page.
        let arguments = |to: &mut XdrWriter| arguments::readdirplus(to, directory, cookie, verifier, count, count);
        self.call_for_data(options, directory, ProcedureNumber::Readdirplus, arguments, |from, reply| {
            DirectoryPage::read(from, true, |range| reply.slice(range))
        })
        .await
    }

    /// FSSTAT
    ///
    /// # Errors
    /// [`Error`]
    pub async fn fsstat(&self, options: CallOptions<'_>, file: &NfsFileHandle) -> Result<FsStat, Error> {
        self.call(options, file, ProcedureNumber::Fsstat, |to| file.write(to), results::fsstat).await
    }

    /// FSINFO
    ///
    /// # Errors
    /// [`Error`]
    pub async fn fsinfo(&self, options: CallOptions<'_>, file: &NfsFileHandle) -> Result<FsInfo, Error> {
        self.call(options, file, ProcedureNumber::Fsinfo, |to| file.write(to), results::fsinfo).await
    }

    /// PATHCONF
    ///
    /// # Errors
    /// [`Error`]
    pub async fn pathconf(&self, options: CallOptions<'_>, file: &NfsFileHandle) -> Result<PathConf, Error> {
        self.call(options, file, ProcedureNumber::Pathconf, |to| file.write(to), results::pathconf).await
    }

    /// COMMIT of a range. With a `count` of zero, the range goes to the end of the file.
    ///
    /// # Errors
    /// [`Error`]
    pub async fn commit(
        &self,
        options: CallOptions<'_>,
        file: &NfsFileHandle,
        offset: u64,
        count: u32,
    ) -> Result<CommitReply, Error> {
        self.call(
            options,
            file,
            ProcedureNumber::Commit,
            |to| arguments::commit(to, file, offset, count),
            results::commit,
        )
        .await
    }

    fn connection(&self, file: &NfsFileHandle) -> Rc<RpcConnection> {
        self.server.connection(file, self.connections)
    }

    async fn call<T>(
        &self,
        options: CallOptions<'_>,
        file: &NfsFileHandle,
        number: ProcedureNumber,
        arguments: impl Fn(&mut XdrWriter),
        results: impl FnOnce(&mut XdrReader<'_>) -> Result<T, Malformed>,
    ) -> Result<T, Error> {
        self.call_for_data(options, file, number, arguments, |from, _| results(from)).await
    }

    async fn call_for_data<T>(
        &self,
        options: CallOptions<'_>,
        file: &NfsFileHandle,
        number: ProcedureNumber,
        arguments: impl Fn(&mut XdrWriter),
        results: impl FnOnce(&mut XdrReader<'_>, &Reply) -> Result<T, Malformed>,
    ) -> Result<T, Error> {
        let call = RepeatableCall { options, number, arguments, payload: None };
        call.complete(&self.connection(file), self.policy, results).await
    }
}

fn check(name: &[u8]) -> Result<(), Error> {
    if name.len() > MAX_NAME { Err(Error::NameTooLong) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_names_no_largest_file_has_no_limit() {
        let info = |file_max| FsInfo {
            read_max: MAX_TRANSFER,
            write_max: MAX_TRANSFER,
            file_max,
            time_step: Time::default(),
            properties: 0,
            attributes: None,
        };
        for (file_max, expected) in [(0, u64::MAX), (1 << 40, 1 << 40)] {
            assert_eq!(Limits::new(&info(file_max), None, None).file, expected);
        }
    }
}
