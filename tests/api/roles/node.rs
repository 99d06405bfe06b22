//! `podfs node` as the volume manager of a node, with the service account of `packaging/examples/rbac/node.yaml`. The tests of
//! `--register-csi-drivers` and `--discover` use their roles, too.

use std::process::Command;

use serde_json::{Value, json};

use super::volumes::{VOLUMES, put_objects, put_pod};
use super::{Account, Permissions, create, objects_of};
use crate::api_server::{ApiServer, InitialEvents, Style};
use crate::common::node::Node;
use crate::common::{config_map, eventually, wait_content};
use crate::rig::NODE;
use crate::signer::Signer;

/// The account of `node.yaml`, with the rights of further files of the same directory.
pub fn account(server: &ApiServer, more: &[&str]) -> Account {
    for file in [&["node.yaml"], more].concat() {
        create(server, objects_of(&format!("examples/rbac/{file}")));
    }
    Account::bind(server, "podfs-node", "podfs-node")
}

/// `podfs node` with the token of an account.
fn command(node: &Node, server: &ApiServer, account: &Account) -> Command {
    let mut command = node.bare_command();
    command.arg("--kubeconfig").arg(server.kubeconfig_of(&account.user, Style::Token)).args(["--node-name", NODE]);
    command
}

#[test]
fn the_role_for_podfs_node_allows_exactly_its_requests_for_volumes_of_every_kind() {
    let (server, node, signer) = (ApiServer::start(), Node::new(), Signer::new());
    let account = account(&server, &[]);
    let _driver = put_objects(&server, &node.fixture.path("root"), &node.fixture.path("source"));
    put_pod(&server, VOLUMES, &json!({}));
    let daemon = node.start_command(command(&node, &server, &account));
    let is_posted =
        |event: &Value| event["message"].as_str().is_some_and(|message| message.contains("\"late\" not found"));
    eventually("an event reports the missing object", || server.objects("Event").iter().any(is_posted));
    signer.issue(&server, signer.next(&server), 3600, 7200);
    eventually("the new size is recorded", || server.count("patch", "persistentvolumeclaims/status") > 0);
    drop(daemon);
    let mut used: Permissions = account.used(&server);

    // A server without initial events gets list requests. The next daemon adds to the event of the earlier one.
    server.initial_events(InitialEvents::Refused);
    let daemon = node.start_command(command(&node, &server, &account));
    eventually("the event is counted", || server.count("patch", "events") > 0);
    server.put(&config_map("late", &[("key", "there")]));
    signer.issue(&server, signer.next(&server), 3600, 7200);
    node.expect(&["wait", "default/web"]);
    for (volume, file, content) in [("config", "key", "1"), ("late", "key", "there"), ("all", "cpu", "2000")] {
        wait_content(&node.path("web", volume).join(file), content);
    }
    used.extend(account.used(&server));
    account.assert_exact(&used);
    let log = node.log();
    assert!(!log.contains("orbidden"), "{log}");
    server.assert_conventions();
    drop(daemon);
}

#[test]
fn the_role_for_the_volumes_in_use_allows_exactly_what_the_option_adds() {
    let (server, node) = (ApiServer::start(), Node::new());
    let account = account(&server, &["volumes-in-use.yaml"]);
    server.put_value(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE},
        "status": {"volumesInUse": ["kubernetes.io/stale/x"]}}));
    let mut command = command(&node, &server, &account);
    command.arg("--report-volumes-in-use");
    let daemon = node.start_command(command);
    eventually("what is in use is reported", || {
        let object = server.object("Node", "", NODE).expect("the Node");
        object["status"]["volumesInUse"].as_array().is_some_and(Vec::is_empty)
    });
    account.assert_suffices(&server);
    let added = super::permissions_in("examples/rbac/volumes-in-use.yaml", "podfs-volumes-in-use");
    let unused: Vec<_> = added.difference(&account.used(&server)).cloned().collect();
    assert_eq!(unused, [] as [&str; 0], "permissions that podfs does not need");
    drop(daemon);
}

/// Gives the account of the node the rights of the role in a file that has no binding, as its operator does.
pub fn bind_role(server: &ApiServer, role: &str) {
    let binding: Value = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": role},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": "podfs-node", "namespace": "podfs-node"}],
    });
    server.put_value(binding);
}
