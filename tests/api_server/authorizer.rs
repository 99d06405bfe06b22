//! Permissions: the rules for nodes, with the exact texts of refusals, and a test's rules for other users.
//!
//! A node reads the objects that its pods refer to, one object at a time. It may get, list and watch a ConfigMap or
//! Secret by its name; it may only get PersistentVolumeClaims, PersistentVolumes and VolumeAttachments. It may read
//! every CSIDriver.

use std::collections::BTreeSet;

use serde_json::Value;

use super::identity::{MASTERS, User};
use super::request::ApiRequest;
use super::status::Failure;
use super::store::{Key, Store};

/// The permissions of users other than nodes, and whether the server already knows the permissions of nodes.
#[derive(Default)]
pub struct Rules {
    rules: Vec<Rule>,
    /// A server that has just started does not know the pods of a node, nor the objects that they refer to.
    pub graph_is_empty: bool,
}

struct Rule {
    user: String,
    /// The only namespace of the rule; `None` if it holds in all of them.
    namespace: Option<String>,
    verbs: Vec<String>,
    resource: String,
}

impl Rules {
    /// Permits a user these verbs on a resource (such as `serviceaccounts/token`) in this namespace, or in all of them.
    pub fn permit(&mut self, user: &str, namespace: Option<&str>, verbs: &[&str], resource: &str) {
        let verbs = verbs.iter().map(|verb| (*verb).to_owned()).collect();
        let (user, namespace) = (user.to_owned(), namespace.map(str::to_owned));
        self.rules.push(Rule { user, namespace, verbs, resource: resource.to_owned() });
    }

    /// Removes all permissions of a user.
    pub fn forbid(&mut self, user: &str) {
        self.rules.retain(|rule| rule.user != user);
    }

    pub fn check(&self, store: &Store, user: &User, request: &ApiRequest) -> Result<(), Failure> {
        let resource = request.resource_and_subresource();
        let permits = |rule: &Rule| {
            rule.user == user.name
                && rule.resource == resource
                && rule.verbs.contains(&request.verb)
                && (rule.namespace.is_none() || rule.namespace == request.namespace)
        };
        if user.is_in(MASTERS) || self.rules.iter().any(permits) {
            return Ok(());
        }
        let reason = match user.as_node() {
            Some(node) => self.node_may(store, node, request),
            None => Err(String::new()),
        };
        reason.map_err(|reason| Failure::forbidden(request, &user.name, &reason))
    }

    fn node_may(&self, store: &Store, node: &str, request: &ApiRequest) -> Result<(), String> {
        let (verb, subresource) = (request.verb.as_str(), request.subresource.as_deref());
        let is_read = matches!(verb, "get" | "list" | "watch");
        match (request.plural.as_str(), subresource) {
            ("configmaps" | "secrets", None) => {
                if !is_read {
                    return Err("can only read resources of this type".to_owned());
                }
                if request.namespace.is_none() {
                    return Err("can only read namespaced object of this type".to_owned());
                }
                self.is_related(store, node, request)
            }
            ("persistentvolumeclaims" | "persistentvolumes" | "volumeattachments", None) => {
                if verb != "get" {
                    return Err("can only get individual resources of this type".to_owned());
                }
                self.is_related(store, node, request)
            }
            ("persistentvolumeclaims", Some("status")) if matches!(verb, "get" | "update" | "patch") => {
                self.is_related(store, node, request)
            }
            ("serviceaccounts", _) => {
                if verb == "get" && subresource.is_none() {
                    return self.is_related(store, node, request);
                }
                if verb != "create" || request.name.is_none() {
                    return Err("can only create tokens for individual service accounts".to_owned());
                }
                if subresource != Some("token") {
                    return Err("can only create token subresource of serviceaccount".to_owned());
                }
                self.is_related(store, node, request)
            }
            ("pods", None) if verb == "get" => self.is_related(store, node, request),
            ("pods", None) if is_read => {
                let selector = request.parameter("fieldSelector").unwrap_or_default();
                let selects_node = [format!("spec.nodeName={node}"), format!("spec.nodeName=={node}")];
                if selector.split(',').any(|term| selects_node.iter().any(|selects_node| selects_node == term)) {
                    return Ok(());
                }
                if request.name.is_none() {
                    return Err("can only list/watch pods with spec.nodeName field selector".to_owned());
                }
                self.is_related(store, node, request)
            }
            ("nodes", None) if is_read => match request.name.as_deref() {
                Some(name) if name == node => Ok(()),
                Some(name) => Err(format!("node '{node}' cannot read '{name}', only its own Node object")),
                None => Err(format!("node '{node}' cannot read all nodes, only its own Node object")),
            },
            ("csinodes", None) if matches!(verb, "get" | "create" | "update" | "patch" | "delete") => {
                // A create request has no name in its path, so the name of the object decides.
                let name = request.name.as_deref().or(request.body["metadata"]["name"].as_str());
                match name == Some(node) {
                    true => Ok(()),
                    false => Err(format!("can only access CSINode with the same name as the requesting node {node}")),
                }
            }
            ("nodes", Some("status")) if verb == "patch" && request.name.as_deref() == Some(node) => Ok(()),
            ("events", None) if matches!(verb, "create" | "patch" | "update") => Ok(()),
            // A real server checks the pod in its admission; this server does not check it.
            ("podcertificaterequests", None) if verb == "create" && request.body["spec"]["nodeName"] == node => Ok(()),
            ("podcertificaterequests", None) if verb == "get" => self.is_related(store, node, request),
            ("clustertrustbundles" | "csidrivers", None) if is_read => Ok(()),
            _ => Err(String::new()),
        }
    }

