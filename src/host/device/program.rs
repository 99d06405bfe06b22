//! Running programs that work on a device: mkfs, fsck, blkid and similar programs.

use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::process::{Command, Stdio};

use crate::host::HostError;
use crate::host::bounded_file::{bounded_file, content};
use crate::host::global_mount::LockedGlobalMount;

/// Directories of administrators' programs. Some systems do not have them in the `PATH` of ordinary users.
const SYSTEM: &str = "/usr/sbin:/sbin";
/// Most bytes of output. What a program writes beyond that is lost: fsck says much of a disk with many errors.
const MOST_OUTPUT: u64 = 16 << 20;

/// The result of a program.
#[derive(Debug)]
pub(super) struct ProgramOutput {
    /// The exit code; `None` if a signal ended the program.
    pub(super) code: Option<i32>,
    /// The standard output.
    pub(super) output: String,
    /// The standard output and the standard error, in one line.
    pub(super) words: String,
}

/// Why a program did not run.
#[derive(Debug)]
pub(super) enum NoOutcome {
    /// The program is not installed.
    Missing,
    /// The program cannot be started, or its output cannot be read.
    Failed(HostError),
}

/// Runs a program to its end. With `held`, the lock lasts at least as long as the program.
pub(super) fn run(
    program: &str,
    arguments: &[&OsStr],
    held: Option<&LockedGlobalMount<'_>>,
) -> Result<ProgramOutput, NoOutcome> {
    let path = search_path(std::env::var_os("PATH"));
    let input = match held {
        Some(held) => held.program_input().map_err(NoOutcome::Failed)?.into(),
        None => Stdio::null(),
    };
    let failed = |cause: io::Error| match cause.kind() {
        ErrorKind::NotFound => NoOutcome::Missing,
        _ => NoOutcome::Failed(HostError::failed(format!("cannot run {program}"), cause)),
    };
    // If podfs were killed, the kernel would end a program with a pipe at its next line (`SIGPIPE`).
    let (output, errors) = (bounded_file(MOST_OUTPUT).map_err(failed)?, bounded_file(MOST_OUTPUT).map_err(failed)?);
    let mut command = Command::new(program);
    command.args(arguments).env("PATH", path).env("LC_ALL", "C").stdin(input);
    command.stdout(output.try_clone().map_err(failed)?).stderr(errors.try_clone().map_err(failed)?);
    let status = command.status().map_err(failed)?;
    let text = |mut file| content(&mut file, MOST_OUTPUT).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let output = text(output).map_err(failed)?;
    let both = format!("{output}\n{}", text(errors).map_err(failed)?);
    let lines = both.lines().map(str::trim).filter(|line| !line.is_empty());
    let words = lines.collect::<Vec<_>>().join("; ");
    Ok(ProgramOutput { code: status.code(), output, words })
}

/// The `PATH` of the program: that of podfs, and [`SYSTEM`]. An empty element would be the working directory.
fn search_path(own: Option<OsString>) -> OsString {
    let mut path = own.filter(|own| !own.is_empty()).unwrap_or_else(|| "/usr/bin:/bin".into());
    path.push(":");
    path.push(SYSTEM);
    path
}

impl ProgramOutput {
    /// How the program ended, as the predicate of a sentence, such as `ended with code 1`.
    pub(super) fn end(&self) -> String {
        self.code.map_or_else(|| "was killed".to_owned(), |code| format!("ended with code {code}"))
    }
}

impl NoOutcome {
    /// The error about a program that podfs needs.
    pub(super) fn needed(self, program: &str, package: &str) -> HostError {
        match self {
            NoOutcome::Missing => {
                HostError::Refused(format!("the program {program} is not installed; install it (Debian: {package})"))
            }
            NoOutcome::Failed(error) => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_working_directory_is_not_searched_if_podfs_has_no_path() {
        let with = |own: &str| search_path(Some(own.into()));
        assert_eq!(with("/opt/bin"), "/opt/bin:/usr/sbin:/sbin");
        assert_eq!((search_path(None), with("")), ("/usr/bin:/bin:/usr/sbin:/sbin".into(), with("/usr/bin:/bin")));
    }
}
