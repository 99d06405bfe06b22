//! The processes that a server can signal: itself and its children (`landlock(7)`, Linux 6.12).
//!
//! A server with its own uid cannot signal others anyway. A server that is root could signal all processes of root.

use std::io;

use landlock::{Ruleset, RulesetAttr, RulesetError, Scope};

/// Restricts this process: it can signal only itself and its later children, and cannot connect to abstract sockets of other
/// processes. An older kernel ignores these restrictions. This does not restrict files and the network.
///
/// # Errors
/// When the kernel knows the restrictions and refuses them.
pub fn restrict_signals() -> io::Result<()> {
    let restrict = || -> Result<_, RulesetError> {
        Ruleset::default().scope(Scope::Signal | Scope::AbstractUnixSocket)?.create()?.restrict_self()
    };
    restrict().map(drop).map_err(io::Error::other)
}
