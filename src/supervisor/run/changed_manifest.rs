//! A manifest file that was changed while the pod runs. The volumes of a running pod do not change with it: containers use them.

use std::collections::BTreeSet;

use tracing::{debug, warn};

use super::Supervisor;
use super::publishing::fits;
use crate::manifest::pod::{Pod, PodIdentity};
use crate::source::Source;
use crate::volume::Volume;

impl Supervisor {
    /// Warns if the manifest has other volumes than the pod. The pod's volumes change when an agent publishes or
    /// unpublishes volumes, and not with the manifest. If an agent pushes objects, there is no warning: the agent
    /// writes the manifest for the next supervisor.
    pub(super) fn warn_of_other_volumes(&self, pod: &Pod) {
        let is_known = |volume: &Volume| self.volumes.values().any(|known| known == volume);
        let is_same = pod.volumes.len() == self.volumes.len() && pod.volumes.iter().all(is_known);
        match &self.source {
            _ if is_same => {}
            Source::Push(_) => debug!("the manifest has other volumes than were published"),
            Source::Files(_) | Source::Api(_) => warn!(
                "the volumes of a pod do not change with its manifest while it runs; the new ones take effect when it is \
                 restarted, or when an agent publishes them"
            ),
        }
    }

    /// Why a podfs that started now would not serve this pod with these volumes, in one sentence: its manifest file was changed.
    /// `podfs node` gives its supervisors the volumes themselves, so their file does not count.
    pub(super) fn changed_manifest(&self) -> Option<String> {
        let manifest = self.source.manifest().filter(|_| !self.setting.keep_empty_dirs)?;
        if manifest.identity != self.identity {
            let described = |pod: &PodIdentity| format!("{pod} (uid {})", pod.uid);
            let (changed, served) = (described(&manifest.identity), described(&self.identity));
            return Some(format!("the manifest file now describes pod {changed}, and podfs serves {served}"));
        }
        let changed = changed_volumes(self.volumes.values(), &manifest.volumes);
        (!changed.is_empty()).then(|| {
            let names: Vec<_> = changed.iter().map(|name| format!("{name:?}")).collect();
            format!(
                "the manifest file was changed: podfs does not serve its volumes as they are there now ({})",
                names.join(", ")
            )
        })
    }
}

/// The names of the volumes that are only in one of the lists, or whose mount would not fit the definition in the other one.
fn changed_volumes<'a>(served: impl Iterator<Item = &'a Volume> + Clone, manifest: &'a [Volume]) -> BTreeSet<&'a str> {
    let is_served = |volume: &&Volume| served.clone().any(|known| known.name == volume.name && fits(known, volume));
    let is_in_manifest = |known: &&Volume| manifest.iter().any(|volume| volume.name == known.name);
    let changed = manifest.iter().filter(|volume| !is_served(volume));
    changed.chain(served.clone().filter(|known| !is_in_manifest(known))).map(|volume| volume.name.as_str()).collect()
}
