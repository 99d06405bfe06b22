//! The credential of a call: the user and groups that it is made with.

use crate::xdr::XdrWriter;

/// Most supplementary groups of AUTH_SYS; a server refuses more.
pub const MAX_GROUPS: usize = 16;
/// The name of this machine in credentials. Servers decide nothing by it. It is constant, because a successor must
/// repeat a call with the same bytes.
const MACHINE: &[u8] = b"podfs";

const AUTH_NONE: u32 = 0;
const AUTH_SYS: u32 = 1;

/// The user and groups that a call is made with.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum Credential {
    /// No user (AUTH_NONE).
    #[default]
    Anonymous,
    /// A user of this machine (AUTH_SYS).
    User {
        /// The user's id.
        uid: u32,
        /// The id of the user's first group.
        gid: u32,
        /// The ids of other groups. The first [`MAX_GROUPS`] are sent.
        groups: Vec<u32>,
    },
}

impl Credential {
    /// The superuser, which most servers map to the user `nobody`.
    pub fn root() -> Self {
        Self::User { uid: 0, gid: 0, groups: Vec::new() }
    }

    /// The number of this kind in the list of kinds that a server accepts.
    pub fn flavor(&self) -> u32 {
        match self {
            Self::Anonymous => AUTH_NONE,
            Self::User { .. } => AUTH_SYS,
        }
    }

    /// Writes the credential and verifier of a call.
    pub(super) fn write(&self, writer: &mut XdrWriter) {
        writer.u32(self.flavor());
        match self {
            Self::Anonymous => {
                writer.length(0);
            }
            Self::User { uid, gid, groups } => {
                let groups = &groups[..groups.len().min(MAX_GROUPS)];
                let machine = MACHINE.len() + crate::xdr::padding(MACHINE.len());
                writer.length(4 * (5 + groups.len()) + machine);
                // The stamp is arbitrary. It is constant, because a repeated call must have the same bytes.
                writer.u32(0).opaque(MACHINE).u32(*uid).u32(*gid).length(groups.len());
                for group in groups {
                    writer.u32(*group);
                }
            }
        }
        writer.u32(AUTH_NONE).length(0);
    }
}
