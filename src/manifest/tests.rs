//! Tests: the documents of a text, and the errors of texts that cannot be parsed.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::{Document, ManifestError, parse_bare, parse_documents, read_documents};

fn yaml(text: &str) -> Result<Vec<Document>, ManifestError> {
    parse_documents(Path::new("app.yaml"), text.as_bytes())
}

fn json(text: &str) -> Result<Vec<Document>, ManifestError> {
    parse_documents(Path::new("app.json"), text.as_bytes())
}

/// The error that the user gets for `text`.
fn complaint(text: &str) -> String {
    yaml(text).expect_err("the text is refused").to_string()
}

fn kinds(documents: &[Document]) -> Vec<&str> {
    documents.iter().map(|document| document.kind.as_str()).collect()
}

fn origins(documents: &[Document]) -> Vec<String> {
    documents.iter().map(|document| document.origin.to_string()).collect()
}

fn json_complaint(text: &str) -> String {
    json(text).expect_err("the text is refused").to_string()
}

/// A volume source as far as modes go, and a map of strings as ConfigMaps have them.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
struct Shape {
    default_mode: Option<i32>,
    optional: Option<bool>,
    data: BTreeMap<String, String>,
}

fn bare(text: &str) -> Result<Shape, ManifestError> {
    parse_bare(Path::new("app.yaml"), text.as_bytes())
}

fn bare_complaint(text: &str) -> String {
    bare(text).expect_err("the text is refused").to_string()
}

#[test]
fn documents_and_lists_are_flattened_in_order() {
    let documents = yaml(concat!(
        "# a comment\n---\napiVersion: v1\nkind: Pod\n---\n# nothing\n---\napiVersion: v1\nkind: List\nitems:\n",
        "- {apiVersion: v1, kind: Secret}\n- {apiVersion: apps/v1, kind: Deployment}\n",
    ))
    .expect("two documents");
    assert_eq!(kinds(&documents), ["Pod", "Secret", "Deployment"]);
    assert_eq!(
        origins(&documents),
        ["app.yaml, document 1", "app.yaml, document 2, item 1", "app.yaml, document 2, item 2"]
    );
    assert_eq!(documents[2].api_version, "apps/v1");
}

#[test]
fn a_bad_document_leaves_the_others_as_they_are() {
    let text =
        |bad: &str| format!("apiVersion: v1\nkind: Pod\n---\n{bad}\n--- # the last\napiVersion: v1\nkind: Secret\n");
    let read = |text: &[u8]| -> Vec<String> {
        let documents = read_documents(Path::new("app.yaml"), text).into_iter();
        documents
            .map(|document| {
                document.map_or_else(|error| error.to_string(), |good| format!("{} {}", good.kind, good.origin))
            })
            .collect()
    };
    let around = |bad: &str| ["Pod app.yaml, document 1", bad, "Secret app.yaml, document 3"].map(str::to_owned);
    assert_eq!(read(text("a: [hunter2").as_bytes()), around("app.yaml:4:4: unclosed bracket '['"));
    assert_eq!(
        read(text("\na:\n  b: 1\n  b: 1").as_bytes()),
        around("app.yaml:7:3: the key `b` appears twice in one mapping; remove one")
    );
    let binary = String::into_bytes(text("a: é")).into_iter().map(|byte| if byte == 0xc3 { 0xff } else { byte });
    let binary = read(&binary.collect::<Vec<_>>());
    assert!(binary[1].starts_with("app.yaml:4:4: the text is not UTF-8") && binary.len() == 3, "{binary:?}");
    let item = "apiVersion: v1\nkind: List\nitems: [{kind: Secret, apiVersion: v1}, {a: b}]";
    let items = read(text(item).as_bytes());
    assert_eq!(items[1], "Secret app.yaml, document 2, item 1");
    assert!(
        items[2].starts_with("app.yaml, document 2, item 2: apiVersion is missing") && items.len() == 4,
        "{items:?}"
    );
    // Directives belong to the document behind them.
    let directive = "a: [\n...\n%YAML 1.1\n---\napiVersion: v1\nkind: Node\n";
    let directive = read(text(directive).as_bytes());
    assert_eq!((directive[2].as_str(), directive.len()), ("Node app.yaml, document 3", 4), "{directive:?}");
}

