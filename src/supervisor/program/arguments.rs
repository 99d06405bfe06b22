//! The command line of podfs-supervisor. `podfs node` writes it, and after an upgrade the next version of the program reads it.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;

use super::log::{LogFormat, LogOptions};
use super::options::{DriverOptions, GenerationOptions, MemoryOptions, SubPathOptions, TransportOptions, directory};

/// Words on the command line of a supervisor that an earlier `podfs node` has started as `podfs run`. podfs-supervisor ignores
/// them: it always behaves as they ask.
const OF_PODFS_RUN: [&str; 5] = ["run", "--push", "--pod-once", "--agent-watches-mounts", "--keep-empty-dirs"];

/// The supervisor of a pod of podfs node, which starts it. Not for people: podfs run serves a single pod.
#[derive(Parser)]
#[command(name = "podfs-supervisor", disable_version_flag = true)]
pub(super) struct Arguments {
    /// The manifest of the pod, which is read once. A supervisor that fails writes the reason beside it.
    #[arg(long, value_name = "FILE")]
    pub(super) pod: PathBuf,
    /// The uid that the pod has to have.
    #[arg(long, value_name = "UID")]
    pub(super) uid: String,
    /// Where volumes appear.
    #[arg(long, value_name = "DIR", value_parser = directory())]
    pub(super) root_dir: PathBuf,
    /// State that a reboot may erase.
    #[arg(long, value_name = "DIR", value_parser = directory())]
    pub(super) run_dir: PathBuf,
    #[command(flatten)]
    pub(super) drivers: DriverOptions,
    #[command(flatten)]
    pub(super) memory: MemoryOptions,
    #[command(flatten)]
    pub(super) generations: GenerationOptions,
    #[command(flatten)]
    pub(super) sub_paths: SubPathOptions,
    #[command(flatten)]
    pub(super) transport: TransportOptions,
    #[command(flatten)]
    pub(super) log: LogOptions,
    /// How log lines look.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    pub(super) log_format: LogFormat,
}

/// The manifest that these words name.
pub(super) fn manifest(words: impl Iterator<Item = OsString>) -> Option<PathBuf> {
    words.skip_while(|word| word != "--pod").nth(1).map(PathBuf::from)
}

/// The arguments without the words of `podfs run`.
pub(super) fn of_this_program(words: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    words.filter(|word| !OF_PODFS_RUN.iter().any(|of_run| word == *of_run))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_of_an_earlier_daemon_is_understood() {
        let words = "podfs-supervisor run --push --pod-once --agent-watches-mounts --keep-empty-dirs --uid u1 --pod /run/pod.json \
                     --root-dir /root --run-dir /run --log info --log-format json --keep-old-generations 1 \
                     --flexvolume-dir /exec --sub-path live --server-memory-max 67108864";
        let arguments = Arguments::parse_from(of_this_program(words.split_whitespace().map(OsString::from)));
        assert_eq!((arguments.uid.as_str(), arguments.pod.to_str()), ("u1", Some("/run/pod.json")));
        assert_eq!(arguments.memory.server_memory_max, Some(64 << 20));
    }
}
