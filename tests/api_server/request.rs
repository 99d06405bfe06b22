//! Requests as an API server understands them: it turns the method and the path into a verb on a resource.

use axum::http::request::Parts;
use axum::http::{Method, Version};
use reqwest::Url;
use serde_json::Value;

use super::resources::Resource;
use super::selector::name_of_selector;

/// A request.
#[derive(Clone, Debug)]
pub struct ApiRequest {
    /// `get`, `list`, `watch`, `create`, or the method in lower case.
    pub verb: String,
    /// The resource, if the path leads to one that is served.
    pub resource: Option<&'static Resource>,
    /// The resource in the path.
    pub plural: String,
    pub subresource: Option<String>,
    pub namespace: Option<String>,
    /// The name in the path, or the only name that the field selector admits.
    pub name: Option<String>,
    pub path: String,
    pub query: Vec<(String, String)>,
    /// The query before it is decoded.
    pub raw_query: String,
    pub user: String,
    pub agent: String,
    pub accept: String,
    pub content_type: String,
    pub version: Version,
    /// The number of the connection that carried the request.
    pub connection: u64,
    /// The body, if it is JSON.
    pub body: Value,
}

impl ApiRequest {
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
        // As in a real server, a list or watch that selects one name is a request for that name, also to the
        // authorizer.
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

    /// For example `serviceaccounts/token`.
    pub fn resource_and_subresource(&self) -> String {
        match &self.subresource {
            Some(subresource) => format!("{}/{subresource}", self.plural),
            None => self.plural.clone(),
        }
    }

    /// The resource and the name, as errors name them: `configmaps "app"`.
    pub fn title(&self) -> String {
        let resource =
            if self.group().is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group()) };
        match &self.name {
            Some(name) => format!("{resource} {name:?}"),
            None => resource,
        }
    }

    /// Whether the client wants only the metadata of the objects.
    pub fn wants_metadata(&self) -> bool {
        self.accept.contains(";as=PartialObjectMetadata")
    }

    /// Whether the request is for a watch that begins with the existing objects.
    pub fn wants_initial_events(&self) -> bool {
        self.verb == "watch" && self.is_set("sendInitialEvents")
    }

    /// Whether the request is this verb on this resource (and subresource).
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
        let (group, after_group) = match segments.split_first() {
            Some((root, segments)) if root == "api" => (String::new(), segments),
            Some((root, [group, segments @ ..])) if root == "apis" => (group.clone(), segments),
            _ => return Self::default(),
        };
        let [version, after_version @ ..] = after_group else { return Self::default() };
        let (namespace, after_namespace) = match after_version {
            [namespaces, namespace, segments @ ..] if namespaces == "namespaces" && !segments.is_empty() => {
                (Some(namespace.clone()), segments)
            }
            segments => (None, segments),
        };
        let [plural, after_plural @ ..] = after_namespace else { return Self::default() };
        let mut names = after_plural.iter().cloned();
        let (name, subresource) = (names.next(), names.next());
        Self { group, version: version.clone(), namespace, plural: plural.clone(), name, subresource }
    }
}

fn decode(query: &str) -> Vec<(String, String)> {
    let url = Url::parse(&format!("https://server/?{query}")).expect("the HTTP library has checked the query");
    url.query_pairs().into_owned().collect()
}

/// Decodes percent-encoding only: in a path, unlike a query, `+` is no space.
fn decode_segment(segment: &str) -> String {
    decode(&format!("s={}", segment.replace('+', "%2B").replace('&', "%26"))).remove(0).1
}
