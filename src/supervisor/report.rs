//! Readiness and state, told to everyone who asked.
//!
//! | to | when | what |
//! |---|---|---|
//! | people, on standard error | once, when ready | one line |
//! | the node agent, on `--ready-fd` | once, when ready | one JSON object, then the end of the file |
//! | systemd, by `sd_notify(3)` | at every change | `STATUS=`, and `READY=1` when ready |

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use sd_notify::NotifyState;
use serde::Serialize;
use tracing::{info, warn};

use super::volume::State;
use crate::manifest::pod::PodIdentity;
use crate::volume::Volume;

/// How a person at a terminal, or a program that reads logs, wants to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Plain lines.
    People,
    /// Everything on standard error is a JSON log line.
    Logs,
}

/// What is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The volumes of a pod.
    Pod,
    /// One volume, by a person who looks at it.
    Volume,
}

/// Collects the state of the volumes, and tells when it changes.
pub struct Report {
    subject: Subject,
    identity: PodIdentity,
    expected: usize,
    volumes: BTreeMap<usize, VolumeReport>,
    audience: Audience,
    ready_fd: Option<OwnedFd>,
    ready: bool,
    status: String,
}

struct VolumeReport {
    name: String,
    kind: &'static str,
    path: PathBuf,
    state: State,
}

#[derive(Serialize)]
struct Ready<'a> {
    pod: ReadyPod<'a>,
    volumes: Vec<ReadyVolume<'a>>,
}

#[derive(Serialize)]
struct ReadyPod<'a> {
    namespace: &'a str,
    name: &'a str,
    uid: &'a str,
}

#[derive(Serialize)]
struct ReadyVolume<'a> {
    name: &'a str,
    kind: &'a str,
    path: &'a Path,
    generation: &'a str,
}

impl Report {
    /// Reports on `expected` volumes.
    pub fn new(
        subject: Subject,
        identity: PodIdentity,
        expected: usize,
        audience: Audience,
        ready_fd: Option<OwnedFd>,
    ) -> Self {
        let (volumes, status) = (BTreeMap::new(), String::new());
        Self { subject, identity, expected, volumes, audience, ready_fd, ready: false, status }
    }

    /// The supervisor begins.
    pub(super) fn started(&mut self) {
        if self.subject == Subject::Pod {
            info!("serving {} volume(s) of pod {}", self.expected, self.identity);
        }
    }

    /// A volume was refreshed.
    pub(super) fn volume(&mut self, place: usize, volume: &Volume, path: &Path, state: &State) {
        let report = VolumeReport {
            name: volume.name.to_string(),
            kind: volume.kind.word,
            path: path.to_owned(),
            state: state.clone(),
        };
        self.volumes.insert(place, report);
    }

    /// Tells what has changed since the last time.
    pub(super) fn progress(&mut self) {
        let status = self.describe();
        if status != self.status {
            notify(&[NotifyState::Status(&status)]);
            self.status = status;
        }
        if !self.ready && self.is_ready() {
            self.ready = true;
            self.tell_ready();
        }
    }

    /// The supervisor ends.
    pub(super) fn stopping(&self) {
        notify(&[NotifyState::Stopping, NotifyState::Status("unmounting")]);
    }

    /// Every volume's first generation is visible at its path.
    fn is_ready(&self) -> bool {
        self.volumes.len() == self.expected
            && !self.volumes.values().any(|volume| matches!(volume.state, State::Waiting(_)))
    }

    fn describe(&self) -> String {
        let shown = self.volumes.values().filter(|volume| !matches!(volume.state, State::Waiting(_))).count();
        let mut text = format!("{shown} of {} volumes are up", self.expected);
        for volume in self.volumes.values() {
            match &volume.state {
                State::Waiting(reason) => text += &format!("; {} waits: {reason}", volume.name),
                State::Behind(_, reason) => text += &format!("; {} is not refreshed: {reason}", volume.name),
                State::Live(_) => {}
            }
        }
        // sd_notify is a protocol of lines.
        text.replace('\n', " ")
    }

    fn tell_ready(&mut self) {
        let line = match self.subject {
            Subject::Pod => format!("pod {} is ready: {}", self.identity, self.places()),
            Subject::Volume => format!("{}; Ctrl-C unmounts it", self.volume_places()),
        };
        match self.audience {
            Audience::People => eprintln!("podfs: {line}"),
            Audience::Logs => info!("{line}"),
        }
        if let Some(descriptor) = self.ready_fd.take()
            && let Err(error) = self.write_ready(descriptor)
        {
            // The pod's volumes do not depend on who wanted to hear of them.
            warn!("cannot write to the descriptor given with --ready-fd: {error}");
        }
        notify(&[NotifyState::Ready, NotifyState::Status(&self.status)]);
    }

    fn write_ready(&self, descriptor: OwnedFd) -> io::Result<()> {
        let mut json = serde_json::to_vec(&self.ready_object())?;
        json.push(b'\n');
        File::from(descriptor).write_all(&json)
    }

    /// Volumes are listed by directory: `config in /…/kubernetes.io~configmap`.
    fn places(&self) -> String {
        let mut names: BTreeMap<&Path, Vec<&str>> = BTreeMap::new();
        for volume in self.volumes.values() {
            names.entry(volume.path.parent().unwrap_or(&volume.path)).or_default().push(&volume.name);
        }
        let places: Vec<_> =
            names.iter().map(|(directory, names)| format!("{} in {}", names.join(", "), directory.display())).collect();
        if places.is_empty() { "it has no volumes".to_owned() } else { places.join("; ") }
    }

    /// `volume "config" is ready at /mnt`
    fn volume_places(&self) -> String {
        let place = |volume: &VolumeReport| format!("volume {:?} is ready at {}", volume.name, volume.path.display());
        self.volumes.values().map(place).collect::<Vec<_>>().join(", ")
    }

    fn ready_object(&self) -> Ready<'_> {
        let PodIdentity { namespace, name, uid } = &self.identity;
        let volumes = self.volumes.values().filter_map(|volume| match &volume.state {
            State::Live(generation) | State::Behind(generation, _) => Some(ReadyVolume {
                name: &volume.name,
                kind: volume.kind,
                path: &volume.path,
                generation: generation.as_str(),
            }),
            State::Waiting(_) => None,
        });
        Ready { pod: ReadyPod { namespace, name, uid: uid.as_str() }, volumes: volumes.collect() }
    }
}

fn notify(state: &[NotifyState<'_>]) {
    // Without systemd there is nobody to tell, and that is no error.
    if let Err(error) = sd_notify::notify(state) {
        warn!("cannot notify the service manager: {error}");
    }
}
