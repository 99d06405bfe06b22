//! Removes the leftovers of a pod that has no supervisor and that the node no longer has.
//!
//! The manifest for the supervisor goes first. systemd may start a supervisor again that was killed together with the daemon: it reads
//! the manifest, waits for the claim on the pod while this module has it, and ends if the manifest is gone then.
//!
//! The checkpoint goes last. If a retirement is killed at any step, the next one finishes it: each step skips leftovers
//! that are gone already, and finds the others by their names or records.

use std::path::Path;
use std::sync::Arc;

use tracing::debug;

use super::OperationError;
use crate::admin::cleanup::{Cleanup, CleanupLine, CleanupStep};
use crate::manifest::pod::PodUid;
use crate::node::checkpoint::Checkpoints;
use crate::node::orphans;
use crate::supervisor::run_dir::cgroup;
use crate::supervisor::run_dir::record::PodLockRecord;

/// Ends the pod's server, detaches its mounts, deletes the content of its emptyDirs, and removes its directories, run
/// files and checkpoint. Files of other programs in the pod's directory stay; the report of orphaned directories has
/// them.
///
/// # Errors
/// When something stays.
pub(super) fn retire(
    run_directory: &Path,
    root_directory: &Path,
    checkpoints: &Checkpoints,
    uid: &PodUid,
) -> Result<(), OperationError> {
    let remove = |error| OperationError::Remove { pod: uid.clone(), cause: Arc::new(error) };
    if let Err(error) = PodLockRecord::check_version(&run_directory.join(uid.as_str())) {
        let left = format!("podfs cannot use the record of the pod in {}: {error}", run_directory.display());
        return Err(OperationError::Left { pod: uid.clone(), left });
    }
    checkpoints.remove_manifest(uid).map_err(remove)?;
    let mut left = Vec::new();
    let mut report = |step: &CleanupStep| match step {
        CleanupStep::Left(path, reason) => left.push(format!("{}: {reason}", path.display())),
        done => debug!("pod {uid}: {}", CleanupLine(done, false)),
    };
    let retired = Cleanup::new(false, &mut report).retire(run_directory, root_directory, uid);
    match retired {
        Ok(true) => {}
        Ok(false) => return Err(OperationError::Left { pod: uid.clone(), left: left.join("; ") }),
        Err(error) => return Err(OperationError::Clean { pod: uid.clone(), cause: Arc::new(error) }),
    }
    match orphans::remove_pod(root_directory, uid) {
        Ok(None) => {}
        Ok(Some(reason)) => debug!("the directory of pod {uid} stays: {reason}"),
        Err(error) => debug!("the directory of pod {uid} stays: {error}"),
    }
    cgroup::remove_named_of_supervisor(uid);
    checkpoints.remove(uid).map_err(remove)
}
