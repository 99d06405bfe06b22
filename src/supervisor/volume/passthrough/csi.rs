//! csi volumes of the pod, and volumes of other kinds that podfs has translated to csi volumes.

use std::time::Duration;

use super::{MountPlan, PassthroughParts, PassthroughSource, RefreshFailure};
use crate::manifest::PodView;
use crate::supervisor::volume::driver::{self, Republication};
use crate::volume::{Csi, Volume};

/// A csi volume of the pod.
pub(in crate::supervisor::volume) struct CsiSource {
    csi: Box<Csi>,
    republication: Republication,
}

impl CsiSource {
    pub(in crate::supervisor::volume) fn new(csi: Box<Csi>) -> Self {
        Self { csi, republication: Republication::default() }
    }
}

impl PassthroughSource for CsiSource {
    fn find(
        &mut self,
        volume: &mut PassthroughParts,
        spec: &Volume,
        pod: &PodView,
    ) -> Result<MountPlan, RefreshFailure> {
        let path = volume.place(Csi::DIRECTORY, spec.name.as_str());
        let (plan, republication) = driver::mount_csi(&volume.setting, spec, path, &self.csi, None, pod)?;
        self.republication = republication;
        Ok(plan)
    }

    fn follow(&mut self, volume: &PassthroughParts, spec: &Volume, pod: &PodView) -> Result<(), RefreshFailure> {
        self.republication.publish_again(&volume.setting, spec, &self.csi, None, pod)
    }

    fn republish_in(&self) -> Option<Duration> {
        self.republication.next()
    }
}
