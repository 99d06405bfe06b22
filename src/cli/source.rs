//! The options for the sources of a pod and its objects.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Args, ValueHint};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::stdio::dup2_stdin;

use super::exit::Failure;
use crate::source::{
    AcceptedDocuments, ApiPlan, ApiSource, FileSource, PodInput, SettingsSource, Snapshot, Source, TokenPolicy,
};
use crate::types::PodName;
use crate::volume::Volume;

/// The sources of objects: files, an API server, or both.
#[derive(Args)]
pub(super) struct SourceOptions {
    /// A file or directory with the objects the pod refers to: ConfigMaps, Secrets, claims, PersistentVolumes and others. May
    /// be given several times.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    objects: Vec<PathBuf>,
    /// Read the objects from the API server of this kubeconfig's current context, and watch them for changes. Objects in
    /// --objects win.
    #[arg(long, value_name = "FILE", conflicts_with = "in_cluster", value_hint = ValueHint::FilePath)]
    kubeconfig: Option<PathBuf>,
    /// Ask the API server of the cluster that podfs itself runs in, as its service account.
    #[arg(long)]
    in_cluster: bool,
    /// Whether podfs requests no tokens, because the output of the command shows none.
    #[arg(skip)]
    pub(super) without_tokens: bool,
    /// The node that podfs serves; podfs refuses a pod of the API server that is on another one.
    #[arg(long, value_name = "NAME", requires = "pod_name")]
    node_name: Option<String>,
}

impl SourceOptions {
    /// Opens the sources. `volumes` are the volumes to serve; `None` means all of the pod.
    pub(super) fn open(
        &self,
        pod: Option<&Path>,
        pod_name: Option<&PodName>,
        volumes: Option<&Volume>,
    ) -> Result<(Source, Snapshot), Failure> {
        self.open_accepting(AcceptedDocuments::Pods, pod, pod_name, volumes)
    }

    /// Like [`Self::open`]. `accepted` says which documents of the pod file may be the pod.
    pub(super) fn open_accepting(
        &self,
        accepted: AcceptedDocuments,
        pod: Option<&Path>,
        pod_name: Option<&PodName>,
        volumes: Option<&Volume>,
    ) -> Result<(Source, Snapshot), Failure> {
        let files = |pod: Option<&Path>| -> Result<_, Failure> {
            let pod = pod.map(pod_input).transpose()?;
            Ok(FileSource::open_accepting(accepted, pod, &self.objects)?)
        };
        let Some(access) = self.access() else {
            if pod_name.is_some() {
                let sentence = "--pod-name is a pod of the API server; give --kubeconfig or --in-cluster, too";
                return Err(Failure::input(anyhow!(sentence)));
            }
            let (files, snapshot) = files(pod)?;
            return Ok((Source::Files(files), snapshot));
        };
        let has_files = pod.is_some() || !self.objects.is_empty();
        let plan = ApiPlan {
            access,
            pod: pod_name.cloned(),
            node: self.node_name.clone(),
            volumes: volumes.map(|volume| vec![volume.clone()]),
            files: has_files.then(|| files(pod)).transpose()?,
            tokens: if self.without_tokens { TokenPolicy::Empty } else { TokenPolicy::Issued },
        };
        let (api, snapshot) = ApiSource::open(plan)?;
        Ok((Source::Api(api), snapshot))
    }

    /// Whether no option names a source of objects.
    pub(super) fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.access().is_none()
    }

    /// The access to the API server that the options name; otherwise to the server of this kubeconfig.
    pub(super) fn access_or(
        &mut self,
        kubeconfig: impl FnOnce() -> Result<PathBuf, Failure>,
    ) -> Result<SettingsSource, Failure> {
        if let Some(access) = self.access() {
            return Ok(access);
        }
        let path = kubeconfig()?;
        self.kubeconfig = Some(path.clone());
        Ok(SettingsSource::Kubeconfig(path))
    }

    /// The access to the API server that the options name; `None` if they name none.
    pub(super) fn access(&self) -> Option<SettingsSource> {
        let kubeconfig = self.kubeconfig.clone().map(SettingsSource::Kubeconfig);
        kubeconfig.or(self.in_cluster.then_some(SettingsSource::InCluster))
    }
}

/// Reads an input whole: the file, or standard input if the path is `-`. Returns its name for messages, too.
pub(super) fn read_input(path: &Path) -> Result<(&Path, Vec<u8>), Failure> {
    let (name, bytes) = if path == Path::new("-") {
        let mut bytes = Vec::new();
        (Path::new("standard input"), io::stdin().read_to_end(&mut bytes).map(|_| bytes))
    } else {
        (path, std::fs::read(path))
    };
    let bytes = bytes.map_err(|error| Failure::input(anyhow!("{}: cannot be read: {error}", name.display())))?;
    Ok((name, bytes))
}

/// The file with the pod, or the content of standard input if the path is `-`.
fn pod_input(path: &Path) -> Result<PodInput, Failure> {
    if path != Path::new("-") {
        return Ok(PodInput::File(path.to_owned()));
    }
    let mut bytes = Vec::new();
    let read = io::stdin().read_to_end(&mut bytes);
    read.map_err(|error| Failure::input(anyhow!("cannot read the pod from standard input: {error}")))?;
    // After an upgrade, this process executes another version of podfs, which reads standard input again.
    let replaced = replace_stdin(&bytes);
    replaced.map_err(|error| Failure::general(anyhow!("cannot keep the pod from standard input: {error}")))?;
    Ok(PodInput::Stdin(bytes))
}

/// Replaces standard input by a memory file with these bytes.
fn replace_stdin(bytes: &[u8]) -> io::Result<()> {
    let mut file = File::from(memfd_create(c"podfs-pod", MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(dup2_stdin(file)?)
}
