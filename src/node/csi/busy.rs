//! The targets with a call that has not ended: one call for a target runs at a time.
//!
//! The lock of a target goes with the work: the thread that may block holds it. So a call that no longer waits for its thread
//! leaves the target locked until the thread has ended, and no later call overtakes it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tonic::Status;

use crate::manifest::pod::PodUid;

/// The targets with a call, each with the pod that the call publishes a volume of, if it publishes one. Threads hold the mutex
/// for moments, and never over a call that may block.
#[derive(Clone, Default)]
pub(super) struct BusyTargets(Arc<Mutex<HashMap<PathBuf, Option<PodUid>>>>);

/// The right of one call to work on a target. While it exists, podfs refuses other calls for the target.
pub(super) struct TargetLock {
    busy: BusyTargets,
    target: PathBuf,
}

impl BusyTargets {
    /// Locks a target. `published` is the pod of a call that publishes a volume.
    ///
    /// # Errors
    /// ABORTED when another call for the target has not ended.
    pub(super) fn lock(&self, target: &Path, published: Option<PodUid>) -> Result<TargetLock, Status> {
        let mut targets = self.targets();
        if targets.contains_key(target) {
            return Err(Status::aborted(format!("another call for {} has not ended; call again", target.display())));
        }
        targets.insert(target.to_owned(), published);
        Ok(TargetLock { busy: self.clone(), target: target.to_owned() })
    }

    /// Whether a call publishes a volume of the pod.
    pub(super) fn has_publish_of(&self, uid: &PodUid) -> bool {
        self.targets().values().any(|published| published.as_ref() == Some(uid))
    }

    fn targets(&self) -> MutexGuard<'_, HashMap<PathBuf, Option<PodUid>>> {
        self.0.lock().expect("a thread that panics ends the process")
    }
}

impl TargetLock {
    /// Runs work on the target that may block. Returns the lock with the result if the work ends within this time; otherwise
    /// its thread keeps the lock until it ends.
    ///
    /// # Errors
    /// That of the work, and DEADLINE_EXCEEDED.
    pub(super) async fn run<T: Send + 'static>(
        self,
        limit: Duration,
        work: impl FnOnce() -> Result<T, Status> + Send + 'static,
    ) -> Result<(TargetLock, T), Status> {
        let running = spawn_blocking(move || work().map(|done| (self, done)));
        match timeout(limit, running).await {
            Ok(Ok(ended)) => ended,
            Ok(Err(error)) => Err(Status::internal(error.to_string())),
            Err(_) => Err(Status::deadline_exceeded("the directory of the kubelet does not answer")),
        }
    }
}

impl Drop for TargetLock {
    fn drop(&mut self) {
        self.busy.targets().remove(&self.target);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tonic::Code;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_thread_that_hangs_keeps_the_lock_until_it_ends() {
        let (busy, target) = (BusyTargets::default(), Path::new("/k/pods/u/a/mount"));
        let lock = busy.lock(target, None).expect("it is free");
        let (answer, answered) = mpsc::channel::<()>();
        let (limit, work) = (Duration::from_secs(10), move || answered.recv().map_err(|_| Status::internal("x")));
        let call = tokio::spawn(lock.run(limit, work));
        tokio::task::yield_now().await;
        tokio::time::advance(limit).await;
        let outcome = call.await.expect("it ends").map(drop).map_err(|status| status.code());
        assert_eq!(outcome, Err(Code::DeadlineExceeded));
        let again = busy.lock(target, None).map(drop).map_err(|status| status.code());
        assert_eq!(again, Err(Code::Aborted), "the thread works on the target");
        answer.send(()).expect("it waits");
        while busy.lock(target, None).is_err() {
            tokio::task::yield_now().await;
        }
        let lock = busy.lock(target, None).expect("it is free");
        let (_lock, done) = lock.run(limit, || Ok(7)).await.map_err(|status| status.code()).expect("it ends");
        assert!(done == 7 && busy.lock(target, None).is_err(), "the call goes on");
    }

    #[test]
    fn a_call_that_publishes_names_its_pod() {
        let (busy, uid) = (BusyTargets::default(), PodUid::parse("u").expect("a uid"));
        let unpublishes = busy.lock(Path::new("/a"), None).map_err(|status| status.code());
        assert!(!busy.has_publish_of(&uid));
        let publishes = busy.lock(Path::new("/b"), Some(uid.clone())).map_err(|status| status.code());
        assert!(busy.has_publish_of(&uid));
        drop((unpublishes, publishes));
        assert!(!busy.has_publish_of(&uid));
    }
}
