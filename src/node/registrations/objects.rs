//! The changes of the CSINode and the Node object for a driver, as JSON merge patches.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::driver::csi::NodeDriver;
use crate::volume::migration::REPLACED_PLUGINS;

/// The annotation of a Node with each driver's name of the node.
const NODE_IDS: &str = "csi.volume.kubernetes.io/nodeid";
/// The annotation of a CSINode with the kubelet's plugins whose volumes CSI drivers serve on the node.
const MIGRATED: &str = "storage.alpha.kubernetes.io/migrated-plugins";

/// A change of the node's drivers.
#[derive(Clone, Copy, Debug)]
pub(super) enum DriverChange<'a> {
    /// A driver has registered.
    Put(&'a NodeDriver),
    /// The driver of this name has gone.
    Remove(&'a str),
}

/// A driver and the node contradict each other.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RegistrationConflict {
    #[error(
        "detected topology value collision: driver reported {key:?}:{reported:?} but existing label is {key:?}:{existing:?}; \
         correct the label of the Node, or the driver's settings"
    )]
    Label { key: String, reported: String, existing: String },
    #[error("annotation {NODE_IDS} of the Node is no JSON object of texts; correct or remove it")]
    Annotation,
}

/// The CSINode object of a node, without drivers.
pub(super) fn new_csi_node(node: &Value) -> Value {
    let metadata = &node["metadata"];
    let owner = json!({"apiVersion": "v1", "kind": "Node", "name": metadata["name"], "uid": metadata["uid"]});
    json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "CSINode",
        "metadata": {
            "name": metadata["name"], "ownerReferences": [owner], "annotations": {MIGRATED: REPLACED_PLUGINS.join(",")},
        },
        "spec": {"drivers": []},
    })
}

/// The change of the CSINode; `None` if it needs none. The server refuses a change of an entry: podfs removes an entry
/// that differs, and adds it with the next change.
pub(super) fn csi_node_change(found: &Value, edit: Option<DriverChange<'_>>) -> Option<Value> {
    let drivers = found["spec"]["drivers"].as_array().cloned().unwrap_or_default();
    let plugins = REPLACED_PLUGINS.join(",");
    let is_annotated = found["metadata"]["annotations"][MIGRATED] == plugins;
    let without = |name: &str| drivers.iter().filter(|entry| entry["name"] != name).cloned().collect::<Vec<_>>();
    let wanted = match edit {
        None => drivers.clone(),
        Some(DriverChange::Remove(name)) => without(name),
        Some(DriverChange::Put(driver)) => match drivers.iter().find(|entry| entry["name"] == driver.name.as_str()) {
            Some(entry) if is_entry_of(entry, driver) => drivers.clone(),
            Some(_) => without(&driver.name),
            None => drivers.iter().cloned().chain([entry(driver)]).collect(),
        },
    };
    if is_annotated && wanted == drivers {
        return None;
    }
    let version = &found["metadata"]["resourceVersion"];
    Some(json!({
        "metadata": {"resourceVersion": version, "annotations": {MIGRATED: plugins}},
        "spec": {"drivers": wanted},
    }))
}

fn entry(driver: &NodeDriver) -> Value {
    let NodeDriver { name, node_id, topology, most_volumes } = driver;
    let mut entry = json!({"name": name, "nodeID": node_id, "topologyKeys": topology.keys().collect::<Vec<_>>()});
    if let Some(count) = most_volumes {
        entry["allocatable"] = json!({"count": count});
    }
    entry
}

/// Whether an entry has the driver's values, with keys in any order.
fn is_entry_of(found: &Value, driver: &NodeDriver) -> bool {
    let keys = found["topologyKeys"].as_array().into_iter().flatten();
    let mut keys: Vec<_> = keys.filter_map(Value::as_str).collect();
    keys.sort_unstable();
    found["nodeID"] == driver.node_id.as_str()
        && keys == driver.topology.keys().map(String::as_str).collect::<Vec<_>>()
        && found["allocatable"]["count"].as_i64() == driver.most_volumes.map(i64::from)
}

