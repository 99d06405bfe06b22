//! Certificates of the pod: the requests, the files of volumes, and the time of the next request.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::common::outcome::finish;
use crate::common::*;
use crate::rig::{NODE, Rig};
use crate::signer::{REQUEST, REQUESTS, Signer, refuse, volume};
use crate::source::tokens::service_account;

/// A server with a node and a service account, and a pod with a certificate.
fn rig(key_type: &str) -> Rig {
    let rig = Rig::new(&volume(key_type));
    rig.server.put(&service_account("default"));
    rig.server.put(&format!("{{apiVersion: v1, kind: Node, metadata: {{name: {NODE}}}}}"));
    rig
}

/// The output of openssl for a file.
fn openssl(arguments: &[&str], file: &Path) -> String {
    let outcome = finish(Command::new("openssl").args(arguments).arg("-in").arg(file));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    outcome.stdout
}

#[test]
fn pc_01_a_key_and_its_certificate_are_in_one_generation_at_their_paths() {
    for key_type in ["ED25519", "ECDSAP256", "ECDSAP384"] {
        let (rig, signer) = (rig(key_type), Signer::new());
        let mut running = rig.start();
        running.wait_log("credential bundle is not issued yet");
        let request = signer.next(&rig.server);
        let spec = &request["spec"];
        assert_eq!((&spec["signerName"], &spec["maxExpirationSeconds"]), (&json!("example.com/server"), &json!(7200)));
        assert_eq!(
            (&spec["podName"], &spec["podUID"], &spec["nodeName"]),
            (&json!("web"), &json!(rig.uid), &json!(NODE))
        );
        assert_eq!(spec["unverifiedUserAnnotations"], json!({"example.com/role": "web"}));
        let uid = |kind: &str| rig.server.objects(kind)[0]["metadata"]["uid"].clone();
        assert_eq!((&spec["nodeUID"], &spec["serviceAccountUID"]), (&uid("Node"), &uid("ServiceAccount")));
        signer.issue(&rig.server, request, 3600, 7200);
        running.wait_ready();
        let file = |name: &str| running.volume("identity").join(name);
        let read = |name: &str| fs::read_to_string(file(name)).expect("a file");
        assert_eq!(read("both.pem"), read("key.pem") + &read("chain.pem"));
        assert_eq!(
            openssl(&["pkey", "-pubout"], &file("key.pem")),
            openssl(&["x509", "-noout", "-pubkey"], &file("chain.pem")),
            "{key_type}: the certificate is for this key"
        );
        assert!(!running.log().contains("PRIVATE KEY"));
    }
}

#[test]
fn pc_02_a_request_that_is_denied_is_not_repeated() {
    for (kind, word) in [("Denied", "denied"), ("Failed", "failed")] {
        let (rig, signer) = (rig("ECDSAP256"), Signer::new());
        let running = rig.start();
        refuse(&rig.server, signer.next(&rig.server), kind);
        running.wait_log(&format!(
            "PodCertificateRequest was permanently {word}: reason=\"UnsupportedKeyType\" message=\"use ED25519\""
        ));
        assert_eq!(rig.server.count("create", REQUESTS), 1);
    }
    let rig = rig("RSA4096");
    rig.start().wait_log("podfs makes no keys of type RSA4096; write keyType: ECDSAP256, ECDSAP384 or ED25519");
    assert_eq!(rig.server.count("create", REQUESTS), 0);
}

#[test]
fn pc_02_a_certificate_is_withdrawn_when_it_ends_and_the_signer_gives_no_other() {
    let unanswered = |_: &Rig, _: &Signer| {};
    let denied = |rig: &Rig, signer: &Signer| refuse(&rig.server, signer.next(&rig.server), "Denied");
    type Answer = fn(&Rig, &Signer);
    let rows: [(Answer, &str); 2] =
        [(unanswered, "credential bundle is not issued yet"), (denied, "PodCertificateRequest was permanently denied")];
    for (answer, reason) in rows {
        let (rig, signer) = (rig("ED25519"), Signer::new());
        let mut running = rig.start();
        // Half of a short life has to pass.
        signer.issue(&rig.server, signer.next(&rig.server), 1, 4);
        running.wait_ready();
        assert_eq!(rig.reason("identity"), None);
        answer(&rig, &signer);
        eventually("the certificate has ended", || rig.reason("identity").is_some_and(|it| it.contains(reason)));
    }
}

#[test]
fn pc_03_another_certificate_for_another_key_comes_when_the_signer_says() {
    let (rig, signer) = (rig("ED25519"), Signer::new());
    let mut running = rig.start();
    running.wait_log("credential bundle is not issued yet");
    // podfs makes a deleted request again.
    let first = signer.next(&rig.server);
    rig.server.delete(REQUEST, "default", first["metadata"]["name"].as_str().expect("a name"));
    eventually("the request is made again", || {
        rig.server.count("create", REQUESTS) == 2 && !rig.server.objects(REQUEST).is_empty()
    });
    let request = rig.server.objects(REQUEST).remove(0);
    // The renewal is due when half of a short lifetime is over.
    signer.issue(&rig.server, request, 1, 4);
    running.wait_ready();
    let both = running.volume("identity").join("both.pem");
    let before = fs::read_to_string(&both).expect("a file");
    signer.issue(&rig.server, signer.next(&rig.server), 3600, 7200);
    eventually("the next certificate is shown", || fs::read_to_string(&both).expect("a file") != before);
    let after = fs::read_to_string(&both).expect("a file");
    let key = |bundle: &str| bundle.split("-----BEGIN CERTIFICATE").next().map(str::to_owned);
    assert_ne!(key(&before), key(&after));
}
