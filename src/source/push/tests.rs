use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::*;
use crate::manifest::objects::Values;
use crate::manifest::parse_documents;
use crate::source::PodInput;
use crate::volume::{CredentialKey, TokenKey};

/// A pod that shows a ConfigMap, a token and the bundles of a signer, with objects in files and a source for pushes.
struct Pushed {
    source: PushSource,
    first: Snapshot,
    _directory: TempDir,
}

const POD: &str = "{apiVersion: v1, kind: Pod, metadata: {name: web, uid: u1}, spec: {containers: [{name: c}], volumes: [\
    {name: a, configMap: {name: app, optional: true}}, \
    {name: b, projected: {sources: [{serviceAccountToken: {path: token}}, \
        {clusterTrustBundle: {path: ca, signerName: x/y, labelSelector: {}}}]}}]}}";

fn start(objects: &str) -> Pushed {
    let directory = tempfile::tempdir().expect("a directory");
    let paths: Vec<PathBuf> = match objects {
        "" => vec![],
        objects => {
            let path = directory.path().join("objects.yaml");
            std::fs::write(&path, objects).expect("written");
            vec![path]
        }
    };
    let (files, read) = FileSource::open(Some(PodInput::Stdin(POD.into())), &paths).expect("files");
    let pod = read.pod.clone().expect("a pod");
    let (source, first) = PushSource::new(files, read, pod);
    Pushed { source, first, _directory: directory }
}

fn objects(yaml: &str) -> Push {
    let documents = parse_documents(Path::new("push.yaml"), yaml.as_bytes()).expect(yaml);
    Push { objects: documents.into_iter().map(crate::manifest::Document::into_value).collect(), ..Push::default() }
}

fn config_map(name: &str, value: &str) -> String {
    format!("{{apiVersion: v1, kind: ConfigMap, metadata: {{name: {name}}}, data: {{k: {value}}}}}")
}

impl Pushed {
    fn push(&self, push: Push) -> Result<PushCounts, String> {
        self.source.inbox().take(push).map_err(|error| error.to_string())
    }

    fn value(&self, name: &str) -> Option<String> {
        let snapshot = self.source.snapshot();
        let value = snapshot.known.objects.config_map("default", name)?.value("k")?.to_vec();
        Some(String::from_utf8(value).expect("text"))
    }
}

#[test]
fn before_the_first_push_nothing_is_known_and_after_it_everything_is() {
    let pushed = start("");
    let why = |snapshot: &Snapshot| {
        let object = snapshot.known.objects.why_absent(ObjectKind::ConfigMap, "default", "app").map(str::to_owned);
        (object, snapshot.known.objects.why_no_bundles_of("x/y").map(str::to_owned))
    };
    let expected = (
        Some("configmap \"app\" is not known yet: nothing was pushed".to_owned()),
        Some("clustertrustbundles of \"x/y\" are not known yet: nothing was pushed".to_owned()),
    );
    assert_eq!(why(&pushed.first), expected);
    pushed.push(Push::default()).expect("nothing is a push, too");
    assert_eq!(why(&pushed.source.snapshot()), (None, None));
}

#[tokio::test]
async fn a_push_wakes_the_follower() {
    let mut pushed = start("");
    let taken = pushed.push(objects(&config_map("app", "one"))).expect("good");
    assert_eq!(taken, PushCounts { objects: 1, tokens: 0 });
    let snapshot = pushed.source.changed().await;
    assert!(snapshot.known.objects.config_map("default", "app").is_some());
}

#[test]
fn objects_are_replaced_deleted_and_forgotten() {
    let pushed = start("");
    pushed.push(objects(&[config_map("app", "one"), config_map("more", "two")].join("\n---\n"))).expect("good");
    pushed.push(objects(&config_map("app", "three"))).expect("good");
    assert_eq!((pushed.value("app").as_deref(), pushed.value("more").as_deref()), (Some("three"), Some("two")));
    let deletion = |kind: &str| DeletedObject { kind: kind.to_owned(), name: "app".to_owned() };
    pushed.push(Push { delete: vec![deletion("ConfigMap")], ..Push::default() }).expect("good");
    assert_eq!((pushed.value("app").as_deref(), pushed.value("more").as_deref()), (None, Some("two")));
    pushed.push(Push { replace: true, ..objects(&config_map("app", "four")) }).expect("good");
    assert_eq!((pushed.value("app").as_deref(), pushed.value("more").as_deref()), (Some("four"), None));
    let error =
        pushed.push(Push { delete: vec![deletion("Deployment")], ..Push::default() }).expect_err("no such kind");
    assert_eq!(
        error,
        "no volume shows a Deployment, so there is nothing to delete; a kind is written as in manifests, such as ConfigMap"
    );
}

