//! Programs that work on a device: mkfs, fsck, blkid and their like.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek};
use std::process::{Command, Stdio};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::host::HostError;
use crate::host::global_mount::LockedGlobalMount;

/// Directories of administrators' programs. Some systems do not have them in the `PATH` of ordinary users.
const SYSTEM: &str = "/usr/sbin:/sbin";

/// The result of a program.
#[derive(Debug)]
pub(super) struct ProgramOutput {
    /// Its exit code; none if a signal ended it.
    pub(super) code: Option<i32>,
    /// Its standard output.
    pub(super) output: String,
    /// Its standard output and error, in one line.
    pub(super) words: String,
}

/// Why a program has no outcome.
#[derive(Debug)]
pub(super) enum NoOutcome {
    /// It is not installed.
    Missing,
    /// It cannot be started.
    Failed(HostError),
}

/// Runs a program to its end. With `held`, the lock lasts at least as long as the program.
pub(super) fn run(
    program: &str,
    arguments: &[&OsStr],
    held: Option<&LockedGlobalMount<'_>>,
) -> Result<ProgramOutput, NoOutcome> {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(OsString::from(format!(":{SYSTEM}")));
    let input = match held {
        Some(held) => held.program_input().map_err(NoOutcome::Failed)?.into(),
        None => Stdio::null(),
    };
    let failed = |cause: io::Error| match cause.kind() {
        ErrorKind::NotFound => NoOutcome::Missing,
        _ => NoOutcome::Failed(HostError::failed(format!("cannot run {program}"), cause)),
    };
    let (mut output, mut errors) = (memory_file().map_err(failed)?, memory_file().map_err(failed)?);
    let mut command = Command::new(program);
    command.args(arguments).env("PATH", path).env("LC_ALL", "C").stdin(input);
    command.stdout(output.try_clone().map_err(failed)?).stderr(errors.try_clone().map_err(failed)?);
    let status = command.status().map_err(failed)?;
    let output = text(&mut output).map_err(failed)?;
    let both = format!("{output}\n{}", text(&mut errors).map_err(failed)?);
    let lines = both.lines().map(str::trim).filter(|line| !line.is_empty());
    let words = lines.collect::<Vec<_>>().join("; ");
    Ok(ProgramOutput { code: status.code(), output, words })
}

/// A program prints to memory, and not to a pipe: when podfs is killed, a pipe would end the program with its next
/// line (`SIGPIPE`).
fn memory_file() -> io::Result<File> {
    Ok(memfd_create("output", MemfdFlags::CLOEXEC)?.into())
}

fn text(file: &mut File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl ProgramOutput {
    /// The exit of the program as the predicate of a sentence, such as `ended with code 1`.
    pub(super) fn end(&self) -> String {
        self.code.map_or_else(|| "was killed".to_owned(), |code| format!("ended with code {code}"))
    }
}

impl NoOutcome {
    /// A sentence, for a program that podfs cannot do without.
    pub(super) fn needed(self, program: &str, package: &str) -> HostError {
        match self {
            NoOutcome::Missing => {
                HostError::Refused(format!("the program {program} is not installed; install it (Debian: {package})"))
            }
            NoOutcome::Failed(error) => error,
        }
    }
}
