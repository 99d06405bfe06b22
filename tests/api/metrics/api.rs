//! Metrics of the requests to an API server.

use std::fs;
use std::time::{Duration, SystemTime};

use crate::api_server::{Answer, InitialEvents, Order};
use crate::common::*;
use crate::metrics::pods::volume;
use crate::rig::Rig;

const CONNECTED: &str = "podfs_source_connected";
const TROUBLED: &str = "podfs_source_objects_in_trouble";

#[test]
fn an_unreachable_server_is_reported_until_it_is_back() {
    let rig = Rig::of_config("1");
    let running = rig.run();
    rig.wait_watched("ConfigMap", "app");
    let scrape = rig.fixture.scrape();
    scrape.strictly();
    // The pod and its ConfigMap.
    let numbers = [CONNECTED, "podfs_source_objects", TROUBLED].map(|name| scrape.get(name, &[]));
    assert_eq!(numbers, [1.0, 2.0, 0.0]);
    rig.server.connections(Order::Refuse);
    running.wait_log("the API server is unreachable");
    rig.fixture.scrape_until(CONNECTED, &[], |connected| connected == 0.0);
    rig.server.connections(Order::Serve);
    let scrape = rig.fixture.scrape_until(CONNECTED, &[], |connected| connected == 1.0);
    assert_eq!(scrape.get(TROUBLED, &[]), 0.0);
    assert_eq!(scrape.get("podfs_volume_current", &volume("config")), 1.0);
}

#[test]
fn a_server_that_refuses_an_object_is_connected() {
    let rig = Rig::new("[{name: config, configMap: {name: app}}]");
    rig.put_config("1");
    rig.server.initial_events(InitialEvents::Refused);
    rig.server.fail_always("list", "configmaps", Answer::Error(500));
    let _running = rig.start();
    let scrape = rig.fixture.scrape_until(TROUBLED, &[], |troubled| troubled == 1.0);
    assert_eq!(scrape.get(CONNECTED, &[]), 1.0);
    rig.fixture.scrape_until("podfs_volumes", &[("state", "waiting")], |waiting| waiting == 1.0);
    rig.server.heal();
    rig.fixture.scrape_until(TROUBLED, &[], |troubled| troubled == 0.0);
}

#[test]
fn a_change_on_the_server_has_its_delay_in_the_metrics() {
    let rig = Rig::of_config("1");
    let running = rig.run();
    rig.wait_watched("ConfigMap", "app");
    rig.put_config("2");
    wait_content(&running.volume("config").join("key"), "2");
    let count = "podfs_propagation_seconds_count";
    let scrape = rig.fixture.scrape_until(count, &volume("config"), |count| count == 1.0);
    assert!(scrape.get("podfs_propagation_seconds_sum", &volume("config")) > 0.0);
}

#[test]
fn the_end_of_a_token_moves_when_it_is_replaced() {
    let volumes = "[{name: access, projected: {sources: [{serviceAccountToken: {path: token}}, \
        {serviceAccountToken: {path: vault, audience: vault, expirationSeconds: 7200}}]}}]";
    let rig = Rig::new(volumes);
    let account = "{apiVersion: v1, kind: ServiceAccount, metadata: {name: default, namespace: default}}";
    rig.server.put(account);
    rig.server.change_behaviour(|behaviour| behaviour.token_lifetime = Some(Duration::from_secs(6)));
    let running = rig.run();
    let token = fs::read_to_string(running.volume("access").join("token")).expect("a token");
    let end = "podfs_token_expiration_timestamp_seconds";
    let scrape = rig.fixture.scrape();
    let own = [("expiration_seconds", "3600")];
    let first = scrape.get(end, &own);
    let lifetime = first - SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_secs_f64();
    assert!((-20.0..7.0).contains(&lifetime), "{lifetime}");
    scrape.get(end, &[("audience", "vault"), ("expiration_seconds", "7200")]);
    rig.fixture.scrape_until(end, &own, |end| end > first);
    assert!(!scrape.0.contains(token.trim()), "a token is no label");
}

#[test]
fn pushed_tokens_and_objects_have_metrics_of_their_end_and_delay() {
    let fixture = Fixture::new(&pod("[{name: access, projected: {sources: [{serviceAccountToken: {path: token}}]}}]"));
    let mut command = fixture.command();
    command.arg("--push");
    let mut running = fixture.start_command(command);
    running.wait_log("failed to fetch token: it was not pushed");
    let uid = fixture.run_files().file_name().expect("a name").to_str().expect("a uid").to_owned();
    let push = |token: &str, end: &str| {
        let request = serde_json::json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"audiences": [], "expirationSeconds": 3600},
            "status": {"token": token, "expirationTimestamp": end},
        });
        fixture.write("push.json", &request.to_string());
        let file = fixture.path("push.json");
        let outcome = outcome::finish(fixture.operator("push").args(["--pod", &uid, "-f"]).arg(file));
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    };
    push("first", "2030-03-17T17:46:40Z");
    running.wait_ready();
    let end = "podfs_token_expiration_timestamp_seconds";
    let scrape = fixture.scrape_until(end, &[], |end| end == 1_900_000_000.0);
    assert_eq!(scrape.get("podfs_propagation_seconds_count", &volume("access")), 1.0);
    assert_eq!(scrape.find(CONNECTED, &[]), None, "podfs uses no API server");
    push("second", "2030-03-17T17:46:41Z");
    fixture.scrape_until(end, &[], |end| end == 1_900_000_001.0);
}
