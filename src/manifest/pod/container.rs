//! The containers of a pod, with the resources that they may use.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource;

use crate::types::InvalidField;
use crate::types::Quantity;

/// A container and what it may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// The most it may use, by resource.
    pub limits: BTreeMap<String, Quantity>,
    /// Its requests, by resource.
    pub requests: BTreeMap<String, Quantity>,
}

/// Parses the containers of a pod, of the kind in this field of its spec.
pub(super) fn containers<'a>(
    field: &str,
    containers: impl Iterator<Item = (&'a str, &'a Option<ResourceRequirements>)>,
) -> Result<Vec<Container>, InvalidField> {
    let parse = |(index, (name, resources)): (usize, (&str, &Option<ResourceRequirements>))| {
        container(name, resources.as_ref()).map_err(|error| error.under(format!("{field}[{index}].resources")))
    };
    containers.enumerate().map(parse).collect()
}

fn container(name: &str, resources: Option<&ResourceRequirements>) -> Result<Container, InvalidField> {
    let limits = amounts("limits", resources.and_then(|resources| resources.limits.as_ref()))?;
    let mut requests = amounts("requests", resources.and_then(|resources| resources.requests.as_ref()))?;
    // The API server's default, which podfs applies itself because a manifest file need not have passed through an API
    // server: the request of a container is its limit.
    for (resource, limit) in &limits {
        requests.entry(resource.clone()).or_insert(*limit);
    }
    Ok(Container { name: name.to_owned(), limits, requests })
}

pub(super) fn amounts(
    field: &str,
    amounts: Option<&BTreeMap<String, resource::Quantity>>,
) -> Result<BTreeMap<String, Quantity>, InvalidField> {
    let parse = |(name, text): (&String, &resource::Quantity)| match Quantity::parse(&text.0) {
        Ok(amount) => Ok((name.clone(), amount)),
        Err(error) => Err(InvalidField::new(format!("{field}.{name}"), error)),
    };
    amounts.into_iter().flatten().map(parse).collect()
}
