//! Claims whose volumes are about to grow on this node. Before a supervisor gets the larger PersistentVolume, podfs
//! sets the claim's status to `NodeResizeInProgress`: a user can request a smaller size only while no
//! node grows the volume.
//!
//! For a volume that the pod has read-only, podfs posts an event that it does not grow, as the kubelet does.
//!
//! An API server that does not accept the status in time delays no volume: the supervisor grows the volume all the
//! same.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::timeout;
use tracing::debug;

use crate::kube::address::{Collection, Resource};
use crate::kube::client::ApiClient;
use crate::kube::error::{ApiError, ErrorClass};
use crate::manifest::pod::{Pod, PodIdentity};
use crate::node::backing::PendingExpansion;
use crate::source::post_read_only;
use crate::types::Quantity;

/// How long the pod's volumes wait for the status of its claims.
const CLAIM_STATUS_TIMEOUT: Duration = Duration::from_secs(2);
const IN_PROGRESS: &str = "NodeResizeInProgress";
const INFEASIBLE: &str = "NodeResizeInfeasible";
/// The condition with which a controller asks the node to do its part of a growth.
const PENDING: &str = "FileSystemResizePending";

/// Announces in claims that their volumes grow, for one pod.
pub(super) struct Announcer {
    client: ApiClient,
    pod: PodIdentity,
    node: String,
    announced: BTreeSet<PendingExpansion>,
}

impl Announcer {
    pub(super) fn new(client: ApiClient, pod: &Pod) -> Announcer {
        let node = pod.facts.node_name.clone().unwrap_or_default();
        Announcer { client, pod: pod.identity.clone(), node, announced: BTreeSet::new() }
    }

    /// Announces once that the volumes of these claims grow, or that they do not.
    pub(super) async fn announce(&mut self, growing: BTreeSet<PendingExpansion>) {
        let namespace = &self.pod.namespace;
        let marks = async {
            for claim in growing.difference(&self.announced) {
                let outcome = if claim.is_read_only { self.refuse(claim).await } else { self.mark(claim).await };
                let name = &claim.claim;
                outcome.unwrap_or_else(|error| {
                    debug!("claim {namespace}/{name} does not say whether its volume grows: {error}");
                });
            }
        };
        if timeout(CLAIM_STATUS_TIMEOUT, marks).await.is_err() {
            debug!("claims of {namespace} do not say in time that their volumes grow");
        }
        self.announced = growing;
    }

    async fn mark(&self, growing: &PendingExpansion) -> Result<(), ApiError> {
        let collection = self.address(growing);
        loop {
            let Some(claim) = self.client.get(&collection).await? else { return Ok(()) };
            let Some(change) = change(&claim, growing) else { return Ok(()) };
            let (resource, path) = (Resource::PERSISTENT_VOLUME_CLAIM, [growing.claim.as_str(), "status"]);
            match self.client.patch(resource, Some(&self.pod.namespace), &path, &change).await {
                // Another client was faster: podfs reads the claim again.
                Err(error) if error.class == ErrorClass::Conflict => {}
                outcome => return outcome.map(drop),
            }
        }
    }

    async fn refuse(&self, growing: &PendingExpansion) -> Result<(), ApiError> {
        let Some(claim) = self.client.get(&self.address(growing)).await? else { return Ok(()) };
        post_read_only(&self.client, &self.pod, &claim, (&growing.volume, growing.bytes), &self.node).await
    }

    fn address(&self, growing: &PendingExpansion) -> Collection {
        Collection::only(Resource::PERSISTENT_VOLUME_CLAIM, Some(&self.pod.namespace), &growing.claim)
    }
}

/// The change of a claim's status; `None` if the status needs no change.
fn change(claim: &Value, growing: &PendingExpansion) -> Option<Value> {
    let status = &claim["status"];
    let state = status["allocatedResourceStatuses"]["storage"].as_str().unwrap_or_default();
    let capacity = status["capacity"]["storage"].as_str().and_then(|text| Quantity::parse(text).ok());
    let has_it = capacity.is_none_or(|capacity| u64::try_from(capacity.units()).is_ok_and(|has| has >= growing.bytes));
    let mut conditions = status["conditions"].as_array().into_iter().flatten();
    let is_up_to_node = !growing.by_controller
        || state.starts_with("NodeResize")
        || conditions.any(|condition| condition["type"] == PENDING);
    if has_it || !is_up_to_node || matches!(state, IN_PROGRESS | INFEASIBLE) {
        return None;
    }
    let version = &claim["metadata"]["resourceVersion"];
    let status = json!({"allocatedResourceStatuses": {"storage": IN_PROGRESS}});
    Some(json!({"metadata": {"resourceVersion": version}, "status": status}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn growing(by_controller: bool) -> PendingExpansion {
        let (claim, volume) = ("data".to_owned(), "v".to_owned());
        PendingExpansion { claim, volume, bytes: 16 << 30, by_controller, is_read_only: false }
    }

    fn claim(capacity: &str, state: Option<&str>) -> Value {
        let status = json!({"capacity": {"storage": capacity}, "allocatedResourceStatuses": {"storage": state}});
        json!({"metadata": {"resourceVersion": "7"}, "status": status})
    }

    #[test]
    fn cs_13_a_claim_is_in_progress_if_the_node_has_to_grow_it() {
        let change = |capacity, state, by_controller| change(&claim(capacity, state), &growing(by_controller));
        let marked = change("8Gi", None, false).expect("a change");
        assert_eq!(marked["status"], json!({"allocatedResourceStatuses": {"storage": IN_PROGRESS}}));
        assert_eq!(marked["metadata"]["resourceVersion"], "7");
        assert!(change("8Gi", Some("NodeResizePending"), true).is_some());
        assert_eq!(change("8Gi", Some("ControllerResizeInProgress"), true), None, "the controller is at it");
        assert_eq!(change("8Gi", Some(IN_PROGRESS), true), None, "it says so");
        assert_eq!(change("8Gi", Some(INFEASIBLE), true), None, "its user may ask for less");
        assert_eq!(change("16Gi", None, false), None, "it has grown");
    }
}
