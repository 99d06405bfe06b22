//! emptyDir volumes: podfs makes and mounts their content, and deletes it at the end of the pod.

use tracing::warn;

use super::{ContainerAccess, MountPlan, PassthroughParts, PassthroughSource, PlannedContent, PodEnd, RefreshFailure};
use crate::host::empty_dir::{self, EmptyDirBacking, EmptyDirContent, EmptyDirPlan};
use crate::host::serve::{BindReason, SourceForm};
use crate::manifest::PodView;
use crate::supervisor::run_dir::site::Site;
use crate::supervisor::volume::label::label;
use crate::volume::{EmptyDir, Volume, VolumeSource};

/// An emptyDir volume.
#[derive(Default)]
pub(in crate::supervisor::volume) struct EmptyDirSource {
    content: Option<EmptyDirContent>,
}

impl PassthroughSource for EmptyDirSource {
    fn find(
        &mut self,
        volume: &mut PassthroughParts,
        spec: &Volume,
        pod: &PodView,
    ) -> Result<MountPlan, RefreshFailure> {
        let plan = plan(spec, pod)?;
        let path = volume.place(spec.kind.directory.unwrap_or_default(), spec.name.as_str());
        let content = match self.content.take() {
            Some(content) => content,
            None => set_up(volume, spec, &plan)?,
        };
        let opened = content.source().try_clone();
        self.content = Some(content);
        let (form, limit) = match plan.backing {
            EmptyDirBacking::Disk => (SourceForm::Fuse, self.limit(spec)),
            // The tmpfs enforces the limit itself.
            EmptyDirBacking::Memory { .. } => (SourceForm::Fuse, None),
            // A program cannot map huge pages of a file through FUSE.
            EmptyDirBacking::HugePages { .. } => (SourceForm::Bind(BindReason::HugePages), None),
        };
        let selinux_context = label(pod, &volume.setting.site);
        let content = PlannedContent::Source { source: opened?, form, limit, remote: None };
        Ok(MountPlan { path, content, access: ContainerAccess::ReadWrite, selinux_context, lock: None })
    }

    /// Finds the content that an earlier supervisor has made, so that this one deletes it later. If the content was
    /// deleted, makes it anew.
    fn is_current(&mut self, volume: &PassthroughParts, spec: &Volume, pod: &PodView) -> Result<bool, RefreshFailure> {
        if self.content.is_some() {
            return Ok(true);
        }
        let content = set_up(volume, spec, &plan(spec, pod)?)?;
        let is_current = !content.is_new();
        self.content = Some(content);
        Ok(is_current)
    }

    /// A tmpfs of an earlier supervisor may have another size.
    fn complete(&mut self, volume: &PassthroughParts, spec: &Volume, pod: &PodView) -> Result<(), RefreshFailure> {
        self.follow(volume, spec, pod)
    }

    /// Changes the size of a tmpfs to that of the plan.
    fn follow(&mut self, _: &PassthroughParts, spec: &Volume, pod: &PodView) -> Result<(), RefreshFailure> {
        let Some(content) = &self.content else { return Ok(()) };
        Ok(content.resize(&plan(spec, pod)?)?)
    }

    fn limit(&self, spec: &Volume) -> Option<u64> {
        source(spec)?.size_limit
    }

    fn is_of_pod(&self) -> bool {
        true
    }

    fn is_new(&self) -> bool {
        self.content.as_ref().is_some_and(EmptyDirContent::is_new)
    }

    fn take_down(self: Box<Self>, volume: &PassthroughParts, name: &str, end: PodEnd) {
        let setting = &volume.setting;
        // Without a pod (`podfs mount`), no later podfs would find the content again.
        let must_delete =
            end == PodEnd::Stopped && !setting.keep_empty_dirs || matches!(setting.site, Site::Exactly(_));
        let home = setting.site.home(name).filter(|home| end == PodEnd::Stopped && home.exists());
        let deleted = match (self.content, home) {
            (Some(content), _) if must_delete => content.delete(),
            // A podfs that was killed while it made the content may have left a part of it.
            (None, Some(home)) => empty_dir::remove_incomplete(&home),
            _ => return,
        };
        match deleted {
            Ok(undeleted) if undeleted.is_empty() => {}
            Ok(undeleted) => warn!("volume {name:?}: podfs leaves of its content {undeleted}"),
            Err(error) => warn!("volume {name:?}: {error}"),
        }
    }
}

fn source(spec: &Volume) -> Option<EmptyDir> {
    match spec.source {
        VolumeSource::EmptyDir(source) => Some(source),
        _ => None,
    }
}

fn plan(spec: &Volume, pod: &PodView) -> Result<EmptyDirPlan, RefreshFailure> {
    let source = source(spec).ok_or_else(|| RefreshFailure::manifests("the volume is no emptyDir"))?;
    let plan = EmptyDirPlan::new(&source, &pod.facts, pod.allocatable());
    plan.map_err(RefreshFailure::manifests)
}

/// Makes the content of an emptyDir, or finds it.
fn set_up(volume: &PassthroughParts, spec: &Volume, plan: &EmptyDirPlan) -> Result<EmptyDirContent, RefreshFailure> {
    let setting = &volume.setting;
    let home = setting.site.home(spec.name.as_str());
    if let (None, EmptyDirBacking::Memory { bytes }) = (&home, plan.backing) {
        // No later podfs continues with the content of `podfs mount`, so nothing may be left of it, also after a SIGKILL.
        return Ok(EmptyDirContent::of_processes(plan, bytes)?);
    }
    let home = setting.mount_points().make_home(home);
    let content = EmptyDirContent::set_up(&home.map_err(RefreshFailure::temporary)?, plan)?;
    if setting.keep_empty_dirs {
        content.leave_to_agent()?;
    }
    Ok(content)
}
