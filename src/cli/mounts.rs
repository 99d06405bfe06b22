//! `podfs mounts`: prepares the mounts of a container for its runtime.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Args, ValueEnum, ValueHint};

use super::exit::Failure;
use super::source::read_input;
use super::status::{pod_directory, print};
use crate::mounts::output::OutputFormat;
use crate::mounts::{AgentFacts, ContainerMount, IdMapping};
use crate::supervisor::control::{ContainerRequest, ControlAnswer, ControlQuestion, ask};
use crate::supervisor::program::options::{RUN_DIRECTORY, directory};

/// Most requests to a supervisor that is busy because a volume does not answer. Each takes 1.5 s.
const TRIES: u32 = 4;

/// Prepare the mounts of a container of a pod, or remove them.
///
/// Call prepare before each start of a container. It prints the container's mounts as its runtime
/// reads them: its volumeMounts with the kubelet's rules, /etc/hosts and a file for its termination message. podfs mounts a
/// subPath below pods/UID/volume-subpaths of the root directory; it makes a missing directory in volumes that are no
/// projections. It refuses a path that a projection does not have yet, or that leads out of its volume.
///
/// Call release after a container has ended and does not start again: it removes the container's subPath mounts and termination
/// messages. podfs run removes the others when it ends.
#[derive(Args)]
#[command(after_help = "\
EXIT STATUS:
  0  everything the container mounts is there, or nothing of it is left
  1  there is no such pod or container, or a mount cannot be made
  2  bad arguments or settings
  3  a privilege is missing

EXAMPLES:
  podfs mounts prepare --pod c15b9f1e-0a47-5d0c-9b6c-3f1f5f1d7a10 --container web --pod-ip 10.1.2.3
  podfs mounts prepare --pod c15b9f1e-0a47-5d0c-9b6c-3f1f5f1d7a10 --container web --env web.env --output podman
  podfs mounts release --pod c15b9f1e-0a47-5d0c-9b6c-3f1f5f1d7a10 --container web")]
