use std::path::Path;

use super::*;
use crate::manifest::parse_documents;
use crate::types::Allocatable;

fn parse(yaml: &str) -> Result<Vec<Arc<NamedObject>>, String> {
    let documents = parse_documents(Path::new("objects.yaml"), yaml.as_bytes()).map_err(|error| error.to_string())?;
    let parsed = documents.into_iter().filter_map(|document| parse_object(document).transpose());
    parsed.map(|object| object.map(Arc::new).map_err(|error| error.to_string())).collect()
}

fn objects(yaml: &str) -> Objects {
    Objects::collect(parse(yaml).expect(yaml)).expect(yaml)
}

fn error(yaml: &str) -> String {
    parse(yaml).expect_err(yaml)
}

fn shown(values: Option<&impl Values>) -> Vec<(String, String)> {
    let mut shown: Vec<(String, String)> = values
        .expect("parsed")
        .values()
        .map(|(key, value)| (key.to_owned(), String::from_utf8_lossy(value).into_owned()))
        .collect();
    shown.sort();
    shown
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
}

#[test]
fn cm_01_a_config_map_shows_text_and_bytes() {
    let objects =
        objects("{apiVersion: v1, kind: ConfigMap, metadata: {name: o}, data: {b: text}, binaryData: {a: Ynl0ZXM=}}");
    assert_eq!(shown(objects.config_map("default", "o")), pairs(&[("a", "bytes"), ("b", "text")]));
    assert!(objects.secret("default", "o").is_none());
    assert!(objects.config_map("other", "o").is_none());
}

#[test]
fn se_01_string_data_of_a_secret_overrides_data() {
    let objects =
        objects("{apiVersion: v1, kind: Secret, metadata: {name: o}, data: {a: b2xk, b: Yg==}, stringData: {a: new}}");
    assert_eq!(shown(objects.secret("default", "o")), pairs(&[("a", "new"), ("b", "b")]));
}

#[test]
fn se_01_base64_may_be_wrapped() {
    let objects = objects("apiVersion: v1\nkind: Secret\nmetadata: {name: o}\ndata:\n  a: |\n    Ynl0\n    ZXM=\n");
    assert_eq!(shown(objects.secret("default", "o")), pairs(&[("a", "bytes")]));
}

#[test]
fn other_kinds_are_ignored() {
    let yaml = "{apiVersion: apps/v1, kind: Deployment}\n---\n{apiVersion: x.io/v1, kind: Secret, data: 7}\n---\n\
                {apiVersion: v1, kind: Pod}";
    assert_eq!(parse(yaml), Ok(vec![]));
}

#[test]
fn bad_base64_names_the_key_and_not_the_value() {
    let error_of_secret = error("{apiVersion: v1, kind: Secret, metadata: {name: o}, data: {pass.word: hunter2!}}");
    assert_eq!(
        error_of_secret,
        "objects.yaml: data[pass.word]: is not base64; encode the value, or move it to stringData as it is"
    );
    let error_of_config_map = error("{apiVersion: v1, kind: ConfigMap, metadata: {name: o}, binaryData: {k: '*'}}");
    assert!(error_of_config_map.starts_with("objects.yaml: binaryData.k: is not base64"), "{error_of_config_map}");
}

#[test]
fn no_error_shows_a_value() {
    for yaml in [
        "{apiVersion: v1, kind: Secret, metadata: {name: o}, data: {k: [hunter2]}}",
        "{apiVersion: v1, kind: Secret, metadata: {name: o}, data: hunter2}",
        "{apiVersion: v1, kind: Secret, metadata: {name: o}, stringData: {k: {hunter2: 1}}}",
        "{apiVersion: v1, kind: Secret, metadata: hunter2, stringData: {k: v}}",
        "{apiVersion: v1, kind: Secret, metadata: {name: o}, data: {k: aHVudGVyMg=}}",
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: o}, data: hunter2}",
    ] {
        let error = error(yaml);
        assert!(error.starts_with("objects.yaml: ") && !error.contains("hunter") && !error.contains("aHVu"), "{error}");
    }
}

