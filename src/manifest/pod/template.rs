//! Pod templates: the pod that the controller of a workload such as a Deployment would make, as far as the manifest describes it.
//!
//! The pod has the workload's name and namespace. Of a StatefulSet, it is the first pod (`NAME-0`), with its claims. It lacks
//! what controllers add to a pod: the random end of a name, and labels such as `pod-template-hash`.

use serde_json::{Map, Value, json};

use crate::manifest::{Document, ManifestError};

/// The workloads, each with the path to its template.
const WORKLOADS: [(&str, &str, &str); 7] = [
    ("apps/v1", "Deployment", "/spec/template"),
    ("apps/v1", "StatefulSet", "/spec/template"),
    ("apps/v1", "DaemonSet", "/spec/template"),
    ("apps/v1", "ReplicaSet", "/spec/template"),
    ("v1", "ReplicationController", "/spec/template"),
    ("batch/v1", "Job", "/spec/template"),
    ("batch/v1", "CronJob", "/spec/jobTemplate/spec/template"),
];

/// Whether a document is a Pod, or a workload with a pod template.
pub fn is_pod_or_template(document: &Document) -> bool {
    (document.api_version.as_str(), document.kind.as_str()) == ("v1", "Pod") || template_path(document).is_some()
}

/// The pod of a workload's template. Other documents stay as they are.
///
/// # Errors
/// A workload without a name or a template.
pub fn from_template(document: Document) -> Result<Document, ManifestError> {
    let Some(path) = template_path(&document) else { return Ok(document) };
    let (origin, kind) = (document.origin.clone(), document.kind.clone());
    let workload = document.into_value();
    let missing = |field: &str| ManifestError::invalid(&origin, field, "is required");
    let metadata = |field: &str| workload["metadata"][field].as_str().filter(|text| !text.is_empty());
    let name = metadata("name").ok_or_else(|| missing("metadata.name"))?;
    let template = workload.pointer(path).and_then(Value::as_object);
    let template = template.ok_or_else(|| missing(&path[1..].replace('/', ".")))?;
    let mut pod = template.clone();
    pod.insert("apiVersion".to_owned(), "v1".into());
    pod.insert("kind".to_owned(), "Pod".into());
    let pod_name = if kind == "StatefulSet" { format!("{name}-0") } else { name.to_owned() };
    let of_pod = mapping(&mut pod, "metadata");
    of_pod.insert("name".to_owned(), pod_name.as_str().into());
    match metadata("namespace") {
        Some(namespace) => drop(of_pod.insert("namespace".to_owned(), namespace.into())),
        None => drop(of_pod.remove("namespace")),
    }
    add_claims(&mut pod, &workload["spec"]["volumeClaimTemplates"], &pod_name);
    Document::from_value(origin.template_of(&format!("{kind} {name}")), Value::Object(pod))
}

fn template_path(document: &Document) -> Option<&'static str> {
    let of = (document.api_version.as_str(), document.kind.as_str());
    WORKLOADS.iter().find(|(version, kind, _)| (*version, *kind) == of).map(|(_, _, path)| *path)
}

/// Adds the volumes that a StatefulSet makes of its claim templates; they take the place of volumes with the same name.
fn add_claims(pod: &mut Map<String, Value>, templates: &Value, pod_name: &str) {
    let names = templates.as_array().into_iter().flatten().filter_map(|claim| claim["metadata"]["name"].as_str());
    for name in names {
        let volume = json!({"name": name, "persistentVolumeClaim": {"claimName": format!("{name}-{pod_name}")}});
        let volumes = mapping(pod, "spec").entry("volumes").or_insert_with(|| Value::Array(Vec::new()));
        if let Value::Array(volumes) = volumes {
            volumes.retain(|other| other["name"] != name);
            volumes.push(volume);
        }
    }
}

/// The mapping in a field; an empty one if there is none.
fn mapping<'a>(object: &'a mut Map<String, Value>, field: &str) -> &'a mut Map<String, Value> {
    let value = object.entry(field).or_insert_with(|| Value::Object(Map::new()));
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut().expect("it is a mapping by now")
}
