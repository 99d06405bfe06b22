//! The program `podfs-fuse`: the server of a pod. A supervisor starts it, with a socket as its standard input:
//!
//! ```text
//! podfs-fuse server --pod=NAMESPACE/NAME --uid=UID --profile=PROFILE [--log-format=FORMAT] [--started-by=VERSION:PATH]
//! ```
//!
//! A podfs of an earlier version recognises servers by the word `server`.

use std::env;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::confinement::{Profile, confine};
use crate::log;
use crate::log::LineFormat;
use crate::memory_lock;
use crate::server::fd_keeper::close_inherited;
use crate::server::process;

/// The name of the program, and of its process.
pub const NAME: &str = "podfs-fuse";
/// The version of podfs.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// [`VERSION`], read from the program's memory. The compiler cannot put it into instructions, so a test can change the version in a
/// built program.
pub fn version() -> &'static str {
    std::hint::black_box(VERSION)
}

/// The exit codes of podfs.
const FAILED: u8 = 1;
const BAD_ARGUMENTS: u8 = 2;

/// Runs the program with this process's arguments.
pub fn main() -> ExitCode {
    // The supervisor executes a descriptor, so the kernel has named the process after the descriptor's number.
    let _ = rustix::thread::set_name(c"podfs-fuse");
    memory_lock::tune_allocator();
    let words = env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    match ProgramCommand::parse(words) {
        Ok(ProgramCommand::Version) => match writeln!(io::stdout(), "{NAME} {VERSION}") {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(FAILED, &format!("cannot write to standard output: {error}")),
        },
        Ok(ProgramCommand::Serve(server)) => match server.serve() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(FAILED, &error.to_string()),
        },
        Err(error) => fail(BAD_ARGUMENTS, &error.to_string()),
    }
}

fn fail(code: u8, sentence: &str) -> ExitCode {
    crate::log::say(NAME, sentence);
    ExitCode::from(code)
}

/// The arguments are invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum ArgumentError {
    #[error("podfs starts this program for each pod that it serves; see podfs(8)")]
    NoCommand,
    #[error("{0} needs a value")]
    NoValue(String),
    #[error("{value:?} is no value of {option}")]
    Value { value: String, option: String },
    #[error("{0} is not an option of {NAME}")]
    Unknown(String),
    #[error("{0} is missing")]
    Missing(&'static str),
}

/// Why the server ends.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error(transparent)]
    OtherVersion(#[from] OtherVersion),
    #[error("the server of pod {pod} cannot continue: {cause}")]
    Ended {
        pod: String,
        #[source]
        cause: io::Error,
    },
}

/// podfs and podfs-fuse are of different versions.
#[derive(Debug, thiserror::Error)]
#[error(
    "podfs {} ({}) does not work with {NAME} {version} ({}); install both programs from one package or one build",
    podfs.version,
    podfs.path.display(),
    path.display()
)]
struct OtherVersion {
    podfs: StartedBy,
    version: String,
    path: PathBuf,
}

/// The command of the arguments.
#[derive(Debug, PartialEq, Eq)]
enum ProgramCommand {
    Version,
    Serve(ServerArguments),
}

/// The arguments of a server.
#[derive(Debug, PartialEq, Eq)]
struct ServerArguments {
    /// The pod's namespace and name, for lists of processes, log lines and errors.
    pod: String,
    /// The pod's uid. The server refuses supervisors of other pods.
    uid: String,
    /// The rights of the server.
    profile: Profile,
    /// The format of log lines, like the supervisor's.
    log_format: LineFormat,
    /// The podfs that executed this program.
    started_by: Option<StartedBy>,
}

impl ProgramCommand {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, ArgumentError> {
        match words.next().as_deref() {
            Some("--version") => Ok(Self::Version),
            Some("server") => ServerArguments::parse(words).map(Self::Serve),
            _ => Err(ArgumentError::NoCommand),
        }
    }
}

