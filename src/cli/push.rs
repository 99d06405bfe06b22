//! `podfs push`: sends objects to a pod's supervisor. An agent has read them for the pod.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Args, ValueHint};

use super::exit::{Failure, say};
use super::source::read_input;
use super::status::pod_directory;
use crate::manifest::{Document, parse_documents};
use crate::source::{DeletedObject, PushCounts};
use crate::supervisor::control::{ControlAnswer, ControlQuestion, LONGEST_PUSH, ask};
use crate::supervisor::program::options::{RUN_DIRECTORY, directory};

/// Give objects to a pod of podfs run --push.
///
/// The pod takes all of them, and shows them at once, or takes none. A push replaces an object that was pushed before. After
/// the first push, objects that were not pushed do not exist. After a crash or an upgrade, the new podfs of the pod has no
/// pushed objects; its volumes keep what they show until the next push.
///
/// Beside ConfigMaps, Secrets, PersistentVolumeClaims, PersistentVolumes, ClusterTrustBundles and Nodes, a push may hold the
/// pod itself, for its labels and annotations, TokenRequests whose spec is what a volume asks for and whose status has the
/// token, and PodCertificates of podfs.io/v1 whose status has the private key with its certificates.
#[derive(Args)]
#[command(after_help = "\
EXIT STATUS:
  0  everything was taken
  1  there is no such pod, or it refuses
  2  bad arguments, settings or manifests
  3  a privilege is missing

EXAMPLES:
  podfs push --pod c15b9f1e-0a47-5d0c-9b6c-3f1f5f1d7a10 -f objects.yaml
  podfs push --pod c15b9f1e-0a47-5d0c-9b6c-3f1f5f1d7a10 --delete ConfigMap/app")]
pub(super) struct Push {
    /// The pod; podfs status lists all.
    #[arg(long, value_name = "UID")]
    pod: String,
    /// Objects, in YAML or JSON; - reads standard input. May be given several times.
    #[arg(short = 'f', long = "file", value_name = "FILE|-", value_hint = ValueHint::FilePath)]
    files: Vec<PathBuf>,
    /// An object that does not exist any more. May be given several times.
    #[arg(long, value_name = "KIND/NAME", value_parser = deletion)]
    delete: Vec<DeletedObject>,
    /// Forget everything that was pushed before.
    #[arg(long)]
    replace: bool,
    /// The run directory of podfs run.
    #[arg(long, value_name = "DIR", default_value = RUN_DIRECTORY, value_parser = directory(), value_hint = ValueHint::DirPath)]
    run_dir: PathBuf,
}

impl Push {
    pub(super) fn execute(self) -> Result<(), Failure> {
        if self.files.is_empty() && self.delete.is_empty() && !self.replace {
            return Err(Failure::input(anyhow!("there is nothing to push; give objects with -f")));
        }
        let mut objects = Vec::new();
        for file in &self.files {
            objects.extend(read(file)?.into_iter().map(Document::into_value));
        }
        let directory = pod_directory(&self.run_dir, &self.pod)?;
        let (delete, replace) = (self.delete, self.replace);
        let push = crate::source::Push { objects, delete, replace, ..crate::source::Push::default() };
        let question = ControlQuestion::Push(push);
        check_size(&question)?;
        match ask(&directory, &question, None).map_err(Failure::general)? {
            ControlAnswer::Pushed(PushCounts { objects, tokens }) => {
                let (objects, tokens) = (counted(objects, "object"), counted(tokens, "token"));
                say(&format!("pod {} has {objects} and {tokens} now", self.pod));
                Ok(())
            }
            ControlAnswer::Refused(reason) | ControlAnswer::Busy(reason) => Err(Failure::general(anyhow!(reason))),
            other => Err(Failure::general(anyhow!("the supervisor gave an answer to another question: {other:?}"))),
        }
    }
}

/// A count with its noun: `1 object`, `2 objects`.
fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

fn deletion(text: &str) -> Result<DeletedObject, String> {
    match text.split_once('/') {
        Some((kind, name)) if !kind.is_empty() && !name.is_empty() => {
            Ok(DeletedObject { kind: kind.to_owned(), name: name.to_owned() })
        }
        _ => Err("write the kind and the name, such as ConfigMap/app".to_owned()),
    }
}

fn read(path: &Path) -> Result<Vec<Document>, Failure> {
    let (name, bytes) = read_input(path)?;
    Ok(parse_documents(name, &bytes)?)
}

/// Refuses a push that is too long. The supervisor would close the connection without an answer.
fn check_size(question: &ControlQuestion) -> Result<(), Failure> {
    // 64 KiB are for the message around the objects.
    const LIMIT: usize = LONGEST_PUSH - (64 << 10);
    let bytes = serde_json::to_vec(question).map_err(Failure::general)?.len();
    if bytes <= LIMIT {
        return Ok(());
    }
    Err(Failure::input(anyhow!(
        "the objects have {bytes} bytes together, and a push may have at most {LIMIT}; push them one after another"
    )))
}
