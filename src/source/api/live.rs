//! The pod, or the pod template of a workload, as the server has it at this moment, for the comparison with a manifest.

use super::single::origin;
use super::start::StartError;
use crate::kube::address::{Collection, Resource};
use crate::kube::client::ApiClient;
use crate::kube::error::ErrorClass;
use crate::kube::settings::SettingsSource;
use crate::manifest::Document;
use crate::manifest::pod::{Pod, from_template};
use crate::types::PodName;

/// The pod, or the pod of the workload's template, with this `apiVersion`, kind and name; none if the server does not have it.
///
/// # Errors
/// When the settings cannot be used, or the server refuses.
pub async fn live_pod(
    access: SettingsSource,
    api_version: &str,
    kind: &str,
    name: &PodName,
) -> Result<Option<Pod>, StartError> {
    let Some(resource) = Resource::of_pods(api_version, kind) else { return Ok(None) };
    let client = ApiClient::open(access).await?;
    let collection = Collection::only(resource, Some(&name.namespace), &name.name);
    let object = client.get(&collection).await.map_err(|error| StartError::Refused {
        pod: name.clone(),
        is_final: matches!(error.class, ErrorClass::Unauthorized | ErrorClass::Forbidden),
        sentence: error.sentence,
    })?;
    let Some(object) = object else { return Ok(None) };
    let document = Document::of_server(origin(&format!("{kind} {name}")), object)?;
    Ok(Some(Pod::parse(from_template(document)?)?))
}
