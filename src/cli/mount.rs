//! `podfs mount`: one volume in the foreground, for people who debug it.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::Args;
use k8s_openapi::api::core::v1 as core;
use podfs_fuse::mount::directories::Directories;

use super::block_on;
use super::exit::Failure;
use super::log::LogFormat;
use super::run::{check_machine, pod_input};
use crate::manifest::parse_bare;
use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::source::FileSource;
use crate::supervisor::report::{Audience, Report, Subject};
use crate::supervisor::{self, Assignment};
use crate::volume::{Volume, VolumeSource};

/// Mount a single core/v1 Volume at DIR until Ctrl-C.
#[derive(Args)]
pub(super) struct Mount {
    /// The volume, as it stands in a pod's `spec.volumes`; `-` reads standard input.
    #[arg(long, value_name = "FILE|-")]
    volume: PathBuf,
    /// The pod it belongs to: for downwardAPI, and for fsGroup.
    #[arg(long, value_name = "FILE")]
    pod: Option<PathBuf>,
    /// A file or directory with the objects it refers to; may be given several times.
    #[arg(long, value_name = "PATH")]
    objects: Vec<PathBuf>,
    /// Print one line per FUSE request on standard output.
    #[arg(long)]
    trace: bool,
    /// An empty directory; it is made if it does not exist, and removed at the end.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

impl Mount {
    pub(super) fn execute(self) -> Result<(), Failure> {
        LogFormat::Text.start();
        let volume = read_volume(&self.volume)?;
        check_machine()?;
        let pod = self.pod.as_deref().map(pod_input).transpose()?;
        let (source, snapshot) = FileSource::open(pod, &self.objects)?;
        let (identity, facts) = match &snapshot.pod {
            Some(pod) => (pod.identity.clone(), pod.facts.clone()),
            None => (PodIdentity::stand_in(), PodFacts::stand_in()),
        };
        self.check_needs(&volume, &identity, snapshot.pod.is_some())?;
        let report = Report::new(Subject::Volume, identity.clone(), 1, Audience::People, None);
        let volumes = vec![(volume, self.directory)];
        let directories = Directories::default();
        let assignment = Assignment { identity, facts, volumes, claim: None, directories, trace: self.trace };
        block_on(async { Ok(supervisor::run(assignment, source, snapshot, report).await?) })
    }

    /// Says what the volume needs rather than waiting for what nobody will give.
    fn check_needs(&self, volume: &Volume, identity: &PodIdentity, has_pod: bool) -> Result<(), Failure> {
        let VolumeSource::Projection(projection) = &volume.source;
        if projection.needs_pod() && !has_pod {
            return Err(Failure::input(anyhow!(
                "the volume shows fields of its pod; give the pod's manifest with --pod"
            )));
        }
        let references: Vec<_> = projection.references().map(|reference| reference.to_string()).collect();
        if self.objects.is_empty() && self.pod.is_none() && !references.is_empty() {
            let needed = format!("the volume needs {} of namespace {}", references.join(", "), identity.namespace);
            if projection.references().all(|reference| reference.optional) {
                eprintln!("podfs: {needed}; without --objects it stays empty");
            } else {
                return Err(Failure::input(anyhow!("{needed}; give the files that hold them with --objects")));
            }
        }
        Ok(())
    }
}

fn read_volume(path: &Path) -> Result<Volume, Failure> {
    let bytes = if path == Path::new("-") {
        let mut bytes = Vec::new();
        io::stdin().read_to_end(&mut bytes).map(|_| bytes)
    } else {
        std::fs::read(path)
    };
    let bytes = bytes.with_context(|| format!("{}: cannot be read", path.display())).map_err(Failure::input)?;
    let volume: core::Volume = parse_bare(path, &bytes)?;
    Volume::parse(&volume, &[]).map_err(|error| Failure::input(anyhow!("{}: {error}", path.display())))
}
