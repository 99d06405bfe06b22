//! `podfs run` with the service account of `packaging/examples/rbac/run.yaml`.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::volumes::{VOLUMES, put_objects, put_payloads};
use super::{Account, Permissions, create, objects_of};
use crate::api_server::{InitialEvents, Style};
use crate::common::*;
use crate::rig::{NODE, Rig};
use crate::signer::Signer;

const FILE: &str = "examples/rbac/run.yaml";

/// `podfs run --in-cluster` in a mount namespace with its own `/run`, where a pod's credentials are.
const IN_A_POD: &str = r#"
    mount -t tmpfs -o mode=755 none /run
    mkdir -p /run/secrets/kubernetes.io/serviceaccount
    printf %s "$TOKEN" >/run/secrets/kubernetes.io/serviceaccount/token
    printf %s "$AUTHORITY" >/run/secrets/kubernetes.io/serviceaccount/ca.crt
    exec "$@"
"#;

fn account(rig: &Rig) -> Account {
    create(&rig.server, objects_of(FILE));
    Account::bind(&rig.server, "podfs-run", "podfs-run")
}

#[test]
fn the_roles_for_podfs_run_allow_exactly_its_requests_for_volumes_of_every_kind() {
    let rig = Rig::new(VOLUMES);
    let account = account(&rig);
    let _driver = put_objects(&rig.server, &rig.fixture.path("root"), &rig.fixture.path("source"));
    let (signer, mut used) = (Signer::new(), Permissions::new());
    // A server that sends the existing objects at the start of a watch gets no list requests. Other servers get them.
    for (initial, of_event) in [(InitialEvents::Sent, "create"), (InitialEvents::Refused, "patch")] {
        rig.server.initial_events(initial);
        let mut podfs = rig.bare_command();
        podfs.args(["--pod-name", "default/web", "--node-name", NODE]);
        podfs.arg("--kubeconfig").arg(rig.server.kubeconfig_of(&account.user, Style::Token));
        let mut running = rig.fixture.start_command(podfs);
        eventually("an event reports the missing object", || rig.server.count(of_event, "events") > 0);
        rig.server.put(&config_map("late", &[("key", "there")]));
        signer.issue(&rig.server, signer.next(&rig.server), 3600, 7200);
        running.wait_ready();
        for (volume, file, content) in
            [("config", "key", "1"), ("keys", "key", "pem"), ("late", "key", "there"), ("all", "cpu", "2000")]
        {
            wait_content(&running.volume(volume).join(file), content);
        }
        let log = running.log();
        assert!(!log.contains("orbidden"), "{log}");
        assert_eq!(running.stop().code(), Some(0), "{log}");
        used.extend(account.used(&rig.server));
        rig.server.delete("ConfigMap", "default", "late");
    }
    account.assert_exact(&used);
}

#[test]
fn podfs_in_a_pod_of_the_cluster_has_the_rights_of_its_service_account() {
    let volumes = "[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: tls}}]";
    let rig = Rig::new(volumes);
    let account = account(&rig);
    put_payloads(&rig.server);
    let mut podfs = rig.bare_command();
    podfs.args(["--in-cluster", "--pod-name", "default/web", "--node-name", NODE]);
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-ec", IN_A_POD, "sh"]).arg(podfs.get_program()).args(podfs.get_args());
    let address = rig.server.url();
    let (host, port) =
        address.strip_prefix("https://").and_then(|address| address.rsplit_once(':')).expect("an address");
    command.env("KUBERNETES_SERVICE_HOST", host).env("KUBERNETES_SERVICE_PORT", port);
    command.env("TOKEN", rig.server.new_token(&account.user)).env("AUTHORITY", rig.server.authority());
    let mut running = rig.fixture.start_command(command);
    running.wait_ready();
    let root = PathBuf::from(format!("/proc/{}/root", running.pid()));
    let inside = |volume: &str, file: &str| {
        let volume = running.volume(volume);
        root.join(volume.strip_prefix("/").expect("an absolute path")).join(file)
    };
    assert_eq!(fs::read_to_string(inside("keys", "key")).expect("a file"), "pem");
    wait_content(&inside("config", "key"), "1");
    rig.put_config("2");
    wait_content(&inside("config", "key"), "2");
    account.assert_suffices(&rig.server);
    assert_eq!(running.stop().code(), Some(0));
}
