//! The task of one pod: it alone starts, changes and ends the pod's supervisor, so operations on its volumes share one.
//!
//! 1. The task writes the checkpoint of the pod before it starts the supervisor or publishes volumes to it. So this daemon or the
//!    next one starts a supervisor with all volumes of the supervisor before, and a restart takes no volume from a container.
//! 2. A pod has its supervisor while a process holds the lock in its run directory. The task starts a supervisor only
//!    if no process does.
//! 3. The supervisor ends with its last volume; the supervisor of a pod without volumes ends with the pod. If the supervisor fails
//!    to clean up, the task cleans up.
//! 4. The task ends when there is nothing left to do or to watch. A later task begins with the checkpoint.

mod ending;
mod files;
mod operation;
mod publication;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use podfs_fuse::{Backoff, DoublingPause};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};

pub(super) use operation::PodOperation;

use super::control::{self, StatusWatch};
use super::launch::LaunchedSupervisor;
use super::life::{ConnectingSupervisor, EndingSupervisor, LifeEvent, RunningSupervisor, SupervisorLife, process};
use super::retire::retire;
use super::waiting::WaitingOperations;
use super::{FailureKind, OperationError, SharedSupervisors, SupervisorReport, blocking};
use crate::manifest::pod::PodUid;
use crate::node::checkpoint::Checkpoint;
use crate::node::pod::NodePod;
use crate::node::reconstruct::{self, FoundSupervisor};
use crate::node::spans;
use crate::supervisor::run_dir::cgroup;
use crate::supervisor::server::WatchedProcess;
use crate::supervisor::status::{PodState, PodStatus};

/// The longest pause before the task calls a supervisor again.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long a supervisor may be silent before the task reports it.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(3);
/// The pauses before the task repeats a publication that has failed.
const PUBLISH_PAUSE: DoublingPause = DoublingPause::new(Duration::from_millis(500), Duration::from_secs(60));
/// How long systemd may take to start a supervisor.
const UNIT_START_TIMEOUT: Duration = Duration::from_secs(30);

/// The task of a pod.
pub(super) struct PodTask {
    uid: PodUid,
    shared: Arc<SharedSupervisors>,
    requests: mpsc::UnboundedReceiver<PodOperation>,
    directory: PathBuf,
    /// The volumes that the pod wants; `None` until it wants one.
    wanted: Option<Checkpoint>,
    /// The checkpoint on disk.
    written: Option<Checkpoint>,
    /// The volumes that the supervisor was started with, or got by the last publication.
    published: Option<Checkpoint>,
    /// Whether the supervisor serves all of `published`. False after a publication that failed.
    is_taken: bool,
    life: SupervisorLife,
    waiting: WaitingOperations,
    status: Option<PodStatus>,
    /// Whether this supervisor, or one before it, may have mounted volumes of the pod.
    may_be_mounted: bool,
    /// When the task repeats a publication that has failed. The next operation repeats it at once.
    publish_at: Option<Instant>,
    /// The pauses between publications that fail.
    publish_pauses: Backoff,
}

impl PodTask {
    pub(super) fn new(
        uid: PodUid,
        shared: Arc<SharedSupervisors>,
        requests: mpsc::UnboundedReceiver<PodOperation>,
    ) -> PodTask {
        let directory = shared.settings.run_directory.join(uid.as_str());
        PodTask {
            uid,
            shared,
            requests,
            directory,
            wanted: None,
            written: None,
            published: None,
            is_taken: true,
            life: SupervisorLife::Absent,
            waiting: WaitingOperations::default(),
            status: None,
            may_be_mounted: false,
            publish_at: None,
            publish_pauses: PUBLISH_PAUSE.backoff(),
        }
    }

