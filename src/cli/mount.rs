//! `podfs mount`: one volume in the foreground, for debugging.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Args, ValueEnum, ValueHint};
use k8s_openapi::api::core::v1 as core;
use podfs_fuse::passthrough;
use serde_json::Value;

use super::block_on;
use super::exit::{Failure, say};
use super::log::{LogFormat, LogOptions};
use super::source::{SourceOptions, read_input};
use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::manifest::{check_volume_spelling, parse_bare};
use crate::supervisor::program::machine::check_machine;
use crate::supervisor::program::options::{FLEX_VOLUMES, GenerationOptions, TransportOptions};
use crate::supervisor::run_dir::claim::PodLeftovers;
use crate::supervisor::run_dir::site::Site;
use crate::supervisor::status::report::{Report, ReportScope};
use crate::supervisor::{self, Assignment};
use crate::types::PodName;
use crate::volume::{Claim, ClaimReference, Projection, SubPathMode, Volume, VolumeFields, VolumeSource, VolumeUses};

/// Mount a single core/v1 Volume at DIR until Ctrl-C.
///
/// Without --objects or an API server, it prints which objects the volume needs. The pod's annotations for its volume of
/// the same name apply; --cache wins over them. An emptyDir on a disk keeps its content in a private directory below TMPDIR,
/// podfs-XXXXXX. After a SIGKILL of podfs mount, this directory stays, and podfs cleanup does not know it: unmount DIR, and remove the
/// directory with rm -r.
#[derive(Args)]
#[command(after_help = "\
EXIT STATUS:
  0  stopped by a signal
  1  failed
  2  bad arguments, settings or manifests
  3  a privilege, a kernel feature or the program podfs-fuse is missing

EXAMPLES:
  podfs mount --volume volume.yaml --objects objects/ --trace /mnt/volume
  podfs mount --volume volume.yaml --pod-name default/web --kubeconfig kubelet.conf /mnt/volume")]
pub(super) struct Mount {
    /// The volume, as it stands in a pod's spec.volumes; - reads standard input.
    #[arg(long, value_name = "FILE|-", value_hint = ValueHint::FilePath)]
    volume: PathBuf,
    /// The pod it belongs to: for downwardAPI, fsGroup, and limits of memory.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pod: Option<PathBuf>,
    /// Ask the API server for the pod it belongs to.
    #[arg(long, value_name = "NAMESPACE/NAME", conflicts_with = "pod")]
    pod_name: Option<PodName>,
    #[command(flatten)]
    source: SourceOptions,
    /// How long the kernel may cache names and attributes of a directory of the host.
    #[arg(long, value_name = "HOW", value_enum)]
    cache: Option<Cache>,
    /// Write one JSON line on standard error for each open of a file: the time, the file, and the process.
    #[arg(long)]
    audit: bool,
    /// Print one line per FUSE request on standard output.
    #[arg(long)]
    trace: bool,
    #[command(flatten)]
    generations: GenerationOptions,
    #[command(flatten)]
    transport: TransportOptions,
    #[command(flatten)]
    log: LogOptions,
    /// An empty directory; podfs makes it if it does not exist, and removes it at the end.
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    directory: PathBuf,
}

/// The words of [`passthrough::CacheMode`].
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Cache {
    /// Not at all.
    None,
    /// For one second.
    Auto,
    /// For ever: the source changes only through this volume.
    Always,
}

impl From<Cache> for passthrough::CacheMode {
    fn from(cache: Cache) -> Self {
        match cache {
            Cache::None => Self::None,
            Cache::Auto => Self::Auto,
            Cache::Always => Self::Always,
        }
    }
}

impl Mount {
    pub(super) fn execute(self) -> Result<(), Failure> {
        self.log.start(LogFormat::Text);
        let mut volume = read_volume(&self.volume)?;
        if !rustix::process::geteuid().is_root() {
            let sentence = "podfs mount mounts file systems, so it must run as root; podfs view shows the projected volumes \
                            of a pod without root";
            return Err(Failure::machine(anyhow!(sentence)));
        }
        let server_program = check_machine()?;
        let (source, snapshot) = self.source.open(self.pod.as_deref(), self.pod_name.as_ref(), Some(&volume))?;
        let (identity, facts) = match &snapshot.pod {
            Some(pod) => (pod.identity.clone(), pod.facts.clone()),
            None => (PodIdentity::placeholder(), PodFacts::placeholder()),
        };
        self.check_needs(&volume, &identity, snapshot.pod.is_some())?;
        // The pod's annotations for its volume of this name apply.
        let own = snapshot.pod.iter().flat_map(|pod| &pod.volumes).find(|own| own.name == volume.name);
        volume.preferences = own.map(|own| own.preferences).unwrap_or_default();
        if let Some(cache) = self.cache {
            volume.preferences.cache = cache.into();
        }
        volume.preferences.audit |= self.audit;
        let volumes = vec![volume];
        let report = Report::new(ReportScope::Volume, identity.clone(), &volumes, LogFormat::Text);
        let assignment = Assignment {
            identity,
            facts,
            volumes: volumes.clone(),
            definitions: Vec::new(),
            site: Site::Exactly(self.directory),
            claim: None,
            inheritance: PodLeftovers::default(),
            server_program,
            flex_volumes: FLEX_VOLUMES.into(),
            trace: self.trace,
            keep_old_generations: self.generations.keep_old_generations,
            sub_path: SubPathMode::default(),
            io_uring: self.transport.io_uring.is_chosen(),
            agent_watches_mounts: false,
            keep_empty_dirs: false,
            server_memory: None,
            metrics: None,
        };
        block_on(&volumes, async { Ok(supervisor::run(assignment, source, snapshot, report).await?) })
    }