#[test]
fn cm_06_a_volume_waits_for_objects_of_unknown_state() {
    let pushed = start("");
    let token = TokenKey::new(None, None);
    let app = Missing::Object(ObjectKey {
        kind: ObjectKind::ConfigMap,
        namespace: "default".to_owned(),
        name: "app".to_owned(),
    });
    let signer = Missing::BundlesOf("x/y".to_owned());
    let unknown = vec![
        UnknownObject::missing(&app, "no right to it".to_owned()),
        UnknownObject::missing(&signer, "no answer".to_owned()),
        UnknownObject::credential(&CredentialKey::Token(token.clone()), "no account".to_owned()),
    ];
    pushed.push(Push { unknown: unknown.clone(), settling: true, ..Push::default() }).expect("good");
    let snapshot = pushed.source.snapshot();
    assert!(snapshot.known.is_settling);
    assert_eq!(snapshot.known.objects.why_absent(ObjectKind::ConfigMap, "default", "app"), Some("no right to it"));
    assert_eq!(snapshot.known.objects.why_no_bundles_of("x/y"), Some("no answer"));
    assert_eq!(snapshot.known.tokens.get(&token), Some(Err("no account")));
    pushed.push(Push { unknown: unknown[..1].to_vec(), ..objects(&config_map("app", "one")) }).expect("good");
    let snapshot = pushed.source.snapshot();
    assert_eq!((pushed.value("app").as_deref(), snapshot.known.is_settling), (Some("one"), false));
    assert_eq!(snapshot.known.objects.why_absent(ObjectKind::ConfigMap, "default", "app"), None);
    assert_eq!(snapshot.known.objects.why_no_bundles_of("x/y"), None, "it has none");
}

#[test]
fn an_unknown_reference_that_is_none_is_refused_with_the_reason() {
    let pushed = start("");
    let unknown = |kind: &str, name: Option<&str>, signer: Option<&str>| UnknownObject {
        kind: kind.to_owned(),
        name: name.map(str::to_owned),
        signer: signer.map(str::to_owned),
        audience: None,
        expiration_seconds: None,
        certificate: None,
        reason: "no answer".to_owned(),
    };
    let rows = [
        (
            unknown("ConfigMap", None, None),
            "an unknown ConfigMap has no name; give its name, or the signer of ClusterTrustBundles",
        ),
        (
            unknown("Secret", Some("s"), Some("x/y")),
            "an unknown Secret has a signer; only ClusterTrustBundles without a name have one",
        ),
        (
            unknown("Deployment", Some("web"), None),
            "no volume shows a Deployment, so it cannot be unknown; a kind is written as in manifests, such as ConfigMap, \
             TokenRequest or PodCertificate",
        ),
        (
            unknown("TokenRequest", Some("t"), None),
            "an unknown TokenRequest has a name or a signer; podfs knows it by what the volume asks for, so remove them",
        ),
        (
            unknown("PodCertificate", None, None),
            "an unknown PodCertificate has no certificate; give the signerName and keyType that the volume asks for",
        ),
    ];
    for (unknown, expected) in rows {
        let error = pushed.push(Push { unknown: vec![unknown], ..Push::default() }).expect_err("it is refused");
        assert_eq!(error, expected);
    }
}

#[test]
fn an_object_in_a_file_wins() {
    let pushed = start(&config_map("app", "file"));
    pushed.push(objects(&config_map("app", "push"))).expect("good");
    assert_eq!(pushed.value("app").as_deref(), Some("file"));
}

