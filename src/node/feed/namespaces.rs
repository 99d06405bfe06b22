//! The namespaces whose pods are chosen for the runtime's containers: those with the label [`VOLUMES_KEY`].
//!
//! The credentials of a node need not allow it to list namespaces. Then podfs chooses pods by their own labels alone, and says
//! so once in the log.

use std::collections::BTreeSet;

use serde_json::Value;
use tokio::sync::mpsc::UnboundedSender;
use tracing::{debug, info};

use super::FeedInput;
use crate::kube::address::Collection;
use crate::kube::client::ApiClient;
use crate::kube::error::ErrorClass;
use crate::kube::follower::{Follower, FollowerEvent};
use crate::volume::VOLUMES_KEY;

/// Sends the names of the namespaces after each change, until the feed is dropped.
pub(super) async fn follow(client: ApiClient, input: UnboundedSender<FeedInput>) {
    let mut follower = Follower::new(client, Collection::of_namespaces(format!("{VOLUMES_KEY}=true")));
    let (mut names, mut was_refused) = (BTreeSet::new(), false);
    loop {
        match follower.next().await {
            FollowerEvent::Listed(namespaces) => names = namespaces.iter().filter_map(name_of).collect(),
            FollowerEvent::Put(namespace) => names.extend(name_of(&namespace)),
            FollowerEvent::Deleted(namespace) => {
                if let Some(name) = name_of(&namespace) {
                    names.remove(&name);
                }
            }
            FollowerEvent::Alive => continue,
            FollowerEvent::Failure(error) => {
                let is_refused = matches!(error.class, ErrorClass::Forbidden);
                if is_refused && !std::mem::replace(&mut was_refused, true) {
                    info!("{error}; podfs chooses pods only by their own label or annotation {VOLUMES_KEY}");
                } else {
                    debug!("podfs cannot watch namespaces: {error}");
                }
                continue;
            }
        }
        was_refused = false;
        if input.send(FeedInput::Namespaces(names.clone())).is_err() {
            return;
        }
    }
}

fn name_of(namespace: &Value) -> Option<String> {
    namespace["metadata"]["name"].as_str().map(str::to_owned)
}
