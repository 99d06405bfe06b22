//! Waiting for the volumes of a pod: `WaitForVolumes` and `WaitForUnmount`, with the kubelet's rules and texts (VM-07, VM-11).
//!
//! A plain function judges the state. The wait calls it after each change of the state.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::manifest::pod::PodUid;
use crate::node::{MountState, NodeHandle, NodeState, PodEntry, PodStage, VolumeEntry};

/// How long an agent waits by default: a second more than the longest back-off.
pub const TIMEOUT: Duration = Duration::from_secs(123);
/// How long the manager may take to process a pod again before the pod's errors count: the kubelet's poll interval.
/// Earlier errors may be outdated.
const REPROCESSING_DELAY: Duration = Duration::from_millis(300);
/// The kubelet's words for a timeout.
const TIME_IS_OVER: &str = "context deadline exceeded";

/// Why podfs cannot say yet whether a pod is to run.
const UNKNOWN: &str = "its source has not listed its pods yet, or podfs node runs without that source";

/// Why a wait ended without success.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The node does not have the pod.
    #[error("pod {0}: this node does not have it; podfs node status lists its pods, by NAMESPACE/NAME and uid")]
    Unknown(String),
    /// The timeout is over, and volumes are not mounted.
    #[error("{0}")]
    NotMounted(UnmountedVolumes),
    /// The pod has errors that waiting does not solve, and volumes are not mounted.
    #[error("{0}")]
    Failed(UnmountedVolumes),
    /// podfs no longer serves the pod, so its volumes will not be mounted again.
    #[error("pod {pod}: {why}, so its volumes are not mounted any more")]
    Over {
        /// The pod.
        pod: String,
        /// Why podfs no longer serves it.
        why: &'static str,
    },
    /// The timeout is over, and volumes are still mounted.
    #[error("mounted volumes=[{}]: {reason}", .volumes.join(" "))]
    StillMounted {
        /// Their names, sorted.
        volumes: Vec<String>,
        /// Why.
        reason: String,
    },
    /// The daemon ends.
    #[error("podfs node ends; ask again when it has started")]
    Ending,
}

/// Volumes of a pod that are not mounted, in the kubelet's words. No volume of podfs is ever attached.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unmounted volumes=[{}], unattached volumes=[], failed to process volumes=[{}]: {reason}",
    .unmounted.join(" "),
    .unprocessed.join(" ")
)]
pub struct UnmountedVolumes {
    /// Their names, sorted.
    pub unmounted: Vec<String>,
    /// The names of those that podfs could not add to the desired world, sorted.
    pub unprocessed: Vec<String>,
    /// Why.
    pub reason: String,
}

/// Waits until the volumes are mounted that the pod's containers use.
///
/// # Errors
/// When the timeout is over, when the pod has errors or has ended, and when the daemon ends.
pub async fn for_volumes(node: &NodeHandle, pod: &str, timeout: Duration) -> Result<(), WaitError> {
    let mut states = node.follow();
    let deadline = Instant::now() + timeout;
    let mut errors_count_from = None;
    loop {
        let state = Arc::clone(&states.borrow_and_update());
        let found = state.find(pod);
        if let Some((uid, entry)) = found {
            if errors_count_from.is_none() {
                node.reprocess(uid.clone()).await.map_err(|_| WaitError::Ending)?;
                errors_count_from = Some(Instant::now() + REPROCESSING_DELAY);
            }
            if volumes_are_mounted(&state, entry)? {
                return Ok(());
            }
            if !entry.errors.is_empty() && errors_count_from.is_some_and(|time| time <= Instant::now()) {
                return Err(WaitError::Failed(unmounted(entry, entry.errors.join("; "))));
            }
        }
        if deadline <= Instant::now() {
            return Err(match found {
                Some((_, entry)) => WaitError::NotMounted(unmounted(entry, reason(entry, is_unmounted))),
                None => WaitError::Unknown(pod.to_owned()),
            });
        }
        let errors_count_from = errors_count_from.filter(|time| *time > Instant::now());
        change(&mut states, errors_count_from.map_or(deadline, |time| time.min(deadline))).await?;
    }
}

