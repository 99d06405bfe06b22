//! Metrics over HTTP: of one pod, and of the node.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;

use crate::common::builds::{Builds, upgrade};
use crate::common::*;
use crate::metrics::pods::of_config;
use crate::metrics::scrape::{Scrape, check_text};

/// The address of the metrics, from the log of podfs.
#[track_caller]
fn address(running: &Running) -> SocketAddr {
    running.wait_log("/metrics");
    let log = running.log();
    let address = log.split("http://").nth(1).and_then(|url| url.split("/metrics").next());
    address.expect("an address").parse().expect("an address")
}

/// Sends a text to the server. Returns everything that the server sends until it closes the connection.
#[track_caller]
fn exchange(address: SocketAddr, text: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("a connection");
    stream.set_read_timeout(Some(TIMEOUT)).expect("a time limit");
    stream.write_all(text.as_bytes()).expect("written");
    let mut answer = Vec::new();
    // podfs closes the connection of a client that sends too much.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).expect("text")
}

/// The status line and headers of the answer, in lower case, and its body.
#[track_caller]
fn ask(address: SocketAddr, request: &str, headers: &str) -> (String, String) {
    let answer = exchange(address, &format!("{request} HTTP/1.1\r\nHost: podfs\r\nConnection: close\r\n{headers}\r\n"));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer}"));
    (head.to_ascii_lowercase(), body.to_owned())
}

/// A `podfs run` that serves its metrics, too.
fn with_metrics(fixture: &Fixture, program: &Path, address: &str) -> Command {
    let mut command = fixture.command_of(program);
    command.args(["--metrics-addr", address]);
    command
}

/// The exporter of all pods.
fn exporter(fixture: &Fixture) -> Running {
    fixture.spawn(fixture.operator("metrics").args(["--all", "--metrics-addr", "127.0.0.1:0"]))
}

