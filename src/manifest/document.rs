//! Documents: the pieces of a manifest file, each with its place and its kind.

use std::fmt::{self, Debug};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::null::WithNulls;
use super::origin::Origin;
use super::{ManifestError, syntax};

/// A Kubernetes object of any kind, with its fields as they are written.
#[derive(Clone)]
pub struct Document {
    /// Its file, and its position there.
    pub origin: Origin,
    /// Its `apiVersion`.
    pub api_version: String,
    /// Its `kind`.
    pub kind: String,
    body: Map<String, Value>,
}

impl Document {
    /// The document as a typed object.
    ///
    /// # Errors
    ///
    /// A field of the wrong type: the sentence names document and field, never the value.
    pub fn into_typed<T: DeserializeOwned>(self) -> Result<T, ManifestError> {
        typed(&self.origin, Value::Object(self.body))
    }

    /// Its fields, before they are typed.
    pub(super) fn body(&self) -> &Map<String, Value> {
        &self.body
    }

    /// The document as it was written.
    pub fn into_value(self) -> Value {
        Value::Object(self.body)
    }

    /// An object as an API server gives it. Errors call it `origin`.
    ///
    /// # Errors
    ///
    /// When the value is no Kubernetes object.
    pub fn of_server(origin: Origin, object: Value) -> Result<Self, ManifestError> {
        Self::from_value(origin, object)
    }

    /// Its `metadata.name`, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.body.get("metadata")?.get("name")?.as_str()
    }

    /// Its `metadata.namespace`, if it has one.
    pub fn namespace(&self) -> Option<&str> {
        self.body.get("metadata")?.get("namespace")?.as_str().filter(|namespace| !namespace.is_empty())
    }

    pub(super) fn from_value(origin: Origin, value: Value) -> Result<Self, ManifestError> {
        let body = mapping(&origin, value)?;
        Ok(Self {
            api_version: required_string(&origin, &body, "apiVersion")?,
            kind: required_string(&origin, &body, "kind")?,
            origin,
            body,
        })
    }
}

/// Shows place and kind; the body may hold a secret.
impl Debug for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Document")
            .field("origin", &self.origin)
            .field("api_version", &self.api_version)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

/// All documents of a manifest file, which may hold several YAML documents, JSON, or lists (`List`, `ConfigMapList`
/// and the like, whose items become documents of their own). Empty documents are skipped and not counted.
///
/// `file` names the bytes in errors; its ending `.json` selects JSON.
///
/// # Errors
///
/// Malformed text, with line and column; a document that is no Kubernetes object.
pub fn parse_documents(file: &Path, bytes: &[u8]) -> Result<Vec<Document>, ManifestError> {
    read_documents(file, bytes).into_iter().collect()
}

/// The same documents, and the errors of those that cannot be read, in the order of the file.
pub fn read_documents(file: &Path, bytes: &[u8]) -> Vec<Result<Document, ManifestError>> {
    let mut documents = Vec::new();
    for (origin, value) in with_origins(file, bytes) {
        match value.and_then(|value| Document::from_value(origin, value)) {
            Ok(document) => flatten(document, &mut documents),
            Err(error) => documents.push(Err(error)),
        }
    }
    documents
}

/// A single document without `kind` and `apiVersion`, such as a bare core/v1 Volume.
///
/// # Errors
///
/// Malformed text; no document or several; a field of the wrong type.
pub fn parse_bare<T: DeserializeOwned>(file: &Path, bytes: &[u8]) -> Result<T, ManifestError> {
    let values = with_origins(file, bytes).into_iter().map(|(origin, value)| Ok((origin, value?)));
    let mut values = values.collect::<Result<Vec<_>, _>>()?;
    match (values.pop(), values.len()) {
        (Some((origin, value)), 0) => {
            let body = mapping(&origin, value)?;
            typed(&origin, Value::Object(body))
        }
        (None, _) => Err(ManifestError::invalid(&Origin::file(file), "", "the file is empty")),
        (Some(_), others) => {
            Err(ManifestError::invalid(&Origin::file(file), "", format!("expected one document, found {}", others + 1)))
        }
    }
}

fn with_origins(file: &Path, bytes: &[u8]) -> Vec<(Origin, Result<Value, ManifestError>)> {
    let values = syntax::values(file, bytes);
    let whole = Origin::file(file);
    let several = values.len() > 1;
    let origins = (1..).map(|number| match several {
        true => whole.document(number),
        false => whole.clone(),
    });
    origins.zip(values).collect()
}

/// Replaces a list by its items, and lists among them by theirs. The items of a typed list, as the API server writes it, need not
/// repeat their kind.
fn flatten(mut list: Document, documents: &mut Vec<Result<Document, ManifestError>>) {
    let Some(item_kind) = list_of(&list) else {
        return documents.push(Ok(list));
    };
    let items = match list.body.remove("items") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(items)) => items,
        Some(_) => return documents.push(Err(ManifestError::invalid(&list.origin, "items", "must be a list"))),
    };
    for (number, item) in (1..).zip(items) {
        let origin = list.origin.item(number);
        let document = mapping(&origin, item).and_then(|mut item| {
            if !item_kind.is_empty() {
                item.entry("kind").or_insert_with(|| item_kind.clone().into());
                item.entry("apiVersion").or_insert_with(|| list.api_version.clone().into());
            }
            Document::from_value(origin, Value::Object(item))
        });
        match document {
            // The text is not nested so deeply that this takes much of the stack.
            Ok(document) => flatten(document, documents),
            Err(error) => documents.push(Err(error)),
        }
    }
}

/// The kind of a list's items: empty for a plain `List`, whose items each have a kind.
fn list_of(document: &Document) -> Option<String> {
    let item_kind = document.kind.strip_suffix("List")?;
    let is_of = |group: &&str| document.api_version.starts_with(*group);
    let is_list = document.api_version == "v1" || ["certificates.k8s.io/", "storage.k8s.io/"].iter().any(is_of);
    is_list.then(|| item_kind.to_owned())
}

fn mapping(origin: &Origin, value: Value) -> Result<Map<String, Value>, ManifestError> {
    let found = match value {
        Value::Object(body) => return Ok(body),
        Value::Array(_) => "a list",
        _ => "a single value",
    };
    Err(ManifestError::invalid(
        origin,
        "",
        format!("expected a mapping of fields such as kind and metadata, found {found}"),
    ))
}

fn required_string(origin: &Origin, body: &Map<String, Value>, field: &str) -> Result<String, ManifestError> {
    match body.get(field) {
        Some(Value::String(text)) if !text.is_empty() => Ok(text.clone()),
        None | Some(Value::Null | Value::String(_)) => Err(ManifestError::invalid(
            origin,
            "",
            format!("{field} is missing; every object needs apiVersion and kind"),
        )),
        Some(_) => Err(ManifestError::invalid(origin, field, "must be a string")),
    }
}

fn typed<T: DeserializeOwned>(origin: &Origin, value: Value) -> Result<T, ManifestError> {
    serde_path_to_error::deserialize(WithNulls(value)).map_err(|error| ManifestError::mistyped(origin, &error))
}
