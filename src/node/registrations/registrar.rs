//! The task that asks drivers for their names and topologies, and writes the objects of the node. It asks drivers at
//! the same time, each on a task of its own; it writes the objects one after another.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use podfs_fuse::{Backoff, DoublingPause};
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use super::objects::{DriverChange, csi_node_change, new_csi_node, node_change};
use super::registry::{self, SocketId};
use crate::driver::DriverError;
use crate::driver::csi::{NodeDriver, REGISTRY, answer, node_driver};
use crate::kube::address::{Collection, Resource};
use crate::kube::client::ApiClient;
use crate::kube::error::{ApiError, ErrorClass};
use crate::kube::retry::{Pause, Retry};

/// The pauses before podfs tries a failed registration again: the first, and the longest (the kubelet's).
const PAUSE: DoublingPause = DoublingPause::new(Duration::from_millis(500), Duration::from_secs(120));
/// How many conflicts with other clients in a row podfs accepts before it reports a failure.
const CONFLICTS: usize = 20;

/// Registers the drivers of a node for as long as the daemon runs.
pub(in crate::node) async fn serve(client: ApiClient, node: String, root: &Path) {
    let (input, inputs) = unbounded_channel();
    let socket_input = input.clone();
    let report = move |sockets| socket_input.send(RegistrarInput::Sockets(sockets)).is_ok();
    let mut pauses = PAUSE.backoff();
    while let Err(error) = registry::watch(root.join(REGISTRY), report.clone()) {
        if pauses.failures() == 0 {
            let registry = root.join(REGISTRY);
            warn!(
                "podfs registers no CSI driver yet, because it cannot watch {}: {error}; it tries again",
                registry.display()
            );
        }
        sleep(pauses.fail()).await;
    }
    let retry = Retry::new(client.clone());
    let (sockets, gone) = (BTreeMap::new(), BTreeSet::new());
    Registrar { client, node, input, inputs, sockets, gone, has_object: false, retry, last_warning: None }.run().await;
}

/// An event for the registrar.
enum RegistrarInput {
    Sockets(BTreeMap<PathBuf, SocketId>),
    Asked(PathBuf, SocketId, Result<Option<NodeDriver>, DriverError>),
}

struct Registrar {
    client: ApiClient,
    node: String,
    input: UnboundedSender<RegistrarInput>,
    inputs: UnboundedReceiver<RegistrarInput>,
    /// The sockets of the registry.
    sockets: BTreeMap<PathBuf, Registration>,
    /// The drivers that have gone, and that the cluster still has.
    gone: BTreeSet<String>,
    /// Whether podfs has seen the CSINode object.
    has_object: bool,
    retry: Retry,
    /// The last warning about the API server.
    last_warning: Option<String>,
}

/// The registration of a plugin by a socket.
struct Registration {
    id: SocketId,
    stage: Stage,
    backoff: Backoff,
    /// The driver whose entries the cluster may have.
    driver: Option<String>,
}

/// The stage of a registration.
enum Stage {
    /// podfs is asking the plugin. The answer leads to `Known` or `Foreign`, a failure to `Failed`.
    Asked,
    /// podfs asks the plugin again at this time.
    Failed(Instant),
    /// The plugin is no CSI driver.
    Foreign,
    /// podfs has to register this driver in the cluster. A refusal leads to `Failed`.
    Known(NodeDriver),
    /// The cluster has the driver.
    Registered,
}

/// A change of the cluster's objects.
enum RegistrationStep {
    /// Makes the CSINode, also on a node without drivers.
    Begin,
    Remove(String),
    Put(PathBuf, NodeDriver),
}

/// Why podfs could not write an object.
enum WriteError {
    /// The server cannot be reached, or is not ready.
    Temporary(ApiError),
    /// The server refuses the change.
    Refused(String),
}

impl Registrar {
    async fn run(mut self) {
        loop {
            while let Ok(input) = self.inputs.try_recv() {
                self.take(input);
            }
            self.ask_again();
            match self.next_step() {
                Some(step) => self.perform(step).await,
                None => self.wait().await,
            }
        }
    }

    async fn wait(&mut self) {
        let next = self.sockets.values().filter_map(|registration| match registration.stage {
            Stage::Failed(until) => Some(until),
            _ => None,
        });
        let next = next.min();
        tokio::select! {
            Some(input) = self.inputs.recv() => self.take(input),
            () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
        }
    }

