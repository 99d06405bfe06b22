//! The commands for requests to the daemon.

use std::path::Path;
use std::time::Duration;

use anyhow::anyhow;
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::table;
use crate::cli::exit::{Failure, say};
use crate::cli::status::print;
use crate::node::service::proto::MountedVolume;
use crate::node::service::{DaemonClient, DaemonClientError};
use crate::node::{NodeState, PodEntry};

/// How long `release` waits for the deletion of a pod whose manifest file was removed.
const DELETION_TIMEOUT: Duration = Duration::from_millis(1500);
/// The pause between two attempts during that time.
const DELETION_INTERVAL: Duration = Duration::from_millis(50);

/// Delay before the next try to connect to the daemon.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Delay before `podfs node wait` says that the daemon or the pod is missing.
const REPORT_DELAY: Duration = Duration::from_secs(1);

/// A question to the daemon.
#[derive(Subcommand)]
pub(super) enum AskCommand {
    /// Show the pods of the node, and whether their volumes are mounted.
    ///
    /// The exit status is 1 if a volume that should be mounted is not, or if podfs cannot read a source of pods.
    Status(Show),
    /// Wait until the volumes of a pod are mounted, or unmounted.
    ///
    /// Also waits for a daemon that does not run yet, and for a pod that the node does not have yet, and says so on standard error
    /// after a second. If the time is over, the command prints which volumes are not mounted and why, in the words of the kubelet,
    /// and its exit status is 1.
    Wait(Wait),
    /// Show the mounted volumes of a pod, for an agent that binds them into containers.
    Volumes(OfPod),
    /// Refresh all volumes of a pod now. Volumes follow their objects without it.
    Remount(Pod),
    /// Report that the containers of a pod have stopped for good, so that podfs unmounts its volumes.
    ///
    /// The daemon refuses while the pod's source wants it to run: delete it first. Does not wait for the unmounts; podfs node wait
    /// POD --unmounted does.
    Release(Pod),
    /// Show the desired and the actual state of every volume of the node.
    State(Show),
}

#[derive(Args)]
pub(super) struct Show {
    /// A table for people, or JSON for programs.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    output: AskOutput,
}

#[derive(Args)]
pub(super) struct Wait {
    #[command(flatten)]
    pod: Pod,
    /// How many seconds to wait; 0 looks once.
    #[arg(long, value_name = "SECONDS", default_value = "123", value_parser = whole_seconds)]
    timeout: u32,
    /// Wait until no volume of the pod is mounted any more.
    #[arg(long)]
    unmounted: bool,
}

#[derive(Args)]
pub(super) struct OfPod {
    #[command(flatten)]
    pod: Pod,
    #[command(flatten)]
    show: Show,
}

#[derive(Args)]
pub(super) struct Pod {
    /// The uid of the pod, or NAMESPACE/NAME.
    #[arg(value_name = "POD")]
    pod: String,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum AskOutput {
    /// Aligned columns.
    #[default]
    Table,
    /// One JSON object.
    Json,
}

impl AskCommand {
    pub(super) fn execute(self, run_directory: &Path) -> Result<(), Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
        let runtime = runtime.map_err(|error| Failure::general(anyhow!("cannot start: {error}")))?;
        runtime.block_on(self.ask(run_directory))
    }

    async fn ask(self, run_directory: &Path) -> Result<(), Failure> {
        let connect = || DaemonClient::connect(run_directory);
        match self {
            AskCommand::Status(Show { output }) => {
                let state = connect().await?.state().await?;
                show(output, &state, table::pods)?;
                check(&state)
            }
            AskCommand::State(Show { output }) => show(output, &connect().await?.state().await?, table::volumes),
            AskCommand::Wait(wait) => wait.ask(run_directory).await,
            AskCommand::Volumes(OfPod { pod: Pod { pod }, show: Show { output } }) => {
                let volumes = connect().await?.mounted_volumes(pod).await?;
                match output {
                    AskOutput::Table => print(&table::mounted(&volumes)),
                    AskOutput::Json => {
                        print(&json(&AgentVolumes { volumes: volumes.iter().map(AgentVolume::of).collect() })?)
                    }
                }
            }
            AskCommand::Remount(Pod { pod }) => Ok(connect().await?.mark_remount_required(pod).await?),
            AskCommand::Release(Pod { pod }) => release(connect().await?, pod).await,
        }
    }
}

/// Releases a pod. A manifest file that was just removed counts as deleted after a second; until then, the daemon refuses.
async fn release(mut daemon: DaemonClient, pod: String) -> Result<(), Failure> {
    let until = Instant::now() + DELETION_TIMEOUT;
    loop {
        match daemon.release(pod.clone()).await {
            Err(DaemonClientError::Refused(_)) if Instant::now() < until => sleep(DELETION_INTERVAL).await,
            outcome => return Ok(outcome?),
        }
    }
}

/// Parses a number of seconds.
fn whole_seconds(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "it is a number of seconds without a unit, such as 5".to_owned())
}

impl Wait {
    async fn ask(self, run_directory: &Path) -> Result<(), Failure> {
        let waiting = self.answer(run_directory);
        let report = async {
            sleep(REPORT_DELAY).await;
            if let Some(missing) = self.missing(run_directory).await {
                say(&format!("{missing}; waiting for it, up to {} s", self.timeout));
            }
        };
        tokio::pin!(waiting);
        tokio::select! {
            outcome = &mut waiting => outcome,
            () = report => waiting.await,
        }
    }

