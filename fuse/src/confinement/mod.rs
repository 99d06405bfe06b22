//! Confinement: the rights that a server gives up before it answers its first request.
//!
//! A hostile container can reach the server through the kernel, and no other process of podfs. So an attacker that takes the server
//! over should find nothing there: no file, no network, no other process, no privilege. The rights that remain depend on the
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
//! Open descriptors stay open: the server reaches nothing but the descriptors that it was given. A directory of the host is given
//! as a clone that `..` does not lead out of ([`enclosed`](crate::mount::enclosed)); file handles lead to the rest of its file
//! system. There the confinement keeps the host's processes, devices and network away.
//!
//! The order matters:
//!
//! 1. Limits are raised while there is `CAP_SYS_RESOURCE`: memory can be locked, and threads be started, without
//!    privilege afterwards. Where they cannot be raised, `CAP_IPC_LOCK` stays: without it an allocation would fail.
//! 2. Namespaces, while there is `CAP_SYS_ADMIN`.
//! 3. `SECBIT_NO_SETUID_FIXUP`, so that capabilities do not depend on uids; then the bounding set, while there is
//!    `CAP_SETPCAP`; groups, gid and uid, while there are `CAP_SETGID` and `CAP_SETUID`; then all other capabilities.
//! 4. A change of uid makes a process dumpable as the system has it by default, so this is set again.
//! 5. The filter of system calls comes last: nothing above is on its list.
//!
//! All of it is done by a single thread, before there are others, which inherit it.
//!
//! If the kernel refuses a step, podfs logs that and continues: a server that is confined less is better than none.
//!
//! | module | owns |
//! |---|---|
//! | [`root`] | the namespaces and the empty root |
//! | [`privileges`] | limits, uid and capabilities |
//! | `reach` | the processes that the server can signal |
//! | `filter` | the list of system calls, made into a filter |
//! | `arguments` | the arguments that some calls are restricted to |
//! | [`refusal`] | the error of a call that is not on the list |

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

use crate::log::Lines;

/// The rights that a server needs. Each profile includes the rights of those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Profile {
    /// Projections only.
    Projection,
    /// Projections only, some of them with an access log that names the opening process.
    Audit,
    /// Directories of the host, and perhaps projections too.
    Passthrough,
    /// The same, and requests may come over io_uring.
    Rings,
}

impl Profile {
    /// As in the server's arguments.
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

/// How far a process is confined.
#[derive(Debug)]
pub struct Confined {
    /// The profile of the server.
    pub profile: Profile,
    /// The capabilities that it still has.
    pub capabilities: CapabilitySet,
    /// The restrictions that the kernel refused.
    pub missing: Vec<MissingProtection>,
}

/// A part of the confinement that could not be had.
#[derive(Debug)]
pub struct MissingProtection {
    /// The part.
    pub what: &'static str,
    /// The kernel's error.
    pub cause: io::Error,
}

/// Confines this process, and logs in one line what could not be had. `lines` is how calls that are refused later are
/// logged. To be called once, before any thread is started; there is no way back.
pub fn confine(profile: Profile, lines: Lines) -> Confined {
    let mut confined = Confined { profile, capabilities: CapabilitySet::empty(), missing: Vec::new() };
    privileges::raise_limits();
    confined.had("a network of its own", root::leave_network());
    confined.had("an empty root directory", root::leave_files(profile != Profile::Projection));
    confined.had("capabilities that do not depend on uids", privileges::fix_capabilities());
    if profile < Profile::Passthrough {
        confined.had("a uid of its own", privileges::give_up_root());
    }
    confined.had("no more capabilities than it needs", privileges::give_up_capabilities(profile));
    confined.capabilities = capabilities(None).map_or(CapabilitySet::all(), |own| own.permitted);
    confined.had("no core dumps", set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(io::Error::from));
    confined.had("no new privileges", set_no_new_privs(true).map_err(io::Error::from));
    confined.had("no signals to others", reach::keep_to_itself());
    confined.had("a list of system calls", refusal::tell(lines).and_then(|()| filter::install(profile)));
    confined.log();
    confined
}

impl Confined {
    fn had(&mut self, what: &'static str, step: io::Result<()>) {
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

impl Display for Confined {
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
        let mut confined = Confined { profile: Profile::Projection, capabilities, missing: Vec::new() };
        assert_eq!(confined.to_string(), "the server is confined, with the capabilities CHOWN MKNOD");
        confined.had("a network of its own", Err(io::Error::from_raw_os_error(libc::EPERM)));
        confined.had("an empty root directory", Err(io::Error::other("no room")));
        let told = "the server is confined, with the capabilities CHOWN MKNOD, but without a network of its own (Operation not permitted (os error 1)), \
                    an empty root directory (no room)";
        assert_eq!(confined.to_string(), told);
    }
}
