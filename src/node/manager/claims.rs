//! The status of claims whose volumes have grown on this node, as a kubelet keeps it: the new capacity, or why the volume did not
//! grow. A controller of the cluster waits for it.
//!
//! A supervisor grows a volume, and reports the outcome in its status until the claim's status has it. So a daemon that
//! was restarted also gets the outcome, and writes it if the daemon before has not.

use std::collections::HashMap;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tracing::{Instrument, debug, info, warn};

use crate::kube::address::{Collection, Resource};
use crate::kube::client::ApiClient;
use crate::kube::error::{ApiError, ErrorClass};
use crate::kube::retry::Retry;
use crate::manifest::pod::{PodIdentity, PodUid};
use crate::node::spans;
use crate::source::post_growth;
use crate::supervisor::status::ExpansionStatus;
use crate::types::Quantity;

/// The conditions of a claim about its growth. They end with the growth.
const OF_GROWTH: [&str; 4] = ["FileSystemResizePending", "Resizing", "ControllerResizeError", "NodeResizeError"];
const FAILED: &str = "NodeResizeError";
/// The state of a claim's growth in which its user may request a smaller size.
const INFEASIBLE: &str = "NodeResizeInfeasible";
/// How many characters a condition's message may have.
const MAX_MESSAGE: usize = 1024;

/// The writers of claims' statuses.
pub(super) struct Claims {
    client: Option<ApiClient>,
    node: String,
    writers: HashMap<(PodUid, String), Writer>,
}

struct Writer {
    expansion: ExpansionStatus,
    task: JoinHandle<()>,
}

/// The outcome of the growth of a claim's volume.
struct ExpansionResult {
    namespace: String,
    claim: String,
    /// The name of the volume in the pod.
    volume: String,
    node: String,
    expansion: ExpansionStatus,
}

impl Claims {
    /// Writes to the API server of this client. Without a client, writes nothing.
    pub(super) fn new(client: Option<ApiClient>, node: Option<String>) -> Claims {
        Claims { client, node: node.unwrap_or_default(), writers: HashMap::new() }
    }

    /// Writes the outcome of a volume's growth to its claim. Returns whether the outcome is new. Never waits.
    pub(super) fn report_growth(
        &mut self,
        pod: &PodIdentity,
        volume: &str,
        claim: String,
        expansion: &ExpansionStatus,
    ) -> bool {
        let Some(client) = self.client.clone() else { return false };
        let key = (pod.uid.clone(), volume.to_owned());
        if self.writers.get(&key).is_some_and(|writer| writer.expansion == *expansion) {
            return false;
        }
        let grown = ExpansionResult {
            namespace: pod.namespace.clone(),
            claim,
            volume: volume.to_owned(),
            node: self.node.clone(),
            expansion: expansion.clone(),
        };
        let write = grown.write(client).instrument(spans::of_volume(&pod.uid, Some(pod), volume));
        let writer = Writer { expansion: expansion.clone(), task: tokio::spawn(write) };
        if let Some(before) = self.writers.insert(key, writer) {
            before.task.abort();
        }
        true
    }

    /// Stops the writers for a pod that is gone.
    pub(super) fn stop(&mut self, pod: &PodUid) {
        self.writers.retain(|(uid, _), writer| {
            if uid == pod {
                writer.task.abort();
            }
            uid != pod
        });
    }
}

impl ExpansionResult {
    /// Writes the status until the server has accepted it, or it is obsolete.
    async fn write(self, client: ApiClient) {
        let (mut retry, mut last_error) = (Retry::new(client.clone()), None);
        loop {
            match self.try_to_write(&client).await {
                Ok(()) => return,
                // Another client was faster: podfs reads the claim again.
                Err(error) if error.class == ErrorClass::Conflict => {}
                Err(error) if error.class == ErrorClass::NotFound => return,
                Err(error) => {
                    let sentence = error.to_string();
                    if last_error.as_ref() != Some(&sentence) {
                        let ExpansionResult { namespace, claim, .. } = &self;
                        warn!("podfs cannot write the status of claim {namespace}/{claim}: {sentence}; it tries again");
                        last_error = Some(sentence);
                    }
                    let pause = retry.failed(&error);
                    retry.wait(&pause).await;
                }
            }
        }
    }

    async fn try_to_write(&self, client: &ApiClient) -> Result<(), ApiError> {
        let ExpansionResult { namespace, claim: name, expansion, .. } = self;
        let claim = Collection::only(Resource::PERSISTENT_VOLUME_CLAIM, Some(namespace), name);
        let Some(claim) = client.get(&claim).await? else { return Ok(()) };
        let volume = Collection::only(Resource::PERSISTENT_VOLUME, None, text(&claim["spec"]["volumeName"]));
        let Some(volume) = client.get(&volume).await? else { return Ok(()) };
        let Some(change) = change(&claim, &volume, expansion) else { return Ok(()) };
        let resource = Resource::PERSISTENT_VOLUME_CLAIM;
        client.patch(resource, Some(namespace), &[name, "status"], &change).await?;
        if expansion.error.is_none() {
            // The claim's status has the size already, so podfs does not try again to post an event that the server refuses.
            let posted = post_growth(client, &claim, &self.volume, &self.node).await;
            posted.unwrap_or_else(|error| debug!("no event says that claim {namespace}/{name} has grown: {error}"));
            info!("claim {namespace}/{name} has {} now", text(&volume["spec"]["capacity"]["storage"]));
        }
        Ok(())
    }
}

