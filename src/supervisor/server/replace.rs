//! Replaces a live server by a server of another version of podfs, or by a server with more privileges.

use std::io;
use std::sync::Arc;

use podfs_fuse::client::UnloadableVolume;
use podfs_fuse::confinement::Profile;
use tokio::time::timeout;
use tracing::info;

use super::{KILL_TIMEOUT, PodServer, Program, ServerLife, WatchdogState, WatchedProcess, blocking, fd_keeper};

/// Why a server was not replaced.
#[derive(Debug, thiserror::Error)]
pub enum UpgradeError {
    /// The pod has no server that could be replaced. The supervisor has changed nothing.
    #[error("the pod has no server at this moment; try again")]
    NoServer,
    /// The new server cannot be started. The supervisor has changed nothing.
    #[error(transparent)]
    Start(io::Error),
    /// The new server does not answer. The supervisor has changed nothing else.
    #[error("the new podfs does not answer ({cause}); it ended ({end})")]
    Silent {
        /// The error of the connection to it.
        #[source]
        cause: io::Error,
        /// How it ended.
        end: String,
    },
    /// The new server failed, and another server of this supervisor's own program has taken over.
    #[error("{0}")]
    RolledBack(String),
}

impl PodServer {
    /// Gives the server at least the rights of `profile`. Replaces a server with fewer rights by a server with more,
    /// which the supervisor starts before it kills the old one.
    ///
    /// # Errors
    /// When the pod keeps its server, or gets another server with the same rights.
    pub(in crate::supervisor) async fn widen(&mut self, profile: Profile) -> Result<(), UpgradeError> {
        let before = self.profile;
        self.profile = before.max(profile);
        let until_serving = async {
            while !matches!(self.life, ServerLife::Serving { .. } | ServerLife::Over) {
                self.guard().await;
            }
        };
        timeout(KILL_TIMEOUT, until_serving).await.map_err(|_| UpgradeError::NoServer)?;
        let ServerLife::Serving { process, .. } = &self.life else { return Err(UpgradeError::NoServer) };
        if process.profile().is_none_or(|current| current >= self.profile) {
            return Ok(());
        }
        info!("podfs replaces the pod's server by one that can serve directories of the node, too");
        let program = Arc::clone(&self.program);
        let replaced = self.replace(Program::Own(&program), "podfs replaced it by a server with more rights").await;
        if replaced.is_err() {
            self.profile = before;
        }
        replaced
    }

    /// Replaces the server by a server of `program`, which the supervisor starts before it kills the old one.
    ///
    /// # Errors
    /// When a server of the old program goes on: the same process, or a new process.
    pub(in crate::supervisor) async fn upgrade(&mut self, program: Program<'_>) -> Result<(), UpgradeError> {
        self.replace(program, "an upgrade replaced it").await
    }

    /// As [`Self::upgrade`]. `reason` becomes the end of the old server in the history.
    async fn replace(&mut self, program: Program<'_>, reason: &str) -> Result<(), UpgradeError> {
        let ServerLife::Serving { process: old, .. } = &self.life else {
            return Err(UpgradeError::NoServer);
        };
        let started = WatchedProcess::start(program, &self.pod, self.profile, self.log_format, self.cgroup.as_ref());
        let (new, control) = started.map_err(UpgradeError::Start)?;
        let client = Arc::clone(&self.client);
        let successor = match blocking(move || client.greet(control)).await {
            Ok(successor) => successor,
            Err(cause) => {
                new.kill();
                let end = new.ended().await.to_string();
                return Err(UpgradeError::Silent { cause, end });
            }
        };
        old.kill();
        old.ended_or_inert().await;
        self.history.last_end = Some(reason.to_owned());
        self.history.silent_sources.clear();
        self.watchdog = WatchdogState::default();
        let mut keeper = self.client.mark_dead();
        if fd_keeper::is_gone(&keeper).await {
            keeper.let_go();
        }
        let client = Arc::clone(&self.client);
        let attempt = tokio::task::spawn_blocking(move || {
            // If it cannot load a volume, a server of the old version continues with all of them.
            let outcome = client.succeed(successor, &mut keeper, UnloadableVolume::EndsTakeover);
            (outcome, keeper)
        });
        let succeeding = ServerLife::Succeeding { process: Some(new), attempt };
        if let ServerLife::Serving { process: old, .. } = std::mem::replace(&mut self.life, succeeding) {
            old.reap_in_background();
        }
        let mut failure = None;
        while !matches!(self.life, ServerLife::Serving { .. } | ServerLife::Over) {
            self.guard().await;
            if matches!(self.life, ServerLife::Dead { .. }) && failure.is_none() {
                failure = self.history.last_end.clone();
            }
        }
        failure.map_or(Ok(()), |reason| Err(UpgradeError::RolledBack(reason)))
    }
}
