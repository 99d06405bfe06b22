//! `podfs render`: shows the content of a pod's volumes, for people and tests. It needs no privilege, no FUSE and no node.

mod old;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::anyhow;
use clap::{Args, ValueHint};
use podfs_fuse::memory_lock;

use super::block_on;
use super::exit::{Failure, say};
use super::log::{LogFormat, LogOptions};
use super::pod::PodOptions;
use super::status::print;
use crate::manifest::PodView;
use crate::manifest::pod::Pod;
use crate::render::directory::{self, DirectoryError};
use crate::render::model::{RenderedContent, Rendering};
use crate::render::{diff, json, tar, tree};
use crate::source::{Snapshot, Source};
use crate::supervisor::program::options::ROOT_DIRECTORY;
use crate::supervisor::run::machine;
use old::Old;

/// Longest wait for the answers of an API server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Show what the volumes of a pod will contain, without mounting them.
///
/// Names, links, modes, owners, sizes and contents are those that podfs run shows, with one difference: the directory that
/// ..data points to is called ..generation. Volumes of the node, such as hostPath and emptyDir, appear as one line. No
/// privilege is needed.
///
/// If podfs would wait with a volume, render prints the kubelet's reason and exits with 1, so one command checks manifests.
/// It shows the contents of Secrets and tokens only with --reveal.
#[derive(Args)]
#[command(after_help = "\
EXIT STATUS:
  0  every volume is complete
  1  podfs would wait with a volume, or the output cannot be written; the last line on standard error says why
  2  bad arguments, settings or manifests

EXAMPLES:
  podfs render --pod pod.yaml --objects objects/
  podfs render --pod pod.yaml --objects objects/ --container web --output json
  podfs render --pod pod.yaml --objects objects/ --reveal --output tar:volumes.tar
  podfs render --pod deployment.yaml --objects new/ --diff old/
  podfs render --pod deployment.yaml --objects new/ --diff cluster --kubeconfig ~/.kube/config
  podfs render --pod-name default/web --kubeconfig ~/.kube/config
  kubectl podfs render pod/web --namespace shop")]
pub(super) struct Render {
    #[command(flatten)]
    pod: PodOptions,
    /// Show what this container sees at its mount paths, instead of the pod's volumes.
    #[arg(long, value_name = "NAME")]
    container: Option<String>,
    /// The output: tree is text for people; json is for programs; dir:DIR writes files with their modes into a directory
    /// that is empty or does not exist; tar:FILE writes a new archive with owners and modes, tar writes it to standard output.
    #[arg(long, value_name = "tree|json|dir:DIR|tar[:FILE]", default_value = "tree")]
    output: RenderOutput,
    /// Show as a unified diff what changes against the objects in PATH, a file or a directory. The old pod is the one in PATH,
    /// if that is a file with a pod in it. The word cluster compares with the pod, or the workload, and the objects that the API
    /// server has: what changes in the containers if the manifests are applied.
    #[arg(long, value_name = "PATH|cluster", conflicts_with = "output", value_hint = ValueHint::AnyPath)]
    diff: Option<Old>,
    /// Show the contents of Secrets and tokens, too.
    #[arg(long)]
    reveal: bool,
    #[command(flatten)]
    log: LogOptions,
}

/// The format and destination of a rendering.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RenderOutput {
    Tree,
    Json,
    Directory(PathBuf),
    Tar(Option<PathBuf>),
}

/// The text is not a valid `--output`.
#[derive(Debug, thiserror::Error)]
#[error("give tree, json, dir:DIR, tar or tar:FILE")]
struct InvalidRenderOutput;

impl FromStr for RenderOutput {
    type Err = InvalidRenderOutput;

    fn from_str(text: &str) -> Result<RenderOutput, InvalidRenderOutput> {
        match text.split_once(':') {
            None if text == "tree" => Ok(RenderOutput::Tree),
            None if text == "json" => Ok(RenderOutput::Json),
            None if text == "tar" => Ok(RenderOutput::Tar(None)),
            Some(("tar", file)) if !file.is_empty() => Ok(RenderOutput::Tar(Some(file.into()))),
            Some(("dir", directory)) if !directory.is_empty() => Ok(RenderOutput::Directory(directory.into())),
            _ => Err(InvalidRenderOutput),
        }
    }
}

