//! Why the options of an NFS volume cannot be honoured.

/// The first option of a volume that podfs does not know or cannot honour, or two that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NfsOptionsError {
    /// A refused option.
    #[error("mount option {word:?} {problem}")]
    Option {
        /// The option, as in the volume.
        word: String,
        /// The problem.
        problem: OptionProblem,
    },
    /// Two options that contradict each other.
    #[error("mount options {one:?} and {other:?} contradict each other; keep one of them")]
    Contradiction {
        /// The first.
        one: String,
        /// The second.
        other: String,
    },
}

/// Why one mount option is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionProblem {
    /// No client has it.
    #[error("is not known to podfs; remove it, or correct it")]
    Unknown,
    /// A quotation mark without a second one.
    #[error("has a quote without an end; correct it")]
    OpenQuote,
    /// A transport other than TCP, such as UDP or RDMA.
    #[error("asks for another transport than TCP, which podfs does not speak")]
    Transport,
    /// A version of NFS that no client has.
    #[error("asks for a version that podfs does not know; it knows 3, 4, 4.0, 4.1 and 4.2")]
    Version,
    /// A version of the mount protocol that goes with NFS 2.
    #[error("is not served: NFS 3 goes with version 3 of the mount protocol")]
    MountVersion,
    /// `sec=` without a value.
    #[error("names no flavour")]
    NoFlavour,
    /// An address of the server; podfs looks it up by itself.
    #[error("is podfs's own; name the server in the volume")]
    Address,
    /// A value out of its range.
    #[error("must be a number from {least} to {most}")]
    Range {
        /// The least that is allowed.
        least: u32,
        /// The most that is allowed.
        most: u32,
    },
    /// A value that the option does not have.
    #[error("must be {0}")]
    Value(&'static str),
}

/// Why no client can serve a volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// The volume names podfs's client, and an option needs the kernel's.
    #[error("{option} needs the kernel's NFS client, and the volume asks for podfs's own; remove one of the two")]
    NeedsOtherThanAskedFor {
        /// The option.
        option: String,
    },
    /// The volume names the kernel's client, and the kernel has none.
    #[error(
        "the volume asks for the kernel's NFS client, and this kernel has none; load the module nfs, or let podfs choose"
    )]
    AskedForAbsent,
    /// An option needs the kernel's client, and the kernel has none.
    #[error("{option} needs the kernel's NFS client, and this kernel has none; load the module nfs")]
    NeedsAbsent {
        /// The option.
        option: String,
    },
}
