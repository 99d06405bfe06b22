//! System calls that the filter allows only with some arguments: those marked with `*` in the lists.
//!
//! The kernel caches the result for calls without a condition. It runs the filter for each call with a condition. Frequent
//! requests need none of these.

use std::io;

use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq};
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

use crate::passthrough::IOCTLS;

/// All flags of clone(2) that make a namespace.
const NEW_NAMESPACES: libc::c_int = libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWUTS;

/// Commands for descriptors, seals and locks, without `F_SETOWN`, which makes the kernel send signals.
const FCNTLS: &[libc::c_int] = &[
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_SETLKW,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_OFD_SETLKW,
];

/// Names, the end of the keeper with its parent, and the calls of a session's thread at its start.
const PRCTLS: &[libc::c_int] =
    &[libc::PR_SET_NAME, libc::PR_SET_VMA, PR_GET_AUXV, libc::PR_SET_PDEATHSIG, libc::PR_SET_SECUREBITS];

/// Reads the auxiliary vector, once in each process (Linux 6.4).
const PR_GET_AUXV: libc::c_int = 0x4155_5856;

/// The rules for the arguments of the call `name`. The filter allows a call that matches one of them.
///
/// # Errors
/// When the call has no rule here.
pub fn of(name: &str) -> io::Result<Vec<SeccompRule>> {
    match name {
        // No new executable memory.
        "mmap" | "mprotect" => rules([vec![without(2, Dword, libc::PROT_EXEC)?]]),
        "clone" => rules([vec![without(0, Qword, NEW_NAMESPACES)?]]),
        // Only for reading. A server of projections has no other call to open a file, and only the `/proc` of processes in its
        // root.
        "openat" => rules([vec![without(2, Dword, libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC)?]]),
        "socketpair" => rules([vec![is(0, libc::AF_UNIX)?]]),
        "unshare" => rules([vec![is(0, libc::CLONE_FS)?]]),
        // Only of this process, and without a new limit.
        "prlimit64" => rules([vec![is(0, 0)?, condition(2, Qword, Eq, 0)?]]),
        "fcntl" => one_of(1, FCNTLS.iter().map(|command| command.cast_unsigned())),
        // A process may forbid dumps, and not allow them.
        "prctl" => {
            let mut allowed = one_of(0, PRCTLS.iter().map(|option| option.cast_unsigned()))?;
            allowed.extend(rules([vec![is(0, libc::PR_SET_DUMPABLE)?, condition(1, Qword, Eq, 0)?]])?);
            Ok(allowed)
        }
        // The kernel uses 32 bits of the request.
        "ioctl" => one_of(1, IOCTLS.iter().map(|request| *request as u32)),
        _ => Err(io::Error::other(format!("nothing is known of the arguments of {name}"))),
    }
}

fn rules(rules: impl IntoIterator<Item = Vec<SeccompCondition>>) -> io::Result<Vec<SeccompRule>> {
    rules.into_iter().map(|conditions| SeccompRule::new(conditions).map_err(io::Error::other)).collect()
}

fn one_of(argument: u8, values: impl Iterator<Item = u32>) -> io::Result<Vec<SeccompRule>> {
    let each = values.map(|value| Ok(vec![condition(argument, Dword, Eq, value.into())?]));
    rules(each.collect::<io::Result<Vec<_>>>()?)
}

fn is(argument: u8, value: libc::c_int) -> io::Result<SeccompCondition> {
    condition(argument, Dword, Eq, value.cast_unsigned().into())
}

fn without(argument: u8, length: SeccompCmpArgLen, flags: libc::c_int) -> io::Result<SeccompCondition> {
    condition(argument, length, MaskedEq(flags.cast_unsigned().into()), 0)
}

fn condition(
    argument: u8,
    length: SeccompCmpArgLen,
    operator: SeccompCmpOp,
    value: u64,
) -> io::Result<SeccompCondition> {
    SeccompCondition::new(argument, length, operator, value).map_err(io::Error::other)
}