impl ServerArguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, ArgumentError> {
        let (mut pod, mut uid, mut profile, mut started_by) = (None, None, None, None);
        let mut log_format = LineFormat::Text;
        while let Some(word) = words.next() {
            let (option, value) = match word.split_once('=') {
                Some((option, value)) => (option, Some(value.to_owned())),
                None => (word.as_str(), words.next()),
            };
            let value = value.ok_or_else(|| ArgumentError::NoValue(option.to_owned()))?;
            let bad = || ArgumentError::Value { value: value.clone(), option: option.to_owned() };
            match option {
                "--pod" => pod = Some(value),
                "--uid" => uid = Some(value),
                "--profile" => profile = Some(Profile::named(&value).ok_or_else(bad)?),
                "--log-format" => log_format = LineFormat::named(&value).ok_or_else(bad)?,
                "--started-by" => started_by = Some(StartedBy::parse(&value).ok_or_else(bad)?),
                _ => return Err(ArgumentError::Unknown(option.to_owned())),
            }
        }
        let missing = ArgumentError::Missing;
        Ok(Self {
            pod: pod.ok_or_else(|| missing("--pod"))?,
            uid: uid.ok_or_else(|| missing("--uid"))?,
            profile: profile.ok_or_else(|| missing("--profile"))?,
            log_format,
            started_by,
        })
    }

    fn serve(self) -> Result<(), ServeError> {
        let Self { pod, uid, profile, log_format, started_by } = self;
        // SAFETY: the process has only read its arguments, so it has opened nothing.
        unsafe { close_inherited() };
        log::start(log_format);
        log::set_pod(&pod, &uid);
        log::name_pod_in_text();
        if let Some(Err(error)) = started_by.map(|podfs| podfs.check(version(), &own_path())) {
            process::refuse(&error.to_string());
            return Err(error.into());
        }
        // The supervisor has warned already if memory cannot be locked.
        let _unlocked = memory_lock::protect_memory();
        // The process confines itself before it starts a thread or reads a message.
        confine(profile, log_format);
        // Neither this process nor the keeper needs the memory of the confinement again.
        memory_lock::return_free_memory();
        let served = process::serve(version(), &uid);
        served.map_err(|cause| ServeError::Ended { pod, cause })
    }
}

/// The path of this program.
fn own_path() -> PathBuf {
    std::fs::read_link("/proc/self/exe").unwrap_or_else(|_| NAME.into())
}

/// The podfs that executed podfs-fuse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartedBy {
    /// Its version.
    pub version: String,
    /// Its path, for messages.
    pub path: PathBuf,
}

impl StartedBy {
    /// The value of `--started-by`.
    pub fn argument(&self) -> String {
        format!("--started-by={}:{}", self.version, self.path.display())
    }

    fn parse(value: &str) -> Option<Self> {
        let (version, path) = value.split_once(':')?;
        Some(Self { version: version.to_owned(), path: path.into() })
    }

    /// Compares the versions of both programs.
    fn check(&self, version: &str, path: &Path) -> Result<(), OtherVersion> {
        if self.version == version {
            return Ok(());
        }
        let (podfs, version, path) = (self.clone(), version.to_owned(), path.to_owned());
        Err(OtherVersion { podfs, version, path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &str) -> Result<ProgramCommand, String> {
        ProgramCommand::parse(words.split_whitespace().map(str::to_owned)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_value_may_be_in_the_word_of_its_option_or_in_the_next_one() {
        let expected = ServerArguments {
            pod: "default/web".to_owned(),
            uid: "u".to_owned(),
            profile: Profile::Audit,
            log_format: LineFormat::Json,
            started_by: Some(StartedBy { version: "1.2.3".to_owned(), path: "/a:b/podfs".into() }),
        };
        let in_one = "server --pod=default/web --uid=u --profile=audit --log-format=json --started-by=1.2.3:/a:b/podfs";
        assert_eq!(parse(in_one).as_ref(), Ok(&ProgramCommand::Serve(expected)));
        assert_eq!(parse(&in_one.replace('=', " ")), parse(in_one));
        assert_eq!(parse("--version"), Ok(ProgramCommand::Version));
    }

    #[test]
    fn bad_arguments_are_refused_with_a_sentence() {
        for (words, sentence) in [
            ("", "podfs starts this program for each pod that it serves; see podfs(8)"),
            ("serve", "podfs starts this program for each pod that it serves; see podfs(8)"),
            ("server --pod=a --uid=u", "--profile is missing"),
            ("server --pod=a --uid", "--uid needs a value"),
            ("server --profile=all", "\"all\" is no value of --profile"),
            ("server --podd=a", "--podd is not an option of podfs-fuse"),
        ] {
            assert_eq!(parse(words), Err(sentence.to_owned()), "{words}");
        }
    }

    #[test]
    fn programs_of_different_versions_do_not_work_together() {
        let podfs = StartedBy { version: "1.2.3".to_owned(), path: "/usr/bin/podfs".into() };
        podfs.check("1.2.3", Path::new("/p")).expect("the same version");
        let sentence = podfs.check("1.2.4", Path::new("/p")).expect_err("another version").to_string();
        assert!(sentence.starts_with("podfs 1.2.3 (/usr/bin/podfs) does not work with podfs-fuse 1.2.4 (/p); "));
    }
}
