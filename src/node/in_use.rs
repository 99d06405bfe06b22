//! Reports the volumes in use in the status of the Node object, as a kubelet does. Never beside a kubelet: both would write.

use serde_json::json;
use tracing::warn;

use super::NodeHandle;
use super::service::volumes_in_use;
use crate::kube::address::Resource;
use crate::kube::client::Client;
use crate::kube::retry::Retry;

/// Reports as long as the daemon runs: when the daemon has found everything of an earlier one (5.3), and after each change.
pub(super) async fn report(client: Client, node: String, handle: NodeHandle) {
    let mut states = handle.follow();
    let (mut retry, mut reported) = (Retry::new(client.clone()), None);
    loop {
        let state = states.borrow_and_update().clone();
        let names = state.states_synced.then(|| volumes_in_use(&state));
        if let Some(names) = names.filter(|names| reported.as_ref() != Some(names)) {
            let change = json!({"status": {"volumesInUse": names}});
            match client.patch(Resource::NODE, None, &[&node, "status"], &change).await {
                Ok(_) => {
                    retry.reset();
                    reported = Some(names);
                }
                Err(error) => {
                    warn!("the volumes in use are not reported: {error}");
                    let pause = retry.failed(&error);
                    retry.wait(&pause).await;
                    continue;
                }
            }
        }
        if states.changed().await.is_err() {
            return;
        }
    }
}
