//! The start: reads the pod when no manifest file describes it. podfs cannot serve a volume before that, so this module
//! waits until the server can be reached, and fails where waiting does not help.

use std::io;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use super::problem_log::SETTLE_DELAY;
use super::single::{parse_pod, pods};
use crate::kube::client::ApiClient;
use crate::kube::error::{ApiError, ErrorClass};
use crate::kube::follower::{Follower, FollowerEvent};
use crate::kube::settings::SettingsError;
use crate::manifest::ManifestError;
use crate::manifest::pod::Pod;
use crate::types::PodName;

/// How long a server may refuse before podfs gives up.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long the server may answer that podfs has no right to the pod: the server's authorizer knows a pod that was
/// bound a moment ago, or any pod after a restart of the server, only after some seconds.
const TIMEOUT_FOR_RIGHTS: Duration = Duration::from_secs(30);

/// Why the server cannot be a source. Its text is one sentence for the user.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Settings that cannot be used.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The server does not have the pod.
    #[error("pods {:?} not found in namespace {:?} of the API server", .0.name, .0.namespace)]
    NoSuchPod(PodName),
    /// The pod is on another node.
    #[error("pod {pod} is on node {is:?}, not on {expected:?}; podfs serves pods of its own node")]
    OtherNode {
        /// The pod.
        pod: PodName,
        /// The node it is on.
        is: String,
        /// The node it should be on.
        expected: String,
    },
    /// podfs cannot serve the pod that the server sent.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The server refuses to send the pod.
    #[error("pod {pod}: {sentence}")]
    Refused {
        /// The pod.
        pod: PodName,
        /// The request and its failure.
        sentence: String,
        /// Whether it would refuse again after a restart of podfs.
        is_final: bool,
    },
    /// The thread that talks to the server cannot start.
    #[error("cannot start the thread that talks to the API server: {0}")]
    Thread(#[source] io::Error),
}

/// Gets the pod with this name, and the follower of its changes.
pub(super) async fn pod(client: &ApiClient, name: &PodName, node: Option<&str>) -> Result<(Pod, Follower), StartError> {
    let mut follower = Follower::new(client.clone(), pods(&name.namespace, &name.name));
    let started = Instant::now();
    let mut refusal: Option<RefusingServer> = None;
    let mut last_warning = None;
    loop {
        let event = match &refusal {
            Some(refusal) => timeout_at(refusal.ends(), follower.next()).await,
            None => Ok(follower.next().await),
        };
        match (event, refusal.take()) {
            (Ok(FollowerEvent::Listed(mut pods)), _) => {
                let pod = pods.pop().ok_or_else(|| StartError::NoSuchPod(name.clone()))?;
                let pod = parse_pod(pod, &format!("Pod {name}"))?;
                check_node(&pod, name, node)?;
                return Ok((pod, follower));
            }
            (Ok(FollowerEvent::Failure(error)), before) => {
                // An error that may pass within seconds is not reported before that.
                let may_pass = error.may_pass() && !error.is_outage() && started.elapsed() < SETTLE_DELAY;
                if !may_pass && last_warning.as_ref() != Some(&error.sentence) {
                    warn!("podfs waits for pod {name}: {error}");
                    last_warning = Some(error.sentence.clone());
                }
                refusal = RefusingServer::after(before, error);
            }
            (Ok(FollowerEvent::Put(_) | FollowerEvent::Deleted(_) | FollowerEvent::Alive), before) => refusal = before,
            (Err(_), Some(refusal)) => return Err(refusal.into_error(name)),
            (Err(_), None) => {}
        }
    }
}

/// A server that answers and refuses the pod.
struct RefusingServer {
    error: ApiError,
    since: Instant,
}

impl RefusingServer {
    /// The state after an error. An error of another class starts the time anew; an error that may pass ends the
    /// refusal.
    fn after(before: Option<RefusingServer>, error: ApiError) -> Option<RefusingServer> {
        let same = before.filter(|before| before.error.class == error.class);
        let since = same.map_or_else(Instant::now, |before| before.since);
        Some(RefusingServer { error, since }).filter(|refusal| !refusal.error.class.passes())
    }

    /// When podfs gives up.
    fn ends(&self) -> Instant {
        self.since + if self.error.class == ErrorClass::Forbidden { TIMEOUT_FOR_RIGHTS } else { TIMEOUT }
    }

    fn into_error(self, name: &PodName) -> StartError {
        let is_final =
            matches!(self.error.class, ErrorClass::Unauthorized | ErrorClass::Forbidden | ErrorClass::NotFound);
        StartError::Refused { pod: name.clone(), sentence: self.error.sentence, is_final }
    }
}

fn check_node(pod: &Pod, name: &PodName, expected: Option<&str>) -> Result<(), StartError> {
    match (pod.facts.node_name.as_deref(), expected) {
        (Some(is), Some(expected)) if is != expected => {
            let (is, expected) = (is.to_owned(), expected.to_owned());
            Err(StartError::OtherNode { pod: name.clone(), is, expected })
        }
        (None, Some(_)) => {
            info!("pod {name} is on no node yet");
            Ok(())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_over_after_its_time_and_begins_anew_for_another_reason() {
        let error = |class| ApiError::new(class, "no");
        let after = |before, class| RefusingServer::after(before, error(class));
        let first = after(None, ErrorClass::Unauthorized).expect("a refusal");
        let (since, ends) = (first.since, first.ends());
        assert_eq!(ends - since, TIMEOUT);
        let second = after(Some(first), ErrorClass::Unauthorized).expect("a refusal");
        assert_eq!(second.ends(), ends, "the time goes on");
        let other = after(Some(second), ErrorClass::Forbidden).expect("a refusal");
        assert_eq!(other.ends() - other.since, TIMEOUT_FOR_RIGHTS);
        assert!(after(Some(other), ErrorClass::Unreachable).is_none());
        let name: PodName = "default/web".parse().expect("a name");
        for (class, expected) in [
            (ErrorClass::Unauthorized, true),
            (ErrorClass::Forbidden, true),
            (ErrorClass::NotFound, true),
            (ErrorClass::InvalidAnswer, false),
            (ErrorClass::Untrusted, false),
            (ErrorClass::Refused, false),
        ] {
            let error = after(None, class).expect("a refusal").into_error(&name);
            assert!(matches!(error, StartError::Refused { is_final, .. } if is_final == expected), "{class:?}");
        }
    }
}