#[test]
fn a_pod_serves_its_metrics_in_the_requested_format() {
    let fixture = of_config();
    let mut running = fixture.start_command(with_metrics(&fixture, Path::new(PODFS), "127.0.0.1:0"));
    running.wait_ready();
    let address = address(&running);
    let (head, text) = ask(address, "GET /metrics", "");
    assert!(head.starts_with("http/1.1 200") && head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    check_text(&text);
    let (head, text) = ask(address, "GET /metrics", "Accept: application/openmetrics-text; version=1.0.0\r\n");
    assert!(head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
    let scrape = Scrape(text);
    scrape.strictly();
    assert_eq!(scrape.get("podfs_up", &[]), 1.0);
    let (head, body) = ask(address, "HEAD /metrics", "");
    assert!(head.starts_with("http/1.1 200") && body.is_empty(), "{head}");
    let (head, body) = ask(address, "POST /metrics", "Content-Length: 0\r\n");
    assert!(head.starts_with("http/1.1 405") && head.contains("allow: get, head"), "{head}");
    assert_eq!(body, "metrics can only be read: GET /metrics\n");
    assert!(ask(address, "GET /", "").0.starts_with("http/1.1 404"));
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn one_address_serves_all_pods_of_the_node_those_that_come_later_too() {
    let fixture = of_config();
    let mut exporter = exporter(&fixture);
    let address = address(&exporter);
    let pods = || {
        let (head, text) = ask(address, "GET /metrics", "");
        assert!(head.starts_with("http/1.1 200"), "{head}");
        check_text(&text);
        ["web", "db"].map(|pod| Scrape(text.clone()).find("podfs_up", &[("pod", pod)]))
    };
    assert_eq!(pods(), [None, None]);
    let _web = fixture.run();
    fixture.write("pod.yaml", &config_pod().replace("name: web, labels", "name: db, labels"));
    let mut db = fixture.run();
    assert_eq!(pods(), [Some(1.0), Some(1.0)]);
    assert!(db.stop().success());
    assert_eq!(pods(), [Some(1.0), None]);
    exporter.signal(Signal::SIGTERM);
    assert_eq!(exporter.wait().code(), Some(0));
}

#[test]
fn a_taken_address_is_reported_before_anything_is_mounted() {
    let fixture = of_config();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let parts = [&*format!("cannot serve metrics at {address}: Address already in use"), "--metrics-addr"];
    let outcome = fixture.refused(&mut with_metrics(&fixture, Path::new(PODFS), &address));
    outcome.says(1, &parts);
    fixture.assert_nothing_left();
    fixture.metrics(&["--all", "--metrics-addr", &address]).says(1, &parts);
    let outcome = fixture.refused(&mut with_metrics(&fixture, Path::new(PODFS), "nowhere"));
    assert_eq!(outcome.code, Some(2), "{}", outcome.stderr);
}

#[test]
fn a_silent_or_flooding_client_does_not_block_other_readers() {
    let fixture = of_config();
    let mut exporter = exporter(&fixture);
    let address = address(&exporter);
    // These are more connections than the exporter serves at once. It closes silent ones after a while.
    let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(address).expect("a connection")).collect();
    let mut slow = &silent[0];
    slow.write_all(b"GET /metrics HT").expect("written");
    assert!(ask(address, "GET /metrics", "").0.starts_with("http/1.1 200"));
    let long = format!("X-Long: {}\r\n", "x".repeat(100_000));
    let answer = exchange(address, &format!("GET /metrics HTTP/1.1\r\n{long}\r\n"));
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    let answer = exchange(address, "\0\x01\x02 nonsense\r\n\r\n");
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    assert!(ask(address, "GET /metrics", "").0.starts_with("http/1.1 200"));
    exporter.signal(Signal::SIGINT);
    assert_eq!(exporter.wait().code(), Some(0));
}

#[test]
fn a_pod_that_is_upgraded_serves_its_metrics_on() {
    let fixture = of_config();
    let mut builds = Builds::new(&fixture);
    let free = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port");
    let mut running = fixture.start_command(with_metrics(&fixture, &builds.program(), &free.to_string()));
    running.wait_ready();
    // The open connection of a client ends with the old program.
    let kept = TcpStream::connect(free).expect("a connection");
    let version = |text: String| {
        let info = Scrape(text).0.lines().find(|line| line.starts_with("podfs_build_info{")).map(str::to_owned);
        info.expect("the metric exists")
    };
    let before = version(ask(free, "GET /metrics", "").1);
    builds.upgrade(&fixture);
    assert_ne!(version(ask(free, "GET /metrics", "").1), before);
    drop(kept);
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn an_upgraded_pod_continues_without_metrics_if_another_process_has_the_address() {
    let fixture = of_config();
    let builds = Builds::new(&fixture);
    let free = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port");
    let mut running = fixture.start_command(with_metrics(&fixture, &builds.program(), &free.to_string()));
    running.wait_ready();
    // Between the two programs, when the address is free, another program listens there until the test releases it.
    let [hold, bound, thief] = ["hold", "bound", "thief.py"].map(|name| fixture.path(name));
    for pipe in [&hold, &bound] {
        nix::unistd::mkfifo(pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    }
    let held = fs::File::options().read(true).write(true).open(&hold).expect("a pipe");
    let text = format!(
        "import socket, sys\ns = socket.create_server(('127.0.0.1', {}))\nprint('bound', flush=True)\nsys.stdin.read()",
        free.port()
    );
    fixture.write("thief.py", &text);
    let (real, [hold, bound, thief]) = (builds.last(), [&hold, &bound, &thief].map(|path| path.display()));
    let steal = format!("/usr/bin/python3 {thief} <{hold} >{bound} & read -r line <{bound}");
    builds.put_script(&format!("if [ \"$1\" = run ]; then {steal}; fi\nexec {} \"$@\"", real.display()));
    let outcome = upgrade(&fixture);
    assert!(outcome.stdout.contains("done, podfs"), "{}{}", outcome.stdout, outcome.stderr);
    running.wait_log("Address already in use");
    assert_eq!(fixture.scrape().get("podfs_up", &[]), 1.0);
    drop(held);
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}
