//! Publishing a volume, unpublishing it, and its state: what the services do with the manager and the targets.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use podfs_fuse::mount::private::ContainerAccess;
use secrecy::SecretString;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::Status;
use tracing::{Instrument, info, warn};

use super::busy::{BusyTargets, TargetLock};
use super::target::{KubeletRoot, TargetError, TargetUsage};
use crate::manifest::pod::PodUid;
use crate::node::NodeHandle;
use crate::node::feed::{KubeletChange, PodReaders};
use crate::node::publication::{Publication, Publications};
use crate::node::state::{MountState, NodeState, VolumeEntry};

/// How long a call waits until its volume is mounted. The kubelet waits for two minutes, and calls again.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the first call for a volume waits, if podfs knows why the volume is not mounted, so that the kubelet posts the reason as an
/// event of the pod. The kubelet calls again at once, and that call waits for [`MOUNT_TIMEOUT`].
const REASON_DELAY: Duration = Duration::from_secs(3);
/// How long a call waits for system calls on the kubelet's directory.
const SYSTEM_CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How often podfs checks whether the kubelet has removed directories of pods.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// The error of a call without a token, where podfs reads objects as the pod.
const NO_TOKEN: &str = "the call has no token of the pod's service account, and podfs reads objects as the pod (csi-read-as); the \
    CSIDriver object of podfs.io must have tokenRequests: [{audience: \"\"}]";

/// The publications of the kubelet, and the operations on them. Cheap to clone.
#[derive(Clone)]
pub(super) struct CsiOperations {
    shared: Arc<SharedOperations>,
}

struct SharedOperations {
    root: KubeletRoot,
    records: Publications,
    node: NodeHandle,
    changes: UnboundedSender<KubeletChange>,
    /// The readers of objects, where podfs reads them with the credentials of the pods.
    readers: Option<PodReaders>,
    /// The publications by their targets. The lock is held for moments, and never over a call that may block.
    known: Mutex<BTreeMap<PathBuf, Publication>>,
    /// The targets with a call that has not ended.
    busy: BusyTargets,
    /// The targets with a call of NodeGetVolumeStats. They are apart from `busy`: the source of a volume may be silent for ever, and
    /// podfs unmounts such a volume, too.
    measured: BusyTargets,
}

/// The state of a volume.
pub(super) struct Stats {
    pub(super) usage: Option<TargetUsage>,
    pub(super) abnormal: bool,
    pub(super) message: String,
}

impl CsiOperations {
    pub(super) fn new(
        root: KubeletRoot,
        records: Publications,
        known: BTreeMap<PathBuf, Publication>,
        node: NodeHandle,
        changes: UnboundedSender<KubeletChange>,
        readers: Option<PodReaders>,
    ) -> CsiOperations {
        let (known, busy, measured) = (Mutex::new(known), BusyTargets::default(), BusyTargets::default());
        CsiOperations {
            shared: Arc::new(SharedOperations { root, records, node, changes, readers, known, busy, measured }),
        }
    }

    pub(super) fn root(&self) -> &KubeletRoot {
        &self.shared.root
    }

    /// Mounts the volume at its target, or checks that it is still mounted there. `token` is a token of the pod's
    /// service account.
    pub(super) async fn publish(&self, publication: Publication, token: Option<SecretString>) -> Result<(), Status> {
        publication.name_in_span();
        let lock = self.shared.busy.lock(&publication.target, Some(publication.uid()))?;
        let published = tokio::spawn(Arc::clone(&self.shared).publish(publication, token, lock));
        published.await.unwrap_or_else(|error| Err(Status::internal(error.to_string())))
    }

    /// Unmounts the volume from the target. A target that does not exist is no error.
    pub(super) async fn unpublish(&self, volume_id: &str, target: PathBuf) -> Result<(), Status> {
        let lock = self.shared.busy.lock(&target, None)?;
        let known = self.shared.publications().get(&target).cloned();
        known.iter().for_each(Publication::name_in_span);
        if let Some(known) = known.filter(|known| known.volume_id != volume_id) {
            return Err(Status::not_found(format!(
                "at {} is the volume {:?}, not {volume_id:?}",
                target.display(),
                known.volume_id
            )));
        }
        let unpublished = tokio::spawn(Arc::clone(&self.shared).unpublish(target, lock));
        unpublished.await.unwrap_or_else(|error| Err(Status::internal(error.to_string())))
    }

