//! Field and label selectors: they decide which objects a list or watch contains.

use serde_json::Value;

use super::resources::Resource;
use super::status::Failure;
use super::store::Key;

/// The objects of a resource that a list or watch contains.
#[derive(Clone, Debug)]
pub struct Selection {
    resource: &'static Resource,
    namespace: Option<String>,
    fields: Vec<Field>,
    labels: Vec<Label>,
}

#[derive(Clone, Debug)]
struct Field {
    key: String,
    equal: bool,
    value: String,
}

#[derive(Clone, Debug)]
enum Label {
    Exists(String),
    Missing(String),
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
}

impl Selection {
    pub fn new(
        resource: &'static Resource,
        namespace: Option<&str>,
        fields: Option<&str>,
        labels: Option<&str>,
    ) -> Result<Self, Failure> {
        let selector = fields.unwrap_or_default();
        let fields = parse_fields(selector)?;
        let known = |key: &str| {
            matches!(key, "metadata.name" | "metadata.namespace")
                || resource.fields.iter().any(|(field, _)| *field == key)
        };
        if let Some(Field { key, .. }) = fields.iter().find(|field| !known(&field.key)) {
            return Err(Failure::bad_request(format!("field label not supported: {key}")));
        }
        let labels = parse_labels(labels.unwrap_or_default())?;
        Ok(Self { resource, namespace: namespace.map(str::to_owned), fields, labels })
    }

    /// Whether the selection is of this resource.
    pub fn is_of(&self, plural: &str) -> bool {
        self.resource.plural == plural
    }

    pub fn resource(&self) -> &'static Resource {
        self.resource
    }

    /// The only name that is selected.
    pub fn name(&self) -> Option<&str> {
        self.fields.iter().find(|field| field.equal && field.key == "metadata.name").map(|field| field.value.as_str())
    }

    /// The only object that may be selected.
    pub fn key(&self) -> Option<Key> {
        let namespace = self.namespace.as_deref().or((!self.resource.namespaced).then_some(""))?;
        Some(Key::new(self.resource.plural, namespace, self.name()?))
    }

    pub fn selects(&self, key: &Key, object: &Value) -> bool {
        key.plural == self.resource.plural
            && self.namespace.as_ref().is_none_or(|namespace| *namespace == key.namespace)
            && self.fields.iter().all(|field| (self.value(field, key, object) == field.value) == field.equal)
            && self.labels.iter().all(|label| label.selects(&object["metadata"]["labels"]))
    }

    fn value(&self, field: &Field, key: &Key, object: &Value) -> String {
        match field.key.as_str() {
            "metadata.name" => key.name.clone(),
            "metadata.namespace" => key.namespace.clone(),
            field => {
                let pointer = self.resource.fields.iter().find(|(name, _)| *name == field).map(|(_, pointer)| *pointer);
                match pointer.and_then(|pointer| object.pointer(pointer)) {
                    Some(Value::String(value)) => value.clone(),
                    Some(value) => value.to_string(),
                    None => String::new(),
                }
            }
        }
    }
}

impl Label {
    fn selects(&self, labels: &Value) -> bool {
        let value = |key: &String| labels.get(key).and_then(Value::as_str);
        match self {
            Self::Exists(key) => value(key).is_some(),
            Self::Missing(key) => value(key).is_none(),
            Self::In(key, values) => value(key).is_some_and(|value| values.iter().any(|listed| listed == value)),
            Self::NotIn(key, values) => value(key).is_none_or(|value| values.iter().all(|listed| listed != value)),
        }
    }
}

/// The only name that a field selector admits, if it admits just one.
pub fn name_of_selector(selector: &str) -> Option<String> {
    let fields = parse_fields(selector).ok()?;
    fields.into_iter().find(|field| field.equal && field.key == "metadata.name").map(|field| field.value)
}

fn parse_fields(selector: &str) -> Result<Vec<Field>, Failure> {
    let terms = selector.split(',').filter(|term| !term.is_empty());
    terms
        .map(|term| {
            let (key, equal, value) = match (term.split_once("!="), term.split_once("=="), term.split_once('=')) {
                (Some((key, value)), _, _) => (key, false, value),
                (_, Some((key, value)), _) | (_, None, Some((key, value))) => (key, true, value),
                (None, None, None) => {
                    let message = format!("invalid selector: {selector:?}; can't understand {term:?}");
                    return Err(Failure::bad_request(message));
                }
            };
            Ok(Field { key: key.to_owned(), equal, value: value.to_owned() })
        })
        .collect()
}

fn parse_labels(selector: &str) -> Result<Vec<Label>, Failure> {
    // A comma separates terms only outside the brackets of a set.
    let (mut depth, mut terms) = (0, vec![String::new()]);
    for character in selector.chars() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                terms.push(String::new());
                continue;
            }
            _ => {}
        }
        terms.last_mut().expect("the list begins with one term").push(character);
    }
    terms.iter().map(|term| term.trim()).filter(|term| !term.is_empty()).map(parse_label).collect()
}

fn parse_label(term: &str) -> Result<Label, Failure> {
    let set = |values: &str| -> Option<Vec<String>> {
        let values = values.trim().strip_prefix('(')?.strip_suffix(')')?;
        Some(values.split(',').map(|value| value.trim().to_owned()).collect())
    };
    let single = |value: &str| vec![value.trim().to_owned()];
    let key = |key: &str| key.trim().to_owned();
    let label = if let Some((name, values)) = term.split_once(" notin ") {
        set(values).map(|values| Label::NotIn(key(name), values))
    } else if let Some((name, values)) = term.split_once(" in ") {
        set(values).map(|values| Label::In(key(name), values))
    } else if let Some((name, value)) = term.split_once("!=") {
        Some(Label::NotIn(key(name), single(value)))
    } else if let Some((name, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        Some(Label::In(key(name), single(value)))
    } else if let Some(name) = term.strip_prefix('!') {
        Some(Label::Missing(key(name)))
    } else {
        (!term.contains([' ', '(', ')'])).then(|| Label::Exists(key(term)))
    };
    label.ok_or_else(|| Failure::bad_request(format!("unable to parse requirement: {term}")))
}
