//! The methods of the service.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::proto::volume_manager_server::VolumeManager;
use super::proto::watch_response::Event;
use super::proto::*;
use super::wait::{self, WaitError};
use super::{containers, convert, volumes_in_use};
use crate::manifest::pod::PodUid;
use crate::node::{CommandError, NodeHandle, NodeState, PodEntry};
use crate::supervisor::control::{self as supervisor, ControlQuestion};

/// How many events the queue for a client of Watch holds. When it is full, the stream waits.
const WATCH_AHEAD: usize = 16;

/// The methods, which answer from the manager's state.
pub(super) struct Methods {
    node: NodeHandle,
    run_directory: PathBuf,
}

impl Methods {
    pub(super) fn new(node: NodeHandle, run_directory: PathBuf) -> Methods {
        Methods { node, run_directory }
    }

    /// Asks the supervisor of the pod that a request names.
    async fn ask(&self, pod: &str, question: ControlQuestion) -> Result<supervisor::ControlAnswer, Status> {
        let (uid, _) = self.pod(pod)?;
        containers::answer(self.run_directory.join(uid.as_str()), question).await
    }

    /// The pod that a request names.
    fn pod(&self, name: &str) -> Result<(PodUid, Arc<PodEntry>), Status> {
        let name = checked_name(name)?;
        let state = self.node.state();
        let found = state.find(name).map(|(uid, entry)| (uid.clone(), Arc::clone(entry)));
        found.ok_or_else(|| WaitError::Unknown(name.to_owned()).into())
    }
}

