//! Questions and answers of the control socket. Agents and other versions of podfs read these bytes: `podfs-agent(7)`.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use podfs_fuse::protocol::send;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::metrics::Reading;
use crate::mounts::{ContainerMount, Environment};
use crate::source::{Push, Taken};
use crate::supervisor::status::PodStatus;

/// The version of this protocol. A message of another version is refused, with an answer that says so.
pub(super) const PROTOCOL: u32 = 1;
/// How long a question may take to arrive, and how long an answer may take to be taken.
pub(super) const TIMEOUT: Duration = Duration::from_secs(2);
/// Most bytes of a question: the manifest of a pod, of which an API server takes 1.5 MiB, or the environment of a container, which
/// may be as long as Linux takes.
pub(super) const LONGEST_QUESTION: usize = 4 << 20;
/// Most bytes of a question with objects.
pub const LONGEST_PUSH: usize = 16 << 20;
/// Most bytes of an answer: a few hundred for each volume.
pub(super) const LONGEST_ANSWER: usize = 16 << 20;

/// The questions to a supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ControlQuestion {
    /// How the pod is.
    Status,
    /// A line per FUSE request on the pipe that comes with this question, until the reader closes it.
    Trace {
        /// The volume's name.
        volume: String,
    },
    /// To go on as the podfs that is on disk now.
    Upgrade,
    /// To take objects.
    Push(Push),
    /// Its metrics.
    Metrics,
    /// To make ready what a container mounts, which is about to start.
    PrepareContainer(ContainerRequest),
    /// To take away what was made for a container that has ended.
    ReleaseContainer {
        /// The container; without one, all of the pod.
        #[serde(default)]
        container: Option<String>,
    },
    /// How the pod is, at once and after each change, until the connection is closed.
    Follow,
    /// To mount more volumes.
    Publish(Publish),
    /// To unmount volumes, and delete what goes with them.
    Unpublish(VolumeNames),
    /// To refresh volumes now, and to mount those again that another process has unmounted.
    Remount(VolumeNames),
}

/// A container that is about to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRequest {
    /// Its name.
    pub container: String,
    /// What only the agent that starts it knows.
    #[serde(default)]
    pub environment: Environment,
    /// Its runtime can make mounts read-only with everything below them.
    #[serde(default)]
    pub recursive_read_only: bool,
    /// The container needs only volumes: another program has the pod's `/etc/hosts` and the termination log.
    #[serde(default)]
    pub only_volumes: bool,
}

/// The manifest of the pod with the volumes that it has from now on, besides those that are mounted already.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Publish {
    /// A core/v1 Pod.
    pub manifest: Value,
}

/// Does not show it: the environment of containers may be secret.
impl fmt::Debug for Publish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the manifest of the pod")
    }
}

/// Volumes of the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeNames {
    /// Their names.
    pub volumes: Vec<String>,
}

/// What it answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ControlAnswer {
    /// How the pod is.
    Status(Box<PodStatus>),
    /// The lines are written from now on.
    Tracing,
    /// How far an upgrade is.
    Upgrade(Upgrade),
    /// The objects were taken, all of them; this is what is known now.
    Pushed(Taken),
    /// Its metrics at this moment.
    Metrics(Box<Reading>),
    /// The container's mounts; every source is there.
    Prepared(Vec<ContainerMount>),
    /// Nothing of the container is left.
    Released,
    /// These volumes are new, and are going to be mounted.
    Published(VolumeNames),
    /// These volumes are unmounted, and what was to be deleted with them is.
    Unpublished(VolumeNames),
    /// These volumes are being refreshed.
    Remounting(VolumeNames),
    /// It cannot be done, for this reason.
    Refused(String),
    /// It cannot be done at this moment, for this reason.
    Busy(String),
}

/// How far an upgrade is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Upgrade {
    /// The new processes are starting; another answer follows.
    Started,
    /// The pod is served by this version.
    Done {
        /// Its version.
        version: String,
    },
    /// Nothing was tried.
    Refused {
        /// Why.
        reason: String,
    },
    /// The new podfs did not come up; the one before goes on.
    RolledBack {
        /// What went wrong.
        reason: String,
    },
}

/// A message with the version of the protocol.
#[derive(Serialize, Deserialize)]
pub(super) struct Envelope<T> {
    pub(super) version: u32,
    pub(super) message: T,
    /// A program that pushes pushes more on this connection. Other questions are alone on theirs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) stays: bool,
}

/// Sends a question or an answer.
pub(super) fn put(stream: &UnixStream, message: &impl Serialize, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    send(stream, &Envelope { version: PROTOCOL, message, stays: false }, descriptor.as_slice())
}
