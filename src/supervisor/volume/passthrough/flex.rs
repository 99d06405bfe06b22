//! Volumes that FlexVolume drivers mount.

use super::{Common, MountPlan, PassthroughSource, Trouble};
use crate::manifest::PodView;
use crate::supervisor::volume::driver;
use crate::volume::{Flex, Volume};

/// A flexVolume volume of the pod.
pub(in crate::supervisor::volume) struct FlexSource(pub(in crate::supervisor::volume) Box<Flex>);

impl PassthroughSource for FlexSource {
    fn find(&mut self, volume: &mut Common, spec: &Volume, pod: &PodView) -> Result<MountPlan, Trouble> {
        let Self(flex) = self;
        let name = spec.name.as_str();
        let path = volume.place(&flex.directory(), name);
        driver::mount_flex(&volume.setting, spec, path, flex, name, flex.read_only, pod)
    }
}