    /// The state of the volume at a path.
    pub(super) async fn stats(&self, volume_id: &str, path: &Path) -> Result<Stats, Status> {
        let known = self.shared.publications().get(path).filter(|known| known.volume_id == volume_id).cloned();
        let Some(publication) = known else {
            let sentence = format!("the volume {volume_id:?} is not published at {}", path.display());
            return Err(Status::not_found(sentence));
        };
        publication.name_in_span();
        let lock = self.shared.measured.lock(path, None)?;
        let (shared, target) = (Arc::clone(&self.shared), path.to_owned());
        // The blocking thread holds the lock, so a volume that hangs occupies one thread, not one for each call.
        let measured = spawn_blocking(move || {
            let _lock = lock;
            let is_mounted = shared.root.mounted(&target).is_ok_and(|layers| !layers.is_empty());
            (is_mounted, shared.root.usage(&target))
        });
        let measured = timeout(SYSTEM_CALL_TIMEOUT, measured).await;
        let reason = self.shared.reason(&publication);
        let stats = |usage, message: Option<String>| Stats {
            usage,
            abnormal: message.is_some(),
            message: message.unwrap_or_else(|| "the volume is mounted and shows the current content".to_owned()),
        };
        match measured {
            Ok(Ok((true, Ok(usage)))) => Ok(stats(Some(usage), reason)),
            Ok(Ok((true, Err(error)))) => Ok(stats(None, Some(format!("the volume does not work: {error}")))),
            Ok(Ok((false, _))) => Ok(stats(
                None,
                Some(
                    "the volume is not mounted at its path; podfs mounts it with the next NodePublishVolume".to_owned(),
                ),
            )),
            Ok(Err(error)) => Err(Status::internal(error.to_string())),
            Err(_) => Ok(stats(None, Some("the volume does not answer".to_owned()))),
        }
    }

    /// Unmounts volumes whose pods the kubelet no longer has, for as long as the daemon runs.
    pub(super) async fn retire_gone_pods(self) {
        let mut checks = tokio::time::interval(CHECK_INTERVAL);
        loop {
            checks.tick().await;
            let known: Vec<_> = self.shared.publications().values().cloned().collect();
            self.restore_records(&known).await;
            let root = self.shared.root.clone();
            let gone = spawn_blocking(move || {
                known.into_iter().filter(|known| root.has_lost_pod(&known.target, &known.pod.uid)).collect::<Vec<_>>()
            });
            for publication in gone.await.unwrap_or_default() {
                self.retire(&publication).instrument(publication.span()).await;
            }
        }
    }

    async fn retire(&self, Publication { volume_id, target, pod, .. }: &Publication) {
        info!(
            "pod {}/{}: the kubelet has removed its directory; podfs unmounts its volume at {}",
            pod.namespace,
            pod.name,
            target.display()
        );
        if let Err(status) = self.unpublish(volume_id, target.clone()).await {
            warn!("{}", status.message());
        }
    }

    /// Writes the records again that another process has deleted from the run directory.
    async fn restore_records(&self, known: &[Publication]) {
        let (shared, all) = (Arc::clone(&self.shared), known.to_vec());
        let missing = spawn_blocking(move || {
            all.into_iter().filter(|publication| !shared.records.has(&publication.target)).collect::<Vec<_>>()
        });
        for publication in missing.await.unwrap_or_default() {
            // A call for the target is running: it writes or removes the record itself.
            let Ok(lock) = self.shared.busy.lock(&publication.target, None) else { continue };
            if !self.shared.publications().contains_key(&publication.target) {
                continue;
            }
            let (shared, span) = (Arc::clone(&self.shared), publication.span());
            let written = spawn_blocking(move || {
                let _lock = lock;
                shared.records.write(&publication)
            });
            let written = written.await;
            let _span = span.entered();
            match written {
                Ok(Ok(())) => info!("another process has deleted the record of a CSI volume; podfs writes it again"),
                Ok(Err(error)) => warn!("cannot record a CSI volume for the next podfs node: {error}"),
                Err(_) => {}
            }
        }
    }
}

