//! Misspelled fields of manifests that people write.
//!
//! Typed objects ignore fields that they do not know, as the API server does, because an API that is newer than podfs has more of
//! them. So podfs reports an unknown field only if it resembles a known one, and only in a text of the user: what comes from an API
//! server or a kubelet was accepted there.
//!
//! It also checks that each mount of a container has a path and names a volume of the pod, as the API server does.
//!
//! It checks the spelling of the fields that decide what a volume shows: metadata, volumes, mounts of containers, the data of ConfigMaps and
//! Secrets, and the specs of claims and PersistentVolumes. It gets the names of known fields from the types of the API
//! (`known_fields`).

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::known_fields::{below, fields_of, names};
use super::{Document, ManifestError};
use crate::types::InvalidField;
use crate::volume::check_annotation_keys;

/// The kinds of documents that podfs reads, each with the group of its `apiVersion`.
const KINDS: [(&str, &str); 16] = [
    ("", "Pod"),
    ("", "ConfigMap"),
    ("", "Secret"),
    ("", "PersistentVolumeClaim"),
    ("", "PersistentVolume"),
    ("", "Node"),
    ("", "ReplicationController"),
    ("apps", "Deployment"),
    ("apps", "StatefulSet"),
    ("apps", "DaemonSet"),
    ("apps", "ReplicaSet"),
    ("batch", "Job"),
    ("batch", "CronJob"),
    ("certificates.k8s.io", "ClusterTrustBundle"),
    ("storage.k8s.io", "CSIDriver"),
    ("storage.k8s.io", "VolumeAttachment"),
];

/// The fields of a pod's spec that decide what its volumes show.
const OF_SPEC: [&str; 6] =
    ["containers", "ephemeralContainers", "initContainers", "securityContext", "serviceAccountName", "volumes"];
/// The fields of a container that name volumes.
const OF_CONTAINER: [&str; 2] = ["volumeDevices", "volumeMounts"];
const CONTAINERS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// Checks the spelling of the kind of a document, and the version of core kinds. podfs ignores documents of kinds that it does not
/// know.
///
/// # Errors
/// A kind that is a known one but for lower-case and upper-case letters, and a core kind with another version than `v1`.
pub fn check_kind(document: &Document) -> Result<(), ManifestError> {
    let group = document.api_version.rsplit_once('/').map_or("", |(group, _)| group);
    let is_meant = |(of, kind): &&(&str, &str)| {
        *of == group && *kind != document.kind && kind.eq_ignore_ascii_case(&document.kind)
    };
    if group.is_empty() && document.api_version != "v1" && KINDS.contains(&("", document.kind.as_str())) {
        let sentence = format!("must be v1 for a {}, not {:?}", document.kind, document.api_version);
        return Err(ManifestError::invalid(&document.origin, "apiVersion", sentence));
    }
    match KINDS.iter().find(is_meant) {
        Some((_, meant)) => {
            let sentence = format!("{:?} is no kind of object; did you mean {meant:?}?", document.kind);
            Err(ManifestError::invalid(&document.origin, "kind", sentence))
        }
        None => Ok(()),
    }
}

/// Checks the spelling of the kind and the fields of a document, if it is a pod or an object that podfs reads.
///
/// # Errors
/// A misspelled kind, and an unknown field that resembles a known one.
pub fn check_spelling(document: &Document) -> Result<(), ManifestError> {
    check_kind(document)?;
    let body = document.body();
    let checked = match (document.api_version.as_str(), document.kind.as_str()) {
        ("v1", "Pod") => check_object::<core::Pod>(body)
            .and_then(|()| check_annotation_keys(annotations(body)))
            .and_then(|()| pod_spec(body)),
        ("v1", "ConfigMap") => check_object::<core::ConfigMap>(body),
        ("v1", "Secret") => check_object::<core::Secret>(body),
        ("v1", "PersistentVolume") => check_object::<core::PersistentVolume>(body)
            .and_then(|()| below::<core::PersistentVolumeSpec>(body.get("spec"), "spec")),
        ("v1", "PersistentVolumeClaim") => check_object::<core::PersistentVolumeClaim>(body)
            .and_then(|()| below::<core::PersistentVolumeClaimSpec>(body.get("spec"), "spec")),
        _ => Ok(()),
    };
    checked.map_err(|error| ManifestError::invalid(&document.origin, &error.field, error.sentence))
}

