//! Whether a call had its effect.
//!
//! The NFS server answers a repeated call from memory. If it was killed in between, that memory is gone: then it answers that the
//! name exists already, or no longer exists, and that may be the effect of the call itself. The same holds for a server that has
//! not noticed the end of the previous connection. So podfs examines the outcome:
//!
//! | call | done if |
//! |---|---|
//! | MKDIR, SYMLINK, MKNOD | the name leads to such a file, with the same target and device, made since then |
//! | LINK | the name leads to the same file |
//! | REMOVE, RMDIR | there is no such name |
//! | RENAME | the old name is gone, and the new one leads to the file that had it |
//!
//! CREATE is exact, as far as the server is: the server stores the verifier of the call with the file that it made. Some servers
//! make the file first and store the verifier then, and may be killed in between. So in doubt podfs takes an empty file for its own
//! if it was created after this call was first sent, and is unchanged since. podfs takes no other file for its own, because the
//! kernel locks a directory from before the request until the answer, so no process changes the name in between through this
//! mount, and the kernel had looked the name up before. Like Linux' own client, podfs mistakes the same change by another client
//! at this moment for its own.

use podfs_nfs::error::Error;
use podfs_nfs::export::CallOptions;
use podfs_nfs::rpc::Credential;
use podfs_nfs::v3::{Attributes, Creation, FileType, NfsFileHandle, NfsStatus};
use rustix::fs::Timespec;
use rustix::io::Errno;
use tokio::time::sleep;

use super::NfsFilesystem;
use super::nfs_request::{NonIdempotentOutcome, PAUSE};
use crate::nfs::client_state::node::NfsNode;

/// By how much the clocks of servers may be behind, in seconds.
const SLACK: i64 = 120;

/// The file that a call was to make.
pub struct WantedFile<'a> {
    /// Its file type.
    pub kind: FileType,
    /// The target of a symbolic link.
    pub target: Option<&'a [u8]>,
    /// The major and minor number of a device.
    pub device: Option<(u32, u32)>,
}

impl NfsFilesystem {
    /// The file that a call has made: from its answer, or, in doubt, from the server.
    pub(super) async fn made<T>(
        &self,
        once: NonIdempotentOutcome<T>,
        directory: &NfsNode,
        name: &[u8],
        wanted: WantedFile<'_>,
        credential: &Credential,
    ) -> Result<Result<T, (NfsFileHandle, Attributes)>, Errno> {
        let error = match once.outcome {
            Ok(made) => return Ok(Ok(made)),
            Err(error) => error,
        };
        if !once.doubtful || !may_be_own_effect(&error, NfsStatus::EXIST) {
            return Err(error.errno());
        }
        let existing = self.examine_name(directory, name, credential).await?;
        let (handle, found) = existing.filter(|(_, found)| fits(found, &wanted, once.at)).ok_or(Errno::EXIST)?;
        if let Some(target) = wanted.target {
            let link =
                self.export.readlink(CallOptions::new(credential), &handle).await.map_err(|error| error.errno())?;
            if *link.target != *target {
                return Err(Errno::EXIST);
            }
        }
        Ok(Err((handle, found)))
    }

    /// The file of an exclusive CREATE, if the server was killed before it had stored the verifier, or is just storing it for the
    /// same call on another connection.
    pub(super) async fn half_made<T>(
        &self,
        once: &NonIdempotentOutcome<T>,
        directory: &NfsNode,
        name: &[u8],
        creation: &Creation,
        credential: &Credential,
    ) -> Result<Option<NfsFileHandle>, Errno> {
        let is_doubtful = |error: &Error| once.doubtful && may_be_own_effect(error, NfsStatus::EXIST);
        if !once.outcome.as_ref().is_err_and(is_doubtful) {
            return Ok(None);
        }
        // The server knows the call by its verifier, however often podfs makes it.
        sleep(PAUSE).await;
        let again = self.export.create(CallOptions::new(credential), &directory.handle(), name, creation).await;
        let untouched = |found: &Attributes| {
            let wanted_file = WantedFile { kind: FileType::File, target: None, device: None };
            let is_new =
                found.size == 0 && found.links == 1 && found.mtime == found.ctime && found.atime == found.ctime;
            again.is_ok() || (is_new && fits(found, &wanted_file, once.at))
        };
        Ok(self
            .examine_name(directory, name, credential)
            .await?
            .filter(|(_, found)| untouched(found))
            .map(|(handle, _)| handle))
    }

    /// The outcome of a call that removes a name.
    pub(super) async fn removed<T>(
        &self,
        once: NonIdempotentOutcome<T>,
        directory: &NfsNode,
        name: &[u8],
        credential: &Credential,
    ) -> Result<Option<T>, Errno> {
        let error = match once.outcome {
            Ok(result) => return Ok(Some(result)),
            Err(error) => error,
        };
        if once.doubtful && may_be_own_effect(&error, NfsStatus::NOENT) {
            let existing = self.examine_name(directory, name, credential).await?;
            if existing.is_none() {
                return Ok(None);
            }
        }
        Err(error.errno())
    }

    /// The outcome of a call that gives `file` the name `name` in a directory. An error `sign` may be the effect of the call
    /// itself.
    pub(super) async fn named<T>(
        &self,
        once: NonIdempotentOutcome<T>,
        sign: NfsStatus,
        file: Option<&NfsNode>,
        (directory, name): (&NfsNode, &[u8]),
        credential: &Credential,
    ) -> Result<Option<T>, Error> {
        let error = match once.outcome {
            Ok(result) => return Ok(Some(result)),
            Err(error) => error,
        };
        if !once.doubtful || !may_be_own_effect(&error, sign) {
            return Err(error);
        }
        let existing = self.examine_name(directory, name, credential).await.ok().flatten();
        let is_same = |(handle, found): (NfsFileHandle, Attributes)| {
            file.is_none_or(|file| file.handle() == handle || file.fileid == found.fileid)
        };
        if existing.is_some_and(is_same) { Ok(None) } else { Err(error) }
    }
}

/// Whether an error may be the effect of the call itself. A server that executes the same call twice at the same time, for two
/// connections, may find the file and then lose it.
fn may_be_own_effect(error: &Error, sign: NfsStatus) -> bool {
    error.status().is_some_and(|status| status == sign || status == NfsStatus::STALE)
}

fn fits(found: &Attributes, wanted: &WantedFile<'_>, at: Timespec) -> bool {
    let since = i64::from(found.ctime.seconds) + SLACK >= at.tv_sec;
    found.kind == wanted.kind && since && wanted.device.is_none_or(|device| device == found.device)
}