/// Waits until no volume of the pod is mounted any more.
///
/// # Errors
/// When the timeout is over, and when the daemon ends.
pub async fn for_unmount(node: &NodeHandle, pod: &str, timeout: Duration) -> Result<(), WaitError> {
    let mut states = node.follow();
    let deadline = Instant::now() + timeout;
    // Another pod with the name may follow the one that ends.
    let mut ending: Option<PodUid> = None;
    loop {
        let state = Arc::clone(&states.borrow_and_update());
        let found = match &ending {
            Some(uid) => state.pods.get(uid),
            None => state.find_ending(pod).map(|(uid, entry)| {
                ending = Some(uid.clone());
                entry
            }),
        };
        let still_mounted = found.map_or_else(Vec::new, |entry| mounted(entry));
        if still_mounted.is_empty() && (state.sources_ready || ending.is_some()) {
            return Ok(());
        }
        if deadline <= Instant::now() {
            let reason = match found {
                Some(entry) => reason(entry, is_mounted),
                None => format!("{TIME_IS_OVER}; not all sources have listed their pods yet"),
            };
            return Err(WaitError::StillMounted { volumes: still_mounted, reason });
        }
        change(&mut states, deadline).await?;
    }
}

/// Waits for another state, but not longer than until `deadline`.
async fn change(states: &mut watch::Receiver<Arc<NodeState>>, deadline: Instant) -> Result<(), WaitError> {
    tokio::select! {
        changed = states.changed() => changed.map_err(|_| WaitError::Ending),
        () = sleep_until(deadline) => Ok(()),
    }
}

/// Whether all volumes that the pod's containers use are mounted. A mount that no container uses any more does not
/// count.
///
/// # Errors
/// When they will not be mounted again.
fn volumes_are_mounted(node: &NodeState, pod: &PodEntry) -> Result<bool, WaitError> {
    let why = match pod.stage {
        _ if pod.released => Some("it was released"),
        // A daemon that has just started knows the pod from its checkpoint, and has not read all pods yet.
        None if pod.is_unknown() || !node.sources_ready => return Ok(false),
        None => Some("it was deleted"),
        Some(PodStage::Terminal) => Some("it has ended"),
        Some(PodStage::Desired | PodStage::Terminating) => None,
    };
    if let Some(why) = why {
        return Err(WaitError::Over { pod: pod.title(), why });
    }
    let mut expected = pod.volumes.iter().filter(|volume| is_expected(volume)).peekable();
    // A pod that was not processed yet may have more volumes.
    Ok((pod.processed || expected.peek().is_some()) && !expected.any(is_unmounted))
}

/// The pod's volumes that are not mounted.
fn unmounted(pod: &PodEntry, reason: String) -> UnmountedVolumes {
    let names = |is_one: fn(&VolumeEntry) -> bool| sorted(pod.volumes.iter().filter(|volume| is_one(volume)));
    UnmountedVolumes { unmounted: names(is_unmounted), unprocessed: names(is_unprocessed), reason }
}

/// The names of the pod's volumes of which something is mounted.
fn mounted(pod: &PodEntry) -> Vec<String> {
    sorted(pod.volumes.iter().filter(|volume| is_mounted(volume)))
}

/// Whether a container uses the volume. The state lists a volume that no container uses only while it is mounted.
fn is_expected(volume: &VolumeEntry) -> bool {
    volume.desired || is_unprocessed(volume)
}

fn is_unprocessed(volume: &VolumeEntry) -> bool {
    !volume.desired && volume.mount == MountState::NotMounted
}

fn is_unmounted(volume: &VolumeEntry) -> bool {
    is_expected(volume) && volume.mount != MountState::Mounted
}

/// An uncertain volume may be mounted.
fn is_mounted(volume: &VolumeEntry) -> bool {
    volume.mount != MountState::NotMounted
}

/// Why the wait failed: the kubelet's words, and the reasons that podfs has.
fn reason(pod: &PodEntry, concerns: fn(&VolumeEntry) -> bool) -> String {
    let volumes = pod.volumes.iter().filter(|volume| concerns(volume));
    let reasons = volumes.filter_map(|volume| Some(format!("{}: {}", volume.name, volume.reason.as_ref()?)));
    let unknown = pod.is_unknown().then(|| UNKNOWN.to_owned());
    let sentences = pod.errors.iter().chain(&pod.notes).cloned();
    let all = [TIME_IS_OVER.to_owned()].into_iter().chain(unknown).chain(sentences).chain(reasons);
    all.collect::<Vec<_>>().join("; ")
}