/// The change of the Node: the annotation, and for a driver that has registered the labels of its topology. `None` if
/// it needs none.
///
/// # Errors
/// When a label has another value already, or the annotation cannot be read.
pub(super) fn node_change(found: &Value, edit: DriverChange<'_>) -> Result<Option<Value>, RegistrationConflict> {
    let metadata = &found["metadata"];
    let before = match metadata["annotations"][NODE_IDS].as_str().filter(|text| !text.is_empty()) {
        Some(text) => {
            serde_json::from_str::<BTreeMap<String, String>>(text).map_err(|_| RegistrationConflict::Annotation)?
        }
        None => BTreeMap::new(),
    };
    let (mut ids, mut labels) = (before.clone(), BTreeMap::new());
    match edit {
        DriverChange::Remove(name) => drop(ids.remove(name)),
        DriverChange::Put(driver) => {
            ids.insert(driver.name.clone(), driver.node_id.clone());
            for (key, reported) in &driver.topology {
                match metadata["labels"][key].as_str() {
                    Some(existing) if existing == reported => {}
                    Some(existing) => {
                        let (key, reported, existing) = (key.clone(), reported.clone(), existing.to_owned());
                        return Err(RegistrationConflict::Label { key, reported, existing });
                    }
                    None => drop(labels.insert(key, reported)),
                }
            }
        }
    }
    if ids == before && labels.is_empty() {
        return Ok(None);
    }
    let text = (!ids.is_empty()).then(|| json!(ids).to_string());
    let mut change = json!({"resourceVersion": metadata["resourceVersion"], "annotations": {NODE_IDS: text}});
    if !labels.is_empty() {
        change["labels"] = json!(labels);
    }
    Ok(Some(json!({"metadata": change})))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(node_id: &str) -> NodeDriver {
        let topology = [("d/zone", "a"), ("d/rack", "7")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        NodeDriver {
            name: "d".to_owned(),
            node_id: node_id.to_owned(),
            topology: topology.into(),
            most_volumes: Some(24),
        }
    }

    fn csi_node(drivers: &Value) -> Value {
        let mut found = new_csi_node(&json!({"metadata": {"name": "n", "uid": "u"}}));
        found["metadata"]["resourceVersion"] = "7".into();
        found["spec"]["drivers"] = drivers.clone();
        found
    }

    #[test]
    fn a_driver_gets_one_entry_with_its_keys_and_its_number_of_volumes() {
        let driver = driver("w");
        let change =
            csi_node_change(&csi_node(&json!([{"name": "e"}])), Some(DriverChange::Put(&driver))).expect("a change");
        let entry =
            json!({"name": "d", "nodeID": "w", "topologyKeys": ["d/rack", "d/zone"], "allocatable": {"count": 24}});
        assert_eq!(change["spec"]["drivers"], json!([{"name": "e"}, entry]));
        assert_eq!(change["metadata"]["resourceVersion"], "7");
        assert_eq!(csi_node_change(&csi_node(&change["spec"]["drivers"]), Some(DriverChange::Put(&driver))), None);
    }

    #[test]
    fn an_entry_that_differs_is_removed_before_it_is_added() {
        let entries = json!([entry(&driver("old")), {"name": "e"}]);
        let change = csi_node_change(&csi_node(&entries), Some(DriverChange::Put(&driver("new")))).expect("a change");
        assert_eq!(change["spec"]["drivers"], json!([{"name": "e"}]));
        let change = csi_node_change(&csi_node(&entries), Some(DriverChange::Remove("d"))).expect("a change");
        assert_eq!(change["spec"]["drivers"], json!([{"name": "e"}]));
        assert_eq!(csi_node_change(&csi_node(&json!([])), Some(DriverChange::Remove("d"))), None);
    }

    #[test]
    fn the_annotation_of_the_node_has_each_driver_and_goes_with_the_last_one() {
        let found = |ids: &str| json!({"metadata": {"resourceVersion": "7", "annotations": {NODE_IDS: ids}}});
        let change = node_change(&found(r#"{"e":"x"}"#), DriverChange::Put(&driver("w"))).expect("no contradiction");
        let change = change.expect("a change");
        assert_eq!(change["metadata"]["annotations"][NODE_IDS], r#"{"d":"w","e":"x"}"#);
        assert_eq!(change["metadata"]["labels"], json!({"d/rack": "7", "d/zone": "a"}));
        let gone = node_change(&found(r#"{"d":"w"}"#), DriverChange::Remove("d"))
            .expect("no contradiction")
            .expect("a change");
        assert_eq!(gone["metadata"]["annotations"], json!({NODE_IDS: null}));
        assert_eq!(node_change(&found(""), DriverChange::Remove("d")), Ok(None));
        assert_eq!(node_change(&found("[]"), DriverChange::Remove("d")), Err(RegistrationConflict::Annotation));
    }

    #[test]
    fn a_label_of_another_value_is_a_contradiction() {
        let found = json!({"metadata": {"labels": {"d/zone": "b"}}});
        let error = node_change(&found, DriverChange::Put(&driver("w"))).expect_err("a contradiction").to_string();
        let expected = r#"driver reported "d/zone":"a" but existing label is "d/zone":"b""#;
        assert!(error.starts_with("detected topology value collision: ") && error.contains(expected), "{error}");
    }
}
