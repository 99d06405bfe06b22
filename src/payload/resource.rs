//! The numbers of downwardAPI files: limits and requests of a container, in units of a divisor.

use crate::manifest::pod::PodFacts;
use crate::types::{Allocatable, Quantity};
use crate::volume::{ContainerResource, ResourceBound};

/// The content of a file that shows `field`: a plain number, rounded up to whole divisors.
///
/// # Errors
/// [`ContainerNotFound`], with the kubelet's text.
pub(super) fn content(
    field: &ContainerResource,
    facts: &PodFacts,
    allocatable: Allocatable,
) -> Result<String, ContainerNotFound> {
    let container = facts.container(&field.container).ok_or_else(|| ContainerNotFound(field.container.clone()))?;
    let amount = match field.bound {
        ResourceBound::Limit => container.limits.get(&field.resource),
        ResourceBound::Request => container.requests.get(&field.resource),
    };
    let amount = match (amount, field.bound) {
        (Some(amount), _) if !amount.is_zero() => *amount,
        (_, ResourceBound::Limit) => unlimited(&field.resource, allocatable),
        (_, ResourceBound::Request) => Quantity::ZERO,
    };
    // The kubelet takes amount and divisor in thousandths of a core for cpu, and in whole units for everything else.
    // The divisor is not zero, and rounding up keeps it so.
    let quotient = match field.resource.as_str() {
        "cpu" => amount.milli().div_ceil(field.divisor.milli()),
        _ => amount.units().div_ceil(field.divisor.units()),
    };
    Ok(quotient.to_string())
}

/// The amount that a container without a limit can use.
fn unlimited(resource: &str, allocatable: Allocatable) -> Quantity {
    match resource {
        "cpu" => Quantity::from_milli(allocatable.cpu_milli),
        "memory" => Quantity::from_units(allocatable.memory_bytes),
        "ephemeral-storage" => Quantity::from_units(allocatable.ephemeral_storage_bytes),
        // A container without a limit may use no huge pages.
        _ => Quantity::ZERO,
    }
}

/// A downwardAPI file names a container that the pod does not have. Ephemeral containers do not count.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("container {0} not found")]
pub struct ContainerNotFound(String);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::pod::Container;

    const NODE: Allocatable =
        Allocatable { cpu_milli: 3_900, memory_bytes: 8 << 30, ephemeral_storage_bytes: 100_000_000_000 };

    fn container(name: &str, limits: &[(&str, &str)], requests: &[(&str, &str)]) -> Container {
        let amounts = |amounts: &[(&str, &str)]| {
            let amount = |(name, text): &(&str, &str)| (name.to_string(), Quantity::parse(text).expect(text));
            amounts.iter().map(amount).collect()
        };
        Container { name: name.to_owned(), limits: amounts(limits), requests: amounts(requests) }
    }

    fn pod(container: Container) -> PodFacts {
        PodFacts { containers: vec![container], ..PodFacts::placeholder() }
    }

    fn shown(facts: &PodFacts, container: &str, field: &str, divisor: &str) -> Result<String, String> {
        let (bound, resource) = field.split_once('.').expect("bound.resource");
        let field = ContainerResource {
            container: container.to_owned(),
            bound: if bound == "limits" { ResourceBound::Limit } else { ResourceBound::Request },
            resource: resource.to_owned(),
            divisor: Quantity::parse(divisor).expect(divisor),
        };
        content(&field, facts, NODE).map_err(|error| error.to_string())
    }

    #[test]
    fn da_10_quotients_are_rounded_up() {
        let rows = [
            ("cpu", "250m", "1", "1"),
            ("cpu", "1250m", "1", "2"),
            ("cpu", "1", "1m", "1000"),
            ("cpu", "1200m", "100m", "12"),
            ("memory", "100Mi", "1", "104857600"),
            ("memory", "100Mi", "1Mi", "100"),
            ("memory", "33554433", "1Mi", "33"),
            ("memory", "128M", "1Mi", "123"),
            ("memory", "4Ei", "1Ei", "4"),
            ("ephemeral-storage", "1G", "1M", "1000"),
        ];
        for (resource, amount, divisor, expected) in rows {
            let pod = pod(container("app", &[(resource, amount)], &[(resource, amount)]));
            for bound in ["limits", "requests"] {
                let field = format!("{bound}.{resource}");
                assert_eq!(shown(&pod, "app", &field, divisor).as_deref(), Ok(expected), "{field} {amount}/{divisor}");
            }
        }
    }

    #[test]
    fn da_10_amounts_above_2_to_the_53_are_exact() {
        let pod = pod(container("app", &[("memory", "9007199254740993")], &[]));
        assert_eq!(shown(&pod, "app", "limits.memory", "1").as_deref(), Ok("9007199254740993"));
    }

    #[test]
    fn da_09_without_a_limit_the_node_decides() {
        for unset in [container("app", &[], &[]), container("app", &[("cpu", "0"), ("memory", "0")], &[])] {
            let pod = pod(unset);
            assert_eq!(shown(&pod, "app", "limits.cpu", "1").as_deref(), Ok("4"));
            assert_eq!(shown(&pod, "app", "limits.memory", "1Gi").as_deref(), Ok("8"));
            assert_eq!(shown(&pod, "app", "limits.ephemeral-storage", "1G").as_deref(), Ok("100"));
            assert_eq!(shown(&pod, "app", "limits.hugepages-2Mi", "1").as_deref(), Ok("0"));
            assert_eq!(shown(&pod, "app", "requests.cpu", "1m").as_deref(), Ok("0"));
        }
    }

    #[test]
    fn da_08_huge_pages() {
        let pod = pod(container("app", &[("hugepages-2Mi", "8Mi")], &[("hugepages-2Mi", "8Mi")]));
        assert_eq!(shown(&pod, "app", "limits.hugepages-2Mi", "1Mi").as_deref(), Ok("8"));
        assert_eq!(shown(&pod, "app", "requests.hugepages-2Mi", "1").as_deref(), Ok("8388608"));
    }

    #[test]
    fn da_11_init_containers_count_unknown_ones_are_named() {
        let mut pod = pod(container("app", &[], &[]));
        pod.init_containers = vec![container("init", &[("cpu", "2")], &[])];
        assert_eq!(shown(&pod, "init", "limits.cpu", "1").as_deref(), Ok("2"));
        assert_eq!(shown(&pod, "other", "limits.cpu", "1"), Err("container other not found".into()));
    }
}
