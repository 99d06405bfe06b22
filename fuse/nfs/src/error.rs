//! Why a call to an export failed.

use rustix::io::Errno;

use crate::rpc::RpcError;
use crate::v3::NfsStatus;

/// Why a call to an export failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Error {
    /// The call has no results. The server has not executed it, or the client does not know whether it has.
    #[error(transparent)]
    RpcError(#[from] RpcError),
    /// The server answers with an error.
    #[error("the server answers {} (nfsstat3 {})", .status.errno(), .status.0)]
    Refused {
        /// The server's status.
        status: NfsStatus,
        /// The client sent the call more than once. If the server does not remember its first answer, `EXIST` or `NOENT` may
        /// be the effect of the first execution.
        retransmitted: bool,
    },
    /// The name is longer than any server accepts.
    #[error("the name is too long")]
    NameTooLong,
}

impl Error {
    /// The errno for the caller.
    pub fn errno(&self) -> Errno {
        match self {
            Self::RpcError(failure) => failure.errno(),
            Self::Refused { status, .. } => status.errno(),
            Self::NameTooLong => Errno::NAMETOOLONG,
        }
    }

    /// The server's status, if the server answered.
    pub fn status(&self) -> Option<NfsStatus> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            Self::RpcError(_) | Self::NameTooLong => None,
        }
    }

    /// Whether the client sent the call more than once, so that its first execution may be the reason for the server's error.
    pub fn is_retransmitted(&self) -> bool {
        matches!(self, Self::Refused { retransmitted: true, .. })
    }
}