#[test]
fn names_are_required_and_namespaces_default() {
    assert_eq!(
        error("{apiVersion: v1, kind: ConfigMap, metadata: {generateName: o-}}"),
        "objects.yaml: metadata.name: a ConfigMap needs a name for volumes to refer to"
    );
    let objects = objects(
        "{apiVersion: v1, kind: Secret, metadata: {name: o}}\n---\n\
         {apiVersion: v1, kind: ConfigMap, metadata: {name: o, namespace: shop}}\n---\n\
         {apiVersion: v1, kind: Node, metadata: {name: n1, namespace: ignored}}",
    );
    let keys: Vec<String> = objects.keys().map(ToString::to_string).collect();
    assert_eq!(keys, ["ConfigMap shop/o", "Secret default/o", "Node n1"]);
}

#[test]
fn names_follow_the_rules_of_the_api_server_and_so_are_path_elements() {
    let sentence = |kind: &str, metadata: &str| {
        let version = if kind == "CSIDriver" { "storage.k8s.io/v1" } else { "v1" };
        error(&format!(
            "{{apiVersion: {version}, kind: {kind}, metadata: {metadata}, spec: {{hostPath: {{path: /a}}}}}}"
        ))
    };
    for kind in ["ConfigMap", "Secret", "PersistentVolume", "PersistentVolumeClaim", "Node", "CSIDriver"] {
        for name in [".", "..", "a/b", "A", "a%b"] {
            let sentence = sentence(kind, &format!("{{name: \"{name}\"}}"));
            assert!(sentence.starts_with("objects.yaml: metadata.name: must be a DNS name: "), "{sentence}");
        }
    }
    let of_namespace = sentence("ConfigMap", "{name: a, namespace: ..}");
    assert!(of_namespace.starts_with("objects.yaml: metadata.namespace: must be a DNS label: "), "{of_namespace}");
}

#[test]
fn aw_08_keys_that_cannot_be_file_names_are_refused() {
    let long = "k".repeat(254);
    let rows = [
        (".", "a key must not be '.'"),
        ("..", "a key must not be '..'"),
        ("..data", "a key must not start with '..'"),
        ("a/b", "a valid config key must consist of alphanumeric characters, '-', '_' or '.'"),
        ("a b", "a valid config key must consist of alphanumeric characters, '-', '_' or '.'"),
        ("", "a valid config key must consist of alphanumeric characters, '-', '_' or '.'"),
        ("ä", "a valid config key must consist of alphanumeric characters, '-', '_' or '.'"),
        (&long, "a key must be no more than 253 characters"),
    ];
    for (key, rule) in rows {
        for (kind, map, value) in
            [("ConfigMap", "data", "v"), ("ConfigMap", "binaryData", "dg=="), ("Secret", "stringData", "v")]
        {
            let error =
                error(&format!("{{apiVersion: v1, kind: {kind}, metadata: {{name: o}}, {map}: {{'{key}': {value}}}}}"));
            assert!(error.starts_with(&format!("objects.yaml: {map}")) && error.ends_with(rule), "{error}");
        }
    }
    objects(&format!(
        "{{apiVersion: v1, kind: ConfigMap, metadata: {{name: o}}, data: {{{}: v, .hidden: v, a..b: v}}}}",
        &long[1..]
    ));
}

#[test]
fn cm_09_no_key_is_both_text_and_bytes() {
    assert_eq!(
        error("{apiVersion: v1, kind: ConfigMap, metadata: {name: o}, data: {k: v}, binaryData: {k: dg==}}"),
        "objects.yaml: binaryData.k: the key is in data, too; a ConfigMap has each key once"
    );
}

#[test]
fn aw_23_values_may_have_one_mebibyte_together() {
    let half = "x".repeat(512 * 1024);
    let yaml = |more| {
        format!("{{apiVersion: v1, kind: ConfigMap, metadata: {{name: o}}, data: {{a: {half}, b: {half}{more}}}}}")
    };
    assert_eq!(objects(&yaml("")).config_map("default", "o").map(|object| object.values().count()), Some(2));
    assert_eq!(
        error(&yaml("x")),
        "objects.yaml: the values have 1048577 bytes together; an object may have at most 1048576"
    );
}