    fn take(&mut self, input: RegistrarInput) {
        match input {
            RegistrarInput::Sockets(found) => self.take_sockets(&found),
            RegistrarInput::Asked(path, id, asked) => {
                let Some(registration) = self.sockets.get_mut(&path).filter(|known| known.id == id) else { return };
                match asked {
                    Ok(None) => registration.stage = Stage::Foreign,
                    Ok(Some(driver)) => {
                        self.gone.remove(&driver.name);
                        registration.driver = Some(driver.name.clone());
                        registration.stage = Stage::Known(driver);
                    }
                    Err(error) => self.refuse(&path, &error.sentence),
                }
            }
        }
    }

    /// Takes the sockets that exist now.
    fn take_sockets(&mut self, found: &BTreeMap<PathBuf, SocketId>) {
        let is_there = |path: &PathBuf, known: &Registration| found.get(path) == Some(&known.id);
        let (kept, removed): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut self.sockets).into_iter().partition(|(path, known)| is_there(path, known));
        self.sockets = kept;
        for name in removed.into_values().filter_map(|registration| registration.driver) {
            if !self.sockets.values().any(|other| other.driver.as_ref() == Some(&name)) {
                info!("CSI driver {name} has gone from this node");
                self.gone.insert(name);
            }
        }
        for (path, id) in found {
            if !self.sockets.contains_key(path) {
                let registration =
                    Registration { id: *id, stage: Stage::Asked, backoff: PAUSE.backoff(), driver: None };
                self.sockets.insert(path.clone(), registration);
                self.ask(path.clone(), *id);
            }
        }
    }

    fn ask_again(&mut self) {
        let now = Instant::now();
        let is_due = |registration: &Registration| matches!(registration.stage, Stage::Failed(until) if until <= now);
        let due: Vec<_> =
            self.sockets.iter().filter(|(_, of)| is_due(of)).map(|(path, of)| (path.clone(), of.id)).collect();
        for (path, id) in due {
            if let Some(registration) = self.sockets.get_mut(&path) {
                registration.stage = Stage::Asked;
                self.ask(path, id);
            }
        }
    }

    fn ask(&self, path: PathBuf, id: SocketId) {
        let input = self.input.clone();
        tokio::spawn(async move {
            let asked = node_driver(&path).await;
            // Fails only while the daemon ends.
            let _ = input.send(RegistrarInput::Asked(path, id, asked));
        });
    }

    /// Notes a failed registration. Reports the reason to the driver, and asks it again later.
    fn refuse(&mut self, path: &Path, sentence: &str) {
        let Some(registration) = self.sockets.get_mut(path) else { return };
        registration.stage = Stage::Failed(Instant::now() + registration.backoff.fail());
        if registration.backoff.failures() == 1 {
            warn!("{} registers no driver: {sentence}; podfs asks again", path.display());
        }
        let (path, sentence) = (path.to_owned(), sentence.to_owned());
        // Fails if the driver has ended.
        tokio::spawn(async move { answer(&path, Some(&sentence)).await });
    }

    fn next_step(&self) -> Option<RegistrationStep> {
        if !self.has_object {
            return Some(RegistrationStep::Begin);
        }
        let remove = self.gone.first().cloned().map(RegistrationStep::Remove);
        let known = |(path, registration): (&PathBuf, &Registration)| match &registration.stage {
            Stage::Known(driver) => Some(RegistrationStep::Put(path.clone(), driver.clone())),
            _ => None,
        };
        remove.or_else(|| self.sockets.iter().find_map(known))
    }

    async fn perform(&mut self, step: RegistrationStep) {
        let result = match &step {
            RegistrationStep::Begin => self.write_csi_node(None).await,
            RegistrationStep::Remove(name) => self.remove(name).await,
            RegistrationStep::Put(_, driver) => self.write(driver).await,
        };
        match result {
            Ok(()) => {
                self.retry.reset();
                self.last_warning = None;
                self.has_object = true;
                self.performed(step);
            }
            Err(WriteError::Temporary(error)) => self.wait_for_server(&error).await,
            Err(WriteError::Refused(sentence)) => match step {
                RegistrationStep::Put(path, _) => self.refuse(&path, &sentence),
                RegistrationStep::Begin | RegistrationStep::Remove(_) => {
                    self.log_once(&sentence);
                    let pause = self.retry.next_pause();
                    self.wait_until(&pause).await;
                }
            },
        }
    }

    fn performed(&mut self, step: RegistrationStep) {
        match step {
            RegistrationStep::Begin => {}
            RegistrationStep::Remove(name) => drop(self.gone.remove(&name)),
            RegistrationStep::Put(path, driver) => {
                info!("CSI driver {} is registered: it calls this node {:?}", driver.name, driver.node_id);
                if let Some(registration) = self.sockets.get_mut(&path) {
                    registration.stage = Stage::Registered;
                    registration.backoff.reset();
                }
                tokio::spawn(async move { answer(&path, None).await });
            }
        }
    }

    async fn wait_for_server(&mut self, error: &ApiError) {
        self.log_once(&error.to_string());
        let pause = self.retry.failed(error);
        self.wait_until(&pause).await;
    }

    /// Waits before the next request, and takes events meanwhile.
    async fn wait_until(&mut self, pause: &Pause) {
        loop {
            tokio::select! {
                () = self.retry.wait(pause) => return,
                Some(input) = self.inputs.recv() => self.take(input),
            }
        }
    }

    fn log_once(&mut self, sentence: &str) {
        if self.last_warning.as_deref() != Some(sentence) {
            warn!("podfs cannot register CSI drivers: {sentence}; it tries again");
            self.last_warning = Some(sentence.to_owned());
        }
    }

    async fn write(&self, driver: &NodeDriver) -> Result<(), WriteError> {
        self.write_node(DriverChange::Put(driver)).await?;
        self.write_csi_node(Some(DriverChange::Put(driver))).await
    }

    async fn remove(&self, name: &str) -> Result<(), WriteError> {
        self.write_csi_node(Some(DriverChange::Remove(name))).await?;
        self.write_node(DriverChange::Remove(name)).await
    }

    /// Changes the CSINode until it needs no change. Makes it if it does not exist.
    async fn write_csi_node(&self, edit: Option<DriverChange<'_>>) -> Result<(), WriteError> {
        let collection = Collection::only(Resource::CSI_NODE, None, &self.node);
        for _ in 0..CONFLICTS {
            let result = match self.client.get(&collection).await? {
                Some(found) => match csi_node_change(&found, edit) {
                    Some(change) => self.client.patch(Resource::CSI_NODE, None, &[&self.node], &change).await,
                    None => return Ok(()),
                },
                None => self.client.create(Resource::CSI_NODE, None, &[], &new_csi_node(&self.node().await?)).await,
            };
            unless_conflict(result)?;
        }
        Err(WriteError::Refused(format!("CSINode {} is changed by another client all the time", self.node)))
    }

    /// Changes the Node until it needs no change.
    async fn write_node(&self, edit: DriverChange<'_>) -> Result<(), WriteError> {
        for _ in 0..CONFLICTS {
            let found = self.node().await?;
            let change = node_change(&found, edit).map_err(|error| WriteError::Refused(error.to_string()))?;
            let Some(change) = change else { return Ok(()) };
            // Through the subresource `status`, like the kubelet: the API server lets a kubelet change the labels of
            // its Node there.
            unless_conflict(self.client.patch(Resource::NODE, None, &[&self.node, "status"], &change).await)?;
        }
        Err(WriteError::Refused(format!("Node {} is changed by another client all the time", self.node)))
    }

    async fn node(&self) -> Result<Value, WriteError> {
        let found = self.client.get(&Collection::only(Resource::NODE, None, &self.node)).await?;
        found.ok_or_else(|| WriteError::Refused(format!("Node {} does not exist", self.node)))
    }
}

/// The result of a change, where a conflict with another client is no error: the caller reads the object again in any
/// case.
fn unless_conflict(result: Result<Value, ApiError>) -> Result<(), WriteError> {
    match result {
        Err(error) if error.class == ErrorClass::Conflict => Ok(()),
        result => Ok(result.map(drop)?),
    }
}

impl From<ApiError> for WriteError {
    fn from(error: ApiError) -> WriteError {
        match error.class.passes() || error.class == ErrorClass::Untrusted || error.class == ErrorClass::Unauthorized {
            true => WriteError::Temporary(error),
            false => WriteError::Refused(error.to_string()),
        }
    }
}