type MethodResult<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl VolumeManager for Methods {
    async fn wait_for_volumes(&self, request: Request<WaitForVolumesRequest>) -> MethodResult<WaitForVolumesResponse> {
        let WaitForVolumesRequest { pod, timeout_seconds } = request.into_inner();
        wait::for_volumes(&self.node, checked_name(&pod)?, timeout(timeout_seconds)).await?;
        Ok(Response::new(WaitForVolumesResponse {}))
    }

    async fn wait_for_unmount(&self, request: Request<WaitForUnmountRequest>) -> MethodResult<WaitForUnmountResponse> {
        let WaitForUnmountRequest { pod, timeout_seconds } = request.into_inner();
        wait::for_unmount(&self.node, checked_name(&pod)?, timeout(timeout_seconds)).await?;
        Ok(Response::new(WaitForUnmountResponse {}))
    }

    async fn get_mounted_volumes(
        &self,
        request: Request<GetMountedVolumesRequest>,
    ) -> MethodResult<GetMountedVolumesResponse> {
        let (_, pod) = self.pod(&request.into_inner().pod)?;
        Ok(Response::new(GetMountedVolumesResponse { volumes: convert::mounted_messages(&pod) }))
    }

    async fn get_volumes_in_use(&self, _: Request<GetVolumesInUseRequest>) -> MethodResult<GetVolumesInUseResponse> {
        Ok(Response::new(GetVolumesInUseResponse { unique_names: volumes_in_use(&self.node.state()) }))
    }

    async fn mark_remount_required(
        &self,
        request: Request<MarkRemountRequiredRequest>,
    ) -> MethodResult<MarkRemountRequiredResponse> {
        let (pod, _) = self.pod(&request.into_inner().pod)?;
        self.node.mark_remount_required(pod).await?;
        Ok(Response::new(MarkRemountRequiredResponse {}))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> MethodResult<ReleaseResponse> {
        let name = request.into_inner().pod;
        let state = self.node.state();
        let found = state.find_unreleased(checked_name(&name)?).map(|(uid, _)| uid.clone());
        self.node.release(found.ok_or(WaitError::Unknown(name))?).await?;
        Ok(Response::new(ReleaseResponse {}))
    }

    async fn prepare_container(
        &self,
        request: Request<PrepareContainerRequest>,
    ) -> MethodResult<PrepareContainerResponse> {
        let message = request.into_inner();
        let pod = message.pod.clone();
        let question = ControlQuestion::PrepareContainer(containers::request(message)?);
        match self.ask(&pod, question).await? {
            supervisor::ControlAnswer::Prepared(mounts) => {
                let mounts = mounts.into_iter().map(containers::mount).collect::<Result<_, _>>()?;
                Ok(Response::new(PrepareContainerResponse { mounts }))
            }
            _ => Err(unexpected_answer()),
        }
    }

    async fn release_container(
        &self,
        request: Request<ReleaseContainerRequest>,
    ) -> MethodResult<ReleaseContainerResponse> {
        let ReleaseContainerRequest { pod, container } = request.into_inner();
        match self.ask(&pod, ControlQuestion::ReleaseContainer { container }).await? {
            supervisor::ControlAnswer::Released => Ok(Response::new(ReleaseContainerResponse {})),
            _ => Err(unexpected_answer()),
        }
    }

    async fn reconciler_states_synced(
        &self,
        _: Request<ReconcilerStatesSyncedRequest>,
    ) -> MethodResult<ReconcilerStatesSyncedResponse> {
        Ok(Response::new(ReconcilerStatesSyncedResponse { synced: self.node.state().states_synced }))
    }

    async fn get_state(&self, _: Request<GetStateRequest>) -> MethodResult<GetStateResponse> {
        Ok(Response::new(convert::state_message(&self.node.state())))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<WatchResponse, Status>> + Send>>;

    async fn watch(&self, request: Request<WatchRequest>) -> MethodResult<Self::WatchStream> {
        let pod = request.into_inner().pod;
        let only = if pod.is_empty() { None } else { Some(checked_name(&pod)?.to_owned()) };
        let (events, received) = mpsc::channel(WATCH_AHEAD);
        tokio::spawn(send_changes(self.node.clone(), only, events));
        Ok(Response::new(Box::pin(ReceiverStream::new(received))))
    }
}

/// Sends changes to a client of Watch, until it disconnects or the daemon ends.
async fn send_changes(node: NodeHandle, only: Option<String>, events: mpsc::Sender<Result<WatchResponse, Status>>) {
    let mut states = node.follow();
    let mut sent = BTreeMap::new();
    let mut is_first = true;
    loop {
        let state = Arc::clone(&states.borrow_and_update());
        let mut new_events = changes(&mut sent, &state, only.as_deref());
        if std::mem::take(&mut is_first) {
            new_events.push(Event::Initial(Initial {}));
        }
        for event in new_events {
            if events.send(Ok(WatchResponse { event: Some(event) })).await.is_err() {
                return;
            }
        }
        tokio::select! {
            changed = states.changed() => if changed.is_err() { return },
            () = events.closed() => return,
        }
    }
}

/// The events that bring a client from `sent`, the pods that it has, to this state. Updates `sent`.
fn changes(sent: &mut BTreeMap<PodUid, Arc<PodEntry>>, state: &NodeState, only: Option<&str>) -> Vec<Event> {
    let wanted = only.map(|pod| state.find(pod).map(|(uid, _)| uid));
    let is_wanted = |uid: &PodUid| wanted.is_none_or(|one| one == Some(uid));
    let mut events = Vec::new();
    sent.retain(|uid, _| {
        let is_kept = state.pods.contains_key(uid) && is_wanted(uid);
        if !is_kept {
            events.push(Event::Gone(uid.to_string()));
        }
        is_kept
    });
    for (uid, pod) in state.pods.iter().filter(|(uid, _)| is_wanted(uid)) {
        if !sent.get(uid).is_some_and(|before| Arc::ptr_eq(before, pod) || before == pod) {
            events.push(Event::Pod(convert::pod_message(pod)));
            sent.insert(uid.clone(), Arc::clone(pod));
        }
    }
    events
}

fn unexpected_answer() -> Status {
    Status::internal("the pod's supervisor gave an answer to another question")
}

/// Checks that a text can be the name or the uid of a pod.
fn checked_name(pod: &str) -> Result<&str, Status> {
    let is_name = pod
        .split_once('/')
        .is_some_and(|(namespace, name)| !namespace.is_empty() && !name.is_empty() && !name.contains('/'));
    if is_name || PodUid::parse(pod).is_ok() {
        return Ok(pod);
    }
    Err(Status::invalid_argument(format!("pod {pod:?}: neither a uid nor NAMESPACE/NAME")))
}

fn timeout(seconds: Option<u32>) -> Duration {
    seconds.map_or(wait::TIMEOUT, |seconds| Duration::from_secs(seconds.into()))
}

impl From<WaitError> for Status {
    fn from(error: WaitError) -> Status {
        let text = error.to_string();
        match error {
            WaitError::Unknown(_) => Status::not_found(text),
            WaitError::NotMounted(_) | WaitError::StillMounted { .. } => Status::deadline_exceeded(text),
            WaitError::Failed(_) | WaitError::Over { .. } => Status::failed_precondition(text),
            WaitError::Ending => Status::unavailable(text),
        }
    }
}

impl From<CommandError> for Status {
    fn from(refusal: CommandError) -> Status {
        let text = refusal.to_string();
        match refusal {
            CommandError::Unknown(_) => Status::not_found(text),
            CommandError::Wanted(_) | CommandError::Unlisted(_) => Status::failed_precondition(text),
            CommandError::Ending => Status::unavailable(text),
        }
    }
}