    fn is_related(&self, store: &Store, node: &str, request: &ApiRequest) -> Result<(), String> {
        let Some(name) = request.name.as_deref() else { return Err("No Object name found".to_owned()) };
        let namespace = request.namespace.as_deref().unwrap_or_default();
        let attachment = || store.get(&Key::new("volumeattachments", "", name));
        let bound = store.of("pods").filter(|(_, pod)| pod["spec"]["nodeName"] == node);
        let related = bound.into_iter().any(|(key, pod)| match request.plural.as_str() {
            "pods" => key.namespace == namespace && key.name == name,
            "persistentvolumes" => {
                claims(key, pod).iter().any(|claim| is_volume_of(store, &key.namespace, claim, name))
            }
            "persistentvolumeclaims" => key.namespace == namespace && claims(key, pod).contains(name),
            "podcertificaterequests" => {
                let request = store.get(&Key::new("podcertificaterequests", namespace, name));
                request.is_some_and(|request| request["spec"]["podUID"] == pod["metadata"]["uid"])
            }
            "secrets" if has_secret(store, key, pod, namespace, name) => true,
            plural => key.namespace == namespace && names(plural, pod).contains(name),
        }) || request.plural == "volumeattachments"
            && attachment().is_some_and(|attachment| attachment["spec"]["nodeName"] == node);
        if related && !self.graph_is_empty {
            Ok(())
        } else {
            Err(format!("no relationship found between node '{node}' and this object"))
        }
    }
}

/// Whether the `claimRef` of a PersistentVolume names this claim.
fn is_volume_of(store: &Store, namespace: &str, claim: &str, volume: &str) -> bool {
    let volume = store.get(&Key::new("persistentvolumes", "", volume));
    volume.is_some_and(|volume| {
        let reference = &volume["spec"]["claimRef"];
        reference["namespace"] == namespace && reference["name"] == claim
    })
}

/// Whether a PersistentVolume of one of the pod's claims names this Secret for its CSI driver.
fn has_secret(store: &Store, key: &Key, pod: &Value, namespace: &str, name: &str) -> bool {
    let claims = claims(key, pod);
    let is_claimed = |volume: &Value| {
        let reference = &volume["spec"]["claimRef"];
        reference["namespace"] == *key.namespace && claims.iter().any(|claim| reference["name"] == **claim)
    };
    let volumes = store.of("persistentvolumes").filter(|(_, volume)| is_claimed(volume));
    let secrets = ["nodeStageSecretRef", "nodePublishSecretRef", "nodeExpandSecretRef"];
    volumes.into_iter().any(|(_, volume)| {
        let mut named = secrets.iter().map(|field| &volume["spec"]["csi"][*field]);
        named.any(|secret| secret["name"] == name && secret["namespace"] == namespace)
    })
}

/// The names of the PersistentVolumeClaims of a pod's volumes.
fn claims(key: &Key, pod: &Value) -> BTreeSet<String> {
    let volumes = pod["spec"]["volumes"].as_array().into_iter().flatten();
    volumes
        .filter_map(|volume| match &volume["persistentVolumeClaim"]["claimName"] {
            Value::String(claim) => Some(claim.clone()),
            _ if volume["ephemeral"].is_object() => Some(format!("{}-{}", key.name, volume["name"].as_str()?)),
            _ => None,
        })
        .collect()
}

/// The names of the objects of a resource that any part of a pod's specification refers to.
fn names(plural: &str, pod: &Value) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    match plural {
        "configmaps" => refer(&pod["spec"], &["configMap", "configMapRef", "configMapKeyRef"], &mut names),
        "secrets" => refer(
            &pod["spec"],
            &["secret", "secretRef", "secretKeyRef", "imagePullSecrets", "nodePublishSecretRef"],
            &mut names,
        ),
        _ => names.extend(pod["spec"]["serviceAccountName"].as_str().map(str::to_owned)),
    }
    names
}

/// Adds the names in all fields of `value` that are called as one of `reference_fields`, at any depth.
fn refer(value: &Value, reference_fields: &[&str], names: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                if reference_fields.contains(&field.as_str()) {
                    let name =
                        |value: &Value| value["secretName"].as_str().or(value["name"].as_str()).map(str::to_owned);
                    names.extend(name(value));
                    names.extend(value.as_array().into_iter().flatten().filter_map(name));
                }
                refer(value, reference_fields, names);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| refer(value, reference_fields, names)),
        _ => {}
    }
}
