//! The setuid and setgid bits and the capabilities of files: when a file loses them, as on other file systems. The server has all
//! capabilities, so the source would keep the bits.

use std::ffi::CStr;
use std::os::fd::BorrowedFd;

use rustix::fs::{FileType, Mode, OFlags, Statx, chmod, removexattr};
use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use super::super::attributes::attributes_of;
use super::super::descriptor::proc_path;
use super::super::node::Node;
use super::look::CAPABILITY;
use crate::caller::privileges::{has_capability, has_namespace_of_server, is_in_group, is_user};
use crate::session::Caller;

const SETUID: u32 = 0o4000;
pub(super) const SETGID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;

/// Removes setuid and setgid from a file, because a caller without `CAP_FSETID` changes its content; the kernel decides that.
pub(super) fn take_privileges(file: BorrowedFd<'_>, caller: Caller) -> Result<(), Errno> {
    let found = attributes_of(file)?;
    match privileges_taken(&found, caller) {
        0 => Ok(()),
        taken => chmod(proc_path(file), Mode::from_raw_mode(u32::from(found.stx_mode) & 0o7777 & !taken)),
    }
}

/// Removes the capabilities of a file.
pub(super) fn take_capabilities(file: BorrowedFd<'_>) -> Result<(), Errno> {
    match removexattr(proc_path(file), CAPABILITY) {
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
        removed => removed,
    }
}

/// Whether the SETATTR that follows a REMOVEXATTR of this attribute removes it, if the call succeeds. The kernel lets only callers with
/// `CAP_SETFCAP` remove the capabilities of a file; for others, it sends the request by itself at the start of a chown(2), truncate(2) or
/// write(2), before the server can refuse the call.
pub(super) fn is_left_to_setattr(name: &CStr, caller: Caller) -> bool {
    name == CAPABILITY && has_namespace_of_server(caller) && !has_capability(caller, CapabilitySet::SETFCAP)
}

/// Whether a process that may keep the bits of any file is about to write to `node`: then a SETATTR that changes nothing comes because
/// the file has capabilities.
pub(super) fn is_written_by_privileged(node: &Node, caller: Caller) -> bool {
    is_written(node) && has_capability(caller, CapabilitySet::FSETID)
}

/// Removes setuid and setgid before chown(2) of a file with setgid and without group execute. The source would keep setgid, because
/// podfs has `CAP_FSETID`. If the group may execute the file, the source removes both bits.
pub(super) fn take_setgid_of_group(file: BorrowedFd<'_>, caller: Caller) -> Result<(), Errno> {
    let found = attributes_of(file)?;
    let mode = u32::from(found.stx_mode) & 0o7777;
    let concerns = mode & SETGID != 0 && mode & GROUP_EXECUTE == 0;
    if !concerns || !has_namespace_of_server(caller) || privileges_taken(&found, caller) & SETGID == 0 {
        return Ok(());
    }
    chmod(proc_path(file), Mode::from_raw_mode(mode & !(SETUID | SETGID)))
}

/// The bits of a file's mode that it loses when the caller changes it: setuid and setgid. Without group execute, setgid has no
/// effect on a program: it stays if the caller is in the file's group or has `CAP_FSETID` (`setattr_should_drop_sgid` of the kernel).
/// A directory keeps both.
fn privileges_taken(found: &Statx, caller: Caller) -> u32 {
    let mode = u32::from(found.stx_mode);
    if FileType::from_raw_mode(mode) == FileType::Directory {
        return 0;
    }
    let setgid_stays = || is_in_group(caller, found.stx_gid) || has_capability(caller, CapabilitySet::FSETID);
    let keeps = mode & SETGID != 0 && mode & GROUP_EXECUTE == 0 && setgid_stays();
    mode & if keeps { SETUID } else { SETUID | SETGID }
}

/// Refuses a chown(2) without ids of a caller who is not the owner, if the file would lose setuid or setgid (`setattr_prepare` of the
/// kernel). podfs cannot compare the ids of a caller in another user namespace, and refuses nothing there.
pub(super) fn check_changes_nothing(file: BorrowedFd<'_>, caller: Caller) -> Result<(), Errno> {
    let found = attributes_of(file)?;
    let may_change = || {
        is_user(caller, found.stx_uid)
            || has_capability(caller, CapabilitySet::FOWNER)
            || !has_namespace_of_server(caller)
    };
    if privileges_taken(&found, caller) == 0 || may_change() { Ok(()) } else { Err(Errno::PERM) }
}

/// Whether a process has the file open for writing.
pub(super) fn is_written(node: &Node) -> bool {
    node.open().as_deref().is_some_and(|open| open.files.iter().any(|file| file.access() != OFlags::RDONLY))
}
