//! Confinement: the rights that a server gives up before it answers its first request.
//!
//! A hostile container can reach the server through the kernel, and no other process of podfs. So an attacker that takes over
//! the server should reach nothing: no file, no network, no other process, no privilege. The rights that remain depend on the
//! server's [`Profile`].
//!
//! | | projections only | with directories of the host |
//! |---|---|---|
//! | uid, gid | its own, which no other process has | 0 |
//! | capabilities | none | those in [`privileges`], each with its reason |
//! | network | an empty namespace | an empty namespace |
//! | root directory | empty, read-only; if one is audited, as on the right | the same, with `/proc`, which shows processes only |
//! | system calls | `calls/common.calls`; if one is audited, `calls/audit.calls` | `calls/common.calls` and `calls/passthrough.calls`; if requests may come over io_uring, `calls/rings.calls` |
//! | signals | to itself and its children | as on the left (Linux 6.12) |
//! | programs | none: no `execve`, no memory that is executable and new | as on the left |
//! | core dumps, `ptrace` by others | no | no |
//!
//! The server reaches only the descriptors that it gets. It gets a directory of the host as a clone, and `..` does not lead out of
//! it ([`enclosed`](crate::mount::enclosed)). By file handles, the server can still reach the rest of the directory's file system.
//! Even then, the confinement protects the host's processes, devices and network.
//!
//! The order matters:
//!
//! 1. Limits, while there is `CAP_SYS_RESOURCE`: afterwards, the server needs no privilege to lock memory and start threads. If
//!    it cannot raise them, `CAP_IPC_LOCK` stays, because allocations would fail without it.
//! 2. Namespaces, while there is `CAP_SYS_ADMIN`.
//! 3. `SECBIT_NO_SETUID_FIXUP`, so that capabilities do not depend on uids; then the bounding set, while there is
//!    `CAP_SETPCAP`; groups, gid and uid, while there are `CAP_SETGID` and `CAP_SETUID`; then all other capabilities.
//! 4. A change of uid resets whether the process is dumpable (`/proc/sys/fs/suid_dumpable`), so the server sets it again.
//! 5. The filter of system calls, last: it does not allow the calls above.
//!
//! The first thread does all this before it starts other threads, which inherit the confinement.
//!
//! If the kernel refuses a step, podfs logs that and continues: a less confined server is better than none.
//!
//! | module | owns |
//! |---|---|
//! | [`root`] | the namespaces and the empty root |
//! | [`privileges`] | limits, uid and capabilities |
//! | `reach` | the processes that the server can signal |
//! | `filter` | the filters of system calls |
//! | `arguments` | the allowed arguments of some calls |
//! | [`refusal`] | the error of calls that are not listed |

mod arguments;
mod filter;
pub mod privileges;
mod reach;
pub mod refusal;
pub mod root;

use std::fmt::{self, Display, Formatter};
use std::io;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, capabilities, set_no_new_privs};
use tracing::{debug, warn};

use crate::log::LineFormat;

/// The rights that a server needs. Each profile includes the rights of those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Profile {
    /// Projections only.
    Projection,
    /// Projections only, some of them with an access log that names the opening process.
    Audit,
    /// Directories of the host, and perhaps projections.
    Passthrough,
    /// The same, with requests over io_uring.
    Rings,
}

impl Profile {
    /// The word in the server's arguments.
    pub fn name(self) -> &'static str {
        match self {
            Self::Projection => "projection",
            Self::Audit => "audit",
            Self::Passthrough => "passthrough",
            Self::Rings => "passthrough-io-uring",
        }
    }

    /// The profile of this name.
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::Projection, Self::Audit, Self::Passthrough, Self::Rings];
        all.into_iter().find(|profile| profile.name() == name)
    }
}

/// The confinement of a process.
#[derive(Debug)]
pub struct Confinement {
    /// The profile of the server.
    pub profile: Profile,
    /// The capabilities that it still has.
    pub capabilities: CapabilitySet,
    /// The restrictions that the kernel refused.
    pub missing: Vec<MissingProtection>,
}

/// A part of the confinement that the kernel refused.
#[derive(Debug)]
pub struct MissingProtection {
    /// The part.
    pub what: &'static str,
    /// The kernel's error.
    pub cause: io::Error,
}

/// Confines this process for ever, and logs the missing parts in one line. `lines` is the format in which the server logs calls
/// that the filter refuses later. Call it once, before the process starts a thread.
pub fn confine(profile: Profile, lines: LineFormat) -> Confinement {
    let mut confined = Confinement { profile, capabilities: CapabilitySet::empty(), missing: Vec::new() };
    privileges::raise_limits();
    confined.note("a network of its own", root::leave_network());
    confined.note("an empty root directory", root::leave_files(profile != Profile::Projection));
    confined.note("capabilities that do not depend on uids", privileges::fix_capabilities());
    if profile < Profile::Passthrough {
        confined.note("a uid of its own", privileges::give_up_root());
    }
    confined.note("no more capabilities than it needs", privileges::give_up_capabilities(profile));
    confined.capabilities = capabilities(None).map_or(CapabilitySet::all(), |own| own.permitted);
    confined.note("no core dumps", set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(io::Error::from));
    confined.note("no new privileges", set_no_new_privs(true).map_err(io::Error::from));
    confined.note("no signals to others", reach::restrict_signals());
    confined.note("a list of system calls", refusal::install(lines).and_then(|()| filter::install(profile)));
    confined.log();
    confined
}

impl Confinement {
    fn note(&mut self, what: &'static str, step: io::Result<()>) {
        if let Err(cause) = step {
            self.missing.push(MissingProtection { what, cause });
        }
    }

    fn log(&self) {
        if self.missing.is_empty() {
            debug!("{self}");
        } else {
            warn!("{self}; podfs continues. Run it as root with all capabilities to have the rest");
        }
    }
}

impl Display for Confinement {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        write!(to, "the server is confined, with ")?;
        match self.capabilities {
            none if none.is_empty() => write!(to, "no capability")?,
            some => {
                let names: Vec<_> = some.iter_names().map(|(name, _)| name).collect();
                write!(to, "the capabilities {}", names.join(" "))?;
            }
        }
        for (place, MissingProtection { what, cause }) in self.missing.iter().enumerate() {
            write!(to, "{} {what} ({cause})", if place == 0 { ", but without" } else { "," })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_restrictions_are_one_sentence() {
        let capabilities = CapabilitySet::CHOWN | CapabilitySet::MKNOD;
        let mut confined = Confinement { profile: Profile::Projection, capabilities, missing: Vec::new() };
        assert_eq!(confined.to_string(), "the server is confined, with the capabilities CHOWN MKNOD");
        confined.note("a network of its own", Err(io::Error::from_raw_os_error(libc::EPERM)));
        confined.note("an empty root directory", Err(io::Error::other("no room")));
        let sentence = "the server is confined, with the capabilities CHOWN MKNOD, but without a network of its own (Operation not permitted (os error 1)), \
                    an empty root directory (no room)";
        assert_eq!(confined.to_string(), sentence);
    }
}