/// Checks the spelling of the fields of a volume's source. Its parser decides whether an unknown source is a misspelled kind.
///
/// # Errors
/// An unknown field that resembles a known one; the sentence names the volume.
pub fn check_volume_spelling(volume: &Map<String, Value>) -> Result<(), InvalidField> {
    let name = volume.get("name").and_then(Value::as_str).unwrap_or_default();
    let sources = volume.iter().filter(|(_, source)| source.is_object());
    for (kind, source) in sources {
        // The type has no unknown field, but one for each kind.
        let alone = Value::Object(Map::from_iter([(kind.clone(), source.clone())]));
        let known = fields_of::<core::Volume>().contains(&kind.as_str());
        let checked = if known { below::<core::Volume>(Some(&alone), "") } else { Ok(()) };
        checked.map_err(|error| InvalidField { sentence: format!("volume {name:?}: {}", error.sentence), ..error })?;
    }
    Ok(())
}

/// The fields that an object of this type has at its top, and its metadata.
fn check_object<T: DeserializeOwned>(body: &Map<String, Value>) -> Result<(), InvalidField> {
    names(body, fields_of::<T>(), |_| true)?;
    below::<ObjectMeta>(body.get("metadata"), "metadata")
}

/// The keys of the annotations.
fn annotations(body: &Map<String, Value>) -> impl Iterator<Item = &String> {
    let annotations = body.get("metadata").and_then(|metadata| metadata.get("annotations")).and_then(Value::as_object);
    annotations.into_iter().flat_map(Map::keys)
}

fn pod_spec(body: &Map<String, Value>) -> Result<(), InvalidField> {
    let Some(spec) = body.get("spec").and_then(Value::as_object) else { return Ok(()) };
    let list = |of: &'static str| spec.get(of).and_then(Value::as_array).into_iter().flatten().enumerate();
    let check = || -> Result<(), InvalidField> {
        names(spec, fields_of::<core::PodSpec>(), |meant| OF_SPEC.contains(&meant))?;
        let volumes: Vec<_> = list("volumes").filter_map(|(_, volume)| volume["name"].as_str()).collect();
        for (index, volume) in list("volumes") {
            let check = |volume| text(volume, "name").and_then(|_| check_volume_spelling(volume));
            let checked = volume.as_object().map_or(Ok(()), check);
            checked.map_err(|error| error.under(format!("volumes[{index}]")))?;
        }
        for (field, (index, container)) in
            CONTAINERS.into_iter().flat_map(|field| list(field).map(move |one| (field, one)))
        {
            let checked = container.as_object().map_or(Ok(()), |container| check_container(container, &volumes));
            checked.map_err(|error| error.under(format!("{field}[{index}]")))?;
        }
        Ok(())
    };
    check().map_err(|error| error.under("spec"))
}

fn check_container(container: &Map<String, Value>, volumes: &[&str]) -> Result<(), InvalidField> {
    names(container, fields_of::<core::Container>(), |meant| OF_CONTAINER.contains(&meant))?;
    below::<Vec<core::VolumeMount>>(container.get("volumeMounts"), "volumeMounts")?;
    below::<Vec<core::VolumeDevice>>(container.get("volumeDevices"), "volumeDevices")?;
    for (field, path) in [("volumeMounts", "mountPath"), ("volumeDevices", "devicePath")] {
        for (index, mount) in container.get(field).and_then(Value::as_array).into_iter().flatten().enumerate() {
            let checked = mount.as_object().map_or(Ok(()), |mount| check_mount(mount, path, volumes));
            checked.map_err(|error| error.under(format!("{field}[{index}]")))?;
        }
    }
    Ok(())
}

/// Checks what the API server requires of a mount: a path, and the name of a volume of the pod.
fn check_mount(mount: &Map<String, Value>, path: &str, volumes: &[&str]) -> Result<(), InvalidField> {
    if text(mount, path)?.is_empty() {
        return Err(InvalidField::new(path, "is required"));
    }
    let name = text(mount, "name")?;
    if !volumes.contains(&name) {
        let known = if volumes.is_empty() { "no volumes".to_owned() } else { volumes.join(", ") };
        return Err(InvalidField::new("name", format!("the pod has no volume {name:?}; it has {known}")));
    }
    Ok(())
}

