//! The processes that a server can signal: itself and its children (`landlock(7)`, Linux 6.12).
//!
//! A server with a uid of its own can signal no others anyway. A server that is root could signal all processes of root.

use std::io;

use landlock::{Ruleset, RulesetAttr, RulesetError, Scope};

/// From now on, no signal from this process reaches a process that is not its child, and it connects to no abstract socket of
/// another process. A kernel that does not know these restrictions goes on without them. Files and the network are left to what
/// else confines the process.
///
/// # Errors
/// When the kernel refuses what it knows.
pub fn keep_to_itself() -> io::Result<()> {
    let restrict = || -> Result<_, RulesetError> {
        Ruleset::default().scope(Scope::Signal | Scope::AbstractUnixSocket)?.create()?.restrict_self()
    };
    restrict().map(drop).map_err(io::Error::other)
}
