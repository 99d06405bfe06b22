//! The pods of the node: their state in the sources, and how long their volumes are needed. Plain data.
//!
//! | state in the source | the pod's volumes |
//! |---|---|
//! | it should run | are wanted |
//! | it is being deleted, has ended, or does not exist any more | stay until an agent has released the pod: its containers may still run (VM-11) |
//! | it is being deleted or has ended when the daemon first sees it | are never mounted |
//!
//! The kubelet mounts the volumes of a pod that is being deleted if it sees the pod first just after its own start, because
//! containers may still run (VM-12). podfs need not do so: the pod's checkpoint shows whether an earlier daemon served it.

use std::collections::{BTreeMap, BTreeSet};

use crate::manifest::pod::PodUid;
use crate::node::feed::PodSource;
use crate::node::handle::CommandError;
use crate::node::pod::{NodePod, PodStage};

/// The pods of the node.
#[derive(Debug)]
pub struct Pods {
    pods: BTreeMap<PodUid, KnownPod>,
    /// The sources of this daemon.
    sources: BTreeSet<PodSource>,
    /// Those that have not listed their pods yet.
    awaited: BTreeSet<PodSource>,
    /// Whether podfs releases a pod that no source has any more, without waiting for an agent.
    release_when_gone: bool,
}

/// A pod.
#[derive(Clone, Debug)]
pub struct KnownPod {
    /// The pod, as its source described it last.
    pub pod: NodePod,
    /// Whether a source still describes it.
    pub is_described: bool,
    /// Whether its containers have stopped for good.
    pub released: bool,
    /// Whether its volumes were ever wanted.
    was_wanted: bool,
}

impl KnownPod {
    /// Whether it should run.
    pub fn is_wanted(&self) -> bool {
        self.is_described && self.pod.stage == PodStage::Desired
    }

    /// Whether podfs has to serve its volumes.
    pub fn needs_volumes(&self) -> bool {
        self.is_wanted() || (self.was_wanted && !self.released)
    }
}

impl Pods {
    /// No pods, from these sources.
    pub fn new(sources: impl IntoIterator<Item = PodSource>, release_when_gone: bool) -> Pods {
        let sources: BTreeSet<PodSource> = sources.into_iter().collect();
        Pods { pods: BTreeMap::new(), awaited: sources.clone(), sources, release_when_gone }
    }

    /// Whether every source has listed its pods once.
    pub fn sources_ready(&self) -> bool {
        self.awaited.is_empty()
    }

    /// All pods.
    pub fn iter(&self) -> impl Iterator<Item = (&PodUid, &KnownPod)> {
        self.pods.iter()
    }

    /// The pod.
    pub fn get(&self, uid: &PodUid) -> Option<&KnownPod> {
        self.pods.get(uid)
    }

    /// Adds a pod that an earlier daemon served, which no source has described yet.
    pub fn recover(&mut self, pod: NodePod, released: bool) {
        let uid = pod.pod.identity.uid.clone();
        // A daemon without sources gets no list that could say that the pod is gone.
        let released = released || (self.release_when_gone && self.awaited.is_empty());
        self.pods.insert(uid, KnownPod { pod, is_described: false, released, was_wanted: true });
    }

    /// Takes the first list of a source. Returns the pods that have changed.
    pub fn take_list(&mut self, source: PodSource, pods: Vec<NodePod>) -> Vec<PodUid> {
        let mut changed: Vec<_> = pods.into_iter().map(|pod| self.put(pod)).collect();
        self.awaited.remove(&source);
        // An earlier daemon served these pods, and their source no longer has them, or is no source of this daemon.
        let is_over = |origin| PodSource::of(origin) == source || self.awaited.is_empty();
        let gone = self
            .pods
            .iter()
            .filter(|(uid, known)| !known.is_described && is_over(&known.pod.origin) && !changed.contains(uid));
        changed.extend(gone.map(|(uid, _)| uid.clone()).collect::<Vec<_>>());
        changed
    }

    /// Takes a new or changed pod. Returns its uid.
    pub fn put(&mut self, pod: NodePod) -> PodUid {
        let uid = pod.pod.identity.uid.clone();
        let (stage, before) = (pod.stage, self.pods.remove(&uid));
        let was_wanted = match (stage, &before) {
            (PodStage::Desired, _) => true,
            (_, Some(before)) => before.was_wanted,
            (PodStage::Terminating | PodStage::Terminal, None) => false,
        };
        // A released pod may run again: a static pod whose file came back.
        let released = before.is_some_and(|before| before.released) && stage != PodStage::Desired;
        let released = released || (self.release_when_gone && stage == PodStage::Terminal);
        self.pods.insert(uid.clone(), KnownPod { pod, is_described: true, released, was_wanted });
        uid
    }

    /// Notes that no source has the pod any more.
    pub fn note_undescribed(&mut self, uid: &PodUid) {
        if let Some(known) = self.pods.get_mut(uid) {
            known.is_described = false;
            known.released |= self.release_when_gone;
        }
    }

    /// Releases the pods that no source has any more, where podfs does that without an agent: those that an earlier daemon served
    /// and no source has listed. Returns them. `is_gone` says whether podfs knows for certain that the node has no such pod.
    pub fn release_unlisted(&mut self, is_gone: impl Fn(&PodUid) -> bool) -> Vec<PodUid> {
        if !self.release_when_gone || !self.sources_ready() {
            return Vec::new();
        }
        let unlisted =
            self.pods.iter_mut().filter(|(uid, known)| !known.is_described && !known.released && is_gone(uid));
        let release = |(uid, known): (&PodUid, &mut KnownPod)| {
            known.released = true;
            uid.clone()
        };
        unlisted.map(release).collect()
    }

    /// Whether an earlier daemon served the pod, and its source has not listed its pods yet.
    pub fn is_unlisted(&self, known: &KnownPod) -> bool {
        !known.is_described && self.awaited.contains(&PodSource::of(&known.pod.origin))
    }

    /// Whether an earlier daemon served the pod, and no source has said whether the pod still exists: its source has not listed pods
    /// yet, or this daemon does not have that source. The API server also lists the pods of other sources, except static pods.
    pub fn is_unknown(&self, known: &KnownPod) -> bool {
        let source = PodSource::of(&known.pod.origin);
        let says = |source: PodSource| self.sources.contains(&source) && !self.awaited.contains(&source);
        !known.is_described && !says(source) && (source == PodSource::Files || !says(PodSource::Api))
    }

    /// Notes that the pod's containers have stopped for good.
    ///
    /// # Errors
    /// When the node does not have it, when it should run, or when that is not known yet.
    pub fn release(&mut self, uid: &PodUid) -> Result<(), CommandError> {
        let known = self.pods.get(uid).ok_or_else(|| CommandError::Unknown(uid.to_string()))?;
        if known.is_wanted() {
            return Err(CommandError::Wanted(known.pod.pod.identity.to_string()));
        }
        if !known.released && self.is_unlisted(known) {
            return Err(CommandError::Unlisted(known.pod.pod.identity.to_string()));
        }
        if let Some(known) = self.pods.get_mut(uid) {
            known.released = true;
        }
        Ok(())
    }

    /// Forgets a pod that no source has, and of which the node has nothing any more.
    pub fn forget(&mut self, uid: &PodUid) {
        self.pods.remove(uid);
    }
}

#[cfg(test)]
mod tests;
