//! The content of downwardAPI files.
//!
//! Annotations are shown as the manifest has them. The kubelet adds `kubernetes.io/config.seen` and
//! `kubernetes.io/config.source` to its own copy of a pod, and so to its files: when, and from which source, that kubelet got
//! the pod. podfs has no values for them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::quote::quote;
use super::resource::{self, ContainerNotFound};
use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::types::Allocatable;
use crate::types::PodField;
use crate::volume::DownwardValue;

/// The content of a file that shows `value`. Single values are written as they are, without a newline.
pub(super) fn content<'a>(
    value: &DownwardValue,
    identity: &'a PodIdentity,
    facts: &'a PodFacts,
    allocatable: Allocatable,
) -> Result<Cow<'a, [u8]>, ContainerNotFound> {
    let raw = |text: &'a str| Cow::Borrowed(text.as_bytes());
    let looked_up = |map: &'a BTreeMap<String, String>, key: &str| raw(map.get(key).map_or("", String::as_str));
    let formatted = |map| Cow::Owned(format_map(map).into_bytes());
    Ok(match value {
        DownwardValue::Field(PodField::Name) => raw(&identity.name),
        DownwardValue::Field(PodField::Namespace) => raw(&identity.namespace),
        DownwardValue::Field(PodField::Uid) => raw(identity.uid.as_str()),
        DownwardValue::Field(PodField::Labels) => formatted(&facts.labels),
        DownwardValue::Field(PodField::Annotations) => formatted(&facts.annotations),
        DownwardValue::Field(PodField::Label(key)) => looked_up(&facts.labels, key),
        DownwardValue::Field(PodField::Annotation(key)) => looked_up(&facts.annotations, key),
        DownwardValue::Resource(field) => Cow::Owned(resource::content(field, facts, allocatable)?.into_bytes()),
    })
}

/// A line `key="value"` for each entry, in the order of the keys' bytes, without a final newline.
fn format_map(map: &BTreeMap<String, String>) -> String {
    let lines: Vec<String> = map.iter().map(|(key, value)| format!("{key}={}", quote(value.as_bytes()))).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        entries.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
    }

    fn shown(field: &str, facts: &PodFacts) -> String {
        let value = DownwardValue::Field(PodField::parse(field).expect(field));
        let identity = PodIdentity::placeholder();
        let content = content(&value, &identity, facts, Allocatable::default()).expect("fields are always there");
        String::from_utf8(content.into_owned()).expect("text")
    }

    #[test]
    fn da_01_single_fields_are_raw() {
        let facts = PodFacts::placeholder();
        let identity = PodIdentity::placeholder();
        assert_eq!(shown("metadata.name", &facts), identity.name);
        assert_eq!(shown("metadata.namespace", &facts), identity.namespace);
        assert_eq!(shown("metadata.uid", &facts), identity.uid.as_str());
    }

    #[test]
    fn da_02_maps_are_sorted_by_bytes_and_quoted() {
        assert_eq!(format_map(&map(&[])), "");
        assert_eq!(format_map(&map(&[("key", "value")])), r#"key="value""#);
        assert_eq!(format_map(&map(&[("key", "value\n")])), r#"key="value\n""#);
        let labels = map(&[
            ("kubernetes.io/hostname", "node"),
            ("kubernetes.io/arch", "amd64"),
            ("beta.kubernetes.io/os", "linux"),
            ("Zone", "z"),
        ]);
        assert_eq!(
            format_map(&labels),
            "Zone=\"z\"\nbeta.kubernetes.io/os=\"linux\"\nkubernetes.io/arch=\"amd64\"\nkubernetes.io/hostname=\"node\""
        );
    }

    #[test]
    fn da_02_annotations_keep_their_json_readable_for_go() {
        let facts = PodFacts {
            annotations: map(&[("builder", "john-doe"), ("json", r#"{"a":"b"}"#), ("lines", "c\nb\na")]),
            ..PodFacts::placeholder()
        };
        assert_eq!(
            shown("metadata.annotations", &facts),
            "builder=\"john-doe\"\njson=\"{\\\"a\\\":\\\"b\\\"}\"\nlines=\"c\\nb\\na\""
        );
    }

    #[test]
    fn da_04_a_single_label_or_annotation_is_raw_and_empty_when_absent() {
        let facts = PodFacts {
            labels: map(&[("something", "label value")]),
            annotations: map(&[("Www.k8s.io/test", "1\n")]),
            ..PodFacts::placeholder()
        };
        assert_eq!(shown("metadata.labels['something']", &facts), "label value");
        assert_eq!(shown("metadata.annotations['Www.k8s.io/test']", &facts), "1\n");
        assert_eq!(shown("metadata.labels['absent']", &facts), "");
        assert_eq!(shown("metadata.annotations['www.k8s.io/test']", &facts), "");
    }

    #[test]
    fn da_07_the_kubelets_own_annotations_are_not_made_up() {
        assert_eq!(shown("metadata.annotations", &PodFacts::placeholder()), "");
    }
}
