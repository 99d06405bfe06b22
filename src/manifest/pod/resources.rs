//! The resources of the whole pod: the memory that bounds its emptyDirs, and the huge pages that it requests.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1 as core;

use super::container::{Container, amounts};
use crate::types::InvalidField;
use crate::types::Quantity;

const MEMORY: &str = "memory";
const HUGE_PAGES: &str = "hugepages-";

/// The resources of the whole pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodResources {
    /// The memory limit in bytes, if the kubelet would set one for the pod: each container has a limit, or the pod
    /// itself.
    pub memory_limit: Option<u64>,
    /// Sizes of the huge pages the pod asks for, in bytes.
    pub page_sizes: BTreeSet<u64>,
}

impl PodResources {
    /// Computes the resources from the spec and its parsed containers. Errors are relative to the spec.
    pub(super) fn of(
        spec: &core::PodSpec,
        containers: &[Container],
        init_containers: &[Container],
    ) -> Result<PodResources, InvalidField> {
        let of_pod = spec.resources.as_ref();
        let limits = amounts("resources.limits", of_pod.and_then(|resources| resources.limits.as_ref()))?;
        let requests = amounts("resources.requests", of_pod.and_then(|resources| resources.requests.as_ref()))?;
        let overhead = amounts("overhead", spec.overhead.as_ref())?;
        let own = limits.get(MEMORY).copied().filter(|limit| !limit.is_zero());
        let sum = || memory_of_containers(containers, &sidecars(spec, init_containers));
        let limit = own.or_else(sum).map(|limit| limit.units() + overhead.get(MEMORY).map_or(0, |more| more.units()));
        let requested = containers.iter().chain(init_containers).map(|container| &container.requests);
        Ok(PodResources {
            memory_limit: limit.map(|limit| u64::try_from(limit).unwrap_or(u64::MAX)),
            page_sizes: requested.chain([&requests, &limits]).flat_map(page_sizes).collect(),
        })
    }
}

/// An init container, and whether it is a sidecar, which keeps running beside the regular containers.
type Init<'a> = (&'a Container, bool);

fn sidecars<'a>(spec: &core::PodSpec, init_containers: &'a [Container]) -> Vec<Init<'a>> {
    let restarted = spec.init_containers.iter().flatten().map(|init| init.restart_policy.as_deref() == Some("Always"));
    init_containers.iter().zip(restarted).collect()
}

/// The largest sum of the limits of containers that run at the same time, as the kubelet counts: all regular containers
/// with the sidecars, or an init container with the sidecars started before it. If a container has no limit, the pod
/// has none.
fn memory_of_containers(containers: &[Container], init_containers: &[Init<'_>]) -> Option<Quantity> {
    let memory =
        |container: &Container| container.limits.get(MEMORY).filter(|limit| !limit.is_zero()).map(|m| m.units());
    let mut sidecars = 0;
    let mut most = 0;
    for (container, restarted) in init_containers {
        let own = memory(container)?;
        if *restarted {
            sidecars += own;
        }
        most = most.max(if *restarted { sidecars } else { sidecars + own });
    }
    let mut regular = sidecars;
    for container in containers {
        regular += memory(container)?;
    }
    let bytes = u64::try_from(most.max(regular)).unwrap_or(u64::MAX);
    (bytes > 0).then(|| Quantity::from_units(bytes))
}

fn page_sizes(amounts: &BTreeMap<String, Quantity>) -> impl Iterator<Item = u64> {
    amounts.iter().filter(|(_, amount)| !amount.is_zero()).filter_map(|(resource, _)| {
        let size = Quantity::parse(resource.strip_prefix(HUGE_PAGES)?).ok()?;
        u64::try_from(size.units()).ok()
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::manifest::parse_bare;
    use crate::manifest::pod::PodFacts;

    fn resources(spec: &str) -> PodResources {
        let spec: core::PodSpec = parse_bare(Path::new("spec.yaml"), spec.as_bytes()).expect(spec);
        PodFacts::parse(Default::default(), &spec).expect("a valid spec").resources
    }

    #[test]
    fn ed_02_the_memory_limit_counts_when_every_container_has_one() {
        let limit = |spec: &str| resources(spec).memory_limit.map(|bytes| bytes >> 20);
        let with = |memory| format!("{{name: c, resources: {{limits: {{memory: {memory}}}}}}}");
        let (one, two, none) = (with("1Mi"), with("2Mi"), "{name: c, resources: {requests: {memory: 10Gi}}}");
        let sidecar = "{name: s, restartPolicy: Always, resources: {limits: {memory: 4Mi}}}";
        assert_eq!(limit(&format!("{{containers: [{one}, {two}]}}")), Some(3));
        assert_eq!(limit(&format!("{{containers: [{one}, {none}]}}")), None);
        assert_eq!(limit(&format!("{{containers: [{one}], initContainers: [{none}]}}")), None);
        assert_eq!(limit(&format!("{{containers: [{one}], initContainers: [{two}]}}")), Some(2));
        assert_eq!(limit(&format!("{{containers: [{one}], initContainers: [{sidecar}, {two}]}}")), Some(6));
        assert_eq!(limit(&format!("{{containers: [{two}], initContainers: [{sidecar}]}}")), Some(6));
        let of_pod = "resources: {limits: {memory: 8Mi}}";
        assert_eq!(limit(&format!("{{containers: [{none}], {of_pod}}}")), Some(8));
        assert_eq!(limit(&format!("{{containers: [{none}], {of_pod}, overhead: {{memory: 1Mi}}}}")), Some(9));
        assert_eq!(limit("{containers: []}"), None);
    }

    #[test]
    fn ed_04_huge_pages_of_all_containers_count() {
        let with = |size| format!("[{{name: c, resources: {{limits: {{hugepages-{size}: 1Gi}}}}}}]");
        let (small, large) = (with("2Mi"), with("1Gi"));
        let sizes = |spec: &str| resources(spec).page_sizes.into_iter().collect::<Vec<_>>();
        assert_eq!(sizes(&format!("{{containers: {small}}}")), [2 << 20]);
        assert_eq!(sizes(&format!("{{containers: {large}, initContainers: {small}}}")), [2 << 20, 1 << 30]);
        assert_eq!(sizes("{containers: [], resources: {requests: {hugepages-2Mi: 4Mi}}}"), [2 << 20]);
        assert_eq!(sizes("{containers: [{name: c, resources: {requests: {hugepages-2Mi: 0}}}]}"), [] as [u64; 0]);
    }
}
