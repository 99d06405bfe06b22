//! Volumes that FlexVolume drivers mount.

use super::{MountPlan, PassthroughParts, PassthroughSource, RefreshFailure};
use crate::manifest::PodView;
use crate::supervisor::volume::driver;
use crate::volume::{Flex, Volume};

/// A flexVolume volume of the pod.
pub(in crate::supervisor::volume) struct FlexSource(pub(in crate::supervisor::volume) Box<Flex>);

impl PassthroughSource for FlexSource {
    fn find(
        &mut self,
        volume: &mut PassthroughParts,
        spec: &Volume,
        pod: &PodView,
    ) -> Result<MountPlan, RefreshFailure> {
        let Self(flex) = self;
        let path = volume.place(&flex.directory(), spec.name.as_str());
        driver::mount_flex(&volume.setting, spec, path, flex, None, pod)
    }
}
