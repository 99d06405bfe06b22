//! The registry of volume kinds: how each kind is mounted.

use podfs_fuse::mount::point::MountPoint;

use super::device::DeviceVolume;
use super::mount_plan::MountPlan;
use super::mounter::Mounter;
use super::passthrough::claim::ClaimSource;
use super::passthrough::csi::CsiSource;
use super::passthrough::empty_dir::EmptyDirSource;
use super::passthrough::flex::FlexSource;
use super::passthrough::host_path::HostPathSource;
use super::passthrough::nfs::NfsSource;
use super::passthrough::{PassthroughParts, PassthroughSource, PassthroughVolume};
use super::projected::ProjectedVolume;
use super::{RefreshFailure, VolumeContext};
use crate::manifest::PodView;
use crate::volume::{Volume, VolumeSource};

/// The mounter of a volume that is not mounted yet. This is the registry of kinds: each kind has a line here. `point`
/// is the mount point, if podfs has made that already, as it has for the projections of a pod that starts.
pub(super) fn mounter(spec: &Volume, point: Option<MountPoint>, setting: VolumeContext) -> Box<dyn Mounter> {
    match &spec.source {
        VolumeSource::Projection(source) => Box::new(ProjectedVolume::new(source.clone(), spec, point, setting)),
        VolumeSource::Claim(claim) if claim.usage.device => Box::new(DeviceVolume::new(claim.clone(), setting)),
        VolumeSource::HostPath(source) => passthrough(HostPathSource::new(source.clone()), setting),
        VolumeSource::EmptyDir(_) => passthrough(EmptyDirSource::default(), setting),
        VolumeSource::Claim(claim) => passthrough(ClaimSource::new(claim.clone()), setting),
        VolumeSource::Nfs(source, options) => {
            passthrough(NfsSource { source: source.clone(), options: options.clone() }, setting)
        }
        VolumeSource::Flex(source) => passthrough(FlexSource(source.clone()), setting),
        VolumeSource::Csi(source) => passthrough(CsiSource::new(source.clone()), setting),
        VolumeSource::Unsupported(_) => passthrough(UnsupportedSource, setting),
    }
}

fn passthrough(source: impl PassthroughSource + 'static, setting: VolumeContext) -> Box<dyn Mounter> {
    Box::new(PassthroughVolume::new(Box::new(source), setting))
}

/// A kind that podfs does not serve.
struct UnsupportedSource;

impl PassthroughSource for UnsupportedSource {
    fn find(&mut self, _: &mut PassthroughParts, spec: &Volume, _: &PodView) -> Result<MountPlan, RefreshFailure> {
        Err(RefreshFailure::manifests(spec.unsupported_reason().unwrap_or_default()))
    }
}
