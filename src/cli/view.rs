//! `podfs view`: mounts the projected volumes of a pod as a live file system, for users without root.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::anyhow;
use clap::{Args, ValueHint};
use podfs_fuse::memory_lock;
use tokio::time::{Instant, sleep_until};

use super::block_on;
use super::exit::{Failure, say};
use super::log::{LogFormat, LogOptions};
use super::pod::PodOptions;
use super::render::{reveal_hint, view_of};
use super::status::print;
use crate::render::model::{RenderedContent, Rendering};
use crate::source::{Snapshot, Source};
use crate::supervisor::run::signals::StopSignals;
use crate::view::entries::{Reader, ViewVolumes};
use crate::view::{Audience, MountedView};

/// Delay of the report that a volume waits, while the API server still answers requests.
const REPORT_DELAY: Duration = Duration::from_secs(1);

/// Mount a live, read-only view of a pod's projected volumes, without root.
///
/// DIR/VOLUME shows what the volume of that name will contain, in the layout that podfs run mounts; changes of manifests and
/// objects are visible within milliseconds. It is for laptops: the program fusermount3 mounts for the user, and only this user
/// can read the view, whatever the modes of files are. Volumes of the node, such as hostPath and emptyDir, are left out.
///
/// podfs reports a volume that it cannot show yet, and shows it as soon as it can. A shown volume stays as it is while its
/// objects are missing. Secret files are empty unless --reveal is given.
///
/// Ctrl-C, SIGTERM and fusermount3 -u DIR end the command. After a SIGKILL, the next podfs view of the same directory cleans up.
#[derive(Args)]
#[command(allow_missing_positional = true)]
#[command(after_help = "\
EXIT STATUS:
  0  ended by a signal or an unmount
  1  failed; the last line on standard error says what, where and what to do
  2  bad arguments, settings or manifests, or a directory that cannot be used
  3  fusermount3, /dev/fuse or a privilege is missing

EXAMPLES:
  podfs view --pod pod.yaml --objects objects/ view/
  podfs view --pod-name default/web --kubeconfig ~/.kube/config --reveal view/
  kubectl podfs view pod/web --namespace shop view/")]
pub(super) struct View {
    #[command(flatten)]
    pod: PodOptions,
    /// Let other users read the view, too, as containers do: then the modes and owners of files apply, except for root. Needs
    /// user_allow_other in /etc/fuse.conf.
    #[arg(long)]
    allow_other: bool,
    /// Show the contents of Secrets and tokens, too.
    #[arg(long)]
    reveal: bool,
    #[command(flatten)]
    log: LogOptions,
    /// An empty directory of the user; podfs makes it if it does not exist, and removes it at the end.
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    directory: PathBuf,
}

impl View {
    pub(super) fn execute(mut self) -> Result<(), Failure> {
        self.log.start(LogFormat::Text);
        // Users may not lock memory, but podfs can forbid ptrace(2) and core dumps.
        let _unlocked = memory_lock::protect_memory();
        let (source, snapshot) = self.pod.open(self.reveal)?;
        block_on(&[], self.run(source, snapshot))
    }

    async fn run(&self, mut source: Source, snapshot: Snapshot) -> Result<(), Failure> {
        let mut signals =
            StopSignals::listen().map_err(|error| Failure::general(anyhow!("cannot listen to signals: {error}")))?;
        let reader = Reader::new(self.reveal);
        let mut reports = ViewReports { has_hinted: self.reveal, ..ViewReports::default() };
        let volumes = reports.take(&reader, &snapshot, &ViewVolumes::default())?;
        let audience = if self.allow_other { Audience::Everyone } else { Audience::Owner };
        let mut view = MountedView::mount(&self.directory, audience, volumes)?;
        say(&format!("{} is at {}; Ctrl-C ends this", reports.title, view.path().display()));
        let shows_changes = io::stdout().is_terminal();
        loop {
            reports.report_when_due();
            tokio::select! {
                snapshot = source.changed() => {
                    let volumes = reports.take(&reader, &snapshot, &view.volumes())?;
                    for line in view.show(volumes).iter().filter(|_| shows_changes) {
                        print(&format!("{line}\n"))?;
                    }
                }
                () = reports.due() => {}
                _ = signals.received() => break,
                () = view.ended() => break,
            }
        }
        Ok(view.finish()?)
    }
}

/// The reports to the user on standard error. podfs makes each one once.
#[derive(Default)]
struct ViewReports {
    /// The pod, for the title of the view.
    title: String,
    warnings: BTreeSet<String>,
    /// The reasons of volumes that wait now, by volume.
    reasons: BTreeMap<String, String>,
    /// The time to report `reasons`, if they differ from `reported`.
    due: Option<Instant>,
    /// The reasons of the last report.
    reported: BTreeMap<String, String>,
    /// The reported lines about omitted volumes.
    left_out: BTreeSet<String>,
    /// Whether podfs has reported that secret files are empty, or shows their contents.
    has_hinted: bool,
}

impl ViewReports {
    /// Makes the volumes of a snapshot, and notes what to report. A volume that waits keeps its content in `before`.
    fn take(&mut self, reader: &Reader, snapshot: &Snapshot, before: &ViewVolumes) -> Result<ViewVolumes, Failure> {
        let pod = snapshot.pod.as_ref().ok_or_else(|| Failure::input(anyhow!("there is no pod")))?;
        let view = view_of(pod, snapshot);
        let rendering = Rendering::of_volumes(&view, &pod.volumes, &pod.images);
        self.title = format!("pod {}/{}", rendering.namespace, rendering.name);
        for warning in &rendering.warnings {
            report_once(&mut self.warnings, warning);
        }
        for place in &rendering.places {
            if let RenderedContent::OfNode(line) = &place.content {
                report_once(&mut self.left_out, &format!("volume {:?} is left out: {line}", place.volume));
            }
        }
        if let Some(hint) = reveal_hint(&rendering, "shows").filter(|_| !self.has_hinted) {
            say(&hint);
            self.has_hinted = true;
        }
        let waiting = rendering.places.iter().filter_map(|place| match &place.content {
            RenderedContent::Waiting(reason) => Some((place.volume.clone(), reason.clone())),
            RenderedContent::Entries(_) | RenderedContent::OfNode(_) => None,
        });
        self.reasons = waiting.collect();
        let now = Instant::now();
        self.due = match self.reasons == self.reported {
            true => None,
            false if snapshot.known.is_settling => Some(self.due.unwrap_or(now + REPORT_DELAY)),
            false => Some(now),
        };
        Ok(reader.read(&rendering, before))
    }

    /// Waits until there is something to report. Cancel-safe.
    async fn due(&self) {
        match self.due {
            Some(due) => sleep_until(due).await,
            None => pending().await,
        }
    }

    fn report_when_due(&mut self) {
        if self.due.is_none_or(|due| due > Instant::now()) {
            return;
        }
        for (volume, reason) in &self.reasons {
            if self.reported.get(volume) != Some(reason) {
                say(&format!("MountVolume.SetUp failed for volume {volume:?} : {reason}"));
            }
        }
        self.reported = self.reasons.clone();
        self.due = None;
    }
}

fn report_once(reported: &mut BTreeSet<String>, sentence: &str) {
    if reported.insert(sentence.to_owned()) {
        say(sentence);
    }
}