    /// Refuses a volume if no option names its pod or its objects; podfs would wait for them for ever.
    fn check_needs(&self, volume: &Volume, identity: &PodIdentity, has_pod: bool) -> Result<(), Failure> {
        if self.audit {
            volume.may_be_audited().map_err(|reason| Failure::input(anyhow!("--audit {reason}")))?;
        }
        match &volume.source {
            VolumeSource::Projection(_) if self.cache.is_some() => {
                let kind = volume.kind.field;
                Err(Failure::input(anyhow!(
                    "--cache is for directories of the host; {kind} volumes are cached for ever"
                )))
            }
            VolumeSource::Projection(projection) => self.check_projection(projection, identity, has_pod),
            VolumeSource::Claim(claim) => self.check_claim(claim, volume, identity, has_pod),
            VolumeSource::HostPath(_) | VolumeSource::EmptyDir(_) | VolumeSource::Nfs(..) => Ok(()),
            VolumeSource::Flex(_) | VolumeSource::Csi(_) => Err(Failure::input(anyhow!(
                "a driver mounts {} volumes for a pod; use podfs run with the pod's manifest",
                volume.field()
            ))),
            VolumeSource::Unsupported(_) => why_unsupported(&self.volume, volume).map_or(Ok(()), Err),
        }
    }

    fn check_projection(&self, projection: &Projection, identity: &PodIdentity, has_pod: bool) -> Result<(), Failure> {
        if projection.needs_pod() && !has_pod {
            return Err(Failure::input(anyhow!(
                "the volume shows fields of its pod; give the pod's manifest with --pod"
            )));
        }
        let references: Vec<_> = projection.references().map(|reference| reference.to_string()).collect();
        if self.has_no_objects() && !references.is_empty() {
            let needed = format!("the volume needs {} of namespace {}", references.join(", "), identity.namespace);
            if projection.references().all(|reference| reference.optional) {
                say(&format!("{needed}; without --objects it stays empty"));
            } else {
                return Err(Failure::input(anyhow!("{needed}; give the files that hold them with --objects")));
            }
        }
        Ok(())
    }

    fn check_claim(
        &self,
        claim: &Claim,
        volume: &Volume,
        identity: &PodIdentity,
        has_pod: bool,
    ) -> Result<(), Failure> {
        if claim.reference == ClaimReference::OfPod && !has_pod {
            return Err(Failure::input(anyhow!(
                "the claim of the volume goes by the name of its pod; give the pod's manifest with --pod"
            )));
        }
        if self.has_no_objects() {
            let name = claim.reference.name(&identity.name, volume.name.as_str());
            return Err(Failure::input(anyhow!(
                "the volume needs PersistentVolumeClaim {name} of namespace {} and its PersistentVolume; \
                 give the files that hold them with --objects",
                identity.namespace
            )));
        }
        Ok(())
    }

    /// Whether no option names a source of objects. The pod's file may have objects, too.
    fn has_no_objects(&self) -> bool {
        self.source.is_empty() && self.pod.is_none()
    }
}

fn read_volume(path: &Path) -> Result<Volume, Failure> {
    let (path, bytes) = read_input(path)?;
    let document = parse_bare(path, &bytes)?;
    let fields = VolumeFields::of(&document);
    let volume: core::Volume = parse_bare(path, &bytes)?;
    let invalid = |sentence: String| Failure::input(anyhow!("{}: {sentence}", path.display()));
    if let Some(kind) = document.get("kind").and_then(Value::as_str) {
        return Err(invalid(format!("is an object of kind {kind:?}; give one entry of a pod's spec.volumes")));
    }
    let volume =
        check_volume_spelling(&document).and_then(|()| Volume::parse(&volume, &fields, &VolumeUses::default()));
    let volume = volume.map_err(|error| invalid(error.to_string()))?;
    // podfs run would serve the other volumes of the pod. Here, there is no other volume.
    why_unsupported(path, &volume).map_or(Ok(volume), Err)
}

/// The error for the volume of the file `path`, if podfs does not support it.
fn why_unsupported(path: &Path, volume: &Volume) -> Option<Failure> {
    let reason = volume.unsupported_reason()?;
    Some(Failure::input(anyhow!("{}: volume {:?}: {reason}", path.display(), volume.name.as_str())))
}
