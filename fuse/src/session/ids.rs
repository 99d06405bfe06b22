//! Numbers that the kernel and a file system agree on, each with a type of its own. In memory and in messages each is its
//! 64 bits.

use std::fmt;

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Declares a number with a meaning of its own.
macro_rules! id {
    ($(#[$meta:meta])* pub struct $name:ident;) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, FromBytes, IntoBytes, KnownLayout,
            Immutable, Serialize, Deserialize,
        )]
        #[repr(transparent)]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(to)
            }
        }
    };
}

id! {
    /// A node: a file or directory that the kernel knows. In a projection it is the inode number, too.
    pub struct NodeId;
}

id! {
    /// An open file or directory: what the server answered to OPEN, OPENDIR or CREATE (`fh` in the kernel's structs).
    pub struct HandleId;
}

id! {
    /// An owner of locks. The kernel makes the number: of a process for `fcntl(2)`, of an open file for `flock(2)`.
    pub struct LockOwner;
}

impl NodeId {
    /// The root of a FUSE connection.
    pub const ROOT: Self = Self(1);
    /// In an answer to LOOKUP: the name is absent, and the kernel may remember that.
    pub const ABSENT: Self = Self(0);
}

impl HandleId {
    /// The handle of a file or directory that the kernel opens by itself after the server answered OPEN or OPENDIR with `ENOSYS`.
    pub const UNOPENED: Self = Self(0);
}
