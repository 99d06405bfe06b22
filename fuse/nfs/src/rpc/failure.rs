//! Why a call has no results.

use rustix::io::Errno;

use crate::xdr::Malformed;

/// Why a call has no results. The caller names the server.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RpcError {
    /// The server did not answer within the time of the call; the mount is `soft`.
    #[error("the server does not answer")]
    NoAnswer,
    /// The server did not answer within the time of the call; the mount is `softerr`.
    #[error("the server does not answer in time")]
    NoAnswerInTime,
    /// The server does not accept the credentials of the call.
    #[error("the server refuses the caller: {0}")]
    Denied(Denial),
    /// The server does not speak version 2 of RPC.
    #[error("the server speaks another version of RPC")]
    OtherRpc,
    /// Another service listens on the port.
    #[error("the server has no such service on this port")]
    ProgramUnavailable,
    /// The server has only other versions of the service.
    #[error("the server has the versions {lowest} to {highest} of this service only")]
    VersionUnsupported {
        /// The oldest version it has.
        lowest: u32,
        /// The newest version it has.
        highest: u32,
    },
    /// The service lacks the procedure.
    #[error("the server does not know this call")]
    ProcedureUnavailable,
    /// The server cannot read the arguments.
    #[error("the server does not understand the call")]
    GarbageArguments,
    /// The server lacks memory or another resource.
    #[error("the server has an error of its own")]
    SystemError,
    /// The results do not follow the protocol.
    #[error("the server's answer cannot be understood: {0}")]
    Malformed(#[from] Malformed),
}

/// Why the server rejects the credentials of a call.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Denial {
    /// The server rejects the credential.
    #[error("it accepts no such credentials")]
    Credential,
    /// The server rejects the verifier.
    #[error("it accepts no such verifier")]
    Verifier,
    /// The server requires Kerberos, or a reserved port.
    #[error("it requires stronger credentials than AUTH_SYS, or a reserved port")]
    TooWeak,
    /// Anything else.
    #[error("its reason is unknown to podfs")]
    Other,
}

impl RpcError {
    /// The errno that a program gets.
    pub fn errno(self) -> Errno {
        match self {
            Self::NoAnswer | Self::GarbageArguments | Self::SystemError | Self::Malformed(_) => Errno::IO,
            Self::NoAnswerInTime => Errno::TIMEDOUT,
            Self::Denied(_) => Errno::ACCESS,
            Self::OtherRpc | Self::ProgramUnavailable | Self::VersionUnsupported { .. } => Errno::PROTONOSUPPORT,
            Self::ProcedureUnavailable => Errno::OPNOTSUPP,
        }
    }
}