pub(super) struct Mounts {
    /// Whether to prepare or to release.
    #[arg(value_name = "prepare|release", value_enum, hide_possible_values = true)]
    action: Action,
    /// The pod; podfs status lists all.
    #[arg(long, value_name = "UID")]
    pod: String,
    /// The container, as it is called in the pod's manifest. Without it, release is for all containers of the pod.
    #[arg(long, value_name = "NAME")]
    container: Option<String>,
    /// The container's environment variables, for subPathExpr: lines NAME=VALUE as env(1) prints them, or entries that end
    /// with a zero byte as /proc/PID/environ has them; - reads standard input. Empty lines and lines that begin with # are
    /// skipped.
    #[arg(long, value_name = "FILE|-", value_hint = ValueHint::FilePath)]
    env: Option<PathBuf>,
    /// An address of the pod, for /etc/hosts. May be given several times.
    #[arg(long = "pod-ip", value_name = "IP")]
    pod_ips: Vec<IpAddr>,
    /// The pod's name in its network, for /etc/hosts, with its domain if it has one. Without it, the hostname of the manifest,
    /// or the pod's name.
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    hostname: Option<String>,
    /// The pod shares the node's network, and so its /etc/hosts, even if the manifest does not say so.
    #[arg(long)]
    host_network: bool,
    /// Users of the pod's user namespace (hostUsers: false), as CONTAINER:HOST:LENGTH: the first id in the pod, the first on the
    /// node, and how many. May be given several times. Needed with cri; the other runtimes map the ids of the container.
    #[arg(long = "uid-map", value_name = "IDS", requires = "gid_maps")]
    uid_maps: Vec<IdMapping>,
    /// Groups of the pod's user namespace, in the same form.
    #[arg(long = "gid-map", value_name = "IDS", requires = "uid_maps")]
    gid_maps: Vec<IdMapping>,
    /// The runtime cannot make a mount and the mounts below it read-only. Always so with docker and podman.
    #[arg(long)]
    no_recursive_read_only: bool,
    /// The format of the output: oci is JSON for mounts in config.json (runc, crun); cri is JSON of Mount messages
    /// (runtime.v1); docker and podman are arguments of their run, one a line; json is everything that podfs knows.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    output: MountsOutput,
    /// The run directory of podfs run.
    #[arg(long, value_name = "DIR", default_value = RUN_DIRECTORY, value_parser = directory(), value_hint = ValueHint::DirPath)]
    run_dir: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Action {
    /// Before a container starts.
    Prepare,
    /// After it has ended.
    Release,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum MountsOutput {
    #[default]
    Oci,
    Cri,
    Docker,
    Podman,
    Json,
}

/// A name for a line of /etc/hosts.
fn host_name(text: &str) -> Result<String, String> {
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    match text.strip_suffix('.').unwrap_or(text).split('.').all(is_label) {
        true => Ok(text.to_owned()),
        false => Err("a host name has letters, digits, '-' and '_', in parts that a '.' separates".to_owned()),
    }
}

impl From<MountsOutput> for OutputFormat {
    fn from(output: MountsOutput) -> OutputFormat {
        match output {
            MountsOutput::Oci => OutputFormat::Oci,
            MountsOutput::Cri => OutputFormat::Cri,
            MountsOutput::Docker => OutputFormat::Docker,
            MountsOutput::Podman => OutputFormat::Podman,
            MountsOutput::Json => OutputFormat::Json,
        }
    }
}

impl Mounts {
    pub(super) fn execute(self) -> Result<(), Failure> {
        match self.action {
            Action::Prepare => self.prepare(),
            Action::Release => self.release(),
        }
    }

    fn prepare(self) -> Result<(), Failure> {
        let needed = || Failure::input(anyhow!("prepare is for one container; name it with --container"));
        let format = OutputFormat::from(self.output);
        let environment = AgentFacts {
            variables: self.env.as_deref().map(variables).transpose()?.unwrap_or_default(),
            pod_ips: self.pod_ips,
            hostname: self.hostname,
            host_network: self.host_network,
            uid_mappings: self.uid_maps,
            gid_mappings: self.gid_maps,
        };
        let request = ContainerRequest {
            container: self.container.ok_or_else(needed)?,
            environment,
            recursive_read_only: format.has_recursive_read_only() && !self.no_recursive_read_only,
            only_volumes: false,
        };
        let directory = pod_directory(&self.run_dir, &self.pod)?;
        let mounts: Vec<ContainerMount> = match answer(&directory, &ControlQuestion::PrepareContainer(request))? {
            ControlAnswer::Prepared(mounts) => mounts,
            other => return Err(unexpected(&other)),
        };
        print(&format.print(&mounts).map_err(Failure::general)?)
    }

    fn release(self) -> Result<(), Failure> {
        let directory = pod_directory(&self.run_dir, &self.pod)?;
        match answer(&directory, &ControlQuestion::ReleaseContainer { container: self.container })? {
            ControlAnswer::Released => Ok(()),
            other => Err(unexpected(&other)),
        }
    }
}

fn unexpected(answer: &ControlAnswer) -> Failure {
    Failure::general(anyhow!("the supervisor gave an answer to another question: {answer:?}"))
}

/// Asks the pod's supervisor; if it is busy, up to [`TRIES`] times.
fn answer(directory: &Path, question: &ControlQuestion) -> Result<ControlAnswer, Failure> {
    let mut reason = String::new();
    for _ in 0..TRIES {
        match ask(directory, question, None).map_err(Failure::general)? {
            ControlAnswer::Busy(busy) => reason = busy,
            ControlAnswer::Refused(reason) => return Err(Failure::general(anyhow!(reason))),
            other => return Ok(other),
        }
    }
    Err(Failure::general(anyhow!(reason)))
}

/// The variables of a file. Errors have line numbers, but no content of lines: it may be secret.
fn variables(path: &Path) -> Result<BTreeMap<String, String>, Failure> {
    let (name, bytes) = read_input(path)?;
    let separator = if bytes.contains(&0) { 0 } else { b'\n' };
    let mut variables = BTreeMap::new();
    for (index, entry) in bytes.split(|byte| *byte == separator).enumerate() {
        if entry.is_empty() || (separator != 0 && entry.starts_with(b"#")) {
            continue;
        }
        let entry = std::str::from_utf8(entry).ok().and_then(|entry| entry.split_once('='));
        let (variable, value) = entry.filter(|(variable, _)| !variable.is_empty()).ok_or_else(|| {
            Failure::input(anyhow!("{}: entry {} is no variable; write NAME=VALUE in UTF-8", name.display(), index + 1))
        })?;
        variables.insert(variable.to_owned(), value.to_owned());
    }
    Ok(variables)
}
