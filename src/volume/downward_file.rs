//! Files that show facts about the pod, in downwardAPI volumes and in such sources of projected volumes.

use k8s_openapi::api::core::v1::{DownwardAPIVolumeFile, ObjectFieldSelector, ResourceFieldSelector};

use crate::types::{self, InvalidField, PayloadPath, PodField, Quantity};

/// The files of a downwardAPI source. Errors are relative to the source.
pub(super) fn files(items: Option<&[DownwardAPIVolumeFile]>) -> Result<Vec<DownwardFile>, InvalidField> {
    let items = items.unwrap_or_default().iter().enumerate();
    items
        .map(|(index, item)| DownwardFile::parse(item).map_err(|error| error.under(format!("items[{index}]"))))
        .collect()
}

/// A file that shows one fact about the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DownwardFile {
    /// The file in the volume.
    pub path: PayloadPath,
    /// Permission bits; without them, those of the volume.
    pub mode: Option<u16>,
    /// Owner; without it, that of the volume (KEP-5936).
    pub user: Option<u32>,
    /// The value that the file shows.
    pub value: DownwardValue,
}

/// A fact about the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DownwardValue {
    /// A field of its metadata.
    Field(PodField),
    /// A resource of a container.
    Resource(ContainerResource),
}

/// A resource of one container, in units of the divisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerResource {
    /// The container's name.
    pub container: String,
    /// Limit or request.
    pub bound: ResourceBound,
    /// `cpu`, `memory`, `ephemeral-storage` or `hugepages-<size>`.
    pub resource: String,
    /// The unit of the number in the file; never zero.
    pub divisor: Quantity,
}

/// The limit or the request of a container for a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResourceBound {
    /// Its limit.
    Limit,
    /// Its request.
    Request,
}

impl DownwardFile {
    fn parse(file: &DownwardAPIVolumeFile) -> Result<DownwardFile, InvalidField> {
        Ok(DownwardFile {
            path: types::payload_path("path", &file.path)?,
            mode: file.mode.map(|mode| types::mode("mode", mode)).transpose()?,
            user: file.user.map(|user| types::numeric_id("user", user)).transpose()?,
            value: match (&file.field_ref, &file.resource_field_ref) {
                (Some(field), None) => pod_field(field).map(DownwardValue::Field).map_err(|e| e.under("fieldRef"))?,
                (None, Some(field)) => container_resource(field)
                    .map(DownwardValue::Resource)
                    .map_err(|error| error.under("resourceFieldRef"))?,
                (Some(_), Some(_)) => return Err(InvalidField::new("", TWO_REFS)),
                (None, None) => return Err(InvalidField::new("", NO_REF)),
            },
        })
    }
}

const TWO_REFS: &str = "fieldRef and resourceFieldRef can not be specified simultaneously";
const NO_REF: &str = "one of fieldRef and resourceFieldRef is required";

fn pod_field(selector: &ObjectFieldSelector) -> Result<PodField, InvalidField> {
    match selector.api_version.as_deref() {
        None | Some("" | "v1") => {}
        Some(version) => {
            return Err(InvalidField::new("apiVersion", format!("unsupported pod version: {version}")));
        }
    }
    let path = types::required("fieldPath", Some(&selector.field_path))?;
    PodField::parse(path).map_err(|error| InvalidField::new("fieldPath", error))
}

fn container_resource(selector: &ResourceFieldSelector) -> Result<ContainerResource, InvalidField> {
    let container = types::required("containerName", selector.container_name.as_deref())?;
    let resource = types::required("resource", Some(&selector.resource))?;
    let (bound, resource) = bounded(resource).ok_or_else(|| {
        InvalidField::new("resource", format!("unsupported container resource : {resource}; {RESOURCES}"))
    })?;
    Ok(ContainerResource {
        container: container.to_owned(),
        bound,
        resource: resource.to_owned(),
        divisor: divisor(resource, selector.divisor.as_ref().map_or("", |divisor| &divisor.0))?,
    })
}

const RESOURCES: &str = "a volume can show limits and requests of cpu, memory, ephemeral-storage and hugepages-<size>";

/// Splits `limits.cpu` into bound and resource; none for a resource that no file can show.
fn bounded(resource: &str) -> Option<(ResourceBound, &str)> {
    let (bound, name) = match resource.split_once('.')? {
        ("limits", name) => (ResourceBound::Limit, name),
        ("requests", name) => (ResourceBound::Request, name),
        _ => return None,
    };
    let known = matches!(name, "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-");
    known.then_some((bound, name))
}

/// The unit of the number in the file. Zero and an empty text mean one, as in the API.
fn divisor(resource: &str, text: &str) -> Result<Quantity, InvalidField> {
    let allowed: &[&str] = match resource {
        "cpu" => &["1", "1m"],
        _ => &["1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"],
    };
    if text.is_empty() {
        return Ok(Quantity::ONE);
    }
    match Quantity::parse(text) {
        Err(error) => Err(InvalidField::new("divisor", error)),
        Ok(divisor) if divisor.is_zero() => Ok(Quantity::ONE),
        Ok(divisor) if allowed.contains(&text) => Ok(divisor),
        Ok(_) => {
            let allowed = allowed.join(", ");
            Err(InvalidField::new("divisor", format!("{text} is no divisor for {resource}; use one of {allowed}")))
        }
    }
}