#[test]
fn a_duplicate_names_both_places() {
    let object = "{apiVersion: v1, kind: Secret, metadata: {name: o}}";
    let parsed = parse(&format!("{object}\n---\n{object}")).expect("each is fine");
    assert_eq!(
        Objects::collect(parsed).expect_err("twice").to_string(),
        "Secret default/o is described twice, in objects.yaml, document 1 and in objects.yaml, document 2; \
         remove one of them"
    );
}

#[test]
fn da_09_a_node_has_allocatable_resources() {
    let machine = Allocatable { cpu_milli: 1, memory_bytes: 2, ephemeral_storage_bytes: 3 };
    let one = "{apiVersion: v1, kind: Node, metadata: {name: n1}, status: {allocatable: {cpu: 4, memory: 16Gi, pods: '110'}}}";
    let objects_of_one = objects(one);
    let node = objects_of_one.node(Some("n1")).expect("named");
    let expected = Allocatable { cpu_milli: 4_000, memory_bytes: 16 << 30, ephemeral_storage_bytes: 3 };
    assert_eq!(node.allocatable(machine), expected);
    assert_eq!(objects_of_one.node(None), Some(node));
    assert_eq!(objects_of_one.node(Some("n2")), None);

    let two = objects(&format!("{one}\n---\n{{apiVersion: v1, kind: Node, metadata: {{name: n2}}}}"));
    assert_eq!(two.node(None), None);
    assert_eq!(two.node(Some("n2")).map(|node| node.allocatable(machine)), Some(machine));
    assert_eq!(
        error("{apiVersion: v1, kind: Node, metadata: {name: n1}, status: {allocatable: {cpu: many}}}"),
        "objects.yaml: status.allocatable.cpu: \"many\" is not a quantity; \
         write a number with a suffix, such as 250m, 2 or 128Mi"
    );
}

#[test]
fn cb_02_a_trust_bundle_holds_certificates_and_nothing_else() {
    let yaml = |body: &str| {
        format!(
            "apiVersion: certificates.k8s.io/v1beta1\nkind: ClusterTrustBundle\n\
             metadata: {{name: ca, labels: {{a: b}}}}\nspec:\n  signerName: x/y\n  trustBundle: |{body}\n"
        )
    };
    let block = |kind: &str, headers: &str, body: &str| {
        format!("\n    -----BEGIN {kind}-----{headers}\n    {body}\n    -----END {kind}-----")
    };
    let (one, two) = (block("CERTIFICATE", "", "AAAA"), block("CERTIFICATE", "", "BBBB"));
    let good = objects(&yaml(&format!("\n    # a comment{one}{two}{one}")));
    let bundle = good.trust_bundle("ca").expect("parsed");
    assert_eq!((bundle.anchors.len(), bundle.signer.as_deref()), (2, Some("x/y")));
    assert_eq!(good.trust_bundles_of("x/y").count(), 1);
    assert_eq!(good.trust_bundles_of("x/z").count(), 0);
    let named = yaml(&one).replace("name: ca", "name: '..'");
    assert_eq!(error(&named), "objects.yaml: metadata.name: must not be '.' or '..', nor contain '/' or '%'");
    let at = "objects.yaml: spec.trustBundle";
    let key = block("PRIVATE KEY", "", "AAAA");
    let rows = [
        (format!("{one}{key}"), "entry 1 is no certificate; a bundle may hold nothing else"),
        (block("CERTIFICATE", "\n    a: b\n", "AAAA"), "entry 0 has PEM block headers; remove them"),
        (String::new(), "at least one trust anchor must be provided"),
        (block("CERTIFICATE", "", "%%%"), "is no PEM; write the certificates as PEM blocks"),
    ];
    for (body, expected) in rows {
        assert_eq!(error(&yaml(&body)), format!("{at}: {expected}"));
    }
}
