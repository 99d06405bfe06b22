//! Makes filters for seccomp(2) from the lists of system calls. The kernel runs them at each call.
//!
//! There are two filters: one answers absent calls with `ENOSYS`, and the other refuses all calls that are not listed. The
//! kernel uses the stricter result.

use std::collections::BTreeMap;
use std::io;
use std::str::FromStr;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule, TargetArch, apply_filter_all_threads};
use syscalls::Sysno;

use super::{Profile, arguments};

const COMMON: &str = include_str!("calls/common.calls");
const AUDIT: &str = include_str!("calls/audit.calls");
const PASSTHROUGH: &str = include_str!("calls/passthrough.calls");
const RINGS: &str = include_str!("calls/rings.calls");
const ABSENT: &str = include_str!("calls/absent.calls");

/// Restricts this process, its threads and its children to the calls of `profile`, for ever.
///
/// # Errors
/// When the kernel has no seccomp filters.
pub fn install(profile: Profile) -> io::Result<()> {
    let refuse_absent = compile(rules([ABSENT])?, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?;
    // Absent calls are on the list, too, so that the server does not log them.
    let listed: &[&str] = match profile {
        Profile::Projection => &[ABSENT, COMMON],
        Profile::Audit => &[ABSENT, COMMON, AUDIT],
        Profile::Passthrough => &[ABSENT, COMMON, PASSTHROUGH],
        Profile::Rings => &[ABSENT, COMMON, PASSTHROUGH, RINGS],
    };
    let allow_listed = compile(rules(listed.iter().copied())?, SeccompAction::Trap, SeccompAction::Allow)?;
    for program in [refuse_absent, allow_listed] {
        apply_filter_all_threads(&program).map_err(io::Error::other)?;
    }
    Ok(())
}

fn compile(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    others: SeccompAction,
    listed: SeccompAction,
) -> io::Result<BpfProgram> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, others, listed, architecture).map_err(io::Error::other)?;
    filter.try_into().map_err(io::Error::other)
}

fn rules<'a>(lists: impl IntoIterator<Item = &'a str>) -> io::Result<BTreeMap<i64, Vec<SeccompRule>>> {
    // Skips names that this architecture does not have.
    let numbered = lists.into_iter().flat_map(calls).filter_map(|call| Some((Sysno::from_str(call.name).ok()?, call)));
    numbered.map(|(number, call)| Ok((i64::from(number.id()), call.rules()?))).collect()
}

/// A line of a list.
#[derive(Clone, Copy, Debug)]
struct AllowedCall<'a> {
    name: &'a str,
    /// Whether only some arguments are allowed.
    limited: bool,
}

impl AllowedCall<'_> {
    fn rules(self) -> io::Result<Vec<SeccompRule>> {
        if self.limited { arguments::of(self.name) } else { Ok(Vec::new()) }
    }
}

fn calls(list: &str) -> impl Iterator<Item = AllowedCall<'_>> {
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_whitespace().next()).map(|word| match word.strip_suffix('*') {
        Some(name) => AllowedCall { name, limited: true },
        None => AllowedCall { name: word, limited: false },
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// The system calls that the profiles allow, without those for io_uring.
    const PROFILES: [&[&str]; 3] = [&[ABSENT, COMMON], &[ABSENT, COMMON, AUDIT], &[ABSENT, COMMON, PASSTHROUGH]];
    const WITH_RINGS: &[&str] = &[ABSENT, COMMON, PASSTHROUGH, RINGS];

    #[test]
    fn only_rings_add_three_calls() {
        let names: Vec<_> = calls(RINGS).map(|call| call.name).collect();
        assert_eq!(names, ["io_uring_setup", "io_uring_enter", "sched_setaffinity"]);
    }

    #[test]
    fn every_call_exists_once_and_has_a_reason() {
        for lists in PROFILES.into_iter().chain([WITH_RINGS]) {
            let mut seen = HashSet::new();
            let lines = lists.iter().flat_map(|list| list.lines());
            for line in lines.filter(|line| !line.starts_with('#') && !line.is_empty()) {
                let (name, reason) = line.split_once(' ').expect("a name and a reason");
                let name = name.trim_end_matches('*');
                let somewhere =
                    syscalls::x86_64::Sysno::from_str(name).is_ok() || syscalls::aarch64::Sysno::from_str(name).is_ok();
                assert!(somewhere, "{name} is no system call");
                assert!(!reason.trim().is_empty(), "{name} has no reason");
                assert!(seen.insert(name), "{name} is listed twice");
            }
        }
    }

    #[test]
    fn no_call_that_escapes_the_confinement_is_listed() {
        let everything: HashSet<_> =
            PROFILES.into_iter().flatten().flat_map(|list| calls(list)).map(|call| call.name).collect();
        let of_projections: HashSet<_> = calls(COMMON).map(|call| call.name).collect();
        for out in [
            "execve",
            "execveat",
            "ptrace",
            "process_vm_readv",
            "process_vm_writev",
            "pidfd_getfd",
            "socket",
            "mount",
            "fsopen",
            "open_tree",
            "move_mount",
            "umount2",
            "pivot_root",
            "chroot",
            "setns",
            "setuid",
            "setresuid",
            "bpf",
            "init_module",
            "finit_module",
            "kexec_load",
            "perf_event_open",
            "seccomp",
            "io_uring_setup",
            "userfaultfd",
            "keyctl",
        ] {
            assert!(!everything.contains(out), "{out} is listed");
        }
        for out in ["open", "openat", "creat", "open_by_handle_at", "capset", "unshare", "ioctl", "chmod", "connect"] {
            assert!(!of_projections.contains(out), "{out} is listed for projections");
        }
    }

    #[test]
    fn every_list_makes_a_filter() {
        for listed in PROFILES.into_iter().chain([WITH_RINGS, &[ABSENT][..]]) {
            let rules = rules(listed.iter().copied()).expect("rules");
            compile(rules, SeccompAction::Trap, SeccompAction::Allow).expect("a filter");
        }
    }
}
