//! Replaces a live server: by one of another version of podfs, or by one with more privileges.

use std::sync::Arc;

use podfs_fuse::confinement::Profile;
use tokio::time::timeout;
use tracing::info;

use super::{KILL_TIMEOUT, PodServer, Program, ServerLife, WatchedProcess, blocking, keeper};

/// Why a server was not replaced.
#[derive(Debug, thiserror::Error)]
pub enum UpgradeError {
    /// Nothing was changed.
    #[error("{0}")]
    Refused(String),
    /// The new server failed, and another one of this supervisor's program took over.
    #[error("{0}")]
    RolledBack(String),
}

impl PodServer {
    /// Gives the server at least the rights of `profile`. Replaces a server with fewer rights by one with more, which
    /// starts before the old one is killed.
    ///
    /// # Errors
    /// When the pod keeps its server, or gets another one with the same rights.
    pub(in crate::supervisor) async fn widen(&mut self, profile: Profile) -> Result<(), UpgradeError> {
        let before = self.profile;
        self.profile = before.max(profile);
        let became_one = async {
            while !matches!(self.life, ServerLife::Serving { .. } | ServerLife::Over) {
                self.guard().await;
            }
        };
        let refused = || UpgradeError::Refused("the pod has no server at this moment; try again".to_owned());
        timeout(KILL_TIMEOUT, became_one).await.map_err(|_| refused())?;
        let ServerLife::Serving { process, .. } = &self.life else { return Err(refused()) };
        if process.profile().is_none_or(|has| has >= self.profile) {
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

    /// Replaces the server by one that is started from `program`, before the old one is killed.
    ///
    /// # Errors
    /// When a server of the old program goes on: the same process, or another one.
    pub(in crate::supervisor) async fn upgrade(&mut self, program: Program<'_>) -> Result<(), UpgradeError> {
        self.replace(program, "it gave way to an upgrade").await
    }

    async fn replace(&mut self, program: Program<'_>, why: &str) -> Result<(), UpgradeError> {
        let refused = |error: &dyn std::fmt::Display| UpgradeError::Refused(error.to_string());
        let ServerLife::Serving { process: old, .. } = &self.life else {
            return Err(refused(&"the pod has no server at this moment; try again"));
        };
        let started = WatchedProcess::start(program, &self.pod, self.profile, self.log_format, self.cgroup.as_ref());
        let (new, control) = started.map_err(|error| refused(&error))?;
        let client = Arc::clone(&self.client);
        let successor = match blocking(move || client.greet(control)).await {
            Ok(successor) => successor,
            Err(error) => {
                new.kill();
                let how = new.ended().await;
                return Err(UpgradeError::Refused(format!(
                    "the new podfs does not answer ({error}); it ended ({how})"
                )));
            }
        };
        old.kill();
        old.ended_or_inert().await;
        self.history.last_end = Some(why.to_owned());
        let mut keeper = self.client.mark_dead();
        if keeper::is_gone(&keeper).await {
            keeper.let_go();
        }
        let client = Arc::clone(&self.client);
        let attempt = tokio::task::spawn_blocking(move || {
            let outcome = client.succeed(successor, &mut keeper);
            (outcome, keeper)
        });
        let following = ServerLife::Succeeding { process: Some(new), attempt };
        if let ServerLife::Serving { process: old, .. } = std::mem::replace(&mut self.life, following) {
            old.leave();
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
