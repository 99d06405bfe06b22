//! Volumes of kinds that this version of podfs does not serve. Such a volume waits, and delays no other.
//!
//! There are two sorts of them: kinds of the API that podfs does not mount, such as `rbd` and `gitRepo`, and kinds of an API
//! that is newer than podfs. The typed volume has no fields for the latter, so this module looks for them in the fields of the
//! manifest. A field that is spelled almost like a known kind could be a new kind, too; podfs treats it as a spelling mistake.

use k8s_openapi::api::core::v1 as core;
use serde_json::{Map, Value};

use super::{KINDS, VolumeType, sources_given};
use crate::types::InvalidField;

/// The kind of every volume that podfs does not serve. The source of the volume has its kind in the manifest.
pub(super) const UNSUPPORTED: VolumeType = VolumeType { field: "", directory: None, parse: |_, _| None };

/// The least similarity (normalised Levenshtein, 0 to 1) at which podfs takes a field for a misspelled kind of volume.
const ALIKE: f64 = 0.8;

/// The fields of a volume in a manifest.
#[derive(Clone, Debug, Default)]
pub struct VolumeFields(Vec<Field>);

#[derive(Clone, Debug)]
struct Field {
    name: String,
    is_mapping: bool,
}

impl VolumeFields {
    /// The fields of an untyped volume.
    pub fn of(volume: &Map<String, Value>) -> VolumeFields {
        let given = volume.iter().filter(|(name, value)| *name != "name" && !value.is_null());
        VolumeFields(given.map(|(name, value)| Field { name: name.clone(), is_mapping: value.is_object() }).collect())
    }

    /// The kind of this volume, if it is one that the API did not have when podfs was made.
    ///
    /// # Errors
    /// A field that is close to the name of a kind that podfs serves, and a source that is no mapping.
    pub(super) fn newer_kind(&self, typed: &core::Volume) -> Result<Option<String>, InvalidField> {
        let Some(field) = self.0.first().filter(|_| sources_given(typed).is_empty()) else { return Ok(None) };
        let likeness = |kind: &&&VolumeType| {
            strsim::normalized_levenshtein(&kind.field.to_lowercase(), &field.name.to_lowercase())
        };
        let nearest = KINDS.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
        if let Some(kind) = nearest.filter(|kind| likeness(kind) >= ALIKE) {
            let sentence = format!("{:?} is no kind of volume; did you mean {:?}?", field.name, kind.field);
            return Err(InvalidField::new(field.name.as_str(), sentence));
        }
        if !field.is_mapping {
            return Err(InvalidField::new(field.name.as_str(), "must be a mapping of fields"));
        }
        Ok(Some(field.name.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn newer_kind(source: Value) -> Result<Option<String>, String> {
        let fields = VolumeFields::of(source.as_object().expect("fields"));
        let typed = serde_json::from_value(source).expect("a volume");
        fields.newer_kind(&typed).map_err(|error| error.to_string())
    }

    #[test]
    fn a_kind_of_a_newer_api_is_distinguished_from_a_misspelled_one() {
        let kind = |field: &str| newer_kind(serde_json::json!({"name": "v", field: {}}));
        for newer in ["quantumStore", "artifact", "objectBucket", "csiEphemeral", "cifs"] {
            assert_eq!(kind(newer), Ok(Some(newer.to_owned())));
        }
        for known in ["configMap", "csi", "image"] {
            assert_eq!(kind(known), Ok(None), "the typed volume has it");
        }
        for (typo, meant) in [
            ("configmap", "configMap"),
            ("configMaps", "configMap"),
            ("secrets", "secret"),
            ("emptyDirs", "emptyDir"),
            ("hostpath", "hostPath"),
            ("persistentVolumeClaims", "persistentVolumeClaim"),
            ("downwardApi", "downwardAPI"),
        ] {
            let error = kind(typo).expect_err(typo);
            assert!(error.ends_with(&format!("did you mean \"{meant}\"?")), "{error}");
        }
    }

    #[test]
    fn a_source_is_a_mapping_and_nothing_is_no_source() {
        assert_eq!(newer_kind(serde_json::json!({"name": "v", "quantumStore": null})), Ok(None));
        let error = newer_kind(serde_json::json!({"name": "v", "quantumStore": 3})).expect_err("no mapping");
        assert_eq!(error, "quantumStore: must be a mapping of fields");
    }
}
