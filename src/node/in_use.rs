//! Reports the volumes in use in the status of the Node object, as a kubelet does. podfs does not do so
//! beside a kubelet, because both would write the same field.
//!
//! A controller detaches a volume that the Node object does not have. So while podfs does not know the PersistentVolume behind
//! a volume in use, as after a restart of the daemon, it keeps all volumes that the Node object already has.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{MissedTickBehavior, interval};
use tracing::warn;

use super::NodeHandle;
use super::service::volumes_to_report;
use crate::kube::address::{Collection, Resource};
use crate::kube::client::ApiClient;
use crate::kube::retry::Retry;

/// How often podfs reads the list of the Node object again: another client may have overwritten it, or made the object anew.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Reports until the daemon ends, after each change. Until the daemon has found everything of an earlier daemon, it only adds
/// volumes.
pub(super) async fn report(client: ApiClient, node: String, handle: NodeHandle) {
    let mut states = handle.follow();
    let (mut retry, mut checks) = (Retry::new(client.clone()), interval(CHECK_INTERVAL));
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The list of the object, and the names that podfs keeps in it while it does not know the volumes.
    let mut listed = list_of_node(&client, &node, &mut retry).await;
    let (mut known, mut has_reported) = (listed.clone(), false);
    checks.reset();
    loop {
        let state = states.borrow_and_update().clone();
        let names = volumes_to_report(&state, &known);
        // Before the daemon has found everything, the list has nothing new to say unless it is longer.
        let is_new = if state.states_synced {
            !has_reported || listed != names
        } else {
            names.iter().any(|name| !listed.contains(name))
        };
        if is_new {
            let change = json!({"status": {"volumesInUse": names}});
            match client.patch(Resource::NODE, None, &[&node, "status"], &change).await {
                Ok(_) => {
                    retry.reset();
                    has_reported = true;
                    (listed, known) = (names.clone(), names);
                }
                Err(error) => {
                    warn!("podfs cannot report the volumes in use: {error}");
                    let pause = retry.failed(&error);
                    retry.wait(&pause).await;
                    continue;
                }
            }
        }
        tokio::select! {
            changed = states.changed() => if changed.is_err() { return },
            _ = checks.tick() => {
                listed = list_of_node(&client, &node, &mut retry).await;
                known.extend(listed.iter().filter(|name| !known.contains(name)).cloned().collect::<Vec<_>>());
            }
        }
    }
}

/// The volumes in use that the Node object has.
async fn list_of_node(client: &ApiClient, node: &str, retry: &mut Retry) -> Vec<String> {
    let collection = Collection::only(Resource::NODE, None, node);
    loop {
        match client.get(&collection).await {
            Ok(object) => {
                retry.reset();
                let names = object.as_ref().and_then(|object| object.pointer("/status/volumesInUse")?.as_array());
                return names.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect();
            }
            Err(error) => {
                warn!("cannot read which volumes the node reports in use: {error}; podfs changes nothing until it can");
                let pause = retry.failed(&error);
                retry.wait(&pause).await;
            }
        }
    }
}