impl SharedOperations {
    async fn publish(
        self: Arc<Self>,
        publication: Publication,
        token: Option<SecretString>,
        lock: TargetLock,
    ) -> Result<(), Status> {
        self.check_known(&publication)?;
        self.take_token(&publication, token)?;
        let is_known =
            self.publications().get(&publication.target).is_some_and(|known| publication.is_repeat_of(known));
        if !is_known {
            self.record(&publication).await?;
        }
        let source = match self.wait_until_mounted(&publication, !is_known).await {
            Ok(source) => source,
            // The kubelet repeats the call for a volume that is mounted: a failure leaves the volume as it is.
            Err(_) if is_known && self.is_mounted(&publication.target).await => return Ok(()),
            Err(status) => return Err(status),
        };
        let (shared, target) = (Arc::clone(&self), publication.target.clone());
        let access = if publication.read_only { ContainerAccess::ReadOnly } else { ContainerAccess::ReadWrite };
        let mount = move || shared.root.mount(&source, &target, access).map_err(|error| status_of(&error));
        lock.run(SYSTEM_CALL_TIMEOUT, mount).await.map(drop)
    }

    /// Makes podfs read the pod's objects with this token from now on.
    fn take_token(&self, publication: &Publication, token: Option<SecretString>) -> Result<(), Status> {
        let Some(readers) = &self.readers else { return Ok(()) };
        let uid = publication.uid();
        match token {
            Some(token) => readers.renew(&uid, token),
            None if readers.knows(&uid) || self.publications().contains_key(&publication.target) => {}
            None => return Err(Status::invalid_argument(NO_TOKEN)),
        }
        Ok(())
    }

    /// Refuses a publication that contradicts an earlier publication.
    fn check_known(&self, publication: &Publication) -> Result<(), Status> {
        let known = self.publications();
        let at_target = known.get(&publication.target).filter(|known| !publication.is_repeat_of(known));
        let of_volume = || {
            let mut same_id = known.values().filter(|known| known.volume_id == publication.volume_id);
            same_id.find(|known| !known.is_same_volume(publication))
        };
        match at_target.or_else(of_volume) {
            None => Ok(()),
            Some(other) => Err(Status::already_exists(format!(
                "the volume {:?} is published at {} with other attributes; unpublish it first",
                other.volume_id,
                other.target.display()
            ))),
        }
    }

    /// Writes the record of a new publication, and reports it to the manager.
    async fn record(self: &Arc<Self>, publication: &Publication) -> Result<(), Status> {
        let (shared, new) = (Arc::clone(self), publication.clone());
        let recorded = spawn_blocking(move || {
            shared.root.check(&new.target).map_err(|error| status_of(&error))?;
            shared.records.write(&new).map_err(|error| Status::internal(format!("cannot record the volume: {error}")))
        });
        recorded.await.unwrap_or_else(|error| Err(Status::internal(error.to_string())))?;
        self.publications().insert(publication.target.clone(), publication.clone());
        let change = KubeletChange::Published(Box::new(publication.clone()));
        self.changes.send(change).map_err(|_| Status::unavailable("podfs node ends; call again when it has started"))
    }

    /// Waits until the volume is mounted in the manager's state, and returns its path. `is_first` says whether this is the first call
    /// for the volume.
    async fn wait_until_mounted(&self, publication: &Publication, is_first: bool) -> Result<PathBuf, Status> {
        let began = Instant::now();
        let until = began + MOUNT_TIMEOUT;
        let reports_at = if is_first { began + REASON_DELAY } else { until };
        let mut states = self.node.follow();
        loop {
            let path = entry(&states.borrow_and_update(), publication).and_then(|volume| match volume.mount {
                MountState::Mounted => volume.path.clone(),
                MountState::NotMounted | MountState::Uncertain => None,
            });
            if let Some(path) = path {
                return Ok(path);
            }
            let now = Instant::now();
            if now >= until || (now >= reports_at && self.reason(publication).is_some()) {
                return Err(Status::deadline_exceeded(self.why_not_mounted(publication, now - began)));
            }
            let next = if now < reports_at { reports_at } else { until };
            if let Ok(Err(_)) = timeout_at(next, states.changed()).await {
                return Err(Status::unavailable("podfs node ends; call again when it has started"));
            }
        }
    }