fn sorted<'a>(volumes: impl Iterator<Item = &'a VolumeEntry>) -> Vec<String> {
    let mut names: Vec<_> = volumes.map(|volume| volume.name.clone()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::super::fabricated::{FakeManager, UID, node, pod, volume};
    use super::*;
    use crate::node::ManagerCommand;

    const LONG: Duration = Duration::from_secs(60);
    const NOT_AT_ALL: Duration = Duration::ZERO;
    use MountState::{Mounted, NotMounted, Uncertain};

    /// The result of a wait with no time.
    async fn at_once(state: NodeState, pod: &str) -> Result<(), String> {
        let (_fabricated, handle) = FakeManager::new(state);
        for_volumes(&handle, pod, NOT_AT_ALL).await.map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn vm_07_after_the_timeout_the_text_is_the_kubelets() {
        let mut unresolved = volume("claim", NotMounted);
        unresolved.desired = false;
        let volumes = [volume("z", Uncertain), unresolved, volume("config", NotMounted), volume("up", Mounted)];
        assert_eq!(
            at_once(node([pod(volumes)]), "default/web").await,
            Err("unmounted volumes=[claim config z], unattached volumes=[], failed to process volumes=[claim]: \
                 context deadline exceeded"
                .to_owned())
        );
        assert_eq!(TIMEOUT, Duration::from_secs(123));
    }

    #[tokio::test]
    async fn vm_07_the_text_ends_with_the_reasons_of_the_volumes() {
        let mut config = volume("config", NotMounted);
        config.reason = Some("configmap \"web\" not found".to_owned());
        assert_eq!(
            at_once(node([pod([config, volume("up", Mounted)])]), UID).await,
            Err("unmounted volumes=[config], unattached volumes=[], failed to process volumes=[]: context deadline \
                 exceeded; config: configmap \"web\" not found"
                .to_owned())
        );
    }

    #[tokio::test]
    async fn vm_07_errors_of_the_pod_end_the_wait_once_the_pod_was_processed_again() {
        let mut waiting = pod([volume("a", NotMounted), volume("b", NotMounted)]);
        waiting.errors = vec!["one".to_owned(), "two".to_owned()];
        let (mut fabricated, handle) = FakeManager::new(node([waiting.clone()]));
        let error = for_volumes(&handle, UID, LONG).await.expect_err("it has errors");
        assert!(matches!(error, WaitError::Failed(_)), "{error:?}");
        let text = "unmounted volumes=[a b], unattached volumes=[], failed to process volumes=[]: one; two";
        assert_eq!(error.to_string(), text);
        assert!(
            matches!(fabricated.commands.recv().await, Some(ManagerCommand::Reprocess(uid)) if uid.as_str() == UID)
        );

        // Errors that are gone after the manager has processed the pod again were outdated.
        let ended = tokio::spawn(async move { for_volumes(&handle, UID, LONG).await });
        assert!(matches!(fabricated.commands.recv().await, Some(ManagerCommand::Reprocess(_))));
        waiting.errors.clear();
        fabricated.publish(node([waiting.clone()]));
        waiting.volumes.iter_mut().for_each(|volume| volume.mount = Mounted);
        fabricated.publish(node([waiting]));
        assert_eq!(ended.await.expect("no panic"), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn vm_11_a_wait_goes_on_while_the_pod_has_only_notes() {
        let mut waiting = pod([volume("new", NotMounted), volume("old", Mounted)]);
        waiting.notes = vec!["volume \"old\" stays".to_owned()];
        let (_fabricated, handle) = FakeManager::new(node([waiting]));
        let error = for_volumes(&handle, UID, LONG).await.expect_err("a volume is not mounted");
        assert!(matches!(error, WaitError::NotMounted(_)), "{error:?}");
        let text = "unmounted volumes=[new], unattached volumes=[], failed to process volumes=[]: context deadline \
                    exceeded; volume \"old\" stays";
        assert_eq!(error.to_string(), text);
    }

    #[tokio::test]
    async fn a_wait_ends_when_the_last_volume_that_a_container_uses_is_mounted() {
        let mut left_over = volume("left-over", Uncertain);
        left_over.desired = false;
        let with = |mount| node([pod([volume("a", Mounted), volume("b", mount), left_over.clone()])]);
        // The agent knows of the pod before the daemon.
        let (mut fabricated, handle) = FakeManager::new(node([]));
        let ended = tokio::spawn(async move { for_volumes(&handle, "default/web", LONG).await });
        fabricated.publish(with(NotMounted));
        assert!(fabricated.commands.recv().await.is_some(), "the manager looks at the pod again");
        fabricated.publish(with(Uncertain));
        assert!(!ended.is_finished());
        fabricated.publish(with(Mounted));
        assert_eq!(ended.await.expect("no panic"), Ok(()));
    }

    #[tokio::test]
    async fn a_pod_without_volumes_waits_only_until_it_was_processed() {
        let mut empty = pod([]);
        assert_eq!(at_once(node([empty.clone()]), UID).await, Ok(()));
        empty.processed = false;
        let text =
            "unmounted volumes=[], unattached volumes=[], failed to process volumes=[]: context deadline exceeded";
        assert_eq!(at_once(node([empty]), UID).await, Err(text.to_owned()));
    }

    #[tokio::test]
    async fn a_wait_for_a_pod_that_has_ended_fails_at_once() {
        let over = |change: fn(&mut PodEntry)| {
            let mut pod = pod([volume("a", Mounted)]);
            change(&mut pod);
            at_once(node([pod]), UID)
        };
        let told = |why: &str| Err(format!("pod default/web: {why}, so its volumes are not mounted any more"));
        assert_eq!(over(|pod| pod.released = true).await, told("it was released"));
        assert_eq!(over(|pod| (pod.stage, pod.origin) = (None, None)).await, told("it was deleted"));
        let mut unread = node([PodEntry { stage: None, ..pod([volume("a", Mounted)]) }]);
        unread.sources_ready = false;
        let waited = at_once(unread, UID).await.expect_err("it may be deleted");
        let text = format!("{TIME_IS_OVER}; {UNKNOWN}");
        assert!(waited.ends_with(&text), "a daemon that has not read all pods cannot know: {waited}");
        assert_eq!(over(|pod| pod.stage = Some(PodStage::Terminal)).await, told("it has ended"));
        assert_eq!(over(|pod| pod.stage = Some(PodStage::Terminating)).await, Ok(()), "containers may start still");
        let unknown = at_once(node([]), "default/web").await.expect_err("there is none");
        assert!(unknown.starts_with("pod default/web: this node does not have it"), "{unknown}");
    }

    #[tokio::test]
    async fn vm_11_a_wait_for_the_unmount_ends_when_nothing_is_mounted() {
        let mut busy = volume("b", Uncertain);
        busy.reason = Some("its source does not answer".to_owned());
        let with = |volumes: &[VolumeEntry]| node([pod(volumes.iter().cloned())]);
        let (fabricated, handle) =
            FakeManager::new(with(&[volume("c", Mounted), volume("a", NotMounted), busy.clone()]));
        let error = for_unmount(&handle, UID, NOT_AT_ALL).await.expect_err("two are mounted");
        let text = "mounted volumes=[b c]: context deadline exceeded; b: its source does not answer";
        assert_eq!(error.to_string(), text);

        let ended = tokio::spawn(async move { for_unmount(&handle, UID, LONG).await });
        fabricated.publish(with(&[busy]));
        tokio::task::yield_now().await;
        assert!(!ended.is_finished());
        fabricated.publish(with(&[volume("b", NotMounted)]));
        assert_eq!(ended.await.expect("no panic"), Ok(()));
    }

    #[tokio::test]
    async fn vm_11_the_wait_for_the_unmount_of_a_deleted_pod_ignores_the_next_pod_with_its_name() {
        let next = PodEntry { uid: "0-next".to_owned(), ..pod([volume("a", Mounted)]) };
        let deleted = |mount| PodEntry { stage: None, origin: None, ..pod([volume("a", mount)]) };
        let (fabricated, handle) = FakeManager::new(node([next.clone(), deleted(Mounted)]));
        let error = for_unmount(&handle, "default/web", NOT_AT_ALL).await.expect_err("it is mounted");
        assert!(error.to_string().starts_with("mounted volumes=[a]"), "{error}");
        let ended = tokio::spawn(async move { for_unmount(&handle, "default/web", LONG).await });
        tokio::task::yield_now().await;
        fabricated.publish(node([next]));
        assert_eq!(ended.await.expect("no panic"), Ok(()));
    }

    #[tokio::test]
    async fn vm_11_a_pod_that_is_gone_is_unmounted_once_the_state_is_known() {
        let (fabricated, handle) = FakeManager::new(NodeState::default());
        let error = for_unmount(&handle, UID, NOT_AT_ALL).await.expect_err("an earlier daemon may have mounted it");
        let text = "mounted volumes=[]: context deadline exceeded; not all sources have listed their pods yet";
        assert_eq!(error.to_string(), text);
        // The state has each pod of an earlier daemon, so its volumes hold back the wait for no other pod.
        let mut other = pod([volume("a", Uncertain)]);
        (other.uid, other.name) = ("other".to_owned(), Some("other".to_owned()));
        fabricated.publish(NodeState { states_synced: false, ..node([other]) });
        assert_eq!(for_unmount(&handle, UID, NOT_AT_ALL).await, Ok(()));
    }

    #[tokio::test]
    async fn a_wait_ends_with_the_daemon() {
        let (fabricated, handle) = FakeManager::new(node([pod([volume("a", NotMounted)])]));
        drop(fabricated);
        assert_eq!(for_volumes(&handle, UID, LONG).await, Err(WaitError::Ending));
        let (fabricated, handle) = FakeManager::new(node([pod([volume("a", Mounted)])]));
        drop(fabricated);
        assert_eq!(for_unmount(&handle, UID, LONG).await, Err(WaitError::Ending));
    }
}
