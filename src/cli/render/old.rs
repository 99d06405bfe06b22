//! The old side of `podfs render --diff`: the objects of other files, or those of the cluster.

use std::convert::Infallible;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::anyhow;

use super::super::block_on;
use super::super::exit::{Failure, say};
use super::super::pod::PodOptions;
use super::after_answers;
use crate::manifest::pod::{Pod, is_pod_or_template};
use crate::manifest::{Document, KnownObjects, parse_documents};
use crate::source::{
    AcceptedDocuments, ApiPlan, ApiSource, FileSource, PodInput, SettingsSource, Snapshot, Source, TokenPolicy,
    live_pod,
};
use crate::types::PodName;

/// The name of the volume that admission adds to each pod with a service account; manifests do not have it.
const INJECTED: &str = "kube-api-access-";

/// The source of the old side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Old {
    /// The objects of the API server.
    Cluster,
    /// A file or a directory.
    Files(PathBuf),
}

impl FromStr for Old {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Old, Infallible> {
        Ok(if text == "cluster" { Old::Cluster } else { Old::Files(text.into()) })
    }
}

impl Old {
    /// The old pod with its objects; `None` if the cluster does not have the pod.
    pub(super) fn read(
        &self,
        options: &PodOptions,
        new: &Arc<Pod>,
        snapshot: &Snapshot,
    ) -> Result<Option<(Arc<Pod>, Snapshot)>, Failure> {
        match self {
            Old::Files(path) => of_files(path, new, snapshot).map(Some),
            Old::Cluster => {
                let sentence = "--diff cluster compares with an API server; give --kubeconfig or --in-cluster, too";
                let access = options.source().access().ok_or_else(|| Failure::input(anyhow!(sentence)))?;
                of_cluster(access, options.file(), new)
            }
        }
    }
}

/// The objects at the path. The pod is that of the path, if it is a file with a pod; otherwise the new one.
fn of_files(path: &Path, new: &Arc<Pod>, snapshot: &Snapshot) -> Result<(Arc<Pod>, Snapshot), Failure> {
    let holds_pod = path.is_file() && documents(path)?.iter().any(is_pod_or_template);
    let (_files, old) = match holds_pod {
        true => FileSource::open_accepting(AcceptedDocuments::Templates, Some(PodInput::File(path.to_owned())), &[])?,
        false => FileSource::open(None, &[path.to_owned()])?,
    };
    let pod = old.pod.unwrap_or_else(|| Arc::clone(new));
    let known = KnownObjects { objects: old.known.objects, ..snapshot.known.clone() };
    Ok((Arc::clone(&pod), Snapshot { pod: Some(pod), known, ..snapshot.clone() }))
}

fn of_cluster(
    access: SettingsSource,
    file: Option<&Path>,
    new: &Arc<Pod>,
) -> Result<Option<(Arc<Pod>, Snapshot)>, Failure> {
    let PodOrWorkload { api_version, kind, name } = PodOrWorkload::of(file, new)?;
    let live = block_on(&[], async { Ok(live_pod(access.clone(), &api_version, &kind, &name).await?) })?;
    let Some(mut live) = live else {
        say(&format!("the API server has no {kind} {name}; everything is new"));
        return Ok(None);
    };
    let is_of_manifest = |name: &str| new.volumes.iter().any(|volume| volume.name.as_str() == name);
    live.volumes.retain(|volume| !volume.name.as_str().starts_with(INJECTED) || is_of_manifest(volume.name.as_str()));
    let live = Arc::new(live);
    let (no_files, empty) = FileSource::open(None, &[])?;
    let of_pod = Snapshot { pod: Some(Arc::clone(&live)), ..empty };
    let files = Some((no_files, of_pod));
    let plan = ApiPlan { access, pod: None, node: None, volumes: None, files, tokens: TokenPolicy::Empty };
    let (api, snapshot) = ApiSource::open(plan)?;
    let snapshot = block_on(&[], async { Ok(after_answers(Source::Api(api), snapshot).await) })?;
    Ok(Some((live, snapshot)))
}

/// The pod or the workload of a manifest.
struct PodOrWorkload {
    api_version: String,
    kind: String,
    name: PodName,
}

impl PodOrWorkload {
    /// The first pod or workload of the file; otherwise the pod itself.
    fn of(file: Option<&Path>, pod: &Pod) -> Result<PodOrWorkload, Failure> {
        let namespace = pod.identity.namespace.clone();
        let file = file.filter(|file| *file != Path::new("-"));
        let document = file.map(documents).transpose()?.and_then(|all| all.into_iter().find(is_pod_or_template));
        let Some(document) = document else {
            let name = PodName { namespace, name: pod.identity.name.clone() };
            return Ok(PodOrWorkload { api_version: "v1".to_owned(), kind: "Pod".to_owned(), name });
        };
        let (api_version, kind) = (document.api_version.clone(), document.kind.clone());
        let name = document.name().unwrap_or(&pod.identity.name).to_owned();
        Ok(PodOrWorkload { api_version, kind, name: PodName { namespace, name } })
    }
}

fn documents(path: &Path) -> Result<Vec<Document>, Failure> {
    let bytes = fs::read(path).map_err(|error| Failure::input(anyhow!("{}: {error}", path.display())))?;
    Ok(parse_documents(path, &bytes)?)
}