impl Render {
    pub(super) fn execute(mut self) -> Result<(), Failure> {
        self.log.start(LogFormat::Text);
        // Forbids ptrace(2) by the user's other processes, and core dumps.
        let _unlocked = memory_lock::protect_memory();
        if self.output == RenderOutput::Tar(None) && io::stdout().is_terminal() {
            let sentence = "an archive is no text for a terminal; give --output tar:FILE, or redirect standard output";
            return Err(Failure::input(anyhow!(sentence)));
        }
        // podfs requests no tokens for a diff: each new token would be a difference.
        let (source, snapshot) = self.pod.open(self.reveal && self.diff.is_none())?;
        let snapshot = block_on(&[], async { Ok(after_answers(source, snapshot).await) })?;
        let pod = snapshot.pod.as_ref().ok_or_else(|| Failure::input(anyhow!("there is no pod")))?;
        let view = view_of(pod, &snapshot);
        let rendering = self.render(pod, &view)?;
        for warning in &rendering.warnings {
            say(warning);
        }
        match &self.diff {
            Some(old) => {
                let old = old.read(&self.pod, pod, &snapshot)?;
                let old_view = old.as_ref().map(|(pod, snapshot)| view_of(pod, snapshot));
                let old = match (&old, &old_view) {
                    (Some((pod, _)), Some(view)) => self.render(pod, view)?,
                    _ => Rendering::of_volumes(&view, &[], &BTreeMap::new()),
                };
                print(&diff::text(&old, &rendering, self.reveal))?;
            }
            None => self.write(&rendering)?,
        }
        check_complete(&rendering)
    }

    fn render<'a>(&self, pod: &'a Pod, view: &'a PodView) -> Result<Rendering<'a>, Failure> {
        match &self.container {
            Some(name) => {
                Rendering::of_container(view, &pod.volumes, &pod.images, &pod.mounts, name).map_err(Failure::input)
            }
            None => Ok(Rendering::of_volumes(view, &pod.volumes, &pod.images)),
        }
    }

    fn write(&self, rendering: &Rendering<'_>) -> Result<(), Failure> {
        match &self.output {
            RenderOutput::Tree => return print(&tree::text(rendering, self.reveal)),
            RenderOutput::Json => return print(&json::text(rendering, self.reveal).map_err(Failure::general)?),
            // A reader could take an incomplete directory or archive for a complete one.
            RenderOutput::Directory(_) | RenderOutput::Tar(_) if !rendering.reasons().is_empty() => return Ok(()),
            RenderOutput::Directory(path) => {
                directory::write(rendering, self.reveal, path).map_err(|error| match error {
                    DirectoryError::Unwritten { .. } => Failure::general(error),
                    _ => Failure::input(error),
                })?
            }
            RenderOutput::Tar(Some(path)) => self.write_archive(rendering, path)?,
            RenderOutput::Tar(None) => {
                let mut out = BufWriter::new(io::stdout().lock());
                match tar::write(rendering, self.reveal, &mut out) {
                    Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                        let error = anyhow!("cannot write to standard output: {error}");
                        return Err(Failure::general(error));
                    }
                    _ => {}
                }
            }
        }
        self.report_omissions(rendering);
        Ok(())
    }

    fn write_archive(&self, rendering: &Rendering<'_>, path: &Path) -> Result<(), Failure> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                Failure::input(anyhow!("{}: exists already; remove it, or give another file", path.display()))
            }
            _ => Failure::input(anyhow!("{}: cannot be made: {error}", path.display())),
        })?;
        let written = tar::write(rendering, self.reveal, &mut BufWriter::new(&file)).and_then(|()| (&file).flush());
        written.map_err(|error| Failure::general(anyhow!("{}: cannot be written: {error}", path.display())))
    }

    /// Reports empty secret files and omitted volumes on standard error, because directories and archives do not show them.
    fn report_omissions(&self, rendering: &Rendering<'_>) {
        if let Some(hint) = reveal_hint(rendering, "writes").filter(|_| !self.reveal) {
            say(&hint);
        }
        for place in &rendering.places {
            if let RenderedContent::OfNode(line) = &place.content {
                say(&format!("volume {:?} is left out: {line}", place.volume));
            }
        }
    }
}

/// What the user can do about empty secret files, if there are any. `--reveal` does `verb` to their contents.
pub(in crate::cli) fn reveal_hint(rendering: &Rendering<'_>, verb: &str) -> Option<String> {
    match rendering.secrets() {
        0 => None,
        1 => Some(format!("1 secret file is empty here; --reveal {verb} its content")),
        secrets => Some(format!("{secrets} secret files are empty here; --reveal {verb} their contents")),
    }
}

/// The pod and its objects in the snapshot.
pub(in crate::cli) fn view_of(pod: &Pod, snapshot: &Snapshot) -> PodView {
    snapshot.view(&pod.identity, &pod.facts, machine::allocatable(Path::new(ROOT_DIRECTORY)))
}

/// Waits until all requests to the API server are answered, or for [`ANSWER_TIMEOUT`]. Returns the last snapshot.
async fn after_answers(mut source: Source, mut snapshot: Snapshot) -> Snapshot {
    let deadline = tokio::time::Instant::now() + ANSWER_TIMEOUT;
    while snapshot.known.is_settling {
        match tokio::time::timeout_at(deadline, source.changed()).await {
            Ok(next) => snapshot = next,
            Err(_) => break,
        }
    }
    snapshot
}

/// Fails if a volume waits. Reports all reasons; the last one is the error.
fn check_complete(rendering: &Rendering<'_>) -> Result<(), Failure> {
    let mut reasons = rendering.reasons();
    let Some(last) = reasons.pop() else { return Ok(()) };
    for reason in &reasons {
        say(reason);
    }
    Err(Failure::general(anyhow!(last)))
}
