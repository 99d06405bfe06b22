//! Refusals of podfs: one sentence, and exit code 2, or 1 if a restart of podfs may help.

use std::process::Command;
use std::time::Duration;

use crate::api_server::{Answer, InitialEvents, MASTERS, Style, User};
use crate::common::outcome::{finish, finish_within};
use crate::common::*;
use crate::rig::Rig;

#[track_caller]
fn assert_refused(rig: &Rig, command: &mut Command, parts: &[&str]) {
    finish(command).says(2, parts);
    assert!(rig.fixture.mounts().is_empty());
}

#[test]
fn a_pod_that_is_not_there_is_refused() {
    let rig = Rig::of_config("1");
    let user = User::new("admin", MASTERS);
    let kubeconfig = rig.server.kubeconfig_of(&user, Style::Embedded);
    let mut command = rig.bare_command();
    command.args(["--pod-name", "default/nobody", "--kubeconfig"]).arg(kubeconfig);
    assert_refused(&rig, &mut command, &[r#"pods "nobody" not found in namespace "default""#]);
}

#[test]
fn a_pod_of_another_node_is_refused() {
    let rig = Rig::of_config("1");
    let kubeconfig = rig.server.kubeconfig_of(&User::new("admin", MASTERS), Style::Embedded);
    let mut command = rig.bare_command();
    command.args(["--pod-name", "default/web", "--node-name", "n2", "--kubeconfig"]).arg(kubeconfig);
    assert_refused(&rig, &mut command, &[r#"pod default/web is on node "n1", not on "n2""#]);
    // With the credentials of the other node, podfs may not even read the pod.
    let kubeconfig = rig.server.kubeconfig("n2", Style::Embedded);
    let mut command = rig.bare_command();
    command.args(["--pod-name", "default/web", "--kubeconfig"]).arg(kubeconfig);
    let parts = [
        r#"pods "web" is forbidden: User "system:node:n2" cannot watch resource "pods""#,
        "no relationship found between node 'n2' and this object",
    ];
    // The authorizer of a new server does not know the objects of a node's pods yet: podfs waits for half a minute.
    finish_within(&mut command, Duration::from_secs(90)).says(2, &parts);
    assert!(rig.fixture.mounts().is_empty());
}

#[test]
fn podfs_waits_for_a_right_that_comes_a_few_seconds_late() {
    let mut rig = Rig::of_config("1");
    let user = User::new("somebody", "people");
    rig.kubeconfig = rig.server.kubeconfig_of(&user, Style::Token);
    let mut running = rig.start();
    // podfs sends so many requests in the first 5 s.
    eventually("podfs has tried again and again", || rig.server.requests().len() > 18);
    rig.server.permit(&user, &["list", "watch"], "pods");
    rig.server.permit(&user, &["list", "watch"], "configmaps");
    running.wait_ready();
}

#[test]
fn a_server_of_another_authority_is_refused() {
    let mut rig = Rig::of_config("1");
    rig.kubeconfig = rig.server.kubeconfig("n1", Style::OtherAuthority);
    finish(&mut rig.command()).says(1, &["not signed by the certificate authority of the settings"]);
}

#[test]
fn credentials_that_are_not_known_are_refused() {
    let mut rig = Rig::of_config("1");
    rig.kubeconfig = rig.server.kubeconfig("n1", Style::ExpiredCertificate);
    assert_refused(&rig, &mut rig.command(), &["pod default/web", "Unauthorized", "401"]);
}

#[test]
fn a_server_that_is_none_is_refused() {
    let rig = Rig::of_config("1");
    rig.server.initial_events(InitialEvents::Refused);
    rig.server.fail_always("list", "pods", Answer::Html);
    finish(&mut rig.command()).says(1, &["pod default/web", "that is no API server"]);
}

#[test]
fn a_missing_kubeconfig_is_named() {
    let mut rig = Rig::of_config("1");
    rig.kubeconfig = "/nowhere/config".into();
    assert_refused(&rig, &mut rig.command(), &["/nowhere/config: the kubeconfig cannot be read"]);
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    let rig = Rig::of_config("1");
    let mut command = rig.bare_command();
    assert_refused(&rig, command.args(["--pod-name", "default/web"]), &["give --kubeconfig or --in-cluster"]);
    let mut command = rig.bare_command();
    command.args(["--pod-name", "default/web", "--in-cluster"]).env_remove("KUBERNETES_SERVICE_HOST");
    assert_refused(&rig, &mut command, &["KUBERNETES_SERVICE_HOST is not set"]);
}

#[test]
fn podfs_names_a_missing_permission_and_waits_for_it() {
    let mut rig = Rig::of_config("1");
    let user = User::new("somebody", "people");
    rig.kubeconfig = rig.server.kubeconfig_of(&user, Style::Token);
    rig.server.permit(&user, &["list", "watch"], "pods");
    let mut running = rig.start();
    let sentence = r#"configmaps "app" is forbidden: User "somebody" cannot watch resource "configmaps" in API group "" in the namespace "default""#;
    running.wait_log(sentence);
    eventually("the reason of the volume says so", || {
        rig.reason("config").is_some_and(|reason| reason.contains(sentence))
    });
    rig.server.permit(&user, &["list", "watch"], "configmaps");
    running.wait_ready();
    // Objects that podfs may not read any more keep their content (MG-06). podfs also continues if it may not post
    // events.
    rig.server.forbid(&user);
    rig.server.connections(crate::api_server::Order::Break);
    running.wait_log_times("is forbidden", 2);
    wait_content(&running.volume("config").join("key"), "1");
}
