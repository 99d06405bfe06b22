//! The files of a pod in the run directory, which the pod's task writes and removes.

use std::sync::Arc;

use tracing::{debug, warn};

use super::super::life::{ConnectingSupervisor, RunningSupervisor, SupervisorLife};
use super::super::{OperationError, blocking, control};
use super::PodTask;
use crate::node::checkpoint::Checkpoint;
use crate::supervisor::run_dir::cgroup;

impl PodTask {
    /// Makes files again that another process has deleted. A supervisor that is starting, changing or ending makes and
    /// removes its files itself.
    pub(super) async fn restore(&mut self) {
        if !matches!(self.life, SupervisorLife::Up(RunningSupervisor { change: None, has_sent_status: true, .. })) {
            return;
        }
        let (checkpoints, uid, directory) = (self.shared.checkpoints.clone(), self.uid.clone(), self.directory.clone());
        let (is_written, is_unreachable) =
            blocking(move || (checkpoints.has_files(&uid), control::misses_files(&directory))).await;
        if !is_written {
            self.written = None;
            if let Err(reason) = self.write_checkpoint().await {
                debug!("{reason}");
            }
        }
        if is_unreachable && let SupervisorLife::Up(up) = std::mem::replace(&mut self.life, SupervisorLife::Absent) {
            warn!(
                "files of pod {} are gone from {}; its supervisor makes them again",
                self.uid,
                self.directory.display()
            );
            // The supervisor checks its files when a connection to it is closed.
            self.life = SupervisorLife::Calling(ConnectingSupervisor::new(Some(up.process), false, None));
        }
    }

    /// Writes the checkpoint, unless it is up to date.
    pub(super) async fn write_checkpoint(&mut self) -> Result<(), OperationError> {
        match self.wanted.clone() {
            Some(wanted) => self.write(wanted).await,
            None => Ok(()),
        }
    }

    pub(super) async fn write(&mut self, checkpoint: Checkpoint) -> Result<(), OperationError> {
        if self.written.as_ref() == Some(&checkpoint) {
            return Ok(());
        }
        let (checkpoints, uid) = (self.shared.checkpoints.clone(), self.uid.clone());
        let written = blocking(move || checkpoints.write(&uid, &checkpoint).map(|()| checkpoint)).await;
        let failed = |error| OperationError::Write {
            directory: self.shared.settings.run_directory.clone(),
            cause: Arc::new(error),
        };
        self.written = Some(written.map_err(failed)?);
        Ok(())
    }

    /// Removes the files of a pod of which nothing was mounted.
    pub(super) async fn forget(&mut self) {
        let (checkpoints, uid) = (self.shared.checkpoints.clone(), self.uid.clone());
        if let Err(error) = blocking(move || checkpoints.remove(&uid)).await {
            warn!("cannot remove the checkpoint of pod {}: {error}", self.uid);
        }
        let uid = self.uid.clone();
        blocking(move || cgroup::remove_named_of_supervisor(&uid)).await;
        (self.wanted, self.written, self.published) = (None, None, None);
    }
}