    /// Serves requests until nothing is left to do. Returns the receiver: later requests are for the next task.
    pub(super) async fn run(mut self) -> mpsc::UnboundedReceiver<PodOperation> {
        self.begin().await;
        loop {
            while let Ok(request) = self.requests.try_recv() {
                self.take(request).await;
            }
            self.act().await;
            if self.is_over() && self.requests.is_empty() {
                if let Err(reason) = self.write_checkpoint().await {
                    warn!("{reason}");
                }
                return self.requests;
            }
            let deadline = self.waiting.deadline().filter(|_| !matches!(self.life, SupervisorLife::Queued(_)));
            tokio::select! {
                request = self.requests.recv() => match request {
                    Some(request) => self.take(request).await,
                    None => return self.requests,
                },
                event = self.life.next() => self.handle_event(event).await,
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.waiting.expire(self.status.as_ref());
                }
                () = sleep_until(self.publish_at.unwrap_or_else(Instant::now)), if self.publish_at.is_some() => {
                    self.publish_at = None;
                }
            }
        }
    }

    /// Reads the checkpoint, and follows the pod's supervisor if it lives.
    async fn begin(&mut self) {
        let (checkpoints, uid, directory) = (self.shared.checkpoints.clone(), self.uid.clone(), self.directory.clone());
        let found = blocking(move || {
            let supervisor = reconstruct::supervisor(&directory);
            let is_of_daemon = supervisor.is_started_with(&checkpoints.manifest_path(&uid));
            (checkpoints.read(&uid), checkpoints.has_files(&uid), supervisor, is_of_daemon)
        });
        let (checkpoint, has_files, supervisor, is_of_daemon) = found.await;
        match checkpoint {
            Ok(checkpoint) => {
                if let Some((namespace, name)) = checkpoint.as_ref().and_then(Checkpoint::pod_name) {
                    spans::set_pod(namespace, name);
                }
                self.wanted = checkpoint;
            }
            Err(error) => {
                warn!("podfs cannot read the checkpoint of pod {}: {error}", self.uid);
            }
        }
        // A retirement that did not end may have removed the manifest alone.
        self.written = self.wanted.clone().filter(|_| has_files);
        self.published.clone_from(&self.wanted);
        self.may_be_mounted = self.wanted.is_some();
        if let FoundSupervisor::Alive(pid) = supervisor
            && (self.wanted.is_some() || is_of_daemon)
        {
            self.life = SupervisorLife::Calling(ConnectingSupervisor::new(process(pid), false, None));
        }
    }

    fn is_over(&self) -> bool {
        matches!(self.life, SupervisorLife::Absent) && self.waiting.is_empty()
    }

    fn wants_nothing(&self) -> bool {
        self.waiting.for_end()
            || self.wanted.as_ref().is_none_or(|wanted| wanted.volumes.is_empty() && !wanted.without_volumes)
    }

    /// Whether a supervisor that serves nothing wanted may be stopped. If the pod has no checkpoint, the daemon does not know what the
    /// pod wants, before an operation says so.
    fn may_stop(&self) -> bool {
        self.wanted.is_some() || !self.waiting.is_empty()
    }

    /// Whether the supervisor serves what is wanted.
    fn is_published(&self) -> bool {
        self.is_taken && self.published == self.wanted
    }

    async fn take(&mut self, request: PodOperation) {
        self.publish_at = None;
        self.publish_pauses.reset();
        match request {
            PodOperation::Mount { pod, volume, limit, answer } => {
                self.want(pod).volumes.insert(volume.clone());
                self.waiting.add_mount(Some(volume), limit, answer);
                self.answer_mounts();
            }
            PodOperation::Serve { pod, limit, answer } => {
                self.want(pod).without_volumes = true;
                self.waiting.add_mount(None, limit, answer);
                self.answer_mounts();
            }
            PodOperation::Unmount { volume, answer } => {
                if let Some(wanted) = &mut self.wanted {
                    wanted.volumes.remove(&volume);
                }
                self.waiting.add_unmount(volume, answer);
            }
            PodOperation::End(answer) => {
                if let Some(wanted) = &mut self.wanted {
                    wanted.volumes.clear();
                    wanted.without_volumes = false;
                }
                self.waiting.add_end(answer);
            }
            PodOperation::Update(pod) => {
                if let Some(wanted) = &mut self.wanted {
                    wanted.describe(pod.origin, pod.manifest);
                }
            }
            PodOperation::Released(released, answer) => {
                if let Some(wanted) = &mut self.wanted {
                    wanted.released = released;
                }
                let _ = answer.send(self.write_checkpoint().await);
            }
            PodOperation::Adopt => {}
            PodOperation::Restore => self.restore().await,
        }
    }

    /// The wanted state of the pod, with its current description.
    fn want(&mut self, pod: NodePod) -> &mut Checkpoint {
        let NodePod { pod, origin, manifest, .. } = pod;
        if self.wanted.is_none() {
            spans::set_pod(&pod.identity.namespace, &pod.identity.name);
        }
        let new = Checkpoint::new(origin.clone(), Arc::clone(&manifest), BTreeSet::new(), false);
        let wanted = self.wanted.get_or_insert(new);
        wanted.describe(origin, manifest);
        wanted
    }

    /// Does what is needed to reach the wanted state.
    async fn act(&mut self) {
        match &self.life {
            SupervisorLife::Absent if self.wants_nothing() && self.waiting.for_removal() => {
                self.remove_leftovers().await;
            }
            SupervisorLife::Absent if !self.waiting.is_empty() => {
                let starts = Arc::clone(&self.shared.starts);
                self.life =
                    SupervisorLife::Queued(Box::pin(async move { Semaphore::acquire_owned(starts).await.ok() }));
            }
            SupervisorLife::Queued(_) if self.wants_nothing() => {
                self.life = SupervisorLife::Absent;
                Box::pin(self.act()).await;
            }
            SupervisorLife::Calling(ConnectingSupervisor { process: Some(_), .. }) | SupervisorLife::Up(_)
                if self.wants_nothing() && self.may_stop() =>
            {
                self.stop().await
            }
            SupervisorLife::Up(RunningSupervisor { change: None, has_sent_status: true, .. })
                if !self.is_published() && self.publish_at.is_none() =>
            {
                self.publish().await;
            }
            SupervisorLife::Up(RunningSupervisor { change: None, has_sent_status: true, .. })
                if self.is_published() =>
            {
                let wanted = self.wanted.as_ref();
                let is_wanted = |name: &str| wanted.is_some_and(|wanted| wanted.volumes.contains(name));
                self.waiting.unmounted(|volume| !is_wanted(volume), &Ok(()));
            }
            _ => {}
        }
    }

    async fn handle_event(&mut self, event: LifeEvent) {
        match event {
            LifeEvent::Permit(permit) => self.start(permit).await,
            LifeEvent::Call => self.call().await,
            LifeEvent::Ended(end) => self.ended(end).await,
            LifeEvent::Status(Ok(Some(status))) => self.take_status(*status).await,
            // The supervisor has ended, or executes another version of podfs.
            LifeEvent::Status(outcome) => {
                let reason = outcome.err().map_or(OperationError::Closed, OperationError::from);
                debug!("the supervisor of pod {} is called again: {reason}", self.uid);
                if let SupervisorLife::Up(up) = std::mem::replace(&mut self.life, SupervisorLife::Absent) {
                    self.life = SupervisorLife::Calling(ConnectingSupervisor::new(Some(up.process), false, None));
                    if let Some(change) = up.change {
                        self.publication_ended(change, Err(reason));
                    }
                }
            }
            LifeEvent::Changed(outcome) => {
                if let SupervisorLife::Up(RunningSupervisor { change, .. }) = &mut self.life
                    && let Some(change) = change.take()
                {
                    self.publication_ended(change, outcome);
                }
            }
            LifeEvent::Slow => self.report_slow_end().await,
            LifeEvent::Overdue => self.kill_overdue().await,
        }
    }

    /// Takes a status of the supervisor.
    async fn take_status(&mut self, status: PodStatus) {
        if let SupervisorLife::Up(up) = &mut self.life
            && !std::mem::replace(&mut up.has_sent_status, true)
            && let Some(published) = &mut self.published
        {
            let served: BTreeSet<String> = status.volumes.iter().map(|volume| volume.name.clone()).collect();
            // A daemon may be killed after it wrote the checkpoint and before it published the volumes.
            self.is_taken &= published.volumes.is_subset(&served);
            // A daemon that was killed may have published more volumes than its checkpoint has.
            published.volumes.extend(served);
        }
        self.status = Some(status.clone());
        self.answer_mounts();
        self.report(SupervisorReport::Status(Box::new(status))).await;
    }

    /// Starts the supervisor, unless there is one, with all volumes that earlier supervisors served. Later, the task unpublishes
    /// those that the pod no longer wants.
    async fn start(&mut self, permit: Option<OwnedSemaphorePermit>) {
        self.life = SupervisorLife::Absent;
        let is_known = self.written.is_some();
        let Some(mut served) = self.wanted.clone() else { return };
        served.volumes.extend(self.written.iter().flat_map(|written| written.volumes.iter().cloned()));
        if let Err(reason) = self.write(served.clone()).await {
            match &self.written {
                // The task publishes the present description when it can write again.
                Some(written) if served.volumes.is_subset(&written.volumes) => {
                    warn!("{reason}; podfs starts the supervisor of pod {} with the last description", self.uid);
                    served = written.clone();
                }
                _ => return self.fail_all(FailureKind::Transient, &reason),
            }
        }
        (self.published, self.is_taken) = (Some(served), true);
        let (launcher, uid, directory) = (self.shared.launcher.clone(), self.uid.clone(), self.directory.clone());
        let (checkpoints, manifest) =
            (self.shared.checkpoints.clone(), self.shared.checkpoints.manifest_path(&self.uid));
        let launched = blocking(move || match reconstruct::supervisor(&directory) {
            // If its checkpoint was deleted, the command line shows that a daemon has started it.
            found @ FoundSupervisor::Alive(pid) => Err((pid, is_known || found.is_started_with(&manifest))),
            FoundSupervisor::Dead => {
                checkpoints.forget_failure(&uid);
                Ok(launcher.launch(&uid, &manifest))
            }
        });
        let (process, is_unit) = match launched.await {
            Err((pid, true)) => (process(pid), false),
            Err((pid, false)) => {
                self.forget().await;
                return self.fail_all(FailureKind::Final, &OperationError::OfPodfsRun(pid));
            }
            Ok(Ok(LaunchedSupervisor::Child(pid))) => (WatchedProcess::with_pid(pid).ok(), false),
            Ok(Ok(LaunchedSupervisor::Unit)) => (None, true),
            Ok(Err(error)) => return self.fail_start(&error.into()).await,
        };
        self.life = SupervisorLife::Calling(ConnectingSupervisor::new(process, is_unit, permit));
        self.waiting.begin();
    }

    /// Tries to connect to a supervisor that does not answer yet, or no longer.
    async fn call(&mut self) {
        let follower = control::connect(&self.directory).await;
        let SupervisorLife::Calling(calling) = &mut self.life else { return };
        let found = reconstruct::supervisor(&self.directory);
        if let (None, FoundSupervisor::Alive(pid)) = (&calling.process, found) {
            calling.process = process(pid);
        }
        let pid = calling.process.as_ref().map(|process| process.pid().unsigned_abs());
        let watch = match follower {
            Ok(follower) => {
                // The manager pushes objects meanwhile: the first volume needs them.
                if let Some(pid) = pid {
                    self.report(SupervisorReport::Up(pid)).await;
                }
                StatusWatch::begin(follower).await
            }
            Err(error) => Err(error),
        };
        let SupervisorLife::Calling(calling) = &mut self.life else { return };
        match (watch, calling.process.take()) {
            (Ok(watch), Some(process)) => {
                self.life =
                    SupervisorLife::Up(RunningSupervisor { watch, process, change: None, has_sent_status: false });
                self.may_be_mounted = true;
                // systemd may have started it after a start that failed.
                let (checkpoints, uid) = (self.shared.checkpoints.clone(), self.uid.clone());
                blocking(move || checkpoints.forget_failure(&uid)).await;
            }
            (outcome, process) => {
                let silent_for = calling.since.elapsed();
                calling.next = Instant::now() + calling.pause;
                calling.pause = (calling.pause * 5 / 4).min(LONGEST_PAUSE);
                if process.is_none() && !calling.is_unit && found == FoundSupervisor::Dead {
                    return self.ended("its process is gone".to_owned()).await;
                }
                if process.is_none() && silent_for > UNIT_START_TIMEOUT {
                    return self
                        .ended("systemd does not start it; see systemctl status and journalctl".to_owned())
                        .await;
                }
                calling.process = process;
                if silent_for > SILENCE_TIMEOUT && !std::mem::replace(&mut calling.is_reported, true) {
                    // Supervisors of other pods can start meanwhile.
                    calling.permit = None;
                    let reason =
                        outcome.err().map_or_else(|| "its process is not known".to_owned(), |error| error.to_string());
                    let status = PodStatus::without_answer(self.uid.as_str(), PodState::NotAnswering, reason);
                    self.status = Some(status.clone());
                    self.report(SupervisorReport::Status(Box::new(status))).await;
                }
            }
        }
    }

    /// Handles the end of the supervisor.
    async fn ended(&mut self, end: String) {
        let before = std::mem::replace(&mut self.life, SupervisorLife::Absent);
        self.status = None;
        if let SupervisorLife::Ending(EndingSupervisor { cgroup, report_at, .. }) = before {
            debug!("the supervisor of pod {} has ended: {end}", self.uid);
            if report_at.is_none() {
                self.report(SupervisorReport::Ending(None)).await;
            }
            blocking(move || cgroup.iter().for_each(|cgroup| cgroup::remove_of_supervisor(cgroup))).await;
            return self.remove_leftovers().await;
        }
        warn!("the supervisor of pod {} is gone: {end}", self.uid);
        let (checkpoints, uid) = (self.shared.checkpoints.clone(), self.uid.clone());
        let failure = blocking(move || checkpoints.failure(&uid)).await;
        self.fail_start(&OperationError::Ended { end, failure }).await;
        if self.may_be_mounted {
            self.report(SupervisorReport::Gone).await;
        }
    }

    /// Fails the operations that wait, after the supervisor did not start or has ended. Forgets a pod of which nothing was
    /// mounted.
    async fn fail_start(&mut self, reason: &OperationError) {
        if self.may_be_mounted {
            return self.fail_all(FailureKind::Uncertain, reason);
        }
        if let Some(wanted) = &mut self.wanted {
            for volume in self.waiting.mounting() {
                wanted.volumes.remove(volume);
            }
            wanted.without_volumes &= !self.waiting.for_supervisor();
        }
        if self.wants_nothing() {
            self.forget().await;
        }
        self.fail_all(FailureKind::Final, reason);
    }

    /// Removes the leftovers of the pod, which has no supervisor.
    async fn remove_leftovers(&mut self) {
        let (settings, checkpoints, uid) =
            (self.shared.settings.clone(), self.shared.checkpoints.clone(), self.uid.clone());
        let outcome = blocking(move || retire(&settings.run_directory, &settings.root_directory, &checkpoints, &uid));
        let outcome = outcome.await;
        if outcome.is_ok() {
            (self.wanted, self.written, self.published) = (None, None, None);
            self.may_be_mounted = false;
        } else {
            // The retirement has removed the manifest.
            self.written = None;
        }
        self.waiting.removed(&outcome);
        self.waiting.fail_mounts(FailureKind::Transient, "podfs has unmounted the volumes of the pod meanwhile");
    }

    /// Answers the mounts whose volumes are mounted.
    fn answer_mounts(&mut self) {
        if let (SupervisorLife::Up(RunningSupervisor { change: None, .. }), Some(status), Some(published)) =
            (&self.life, &self.status, &self.published)
            && self.is_taken
        {
            self.waiting.mounted(status, |volume| published.volumes.contains(volume));
        }
    }

    /// Answers all mounts and unmounts.
    fn fail_all(&mut self, kind: FailureKind, reason: &OperationError) {
        self.waiting.fail_mounts(kind, &reason.to_string());
        self.waiting.unmounted(|_| true, &Err(reason.clone()));
    }

    async fn report(&mut self, report: SupervisorReport) {
        // Fails only while the manager ends.
        let _ = self.shared.reports.send((self.uid.clone(), report)).await;
    }
}
