//! The options for the pod of the commands that do not need root.

use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args, ValueHint};

use super::exit::Failure;
use super::kubectl::{self, PodReference};
use super::source::SourceOptions;
use crate::source::{AcceptedDocuments, Snapshot, Source};
use crate::types::PodName;

/// The pod, and the sources of the pod and its objects.
#[derive(Args)]
#[command(group = ArgGroup::new("of_pod").args(["pod", "pod_name", "reference"]).required(true))]
pub(super) struct PodOptions {
    /// The pod's manifest, in YAML or JSON; - reads standard input. May also hold a workload, such as a Deployment or a CronJob:
    /// podfs shows its pod template.
    #[arg(long, value_name = "FILE|-", value_hint = ValueHint::FilePath)]
    pod: Option<PathBuf>,
    /// Ask the API server for this pod.
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pod_name: Option<PodName>,
    /// Ask the API server for this pod. Without --kubeconfig, that is the server of kubectl: the file in KUBECONFIG or
    /// ~/.kube/config says which.
    #[arg(value_name = "pod/NAME")]
    reference: Option<PodReference>,
    /// The namespace of pod/NAME, if it is not that of the kubeconfig's current context.
    #[arg(short, long, requires = "reference")]
    namespace: Option<String>,
    #[command(flatten)]
    source: SourceOptions,
}

impl PodOptions {
    /// Opens the sources. Without `reveal`, podfs requests no tokens.
    pub(super) fn open(&mut self, reveal: bool) -> Result<(Source, Snapshot), Failure> {
        self.source.without_tokens = !reveal;
        let name = self.name()?;
        self.source.open_accepting(AcceptedDocuments::Templates, self.pod.as_deref(), name.as_ref(), None)
    }

    /// The file with the pod's manifest.
    pub(super) fn file(&self) -> Option<&Path> {
        self.pod.as_deref()
    }

    /// The sources of objects.
    pub(super) fn source(&self) -> &SourceOptions {
        &self.source
    }

    fn name(&mut self) -> Result<Option<PodName>, Failure> {
        let Some(PodReference(name)) = &self.reference else { return Ok(self.pod_name.clone()) };
        let access = self.source.access_or(kubectl::kubeconfig)?;
        let namespace = match &self.namespace {
            Some(namespace) => namespace.clone(),
            None => access.namespace().map_err(Failure::input)?.unwrap_or_else(|| "default".to_owned()),
        };
        Ok(Some(PodName { namespace, name: name.clone() }))
    }
}