/// The text of a field; an empty one if the field is missing.
///
/// # Errors
/// When the field has a value of another type: YAML reads `n`, `on` and `12` as no text.
fn text<'a>(body: &'a Map<String, Value>, field: &str) -> Result<&'a str, InvalidField> {
    match body.get(field) {
        Some(Value::String(text)) => Ok(text),
        None | Some(Value::Null) => Ok(""),
        Some(Value::Array(_) | Value::Object(_)) => Err(InvalidField::new(field, "must be a string")),
        Some(Value::Bool(_) | Value::Number(_)) => Err(InvalidField::new(field, "must be a string; put it in quotes")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The complaint about a document of this kind with these fields.
    fn complaint(kind: &str, fields: Value) -> Option<String> {
        let mut document = json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": "a"}});
        let Value::Object(fields) = fields else { unreachable!("a mapping") };
        document.as_object_mut().expect("a mapping").extend(fields);
        let origin = super::super::Origin::file("a.yaml".as_ref());
        let document = Document::of_server(origin, document).expect("an object");
        check_spelling(&document).err().map(|error| error.to_string())
    }

    fn complaint_about_source(source: Value) -> Option<String> {
        let Value::Object(mut volume) = source else { unreachable!("a mapping") };
        volume.insert("name".to_owned(), "v".into());
        complaint("Pod", json!({"spec": {"volumes": [volume]}}))
    }

    #[test]
    fn a_misspelled_annotation_of_podfs_is_found() {
        const DOMAIN: &str = "podfs.io";
        let about = |key: &str| complaint("Pod", json!({"metadata": {"name": "a", "annotations": {key: "x"}}}));
        for (name, meant) in
            [("audt.config", "audit"), ("audit", "audit"), ("wihtin.host", "within"), ("hostpath.host", "host-path")]
        {
            let key = format!("{DOMAIN}/{name}");
            let sentence = format!("is no annotation of podfs; did you mean {DOMAIN}/{meant}.<volume>?");
            assert_eq!(about(&key), Some(format!("a.yaml: metadata.annotations[{key}]: {sentence}")));
        }
        for name in ["volumes", "audit.config", "other"] {
            assert_eq!(about(&format!("{DOMAIN}/{name}")), None, "{name}");
        }
        assert_eq!(about("example.com/audit"), None);
    }

    #[test]
    fn a_mount_needs_a_path_and_a_volume_of_the_pod() {
        let about = |mount: Value| {
            let container = json!({"name": "c", "volumeMounts": [mount]});
            complaint("Pod", json!({"spec": {"containers": [container], "volumes": [{"name": "data"}]}}))
        };
        assert_eq!(about(json!({"name": "data", "mountPath": "/x"})), None);
        let name = about(json!({"name": false, "mountPath": "/x"}));
        let expected = "a.yaml: spec.containers[0].volumeMounts[0].name: must be a string; put it in quotes";
        assert_eq!(name.as_deref(), Some(expected));
        let name = complaint("Pod", json!({"spec": {"containers": [], "volumes": [{"name": 12}]}}));
        assert_eq!(name.as_deref(), Some("a.yaml: spec.volumes[0].name: must be a string; put it in quotes"));
        for mount in [json!({"name": "data"}), json!({"name": "data", "mountPath": ""})] {
            let expected = "a.yaml: spec.containers[0].volumeMounts[0].mountPath: is required";
            assert_eq!(about(mount).as_deref(), Some(expected));
        }
        let expected = "a.yaml: spec.containers[0].volumeMounts[0].name: the pod has no volume \"dta\"; it has data";
        assert_eq!(about(json!({"name": "dta", "mountPath": "/x"})).as_deref(), Some(expected));
    }

    #[test]
    fn a_misspelled_field_of_a_volume_is_found_at_any_depth() {
        for (source, field, meant) in [
            (json!({"configMap": {"nam": "y"}}), "configMap.nam", "name"),
            (json!({"configMap": {"name": "y", "Optional": true}}), "configMap.Optional", "optional"),
            (json!({"configMap": {"items": [{"key": "k", "pth": "p"}]}}), "configMap.items[0].pth", "path"),
            (json!({"secret": {"secretname": "y"}}), "secret.secretname", "secretName"),
            (json!({"emptyDir": {"sizelimit": 1}}), "emptyDir.sizelimit", "sizeLimit"),
            (
                json!({"projected": {"sources": [{"secret": {"name": "s"}}, {"configmap": {}}]}}),
                "projected.sources[1].configmap",
                "configMap",
            ),
            (
                json!({"projected": {"sources": [{"configMap": {"nmae": "y"}}]}}),
                "projected.sources[0].configMap.nmae",
                "name",
            ),
            (
                json!({"downwardAPI": {"items": [{"path": "a", "resourceFieldRef": {"divisr": 1}}]}}),
                "downwardAPI.items[0].resourceFieldRef.divisr",
                "divisor",
            ),
            (
                json!({"ephemeral": {"volumeClaimTemplate": {"spec": {"accessmodes": []}}}}),
                "ephemeral.volumeClaimTemplate.spec.accessmodes",
                "accessModes",
            ),
        ] {
            let sentence =
                format!("a.yaml: spec.volumes[0].{field}: volume \"v\": unknown field; did you mean \"{meant}\"?");
            assert_eq!(complaint_about_source(source), Some(sentence));
        }
    }

    #[test]
    fn fields_of_a_newer_api_and_fields_without_a_value_are_ignored() {
        for source in [
            json!({"configMap": {"name": "y", "onlyOnTuesdays": true, "nam": null}}),
            json!({"quantumStore": {"nam": "y"}}),
            json!({"configmap": {"name": "y"}}),
            json!({"hostPath": 3}),
            json!({"csi": {"driver": "d", "volumeAttributes": {"drivr": "any"}}}),
            json!({"configMap": {"items": "wrong", "name": "y"}}),
        ] {
            assert_eq!(complaint_about_source(source.clone()), None, "{source}");
        }
    }

    #[test]
    fn a_misspelled_field_of_pods_and_objects_is_found_where_volumes_depend_on_it() {
        let container = |mounts: Value| json!({"spec": {"containers": [{"name": "c"}, mounts]}});
        for (kind, fields, field, meant) in [
            ("Pod", json!({"Spec": {}}), "Spec", "spec"),
            ("Pod", json!({"metadata": {"lables": {}}}), "metadata.lables", "labels"),
            ("Pod", json!({"spec": {"volume": []}}), "spec.volume", "volumes"),
            ("Pod", container(json!({"volumemounts": []})), "spec.containers[1].volumemounts", "volumeMounts"),
            (
                "Pod",
                container(json!({"volumeMounts": [{"name": "v", "mountpath": "/v"}]})),
                "spec.containers[1].volumeMounts[0].mountpath",
                "mountPath",
            ),
            ("ConfigMap", json!({"Data": {"a": "b"}}), "Data", "data"),
            ("ConfigMap", json!({"binarydata": {"a": "b"}}), "binarydata", "binaryData"),
            ("Secret", json!({"stringdata": {"a": "b"}}), "stringdata", "stringData"),
            ("PersistentVolume", json!({"spec": {"nfs": {"servr": "s"}}}), "spec.nfs.servr", "server"),
            ("PersistentVolumeClaim", json!({"spec": {"volumename": "v"}}), "spec.volumename", "volumeName"),
        ] {
            let sentence = format!("a.yaml: {field}: unknown field; did you mean \"{meant}\"?");
            assert_eq!(complaint(kind, fields), Some(sentence));
        }
        for (kind, fields) in [
            ("Pod", json!({"spec": {"containers": [{"name": "c", "imag": "i"}], "hostnam": "h"}})),
            ("ConfigMap", json!({"data": {"dta": "b"}, "metadata": {"labels": {"nam": "a"}}})),
            ("Deployment", json!({"Spec": {}})),
        ] {
            assert_eq!(complaint(kind, fields), None);
        }
    }

    #[test]
    fn a_kind_with_other_capitals_is_no_kind() {
        for (kind, meant) in
            [("pod", "Pod"), ("configmap", "ConfigMap"), ("PersistentVolumeclaim", "PersistentVolumeClaim")]
        {
            let sentence = format!("a.yaml: kind: \"{kind}\" is no kind of object; did you mean \"{meant}\"?");
            assert_eq!(complaint(kind, json!({})), Some(sentence));
        }
        for kind in ["deployment", "Pdo", "Pod"] {
            assert_eq!(complaint(kind, json!({})), None, "of the group of v1");
        }
    }
    #[test]
    fn a_core_kind_has_the_version_v1() {
        for (api_version, kind) in [("V1", "Pod"), ("v2", "ConfigMap"), ("v1beta1", "Secret")] {
            let document = json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": "a"}});
            let document =
                Document::of_server(super::super::Origin::file("a.yaml".as_ref()), document).expect("a document");
            let error = check_kind(&document).expect_err("refused").to_string();
            assert_eq!(error, format!("a.yaml: apiVersion: must be v1 for a {kind}, not \"{api_version}\""));
        }
        for (api_version, kind) in [("v1", "Pod"), ("example.org/v2", "Secret"), ("v2", "Other")] {
            let document = json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": "a"}});
            check_kind(
                &Document::of_server(super::super::Origin::file("a.yaml".as_ref()), document).expect("a document"),
            )
            .expect("ignored");
        }
    }
}
