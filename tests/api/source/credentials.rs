//! All kinds of credentials, and credentials that change while podfs runs.

use serde_json::Value;

use crate::api_server::{ApiRequest, Order, Presents, Style, User};
use crate::common::outcome::finish;
use crate::common::*;
use crate::rig::{NODE, Rig};

const VOLUMES: &str = "[{name: config, configMap: {name: app}}]";

#[test]
fn every_way_of_a_kubeconfig_leads_to_the_server() {
    for style in [Style::Embedded, Style::Files, Style::Token, Style::TokenFile, Style::Exec] {
        let rig = Rig::with_style(VOLUMES, style);
        rig.put_config("1");
        let running = rig.run();
        wait_content(&running.volume("config").join("key"), "1");
        let is_of_node = |request: &ApiRequest| request.user == format!("system:node:{NODE}");
        assert!(rig.server.requests().iter().all(is_of_node), "{style:?}");
    }
}

#[test]
fn a_token_file_is_read_again_when_the_server_does_not_know_its_token_any_more() {
    let rig = Rig::with_style(VOLUMES, Style::TokenFile);
    rig.put_config("1");
    let running = rig.run();
    let file = running.volume("config").join("key");
    rig.wait_watched("ConfigMap", "app");
    rig.server.renew_token_file(&User::node(NODE));
    rig.server.connections(Order::Break);
    rig.put_config("2");
    wait_content(&file, "2");
}

#[test]
fn client_certificates_in_files_are_read_again() {
    let rig = Rig::with_style(VOLUMES, Style::Files);
    rig.put_config("1");
    let running = rig.run();
    let file = running.volume("config").join("key");
    rig.wait_watched("ConfigMap", "app");
    let stem = format!("system-node-{NODE}");
    let certificate = |until| rig.server.client_certificate(&User::node(NODE), until);
    let write = |pair: crate::api_server::Pair| {
        rig.server.write(&format!("{stem}.crt"), &pair.certificate);
        rig.server.write(&format!("{stem}.key"), &pair.key);
    };
    let (now, hour) = (std::time::SystemTime::now(), std::time::Duration::from_secs(3600));
    write(certificate(now - hour));
    rig.server.connections(Order::Break);
    running.wait_log("Unauthorized");
    write(certificate(now + hour));
    rig.put_config("2");
    wait_content(&file, "2");
}

#[test]
fn a_program_is_run_again_when_the_server_does_not_know_its_token_any_more() {
    let rig = Rig::with_style(VOLUMES, Style::Exec);
    rig.put_config("1");
    let running = rig.run();
    let file = running.volume("config").join("key");
    rig.wait_watched("ConfigMap", "app");
    assert_eq!(rig.server.program_runs(), 1);
    rig.server.renew_token_file(&User::node(NODE));
    rig.server.connections(Order::Break);
    rig.put_config("2");
    wait_content(&file, "2");
    assert_eq!(rig.server.program_runs(), 2);
}

#[test]
fn a_server_at_a_loopback_address_may_be_spoken_to_without_tls() {
    let mut rig = Rig::with_style(VOLUMES, Style::Token);
    rig.put_config("1");
    let url = rig.server.plain_url();
    rig.edit_cluster(|cluster| *cluster = serde_json::json!({"server": url}));
    let running = rig.run();
    let file = running.volume("config").join("key");
    wait_content(&file, "1");
    rig.wait_watched("ConfigMap", "app");
    rig.put_config("2");
    wait_content(&file, "2");
    rig.server.connections(Order::Break);
    rig.put_config("3");
    wait_content(&file, "3");
}

/// Makes the kubeconfig name this certificate as the server's authority.
fn trust(rig: &mut Rig, certificate: &str) {
    let authority = rig.server.write("authority.crt", certificate);
    rig.edit_cluster(|cluster| {
        cluster.as_object_mut().expect("fields").remove("certificate-authority-data");
        cluster["certificate-authority"] = authority.to_str().into();
    });
}

#[test]
fn a_server_that_made_its_own_certificate_is_known_by_it_and_by_no_other() {
    let mut rig = Rig::with_style(VOLUMES, Style::Token);
    rig.put_config("1");
    let of_another = rig.server.present_self_signed();
    let certificate = rig.server.present_self_signed();
    trust(&mut rig, &of_another);
    let sentence = "its certificate is not signed by the certificate authority of the settings";
    finish(&mut rig.command()).says(1, &[sentence]);
    trust(&mut rig, &certificate);
    let running = rig.run();
    wait_content(&running.volume("config").join("key"), "1");
    drop(running);
    rig.fixture.kill_all();
    rig.edit_cluster(|cluster| cluster["tls-server-name"] = "elsewhere.example".into());
    finish(&mut rig.command()).says(1, &["its certificate is for another name"]);
}

#[test]
fn a_server_may_go_by_another_name_or_by_none() {
    type Edit = fn(&mut Value);
    let rows: [(Presents, Edit); 2] = [
        (Presents::OtherName, |cluster| cluster["tls-server-name"] = "elsewhere.example".into()),
        (Presents::OtherAuthority, |cluster| {
            cluster.as_object_mut().expect("fields").remove("certificate-authority-data");
            cluster["insecure-skip-tls-verify"] = true.into();
        }),
    ];
    for (presents, edit) in rows {
        let mut rig = Rig::of_config("1");
        rig.server.present(presents);
        let plain = rig.command();
        rig.edit_cluster(edit);
        finish(&mut { plain }).says(1, &["the server is not the one expected"]);
        let running = rig.run();
        wait_content(&running.volume("config").join("key"), "1");
    }
}
