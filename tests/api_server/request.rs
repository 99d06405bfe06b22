//! Requests as an API server understands them: a verb on a resource, and not a method on a path.

use axum::http::request::Parts;
use axum::http::{Method, Version};
use reqwest::Url;
use serde_json::Value;

use super::resources::Resource;
use super::selector::name_of_selector;

/// A request.
#[derive(Clone, Debug)]
pub struct Asked {
    /// `get`, `list`, `watch`, `create`, or a method that has no verb here.
    pub verb: String,
    /// The resource, if the path leads to one that is served.
    pub resource: Option<&'static Resource>,
    /// The resource in the path.
    pub plural: String,
    pub subresource: Option<String>,
    pub namespace: Option<String>,
    /// The name in the path, or the only one that a field selector admits.
    pub name: Option<String>,
    pub path: String,
    pub query: Vec<(String, String)>,
    /// The query as it was written.
    pub raw_query: String,
    pub user: String,
    pub agent: String,
    pub accept: String,
    pub content_type: String,
    pub version: Version,
    /// The number of the connection it came on.
    pub connection: u64,
    /// The body, if it is JSON.
    pub body: Value,
}

impl Asked {
    pub fn parse(parts: &Parts, connection: u64) -> Self {
        let raw_query = parts.uri.query().unwrap_or_default().to_owned();
        let query = decode(&raw_query);
        let path = parts.uri.path().to_owned();
        let place = Place::parse(&path);
        let is_watch = query.iter().any(|(key, value)| key == "watch" && matches!(value.as_str(), "true" | "1"));
        let verb = match (&parts.method, &place.name) {
            (&Method::GET, Some(_)) => "get".to_owned(),
            (&Method::GET, None) if is_watch => "watch".to_owned(),
            (&Method::GET, None) => "list".to_owned(),
            (&Method::POST, _) => "create".to_owned(),
            (method, _) => method.as_str().to_lowercase(),
        };
        // A list or watch of one name is about that name, also for the authorizer.
        let selected = query.iter().find(|(key, _)| key == "fieldSelector");
        let selected = selected.and_then(|(_, selector)| name_of_selector(selector));
        let header = |name: &str| {
            let value = parts.headers.get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        Self {
            verb,
            resource: Resource::find(&place.group, &place.version, &place.plural),
            plural: place.plural,
            subresource: place.subresource,
            namespace: place.namespace,
            name: place.name.or(selected),
            path,
            query,
            raw_query,
            user: String::new(),
            agent: header("user-agent"),
            accept: header("accept"),
            content_type: header("content-type"),
            version: parts.version,
            connection,
            body: Value::Null,
        }
    }

    pub fn parameter(&self, key: &str) -> Option<&str> {
        self.query.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    pub fn is_set(&self, key: &str) -> bool {
        self.parameter(key).is_some_and(|value| matches!(value, "true" | "1"))
    }

    pub fn group(&self) -> &'static str {
        self.resource.map_or("", |resource| resource.group)
    }

    /// `serviceaccounts/token`.
    pub fn resource_and_subresource(&self) -> String {
        match &self.subresource {
            Some(subresource) => format!("{}/{subresource}", self.plural),
            None => self.plural.clone(),
        }
    }

    /// Its name in errors: `configmaps "app"`.
    pub fn title(&self) -> String {
        let resource =
            if self.group().is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group()) };
        match &self.name {
            Some(name) => format!("{resource} {name:?}"),
            None => resource,
        }
    }

    /// Whether the answer is to have the metadata of objects only.
    pub fn wants_metadata(&self) -> bool {
        self.accept.contains(";as=PartialObjectMetadata")
    }

    /// Whether it is a watch that is to begin with what there is.
    pub fn wants_initial_events(&self) -> bool {
        self.verb == "watch" && self.is_set("sendInitialEvents")
    }

    /// Whether it is this verb on this resource (and subresource).
    pub fn is(&self, verb: &str, resource: &str) -> bool {
        self.verb == verb && self.resource_and_subresource() == resource
    }
}

/// The parts of a path.
#[derive(Default)]
struct Place {
    group: String,
    version: String,
    namespace: Option<String>,
    plural: String,
    name: Option<String>,
    subresource: Option<String>,
}

impl Place {
    fn parse(path: &str) -> Self {
        let segments: Vec<String> = path.split('/').skip(1).map(decode_segment).collect();
        let (group, rest) = match segments.split_first() {
            Some((root, rest)) if root == "api" => (String::new(), rest),
            Some((root, [group, rest @ ..])) if root == "apis" => (group.clone(), rest),
            _ => return Self::default(),
        };
        let [version, rest @ ..] = rest else { return Self::default() };
        let (namespace, rest) = match rest {
            [namespaces, namespace, rest @ ..] if namespaces == "namespaces" && !rest.is_empty() => {
                (Some(namespace.clone()), rest)
            }
            rest => (None, rest),
        };
        let [plural, rest @ ..] = rest else { return Self::default() };
        let mut rest = rest.iter().cloned();
        let (name, subresource) = (rest.next(), rest.next());
        Self { group, version: version.clone(), namespace, plural: plural.clone(), name, subresource }
    }
}

fn decode(query: &str) -> Vec<(String, String)> {
    let url = Url::parse(&format!("https://server/?{query}")).expect("what came over HTTP is a query");
    url.query_pairs().into_owned().collect()
}

/// Percent-encoding only: a plus is a plus in a path.
fn decode_segment(segment: &str) -> String {
    decode(&format!("s={}", segment.replace('+', "%2B").replace('&', "%26"))).remove(0).1
}
