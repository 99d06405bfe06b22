//! The start: the pod, when the server is the only one who knows it. Nothing can be served before it is known, so this
//! waits for a server that is away, and fails where waiting does not help.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::client::Client;
use super::complaints::SETTLE;
use super::error::{ApiError, Class};
use super::follower::{Follower, News};
use super::settings::SettingsError;
use super::single::{parse_pod, pods};
use crate::manifest::ManifestError;
use crate::manifest::pod::Pod;

/// How long a server may go on refusing. A pod that was bound a moment ago is not known to every part of it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Namespace and name of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl FromStr for PodName {
    type Err = String;

    fn from_str(text: &str) -> Result<PodName, String> {
        match text.split('/').collect::<Vec<_>>().as_slice() {
            [namespace, name] if !namespace.is_empty() && !name.is_empty() => {
                Ok(PodName { namespace: (*namespace).to_owned(), name: (*name).to_owned() })
            }
            _ => Err("give a namespace and a name, such as default/web".to_owned()),
        }
    }
}

/// Reads `default/web`.
impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

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
    /// What the server says of the pod is not a pod that podfs can serve.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The server does not give the pod.
    #[error("pod {pod}: {sentence}")]
    Refused {
        /// The pod.
        pod: PodName,
        /// What was asked and what came.
        sentence: String,
    },
    /// The thread that talks to the server cannot start.
    #[error("cannot start the thread that talks to the API server: {0}")]
    Thread(#[source] io::Error),
}

/// The pod of that name, and who tells of its changes.
pub(super) async fn pod(client: &Client, name: &PodName, node: Option<&str>) -> Result<(Pod, Follower), StartError> {
    let mut follower = Follower::new(client.clone(), pods(&name.namespace, &name.name));
    let started = Instant::now();
    let mut told = None;
    loop {
        match follower.next().await {
            News::Listed(mut found) => {
                let pod = found.pop().ok_or_else(|| StartError::NoSuchPod(name.clone()))?;
                let pod = parse_pod(pod, &format!("Pod {name}"))?;
                check_node(&pod, name, node)?;
                return Ok((pod, follower));
            }
            News::Trouble(error) if is_hopeless(&error, started) => {
                return Err(StartError::Refused { pod: name.clone(), sentence: error.sentence });
            }
            // What may pass within seconds is no trouble before that.
            News::Trouble(error) if error.may_pass() && !error.is_outage() && started.elapsed() < SETTLE => {}
            News::Trouble(error) if told.as_ref() != Some(&error.sentence) => {
                warn!("pod {name} is waited for: {error}");
                told = Some(error.sentence);
            }
            News::Trouble(_) | News::Put(_) | News::Deleted(_) | News::Alive => {}
        }
    }
}

fn is_hopeless(error: &ApiError, started: Instant) -> bool {
    match error.class {
        Class::Untrusted => true,
        class if class.passes() => false,
        _ => started.elapsed() >= PATIENCE,
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
    fn a_pod_goes_by_namespace_and_name() {
        let name: PodName = "shop/web-0".parse().expect("a name");
        assert_eq!((name.namespace.as_str(), name.name.as_str()), ("shop", "web-0"));
        for wrong in ["web", "/web", "shop/", "a/b/c", ""] {
            assert!(wrong.parse::<PodName>().is_err(), "{wrong}");
        }
    }
}
