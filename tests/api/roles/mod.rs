//! The roles that podfs ships: an account with exactly the rules of a mode runs podfs in this mode, with volumes of every kind for
//! which podfs sends requests. The rules must be the same as the permissions that these requests need: none may be refused, and no
//! rule may be without a request.

mod beside_kubelet;
mod manifests;
pub mod node;
mod run;
mod volumes;

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};

use crate::api_server::{ApiServer, User};
use crate::common::chart::yaml;
use crate::common::packages::top;

/// Permissions: a verb and a resource each, such as `get storage.k8s.io/csinodes`.
pub type Permissions = BTreeSet<String>;

/// The objects of a file of `packaging`.
pub fn objects_of(file: &str) -> Vec<Value> {
    yaml(&fs::read_to_string(top().join("packaging").join(file)).unwrap_or_else(|error| panic!("{file}: {error}")))
}

/// Creates the objects in their order.
pub fn create(server: &ApiServer, objects: Vec<Value>) {
    for object in objects {
        server.put_value(object);
    }
}

/// The permissions that a rule of a role gives.
fn permissions_of_rule(rule: &Value) -> Permissions {
    let words = |field: &str| -> Vec<String> {
        let list = rule[field].as_array().unwrap_or_else(|| panic!("{rule} has no {field}"));
        list.iter().map(|word| word.as_str().expect("a word").to_owned()).collect()
    };
    let mut permissions = Permissions::new();
    for group in words("apiGroups") {
        for resource in words("resources") {
            permissions.extend(words("verbs").iter().map(|verb| permission(verb, &group, &resource)));
        }
    }
    permissions
}

fn permission(verb: &str, group: &str, resource: &str) -> String {
    let separator = if group.is_empty() { "" } else { "/" };
    format!("{verb} {group}{separator}{resource}")
}

/// The permissions that a ClusterRole gives.
fn permissions_of_role(role: &Value) -> Permissions {
    role["rules"].as_array().expect("rules").iter().flat_map(permissions_of_rule).collect()
}

/// A service account with the permissions of its bindings.
pub struct Account {
    pub user: User,
    /// The permissions of all its bindings.
    pub allowed: Permissions,
}

impl Account {
    /// Gives the account what the bindings in the server say, in the namespaces that they say.
    pub fn bind(server: &ApiServer, namespace: &str, name: &str) -> Account {
        let account = server.object("ServiceAccount", namespace, name);
        assert!(account.is_some(), "there is no account {namespace}/{name}");
        let user = User::new(&format!("system:serviceaccount:{namespace}:{name}"), "system:serviceaccounts");
        let subject = json!({"kind": "ServiceAccount", "name": name, "namespace": namespace});
        let mut allowed = Permissions::new();
        for kind in ["ClusterRoleBinding", "RoleBinding"] {
            for binding in server.objects(kind) {
                if !binding["subjects"].as_array().expect("subjects").contains(&subject) {
                    continue;
                }
                let role = binding["roleRef"]["name"].as_str().expect("a role");
                let role = server.object("ClusterRole", "", role).unwrap_or_else(|| panic!("there is no role {role}"));
                for permission in permissions_of_role(&role) {
                    let (verb, resource) = permission.split_once(' ').expect("a verb and a resource");
                    let resource = in_path(resource);
                    match binding["metadata"]["namespace"].as_str() {
                        Some(namespace) => server.permit_in(&user, namespace, &[verb], resource),
                        None => server.permit(&user, &[verb], resource),
                    }
                    allowed.insert(permission);
                }
            }
        }
        Account { user, allowed }
    }

    /// The permissions that the requests of this account needed.
    pub fn used(&self, server: &ApiServer) -> Permissions {
        used_by(server, &self.user)
    }

    /// Checks that no request needed more than the account has.
    #[track_caller]
    pub fn assert_suffices(&self, server: &ApiServer) {
        let missing: Vec<_> = self.used(server).difference(&self.allowed).cloned().collect();
        assert_eq!(missing, [] as [&str; 0], "{} lacks permissions for requests of podfs", self.user.name);
    }

    /// Checks that each permission was needed, and that no other was.
    #[track_caller]
    pub fn assert_exact(&self, used: &Permissions) {
        let missing: Vec<_> = used.difference(&self.allowed).collect();
        let unused: Vec<_> = self.allowed.difference(used).collect();
        assert!(
            missing.is_empty() && unused.is_empty(),
            "the roles of {} lack {missing:?}, and podfs does not need {unused:?}",
            self.user.name
        );
    }
}

/// The permissions that the requests of a user needed.
pub fn used_by(server: &ApiServer, user: &User) -> Permissions {
    let requests = server.requests().into_iter().filter(|request| request.user == user.name);
    requests.map(|request| permission(&request.verb, request.group(), &request.resource_and_subresource())).collect()
}

/// The permissions that the rules of a ClusterRole of a file give.
pub fn permissions_in(file: &str, role: &str) -> Permissions {
    let roles = objects_of(file).into_iter().filter(|object| object["kind"] == "ClusterRole");
    let role = roles.into_iter().find(|object| object["metadata"]["name"] == role);
    permissions_of_role(&role.unwrap_or_else(|| panic!("{file} has no such role")))
}

/// The resource without its group: `serviceaccounts/token`, `csinodes`.
fn in_path(resource: &str) -> &str {
    match resource.split_once('/') {
        Some((group, resource)) if group.contains('.') => resource,
        _ => resource,
    }
}