#[test]
fn items_of_a_typed_list_need_no_kind() {
    let documents = json(r#"{"apiVersion":"v1","kind":"ConfigMapList","items":[{"data":{}},{}]}"#).expect("a list");
    assert_eq!(kinds(&documents), ["ConfigMap", "ConfigMap"]);
    assert_eq!(origins(&documents), ["app.json, item 1", "app.json, item 2"]);
    for (api_version, kind) in [
        ("storage.k8s.io/v1", "CSIDriver"),
        ("storage.k8s.io/v1", "VolumeAttachment"),
        ("certificates.k8s.io/v1beta1", "ClusterTrustBundle"),
    ] {
        let list = format!(r#"{{"apiVersion":"{api_version}","kind":"{kind}List","items":[{{}}]}}"#);
        let documents = json(&list).expect("a list");
        assert_eq!(kinds(&documents), [kind]);
        assert_eq!(documents[0].api_version, api_version);
    }
}

#[test]
fn a_list_without_items_is_empty() {
    for text in [
        "apiVersion: v1\nkind: List\nitems: null\n",
        "apiVersion: v1\nkind: List\nitems: []\n",
        "apiVersion: v1\nkind: List\n",
    ] {
        assert_eq!(yaml(text).expect("an empty list").len(), 0, "{text}");
    }
    assert_eq!(complaint("apiVersion: v1\nkind: List\nitems: {}\n"), "app.yaml: items: must be a list");
    assert_eq!(
        complaint("apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Pod}\n- {kind: Pod}\n"),
        "app.yaml, item 2: apiVersion is missing; every object needs apiVersion and kind"
    );
}

#[test]
fn text_without_a_document_is_no_document() {
    for text in ["", "\n", "---\n", "---\n---\n...\n", "# only a comment\n", "\u{feff}", "null"] {
        assert_eq!(yaml(text).expect("nothing").len(), 0, "{text:?}");
    }
    assert_eq!(json("").expect("nothing").len(), 0);
}

#[test]
fn json_may_come_as_a_stream_with_a_byte_order_mark_or_under_any_name() {
    let text = "\u{feff}{\"apiVersion\":\"v1\",\"kind\":\"Pod\"}\n{\"apiVersion\":\"v1\",\"kind\":\"Secret\"}";
    assert_eq!(kinds(&json(text).expect("JSON")), ["Pod", "Secret"]);
    assert_eq!(kinds(&yaml(text).expect("JSON")), ["Pod", "Secret"]);
    let escapes = r#"{"data": {"face": "\ud83d\ude00 \/"}}"#;
    assert_eq!(bare(escapes).expect("JSON").data["face"], "😀 /");
    let tabs = "{\n\t\"data\": {\n\t\t\"a\": \"b\"\n\t}\n}\n";
    assert_eq!(bare(tabs).expect("JSON").data["a"], "b");
}

#[test]
fn a_document_that_is_no_object_is_named() {
    assert_eq!(
        complaint("- kind: Pod\n"),
        "app.yaml: expected a mapping of fields such as kind and metadata, found a list"
    );
    assert_eq!(
        complaint("apiVersion: v1\nkind: Pod\n---\nhunter2\n"),
        "app.yaml, document 2: expected a mapping of fields such as kind and metadata, found a single value"
    );
    for text in ["apiVersion: v1\n", "apiVersion: v1\nkind:\n", "apiVersion: v1\nkind: ''\n"] {
        assert_eq!(complaint(text), "app.yaml: kind is missing; every object needs apiVersion and kind");
    }
    assert_eq!(complaint("apiVersion: 1\nkind: Pod\n"), "app.yaml: apiVersion: must be a string");
}

#[test]
fn a_fault_in_the_syntax_has_line_and_column_and_no_content() {
    for (text, expected) in [
        (
            "kind: Secret\nstringData:\n  password: \"hunter2\n",
            "app.yaml:4:1: invalid indentation in multiline quoted scalar",
        ),
        ("data: {hunter2\n", "app.yaml:1:7: unclosed bracket '{'"),
        ("a: hunter2\n b: c\n", "app.yaml:2:3: mapping values are not allowed in this context"),
        ("a: *hunter2\n", "app.yaml:1:4: the alias refers to an anchor that does not exist"),
        ("a: &a [*a]\n", "app.yaml:1:8: the alias refers to itself"),
        ("a: .inf\n", "app.yaml:1:4: the number is not finite; put text in quotes"),
        ("a: !!int hunter2\n", "app.yaml:1:10: the text is not valid YAML"),
    ] {
        assert_eq!(complaint(text), expected);
    }
    assert_eq!(json_complaint("{\"kind\": \"Pod\",\n \"hunter2\" 1}"), "app.json:2:12: expected `:`");
    assert_eq!(json_complaint("{\"kind\": \"Pod\","), "app.json:1:15: EOF while parsing a value");
}

#[test]
fn a_key_twice_is_refused() {
    assert_eq!(
        complaint("a: 1\nb: {c: 1, c: 2}\n"),
        "app.yaml:2:11: the key `c` appears twice in one mapping; remove one"
    );
    assert_eq!(
        json_complaint("{\"a\": 1,\n \"a\": 2}"),
        "app.json:2:4: the key `a` appears twice in one mapping; remove one"
    );
}

#[test]
fn text_that_is_not_utf8_is_located() {
    let error =
        parse_documents(Path::new("app.yaml"), b"kind: Pod\ndata: \xff\xfe\n").expect_err("not UTF-8").to_string();
    assert!(error.starts_with("app.yaml:2:7: the text is not UTF-8; "), "{error}");
}

#[test]
fn modes_are_numbers_as_kubectl_reads_them() {
    for text in ["0644", "0o644", "420"] {
        let shape = bare(&format!("defaultMode: {text}\n")).expect("a mode");
        assert_eq!(shape.default_mode, Some(420), "{text}");
    }
    assert_eq!(bare("defaultMode: 0\n").expect("a mode").default_mode, Some(0));
    assert_eq!(
        bare_complaint("defaultMode: \"0644\"\n"),
        "app.yaml: defaultMode: must be a whole number without quotes"
    );
    assert_eq!(bare_complaint("defaultMode: 0999\n"), "app.yaml: defaultMode: must be a whole number without quotes");
    assert_eq!(bare_complaint("defaultMode: 99999999999\n"), "app.yaml: defaultMode: is out of range");
}

#[test]
fn booleans_are_those_of_kubectl() {
    for text in ["true", "yes", "on", "True", "YES"] {
        assert_eq!(bare(&format!("optional: {text}\n")).expect("a boolean").optional, Some(true), "{text}");
    }
    assert_eq!(bare_complaint("optional: \"yes\"\n"), "app.yaml: optional: must be true or false");
}

#[test]
fn a_scalar_where_a_string_belongs_asks_for_quotes() {
    for value in ["8080", "0644", "1.10", "true", "no", "-1"] {
        assert_eq!(
            bare_complaint(&format!("data: {{port: {value}}}\n")),
            "app.yaml: data.port: must be a string; put it in quotes",
            "{value}"
        );
    }
    assert_eq!(bare_complaint("data: {app.conf: 1}\n"), "app.yaml: data[app.conf]: must be a string; put it in quotes");
    assert_eq!(bare_complaint("data: {port: [hunter2]}\n"), "app.yaml: data.port: must be a string");
    assert_eq!(bare_complaint("data: hunter2\n"), "app.yaml: data: must be a mapping");
}

#[test]
fn strings_and_keys_keep_their_text() {
    let shape =
        bare("data: {8080: a, 0644: b, yes: c, date: 2001-01-01, inf: inf, q: '0644', e: ''}\n").expect("strings");
    assert_eq!(
        shape.data.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect::<Vec<_>>(),
        [("0644", "b"), ("8080", "a"), ("date", "2001-01-01"), ("e", ""), ("inf", "inf"), ("q", "0644"), ("yes", "c"),]
    );
}

#[test]
fn a_type_error_names_document_and_path_but_no_value() {
    use k8s_openapi::api::core::v1::{Pod, Secret};

    let text = "apiVersion: v1\nkind: Pod\nmetadata: {}\n---\napiVersion: v1\nkind: Pod\nspec:\n  containers: []\n  volumes:\n  - name: a\n  - name: b\n    configMap: {defaultMode: 'hunter2'}\n";
    let pod = yaml(text).expect("two pods").pop().expect("the second");
    assert_eq!(
        pod.into_typed::<Pod>().expect_err("no mode").to_string(),
        "app.yaml, document 2: spec.volumes[1].configMap.defaultMode: must be a whole number without quotes"
    );
    let text = "apiVersion: v1\nkind: Secret\ndata: {password: 'hunter2, expected!'}\n";
    let secret = yaml(text).expect("a secret").pop().expect("one");
    assert!(!format!("{secret:?}").contains("hunter2"));
    assert_eq!(
        secret.into_typed::<Secret>().expect_err("no base64").to_string(),
        "app.yaml: data.password: has a value of the wrong form"
    );
}

#[test]
fn a_bare_document_stands_alone() {
    assert_eq!(bare_complaint(""), "app.yaml: the file is empty");
    assert_eq!(bare_complaint("a: 1\n---\nb: 1\n"), "app.yaml: expected one document, found 2");
    assert_eq!(bare_complaint("[]"), "app.yaml: expected a mapping of fields such as kind and metadata, found a list");
}

#[test]
fn a_large_file_is_read() {
    let block: String = "    0123456789abcdef0123456789abcdef0123456789abcdef\n".repeat(20_000);
    let mut text = format!("apiVersion: v1\nkind: ConfigMap\ndata:\n  big: |\n{block}");
    for number in 0..20_000 {
        text += &format!(
            "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: c{number}}}\ndata: {{a: b, c: d, e: f}}\n"
        );
    }
    assert_eq!(yaml(&text).expect("a large file").len(), 20_001);
}

#[test]
fn aliases_may_share_but_not_explode() {
    let shared = "data:\n  a: &v x\n".to_owned() + &(0..500).map(|n| format!("  k{n}: *v\n")).collect::<String>();
    assert_eq!(bare(&shared).expect("shared").data.len(), 501);

    let mut bomb = format!("a0: &a0 [{}]\n", "x".repeat(100_000));
    for level in 1..9 {
        let below = vec![format!("*a{}", level - 1); 10].join(", ");
        bomb += &format!("a{level}: &a{level} [{below}]\n");
    }
    let error = complaint(&bomb);
    assert!(error.ends_with("the document is nested too deeply or its aliases repeat too much"), "{error}");
}

#[test]
fn deep_nesting_is_an_error_and_no_overflow() {
    for (open, close) in [("[", "]"), ("{a: ", "}")] {
        complaint(&(open.repeat(100_000) + &close.repeat(100_000)));
        complaint(&open.repeat(100_000));
    }
    complaint(&"- ".repeat(100_000));
    assert!(json(&"[".repeat(100_000)).is_err());
    let deep = format!("kind: a\napiVersion: b\nspec: {}x{}", "[".repeat(60), "]".repeat(60));
    assert!(yaml(&deep).is_ok());
}
