//! Which processes signals reach: itself and its children (`landlock(7)`, Linux 6.12).
//!
//! A server with a uid of its own can signal no others anyway. A server that is root could signal all processes of root.

use std::io;

/// `struct landlock_ruleset_attr` of `linux/landlock.h`. Only the last field is used, so files and the network are left
/// to what else confines the process.
#[repr(C)]
struct Ruleset {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

/// `LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET`
const SCOPE_ABSTRACT_UNIX_SOCKET: u64 = 1 << 0;
/// `LANDLOCK_SCOPE_SIGNAL`
const SCOPE_SIGNAL: u64 = 1 << 1;

/// No signal from this process reaches another that is not its child. A kernel that does not know this is left alone.
///
/// # Errors
/// When the kernel refuses what it knows.
pub fn keep_to_itself() -> io::Result<()> {
    let scoped = SCOPE_SIGNAL | SCOPE_ABSTRACT_UNIX_SOCKET;
    let ruleset = Ruleset { handled_access_fs: 0, handled_access_net: 0, scoped };
    // SAFETY: the struct outlives the call, and its size is given.
    let made =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const ruleset, size_of::<Ruleset>(), 0_u32) };
    if made < 0 {
        let error = io::Error::last_os_error();
        // No Landlock; not at work; or none that knows the last field.
        let unknown = [libc::ENOSYS, libc::EOPNOTSUPP, libc::E2BIG].map(Some).contains(&error.raw_os_error());
        return if unknown { Ok(()) } else { Err(error) };
    }
    // SAFETY: the call takes numbers only.
    let outcome = match unsafe { libc::syscall(libc::SYS_landlock_restrict_self, made, 0_u32) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: the descriptor was made above, and no other code has it.
    unsafe { libc::syscall(libc::SYS_close, made) };
    outcome
}