    /// A sentence about the missing daemon or pod; `None` if both exist.
    async fn missing(&self, run_directory: &Path) -> Option<String> {
        let Pod { pod } = &self.pod;
        match DaemonClient::connect(run_directory).await {
            Err(absent @ DaemonClientError::Absent(_)) => Some(absent.to_string()),
            // A wait for the unmount of a missing pod ends at once.
            Ok(mut daemon) if !self.unmounted => match daemon.mounted_volumes(pod.clone()).await {
                Err(DaemonClientError::Refused(_)) => {
                    let trouble = self.trouble(run_directory).await;
                    let because = if trouble.is_empty() { String::new() } else { format!(" ({})", trouble.join("; ")) };
                    Some(format!("pod {pod}: this node does not have it yet{because}"))
                }
                _ => None,
            },
            _ => None,
        }
    }

    async fn answer(&self, run_directory: &Path) -> Result<(), Failure> {
        let Wait { pod: Pod { pod }, timeout, unmounted } = self;
        let deadline = Instant::now() + Duration::from_secs((*timeout).into());
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // Rounded up: the daemon waits at least until the deadline, and its answer says which volumes are missing.
            let seconds = u32::try_from(left.as_millis().div_ceil(1000)).unwrap_or(u32::MAX);
            let answer = match DaemonClient::connect(run_directory).await {
                Err(error) => Err(error),
                Ok(mut daemon) if *unmounted => daemon.wait_for_unmount(pod.clone(), Some(seconds)).await,
                Ok(mut daemon) => daemon.wait_for_volumes(pod.clone(), Some(seconds)).await,
            };
            match answer {
                Err(DaemonClientError::Absent(_) | DaemonClientError::Ends(_)) if !left.is_zero() => {
                    sleep(RETRY_PAUSE.min(left)).await
                }
                Err(error @ DaemonClientError::Refused(_)) => {
                    let trouble = self.trouble(run_directory).await;
                    return Err(match trouble.is_empty() {
                        true => error.into(),
                        false => Failure::general(anyhow!(
                            "{error}; podfs cannot read a source of pods: {}",
                            trouble.join("; ")
                        )),
                    });
                }
                answer => return Ok(answer?),
            }
        }
    }

    /// The problems of the sources of pods, which may be why podfs does not have the pod or an object. None for an unmount.
    async fn trouble(&self, run_directory: &Path) -> Vec<String> {
        if self.unmounted {
            return Vec::new();
        }
        let Ok(mut daemon) = DaemonClient::connect(run_directory).await else { return Vec::new() };
        daemon.state().await.map(|state| state.trouble.clone()).unwrap_or_default()
    }
}

fn show(output: AskOutput, state: &NodeState, table: fn(&NodeState) -> String) -> Result<(), Failure> {
    match output {
        AskOutput::Table => print(&table(state)),
        AskOutput::Json => print(&json(&DaemonReport::of(state))?),
    }
}

fn check(state: &NodeState) -> Result<(), Failure> {
    let waiting = state.pods.values().filter(|pod| !table::has_needed_volumes(pod)).count();
    match (waiting, state.trouble.len()) {
        (0, 0) => Ok(()),
        (0, _) => Err(Failure::general(anyhow!("podfs cannot read a source of pods; the output says why"))),
        (waiting, _) => {
            let all = state.pods.len();
            Err(Failure::general(anyhow!("{waiting} of {all} pods lack volumes; the output says why")))
        }
    }
}

fn json(document: &impl Serialize) -> Result<String, Failure> {
    Ok(serde_json::to_string_pretty(document).map_err(Failure::general)? + "\n")
}

/// The output of `--output json`: the state of the node.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DaemonReport<'a> {
    sources_ready: bool,
    states_synced: bool,
    trouble: &'a [String],
    pods: Vec<&'a PodEntry>,
}

impl<'a> DaemonReport<'a> {
    fn of(state: &'a NodeState) -> DaemonReport<'a> {
        DaemonReport {
            sources_ready: state.sources_ready,
            states_synced: state.states_synced,
            trouble: &state.trouble,
            pods: state.pods.values().map(AsRef::as_ref).collect(),
        }
    }
}

#[derive(Serialize)]
struct AgentVolumes<'a> {
    volumes: Vec<AgentVolume<'a>>,
}

/// The fields of a volume that an agent needs.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AgentVolume<'a> {
    name: &'a str,
    kind: &'a str,
    path: &'a str,
    read_only: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    selinux_label: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    supplemental_group: Option<u32>,
}

impl<'a> AgentVolume<'a> {
    fn of(volume: &'a MountedVolume) -> AgentVolume<'a> {
        AgentVolume {
            name: &volume.name,
            kind: &volume.kind,
            path: &volume.path,
            read_only: volume.read_only,
            selinux_label: volume.selinux_label.as_deref(),
            supplemental_group: volume.supplemental_group,
        }
    }
}

impl From<DaemonClientError> for Failure {
    fn from(error: DaemonClientError) -> Failure {
        match error {
            DaemonClientError::NotRoot => Failure::machine(error),
            DaemonClientError::NoPod(_) => Failure::input(error),
            _ => Failure::general(error),
        }
    }
}
