//! Serving one pod: what `podfs run` and podfs-supervisor do once they have the pod and the source of its objects.

use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::anyhow;
use podfs_fuse::mount::table::mounts;
use tracing::warn;

use super::failure::Failure;
use super::machine::block_on;
use super::options::{DriverOptions, GenerationOptions, MemoryOptions, SubPathOptions, TransportOptions};
use crate::manifest::pod::Pod;
use crate::source::{Snapshot, Source};
use crate::supervisor::log_format::LogFormat;
use crate::supervisor::long_step::report_if_long;
use crate::supervisor::run::changed_manifest::volumes_after_crash;
use crate::supervisor::run_dir::bounds::path_exists;
use crate::supervisor::run_dir::claim::PodLock;
use crate::supervisor::run_dir::site::Site;
use crate::supervisor::run_dir::trust;
use crate::supervisor::server::program::ServerProgram;
use crate::supervisor::status::report::{Report, ReportScope};
use crate::supervisor::{self, Assignment, SupervisorError, exec_state, signal_record};

/// The pod's settings, from the command line.
pub(crate) struct PodService {
    /// The directory below which volumes appear.
    pub(crate) root_dir: PathBuf,
    /// The directory of the lock and the sockets of each pod.
    pub(crate) run_dir: PathBuf,
    /// The program of the servers.
    pub(crate) server_program: ServerProgram,
    pub(crate) drivers: DriverOptions,
    pub(crate) memory: MemoryOptions,
    pub(crate) generations: GenerationOptions,
    pub(crate) sub_paths: SubPathOptions,
    pub(crate) transport: TransportOptions,
    /// The format of the lines that the process prints.
    pub(crate) log_format: LogFormat,
    /// The manifest file of the pod, if `podfs node` has started this process. Then `podfs node` watches the mount table for all of
    /// its pods, and deletes the content of emptyDirs when the pod is removed from the node; a supervisor that a signal ends keeps
    /// it. Before `podfs node` removes what is left of a pod, it removes this file.
    pub(crate) manifest_of_node: Option<PathBuf>,
    /// The listener for metrics over HTTP. The control socket has the metrics, too.
    pub(crate) metrics: Option<TcpListener>,
}

impl PodService {
    /// Serves the pod until a signal ends the process.
    pub(crate) fn run(self, pod: &Arc<Pod>, mut source: Source, snapshot: Snapshot) -> Result<(), Failure> {
        trust::check(&self.root_dir).map_err(Failure::input)?;
        // A disk may delay the lock. If a signal ended podfs meanwhile, the run directory would stay.
        signal_record::start(exec_state::record_left).map_err(SupervisorError::Signals)?;
        let step = format!("lock the pod below {}", self.run_dir.display());
        let locked = || PodLock::take(&self.run_dir, &self.root_dir, &pod.identity);
        let (claim, inheritance) = report_if_long(&step, locked)?;
        // podfs node may have had the claim, to remove what was left of the pod.
        if let Some(manifest) = self.manifest_of_node.as_ref().filter(|manifest| !path_exists(manifest)) {
            let manifest = manifest.display();
            return Err(Failure::input(anyhow!(
                "podfs node has removed pod {} from the node: {manifest} is gone",
                pod.identity
            )));
        }
        let site = Site::of_pod(&self.root_dir, &pod.identity.uid);
        let (volumes, definitions) = match &self.manifest_of_node {
            Some(_) => (pod.volumes.clone(), Vec::new()),
            None => {
                let all = mounts()
                    .map_err(|error| warn!("podfs takes the recorded mounts, and not the mount table: {error}"));
                let mounted = match all {
                    Ok(all) => {
                        all.into_iter().map(|mounted| mounted.at).filter(|at| at.starts_with(site.path())).collect()
                    }
                    Err(()) => inheritance.mounts.clone(),
                };
                let agent_decides = matches!(source, Source::Push(_));
                volumes_after_crash(pod, &inheritance.definitions, &mounted, &site, agent_decides)
            }
        };
        // The objects of a volume that stays as it was.
        let snapshot = if volumes == pod.volumes { snapshot } else { source.want(volumes.clone()).unwrap_or(snapshot) };
        let report = Report::new(ReportScope::Pod, pod.identity.clone(), &volumes, self.log_format);
        let assignment = Assignment {
            identity: pod.identity.clone(),
            facts: pod.facts.clone(),
            volumes: volumes.clone(),
            definitions,
            site,
            claim: Some(claim),
            inheritance,
            server_program: self.server_program,
            flex_volumes: self.drivers.flexvolume_dir,
            trace: false,
            keep_old_generations: self.generations.keep_old_generations,
            sub_path: self.sub_paths.sub_path.into(),
            io_uring: self.transport.io_uring.is_chosen(),
            agent_watches_mounts: self.manifest_of_node.is_some(),
            keep_empty_dirs: self.manifest_of_node.is_some(),
            server_memory: self.memory.server_memory_max,
            metrics: self.metrics,
        };
        block_on(&volumes, async { Ok(supervisor::run(assignment, source, snapshot, report).await?) })
    }
}
