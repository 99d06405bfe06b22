//! The options that `podfs run`, `podfs node` and podfs-supervisor have in common.

use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, ValueEnum, ValueHint};

use crate::types::Quantity;
use crate::volume::SubPathMode;

/// The lowest memory limit that podfs accepts: with less memory, the kernel would kill each server before it serves anything.
const LEAST_MEMORY: u64 = 16 << 20;
/// The default of the root directory, below which volumes appear.
pub(crate) const ROOT_DIRECTORY: &str = "/var/lib/podfs";
/// The default directory of FlexVolume drivers, that of the kubelet.
pub(crate) const FLEX_VOLUMES: &str = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec";
/// The default of the run directory, whose content a reboot may erase.
pub(crate) const RUN_DIRECTORY: &str = "/run/podfs";

/// The parser of options that name podfs's own directories: the value as an absolute path without `..`. Records of one podfs name
/// paths in these directories for the next one, which may have another working directory.
pub(crate) fn directory() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| std::path::absolute(path).map(|path| without_parents(&path)))
}

/// An absolute path without `..`. As for the kernel, `..` after a symbolic link is the directory above the link's target.
fn without_parents(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                // A directory that does not exist yet is no symbolic link.
                plain = plain.canonicalize().unwrap_or(plain);
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain
}

/// The longest time for which old generations may be kept.
const LONGEST_KEPT: Duration = Duration::from_secs(60);

/// The memory that servers may take.
#[derive(Args)]
pub(crate) struct MemoryOptions {
    /// Most memory that the server process may take, as a Kubernetes quantity such as 256Mi; beyond it the kernel kills the
    /// server, and podfs starts another one. Needs a cgroup of version 2 that is delegated to podfs (Delegate=yes of its unit).
    #[arg(long, value_name = "QUANTITY", value_parser = memory)]
    pub(crate) server_memory_max: Option<u64>,
}

/// The directories of other vendors' drivers.
#[derive(Args)]
pub(crate) struct DriverOptions {
    /// FlexVolume drivers are programs VENDOR~DRIVER/DRIVER in this directory. A driver may be installed at any time.
    #[arg(long, value_name = "DIR", default_value = FLEX_VOLUMES, value_hint = ValueHint::DirPath)]
    pub(crate) flexvolume_dir: PathBuf,
}

/// How volumes of files change.
#[derive(Args)]
pub(crate) struct GenerationOptions {
    /// How many seconds a volume of files keeps the files before a change, so that a program which resolved ..data just
    /// before the change still finds them: 0 to 60, fractions too. A volume keeps at most 64 old generations, and at most
    /// 16 MiB of them besides the last one.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub(crate) keep_old_generations: Duration,
}

/// How FUSE requests reach the server.
#[derive(Args)]
pub(crate) struct TransportOptions {
    /// Whether requests for directories of the node go over io_uring, which is faster where several callers work at once. Needs
    /// Linux 6.14 with fuse.enable_uring=1, and a server that may call io_uring_setup; otherwise, and with auto, they go through
    /// /dev/fuse.
    #[arg(long, value_name = "WHEN", value_enum, default_value_t)]
    pub(crate) io_uring: IoUring,
}

/// The values of `--io-uring`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum IoUring {
    /// podfs decides; at present, never.
    #[default]
    Auto,
    /// Where it is possible.
    On,
    /// Never.
    Off,
}

impl IoUring {
    /// The value as a word of the command line.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        }
    }

    /// Whether new volumes use io_uring. Some kernels lose requests over io_uring when a server is killed, so podfs uses it only
    /// if the operator asks for it.
    pub(crate) fn is_chosen(self) -> bool {
        self == Self::On
    }
}

/// What a container sees that mounts a part of a volume.
#[derive(Args)]
pub(crate) struct SubPathOptions {
    /// What a container that mounts a key or a directory of a volume of files (subPath) sees after a change: the files of its
    /// start (pinned), as with the kubelet, or those of each moment (live). The annotation podfs.io/sub-path.VOLUME of a pod
    /// decides for one volume.
    #[arg(long, value_name = "MODE", value_enum, default_value_t)]
    pub(crate) sub_path: SubPathArgument,
}

/// The values of `--sub-path`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum SubPathArgument {
    #[default]
    Pinned,
    Live,
}

impl SubPathArgument {
    /// The value as a word of the command line.
    pub(crate) fn word(self) -> &'static str {
        match self {
            SubPathArgument::Pinned => "pinned",
            SubPathArgument::Live => "live",
        }
    }
}

impl From<SubPathArgument> for SubPathMode {
    fn from(mode: SubPathArgument) -> SubPathMode {
        match mode {
            SubPathArgument::Pinned => SubPathMode::Pinned,
            SubPathArgument::Live => SubPathMode::Live,
        }
    }
}

/// Parses how long old generations are kept.
/// Parses the address of `--metrics-addr`.
pub(crate) fn metrics_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        let port = text.rsplit(':').next().filter(|port| port.parse::<u16>().is_ok()).unwrap_or("9753");
        format!("it is an address and a port: 127.0.0.1:{port} for this machine alone, 0.0.0.0:{port} for all, [::1]:{port} for IPv6")
    })
}

fn seconds(text: &str) -> Result<Duration, String> {
    let time = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|time| *time <= LONGEST_KEPT)
        .ok_or_else(|| format!("{text:?} is no number of seconds between 0 and {}", LONGEST_KEPT.as_secs()))
}

/// Parses a server's memory limit, in bytes.
fn memory(text: &str) -> Result<u64, String> {
    let bytes = Quantity::parse(text).map_err(|error| error.to_string())?.units();
    match u64::try_from(bytes) {
        Ok(bytes) if bytes >= LEAST_MEMORY => Ok(bytes),
        Ok(_) => Err(format!("{text} is less than a server needs; give it at least {} Mi", LEAST_MEMORY >> 20)),
        Err(_) => Err(format!("{text} is more than there is anywhere")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn parents_in_a_path_are_those_that_the_kernel_finds() {
        let own = tempfile::tempdir().expect("a directory");
        let base = own.path().canonicalize().expect("a path");
        std::fs::create_dir_all(base.join("a/b")).expect("directories");
        symlink(base.join("a/b"), base.join("link")).expect("a link");
        for (path, plain) in [("a/../c", "c"), ("none/../c", "c"), ("link/../c", "a/c"), ("link/c", "link/c")] {
            assert_eq!(without_parents(&base.join(path)), base.join(plain), "{path}");
        }
        assert_eq!(without_parents(Path::new("/../etc")), Path::new("/etc"));
    }
}
