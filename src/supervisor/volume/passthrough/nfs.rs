//! Exports of NFS servers. The kernel's NFS client mounts them, or podfs's own client serves them.

use std::path::PathBuf;

use super::{
    ContainerAccess, MountPlan, PassthroughParts, PassthroughSource, PlannedContent, RefreshFailure, VolumeContext,
    access,
};
use crate::host::serve::SourceForm;
use crate::manifest::PodView;
use crate::supervisor::volume::nfs::{self, ReachedExport};
use crate::volume::nfs_options::Backend;
use crate::volume::{Nfs, NfsOptions, Volume};

/// An nfs volume of the pod.
pub(in crate::supervisor::volume) struct NfsSource {
    pub(in crate::supervisor::volume) source: Nfs,
    pub(in crate::supervisor::volume) options: Box<NfsOptions>,
}

impl PassthroughSource for NfsSource {
    fn find(
        &mut self,
        volume: &mut PassthroughParts,
        spec: &Volume,
        pod: &PodView,
    ) -> Result<MountPlan, RefreshFailure> {
        let Self { source, options } = self;
        let path = volume.place(Nfs::DIRECTORY, spec.name.as_str());
        plan(&volume.setting, spec, path, source, options, access(source.read_only || options.read_only), pod)
    }
}

/// Plans the mount of an export at `path`.
pub(super) fn plan(
    setting: &VolumeContext,
    spec: &Volume,
    path: PathBuf,
    source: &Nfs,
    options: &NfsOptions,
    access: ContainerAccess,
    pod: &PodView,
) -> Result<MountPlan, RefreshFailure> {
    let selinux_context = options.selinux_context.clone();
    let content = match nfs::backend(spec, source, options)? {
        Backend::User => {
            let export = ReachedExport::find(source, options, access, setting, pod)?;
            PlannedContent::Export(Box::new(export))
        }
        Backend::Kernel => {
            let remote = Some(nfs::callers(Backend::Kernel, options, pod));
            let source = nfs::mount_by_kernel(source, options, access)?;
            PlannedContent::Source { source, form: SourceForm::Fuse, limit: None, remote }
        }
    };
    Ok(MountPlan { path, content, access, selinux_context, lock: None })
}
