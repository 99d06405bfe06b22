//! An object as JSON, which supervisors get, and parsed.

use std::sync::Arc;

use serde_json::Value;

use crate::manifest::objects::{NamedObject, ObjectKey, parse_object};
use crate::manifest::{Document, ManifestError};
use crate::source::ServedObject;

/// An object that volumes can show.
pub(crate) struct WholeObject {
    /// The object as JSON: supervisors get this form.
    pub(crate) value: Value,
    /// The parsed object: the daemon uses this form.
    pub(crate) parsed: Arc<NamedObject>,
}

impl WholeObject {
    /// Parses an object of a manifest file; `None` if volumes do not show objects of its kind.
    ///
    /// # Errors
    /// When the API server would refuse the object.
    pub(crate) fn parse(document: Document) -> Result<Option<Arc<WholeObject>>, ManifestError> {
        let mut value = document.clone().into_value();
        strip(&mut value);
        Ok(parse_object(document)?.map(|parsed| Arc::new(WholeObject { value, parsed: Arc::new(parsed) })))
    }

    /// Whether a volume shows the same content of both objects.
    pub(crate) fn has_same_content(&self, other: &WholeObject) -> bool {
        self.parsed.has_same_content(&other.parsed)
    }

    pub(crate) fn key(&self) -> &ObjectKey {
        &self.parsed.key
    }
}

/// An object of the API server.
impl ServedObject for WholeObject {
    fn parse(mut object: Value, title: &str) -> Result<WholeObject, ManifestError> {
        strip(&mut object);
        let parsed = Arc::new(NamedObject::parse(object.clone(), title)?);
        Ok(WholeObject { value: object, parsed })
    }

    fn named(&self) -> &NamedObject {
        &self.parsed
    }
}

/// Removes fields that no volume shows and that can be as large as the rest of the object.
pub(crate) fn strip(object: &mut Value) {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    metadata.remove("managedFields");
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use super::*;
    use crate::manifest::parse_documents;

    /// The objects of a text.
    pub(crate) fn objects(yaml: &str) -> Vec<Arc<WholeObject>> {
        let documents = parse_documents(Path::new("objects.yaml"), yaml.as_bytes()).expect(yaml);
        documents.into_iter().filter_map(|document| WholeObject::parse(document).expect(yaml)).collect()
    }

    #[test]
    fn an_object_keeps_its_form_without_managed_fields() {
        let yaml = "{apiVersion: v1, kind: ConfigMap, metadata: {name: app, labels: {a: b}, managedFields: [{}]}, data: {k: v}}";
        let object = objects(yaml).remove(0);
        assert_eq!(object.key().to_string(), "ConfigMap default/app");
        assert_eq!(object.value["metadata"], serde_json::json!({"name": "app", "labels": {"a": "b"}}));
        assert_eq!(object.value["data"]["k"], "v");
        assert!(objects("{apiVersion: apps/v1, kind: Deployment}").is_empty());
    }
}
