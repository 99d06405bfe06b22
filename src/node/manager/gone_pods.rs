//! Pods that no source describes: podfs removes what is left of them once it knows for certain that they are gone.
//!
//! A source has listed its pods, and a pod is not among them. This does not show that the pod is gone:
//!
//! 1. The source may have the pod, but this podfs cannot use it: a manifest file that cannot be read, or a pod of the API server
//!    that is not valid for this podfs. So nothing is removed while a source has a problem.
//! 2. The kubelet may have the pod, although it has not published its volumes yet: after a reboot, or after podfs could not read
//!    its records. So nothing is removed while the kubelet has a directory for the pod.
//! 3. The pod may have a source that this podfs does not know, if only another version of podfs can use its checkpoint. So nothing of
//!    it is removed before an agent releases it.
//!
//! A source that had a pod, and then reports its deletion, leaves no doubt.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::Manager;
use crate::manifest::pod::PodUid;
use crate::node::orphans::PodPresence;

/// A pod of an earlier daemon whose checkpoint this daemon cannot use.
#[derive(Clone, Copy, Debug, Default)]
pub struct LostPod {
    /// Whether an agent has released it.
    is_released: bool,
    /// Whether only another version of podfs can use its checkpoint. Its source may be one that this version does not know.
    pub(super) is_of_other_version: bool,
}

impl LostPod {
    /// A pod whose checkpoint only another version of podfs can use.
    pub fn of_other_version() -> LostPod {
        LostPod { is_of_other_version: true, ..LostPod::default() }
    }
}

impl Manager {
    /// Releases the pods of an earlier daemon that are gone, where podfs does that without an agent. Returns them.
    pub(super) fn release_gone_pods(&mut self) -> Vec<PodUid> {
        let (has_trouble, kubelet_pods) = (self.has_trouble(), self.kubelet_pods.as_deref());
        self.pods.release_unlisted(|uid| !has_trouble && !has_directory(kubelet_pods, uid))
    }

    /// Removes pods of an earlier daemon that this daemon cannot reconstruct and that are gone, or that an agent has released (RC-04).
    /// Forgets those that a source describes.
    pub(super) fn retire_lost_pods(&mut self) {
        let has_trouble = self.has_trouble();
        for (uid, LostPod { is_released, is_of_other_version }) in self.lost.clone() {
            let may_exist = || is_of_other_version || has_trouble || has_directory(self.kubelet_pods.as_deref(), &uid);
            if self.pods.get(&uid).is_some() {
                self.lost.remove(&uid);
            } else if is_released || !may_exist() {
                self.retire_lost_pod(&uid);
            }
        }
    }

    /// Notes that an agent has released a pod that this daemon cannot reconstruct. Returns whether there is such a pod.
    pub(super) fn release_lost_pod(&mut self, uid: &PodUid) -> bool {
        self.lost.get_mut(uid).is_some_and(|lost| {
            lost.is_released = true;
            true
        })
    }

    /// The work of each two seconds: looks again at pods that may be gone, and at directories of pods.
    pub(super) fn keep_house(&mut self) {
        self.release_gone_pods().iter().for_each(|uid| self.describe(uid));
        if self.pods.sources_ready() {
            let mounted = self.actual.volumes().map(|(id, _)| id.pod.clone());
            let known = self.pods.iter().map(|(uid, _)| uid.clone()).chain(mounted).chain(self.lost.keys().cloned());
            let (known, is_certain, kubelet_pods) = (known.collect(), !self.has_trouble(), self.kubelet_pods.clone());
            self.housekeeping.start_pass(known, move |uid| {
                match is_certain && !has_directory(kubelet_pods.as_deref(), uid) {
                    true => PodPresence::Gone,
                    false => PodPresence::Uncertain,
                }
            });
        }
    }

    fn has_trouble(&self) -> bool {
        self.trouble.values().any(|sentences| !sentences.is_empty())
    }
}

/// Whether the kubelet has a directory of the pod, or podfs cannot know that.
fn has_directory(kubelet_pods: Option<&Path>, uid: &PodUid) -> bool {
    let is_missing =
        |directory: PathBuf| matches!(directory.symlink_metadata(), Err(error) if error.kind() == ErrorKind::NotFound);
    kubelet_pods.is_some_and(|pods| !is_missing(pods.join(uid.as_str())))
}