/// The change of a claim's status; `None` if the status has the outcome already, or if the PersistentVolume has another size
/// now.
fn change(claim: &Value, volume: &Value, expansion: &ExpansionStatus) -> Option<Value> {
    let (size, status) = (&volume["spec"]["capacity"]["storage"], &claim["status"]);
    let is_current = bytes(size) == Some(expansion.bytes);
    let has_it = bytes(&status["capacity"]["storage"]).is_some_and(|bytes| bytes >= expansion.bytes);
    if !is_current || has_it {
        return None;
    }
    let is_kept = |condition: &&Value, of: &[&str]| !of.contains(&text(&condition["type"]));
    let conditions = || status["conditions"].as_array().into_iter().flatten();
    let state = &status["allocatedResourceStatuses"]["storage"];
    let changed = match &expansion.error {
        None => {
            let mut change = json!({"capacity": {"storage": size}});
            if conditions().any(|condition| !is_kept(&condition, &OF_GROWTH)) {
                change["conditions"] =
                    conditions().filter(|condition| is_kept(condition, &OF_GROWTH)).cloned().collect();
            }
            if state.is_string() {
                change["allocatedResourceStatuses"] = json!({"storage": null});
            }
            change
        }
        Some(error) => {
            let message: String = format!("failed to expand pvc with {error}").chars().take(MAX_MESSAGE).collect();
            let known = conditions().find(|condition| condition["type"] == FAILED);
            let is_known = known.is_some_and(|known| known["message"] == message);
            if is_known && (!expansion.infeasible || state == INFEASIBLE) {
                return None;
            }
            let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            let failed = json!({"type": FAILED, "status": "True", "lastTransitionTime": now, "message": message});
            let others = conditions().filter(|condition| is_kept(condition, &[FAILED])).cloned();
            let mut change = json!({"conditions": others.chain([failed]).collect::<Vec<_>>()});
            if expansion.infeasible {
                change["allocatedResourceStatuses"] = json!({"storage": INFEASIBLE});
            }
            change
        }
    };
    Some(json!({"metadata": {"resourceVersion": claim["metadata"]["resourceVersion"]}, "status": changed}))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The bytes of a quantity.
fn bytes(quantity: &Value) -> Option<u64> {
    u64::try_from(Quantity::parse(quantity.as_str()?).ok()?.units()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(capacity: &str, more: &Value) -> Value {
        let mut claim = json!({"metadata": {"resourceVersion": "7"}, "status": {"capacity": {"storage": capacity}}});
        let more = more.as_object().expect("fields").clone();
        claim["status"].as_object_mut().expect("fields").extend(more);
        claim
    }

    fn volume(capacity: &str) -> Value {
        json!({"spec": {"capacity": {"storage": capacity}}})
    }

    fn grown(error: Option<&str>, infeasible: bool) -> ExpansionStatus {
        ExpansionStatus { bytes: 16 << 30, error: error.map(str::to_owned), infeasible }
    }

    #[test]
    fn cs_13_the_capacity_is_that_of_the_persistent_volume_and_what_was_about_the_growth_ends() {
        let conditions = json!([{"type": "FileSystemResizePending"}, {"type": "VolumeModifying"}]);
        let status = json!({"conditions": conditions, "allocatedResourceStatuses": {"storage": "NodeResizePending"}});
        let change = change(&claim("8Gi", &status), &volume("16Gi"), &grown(None, false)).expect("a change");
        assert_eq!(change["metadata"]["resourceVersion"], "7");
        let expected = json!({
            "capacity": {"storage": "16Gi"}, "conditions": [{"type": "VolumeModifying"}],
            "allocatedResourceStatuses": {"storage": null},
        });
        assert_eq!(change["status"], expected);
    }

    #[test]
    fn cs_13_a_claim_that_has_the_size_or_is_to_have_another_one_stays_as_it_is() {
        let none = json!({});
        assert_eq!(change(&claim("16Gi", &none), &volume("16Gi"), &grown(None, false)), None);
        assert_eq!(change(&claim("8Gi", &none), &volume("32Gi"), &grown(None, false)), None);
        let change = change(&claim("8Gi", &none), &volume("16Gi"), &grown(None, false)).expect("a change");
        assert_eq!(change["status"], json!({"capacity": {"storage": "16Gi"}}));
    }

    #[test]
    fn cs_13_a_failure_is_a_condition_once_and_an_infeasible_size_is_marked() {
        let pending = json!({"conditions": [{"type": "FileSystemResizePending"}]});
        let first = change(&claim("8Gi", &pending), &volume("16Gi"), &grown(Some("no"), false)).expect("a change");
        let conditions = &first["status"]["conditions"];
        assert_eq!(conditions[0]["type"], "FileSystemResizePending");
        assert_eq!(conditions[1]["message"], "failed to expand pvc with no");
        assert!(first["status"]["allocatedResourceStatuses"].is_null());
        let known = claim("8Gi", &first["status"]);
        assert_eq!(change(&known, &volume("16Gi"), &grown(Some("no"), false)), None);
        let marked = change(&known, &volume("16Gi"), &grown(Some("no"), true)).expect("a change");
        assert_eq!(marked["status"]["allocatedResourceStatuses"]["storage"], INFEASIBLE);
        assert_eq!(marked["status"]["conditions"].as_array().map(Vec::len), Some(2));
    }
}