#[test]
fn one_bad_object_refuses_the_whole_push() {
    let pushed = start("");
    pushed.push(objects(&config_map("app", "one"))).expect("good");
    let bad = [
        (
            "{apiVersion: v1, kind: Secret, metadata: {name: s}, data: {k: '%'}}",
            "the push, item 2: data.k: is not base64; encode the value, or move it to stringData as it is",
        ),
        (
            "{apiVersion: apps/v1, kind: Deployment, metadata: {name: d}}",
            "the push, item 2: no volume shows a Deployment; podfs takes ConfigMaps, Secrets, PersistentVolumeClaims, \
             PersistentVolumes, ClusterTrustBundles, Nodes, CSIDrivers, VolumeAttachments, TokenRequests, PodCertificates and the pod",
        ),
        (
            "{apiVersion: v1, kind: Secret, metadata: {name: s, namespace: other}}",
            "the push, item 2: Secret other/s is not of the pod's namespace default; push it to pods of its own",
        ),
        (
            "{apiVersion: v1, kind: Pod, metadata: {name: web, uid: u2}, spec: {containers: []}}",
            "the push, item 2: it is pod default/web (uid u2), and podfs serves default/web (uid u1); \
             push it to the podfs of that pod",
        ),
        (
            "{apiVersion: v1, kind: ConfigMap, metadata: {name: app}}",
            "the push has ConfigMap default/app twice; remove one of them",
        ),
        (
            "{apiVersion: authentication.k8s.io/v1, kind: TokenRequest, spec: {audiences: [a, b]}, status: {token: t}}",
            "the push, item 2: spec.audiences: a volume asks for one audience, or for none; write what it asks for",
        ),
        (
            "{apiVersion: authentication.k8s.io/v1, kind: TokenRequest, spec: {audiences: []}}",
            "the push, item 2: status is missing",
        ),
    ];
    for (bad, expected) in bad {
        let error = pushed.push(objects(&[config_map("app", "two").as_str(), bad].join("\n---\n"))).expect_err(bad);
        assert_eq!(error, expected);
        assert_eq!(pushed.value("app").as_deref(), Some("one"), "{bad}");
    }
}

#[test]
fn kept_objects_have_a_limit() {
    let pushed = start("");
    let many = |range: std::ops::Range<u32>| {
        let yaml: Vec<String> = range.map(|number| config_map(&format!("o{number}"), "v")).collect();
        objects(&yaml.join("\n---\n"))
    };
    pushed.push(many(0..1000)).expect("that many are kept");
    let error = pushed.push(many(1000..1001)).expect_err("one too many");
    assert_eq!(
        error,
        "there would be 1001 objects, and podfs keeps at most 1000 for a pod; push only what its volumes show"
    );
    assert_eq!(pushed.value("o1000"), None);
}

#[test]
fn tokens_are_pushed_as_the_api_server_answers() {
    let pushed = start("");
    let key = TokenKey::new(None, None);
    let reason = pushed.first.known.tokens.get(&key).expect("it is asked for").expect_err("not there yet").to_owned();
    assert_eq!(reason, NO_TOKEN);
    let request = "{apiVersion: authentication.k8s.io/v1, kind: TokenRequest, metadata: {name: default}, \
                   spec: {audiences: [], expirationSeconds: 3600}, \
                   status: {token: hunter2, expirationTimestamp: '2030-01-01T00:00:00Z'}}";
    let push = objects(request);
    assert!(!format!("{push:?}").contains("hunter2"), "{push:?}");
    assert_eq!(pushed.push(push), Ok(PushCounts { objects: 0, tokens: 1 }));
    let snapshot = pushed.source.snapshot();
    assert_eq!(snapshot.known.tokens.get(&key), Some(Ok(b"hunter2".as_slice())));
}

#[test]
fn a_pushed_pod_says_its_labels_from_then_on() {
    let pushed = start("");
    let labelled =
        POD.replace("uid: u1", "uid: u1, labels: {color: blue}").replace("name: a, configMap", "name: c, configMap");
    pushed.push(objects(&labelled)).expect("good");
    let volumes = pushed.source.snapshot().pod.expect("a pod").volumes.clone();
    assert_eq!(volumes, pushed.first.pod.as_ref().expect("a pod").volumes, "its volumes are those of the manifest");
    let label = |pushed: &Pushed| {
        let pod = pushed.source.snapshot().pod.expect("a pod");
        pod.facts.labels.get("color").cloned()
    };
    assert_eq!(label(&pushed).as_deref(), Some("blue"));
    pushed.push(Push { replace: true, ..Push::default() }).expect("good");
    assert_eq!(label(&pushed).as_deref(), Some("blue"));
}
