//! Questions and answers of the control socket. Agents and other versions of podfs read these bytes: `podfs-agent(7)`.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use podfs_fuse::protocol::send;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::metrics::PodReading;
use crate::mounts::{AgentFacts, ContainerMount};
use crate::source::{Push, PushCounts};
use crate::supervisor::status::PodStatus;
use crate::supervisor::status::store::VERSION;

/// The version of this protocol. The supervisor refuses a question of another version, with an answer that says so.
pub(super) const PROTOCOL: u32 = 1;
/// How long the supervisor waits for a question, and for a client that does not read its answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(2);
/// Most bytes of a question without pushed objects. The longest such questions have the manifest of a pod, of which an API
/// server accepts 1.5 MiB, or the environment of a container, which may be as long as Linux allows.
pub(super) const LONGEST_QUESTION: usize = 4 << 20;
/// Most bytes of a question with pushed objects.
pub const LONGEST_PUSH: usize = 16 << 20;
/// Most bytes of an answer: a few hundred for each volume.
pub(super) const LONGEST_ANSWER: usize = 16 << 20;

/// The questions to a supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ControlQuestion {
    /// The pod's status.
    Status,
    /// Write a line for each FUSE request of a volume to the pipe that comes with this question, until the reader closes the
    /// pipe.
    Trace {
        /// The volume's name.
        volume: String,
    },
    /// Upgrade to the podfs that is on disk now.
    Upgrade,
    /// Accept these objects.
    Push(Push),
    /// The pod's metrics.
    Metrics,
    /// Prepare the mounts of a container that is about to start.
    PrepareContainer(ContainerRequest),
    /// Remove the files that podfs made for a container that has ended.
    ReleaseContainer {
        /// The name of the container; `None` for all containers of the pod.
        #[serde(default)]
        container: Option<String>,
    },
    /// The pod's status, at once and after each change, until the client closes the connection.
    Follow,
    /// Mount more volumes.
    Publish(Publish),
    /// Unmount volumes, and delete the content of emptyDirs among them.
    Unpublish(VolumeNames),
    /// Refresh volumes now. The supervisor mounts a volume again if another process has unmounted it.
    Remount(VolumeNames),
}

/// A container that is about to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRequest {
    /// The name of the container.
    pub container: String,
    /// The facts about the container that only the agent that starts it knows.
    #[serde(default)]
    pub environment: AgentFacts,
    /// Whether the container runtime can make mounts read-only with everything below them (KEP-3857).
    #[serde(default)]
    pub recursive_read_only: bool,
    /// Whether the container needs only volumes: another program provides the pod's `/etc/hosts` and the termination
    /// log.
    #[serde(default)]
    pub only_volumes: bool,
}

/// A manifest of the pod. The supervisor mounts the volumes in it that are not mounted yet.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Publish {
    /// A core/v1 Pod.
    pub manifest: Value,
}

/// Omits the manifest: the environment of containers may be secret.
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

/// The answers of a supervisor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ControlAnswer {
    /// The pod's status.
    Status(Box<PodStatus>),
    /// The server writes to the pipe from now on.
    Tracing,
    /// How far an upgrade is.
    Upgrade(Upgrade),
    /// The supervisor has accepted all objects. The counts are of the objects that it has now.
    Pushed(PushCounts),
    /// The pod's metrics at this moment.
    Metrics(Box<PodReading>),
    /// The container's mounts. Every source exists.
    Prepared(Vec<ContainerMount>),
    /// The supervisor has removed everything that it made for the container.
    Released,
    /// These volumes are new; the supervisor is about to mount them.
    Published(VolumeNames),
    /// The supervisor has unmounted these volumes, and deleted the content of emptyDirs among them.
    Unpublished(VolumeNames),
    /// These volumes are being refreshed.
    Remounting(VolumeNames),
    /// The supervisor refuses the question, for this reason.
    Refused(String),
    /// The supervisor cannot do this at this moment, for this reason. The client may ask again.
    Busy(String),
}

/// How far an upgrade is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Upgrade {
    /// The new processes are starting; another answer follows.
    Started,
    /// The new podfs serves the pod.
    Done {
        /// The version of the new podfs.
        version: String,
    },
    /// The supervisor has changed nothing.
    Refused {
        /// Why the supervisor refused the upgrade.
        reason: String,
    },
    /// The new podfs did not start, and the previous podfs goes on.
    RolledBack {
        /// Why the new podfs did not start.
        reason: String,
    },
}

/// A message with the version of the protocol.
#[derive(Serialize, Deserialize)]
pub(super) struct Envelope<T> {
    pub(super) version: u32,
    pub(super) message: T,
    /// Whether the client sends more pushes on this connection. Any other question is the only one on its connection.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) stays: bool,
}

/// The answer to a question of another version.
pub(super) fn not_understood() -> ControlAnswer {
    ControlAnswer::Refused(format!(
        "podfs {VERSION} serves the pod and does not understand the question; use the same version to ask"
    ))
}

/// Sends a question or an answer.
pub(super) fn send_message(
    stream: &UnixStream,
    message: &impl Serialize,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    send(stream, &Envelope { version: PROTOCOL, message, stays: false }, descriptor.as_slice())
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;

    use super::*;
    use crate::types::golden::golden;

    /// Fails if messages have other bytes than in `recorded`, one message a line, or if one of the messages that `definition`
    /// begins is not recorded.
    fn assert_recorded<T: Serialize + DeserializeOwned>(recorded: &str, definition: &str) {
        let changed = "agents and other versions of podfs read this message: give changed messages a new PROTOCOL and golden \
                       files of their own, and add a test that a question of the version before gets an answer. A new field that \
                       has a default needs no new PROTOCOL; add a line with it";
        for line in recorded.lines() {
            let message: Envelope<T> =
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}; {changed}"));
            assert_eq!(serde_json::to_string(&message).expect("JSON"), line, "{changed}");
        }
        let source = include_str!("protocol.rs").split(definition).nth(1).expect("the definition");
        let lines = source.split("\n}").next().unwrap_or_default().lines().filter_map(|line| line.strip_prefix("    "));
        let names = lines.filter(|line| line.starts_with(char::is_uppercase));
        let names = names.map(|line| line.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default());
        let names: Vec<String> = names.map(|name| name[..1].to_lowercase() + &name[1..]).collect();
        assert!(names.len() > 8, "these are not all: {names:?}");
        for name in names {
            let begins = |line: &str| {
                let message =
                    line.split_once("\"message\":").map_or("", |(_, message)| message.trim_start_matches('{'));
                message.starts_with(&format!("\"{name}\""))
            };
            assert!(recorded.lines().any(begins), "record the bytes of {name}, in a line");
        }
    }

    #[test]
    fn messages_have_the_bytes_that_agents_and_other_versions_read() {
        assert_recorded::<ControlQuestion>(golden!("control-questions.jsonl"), "pub enum ControlQuestion {");
        assert_recorded::<ControlAnswer>(golden!("control-answers.jsonl"), "pub enum ControlAnswer {");
    }
}