    fn why_not_mounted(&self, publication: &Publication, waited: Duration) -> String {
        let reason = self.reason(publication).unwrap_or_else(|| match publication.needs_pod {
            true => "neither the API server nor a manifest file has the pod yet".to_owned(),
            false => "its supervisor has not mounted it yet; podfs node status says more".to_owned(),
        });
        format!("the volume is not mounted after {} s: {reason}; podfs continues to wait", waited.as_secs())
    }

    /// Why the volume is not mounted or not current.
    fn reason(&self, publication: &Publication) -> Option<String> {
        let state = self.node.state();
        let pod = state.pods.get(&publication.uid());
        let of_volume = entry(&state, publication).and_then(|volume| volume.reason.clone());
        of_volume.or_else(|| pod.and_then(|pod| pod.errors.first().cloned()))
    }

    async fn is_mounted(self: &Arc<Self>, target: &Path) -> bool {
        let (shared, target) = (Arc::clone(self), target.to_owned());
        let is_mounted = spawn_blocking(move || shared.root.mounted(&target).is_ok_and(|layers| !layers.is_empty()));
        is_mounted.await.unwrap_or(false)
    }

    async fn unpublish(self: Arc<Self>, target: PathBuf, lock: TargetLock) -> Result<(), Status> {
        let (shared, path) = (Arc::clone(&self), target.clone());
        let is_known = self.publications().contains_key(&target);
        let remove = move || {
            shared.root.unmount(&path, is_known).map_err(|error| status_of(&error))?;
            shared
                .records
                .remove(&path)
                .map_err(|error| Status::internal(format!("cannot remove the record of the volume: {error}")))
        };
        let (_lock, ()) = lock.run(SYSTEM_CALL_TIMEOUT, remove).await?;
        let publication = self.publications().remove(&target);
        if let Some(publication) = publication {
            // Fails only while the daemon ends. The next daemon does not find a record of the publication.
            let _ = self.changes.send(KubeletChange::Unpublished(target));
            self.wait_until_forgotten(&publication).await;
        }
        if let Some(readers) = &self.readers {
            // A call that publishes takes the token of its pod before its publication is known, and is busy until after that.
            let is_published = |uid: &PodUid| self.publications().values().any(|known| known.pod.uid == uid.as_str());
            readers.keep(|uid| self.busy.has_publish_of(uid) || is_published(uid));
        }
        Ok(())
    }

    /// Waits until the manager no longer wants the volume. Otherwise, a later publication could find the volume of this
    /// publication in the manager's state.
    async fn wait_until_forgotten(&self, publication: &Publication) {
        let mut states = self.node.follow();
        let is_wanted = |state: &Arc<NodeState>| entry(state, publication).is_some();
        // Fails only while the daemon ends. The manager never blocks.
        let _ = timeout(SYSTEM_CALL_TIMEOUT, states.wait_for(|state| !is_wanted(state))).await;
    }

    fn publications(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Publication>> {
        self.known.lock().expect("a thread that panics ends the process")
    }
}

/// The wanted volume of a publication in the manager's state.
fn entry<'a>(state: &'a NodeState, publication: &Publication) -> Option<&'a VolumeEntry> {
    let uid: PodUid = publication.uid();
    state.pods.get(&uid)?.volumes.iter().find(|volume| volume.desired && volume.name == publication.name)
}

fn status_of(error: &TargetError) -> Status {
    match error {
        TargetError::NoDirectory(_) => Status::invalid_argument(error.to_string()),
        TargetError::Failed { .. } => Status::internal(error.to_string()),
    }
}
