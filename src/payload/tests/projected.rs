//! Several sources in one payload.

use super::*;

#[test]
fn pr_01_sources_share_one_payload() {
    let source = "projected: {defaultMode: 0440, sources: [\
        {configMap: {name: o, items: [{key: foo, path: c/foo}]}}, \
        {secret: {name: o, items: [{key: bar, path: s/bar, mode: 0400}]}}, \
        {downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}]}";
    assert_eq!(files(source, &foo_bar()), lines(&["c/foo=foo@0440", "labels=a=\"1\"@0440", "s/bar=bar@0400"]));
}

#[test]
fn pr_02_the_last_source_wins_and_a_warning_names_both() {
    let objects = objects(
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: o, namespace: shop}, data: {foo: old, bar: bar}}\n---\n\
         {apiVersion: v1, kind: Secret, metadata: {name: s, namespace: shop}, stringData: {foo: new}}",
    );
    let pod = pod("projected: {sources: [{configMap: {name: o}}, {secret: {name: s}}]}", "containers: []");
    let (files, warnings) = assembled(&pod, &objects).expect("last wins");
    assert_eq!(files, ["bar=bar@0644", "foo=new@0644"]);
    assert_eq!(
        warnings,
        [r#"two files are called "foo": key "foo" of configMap "o" is hidden by key "foo" of secret "s""#]
    );
}

#[test]
fn pr_02_items_of_one_source_follow_the_same_rule() {
    let pod = pod("configMap: {name: o, items: [{key: foo, path: x}, {key: bar, path: x}]}", "containers: []");
    let (files, warnings) = assembled(&pod, &foo_bar()).expect("last wins");
    assert_eq!(files, ["x=bar@0644"]);
    assert_eq!(warnings.len(), 1);
}

#[test]
fn pr_03_pr_04_all_problems_are_reported_and_nothing_is_assembled() {
    let source = "projected: {sources: [\
        {configMap: {name: o}}, \
        {configMap: {name: absent}}, \
        {secret: {name: o, items: [{key: k1, path: x1}, {key: k2, path: x2}]}}, \
        {downwardAPI: {items: [{path: cpu, resourceFieldRef: {containerName: none, resource: limits.cpu}}]}}, \
        {serviceAccountToken: {path: token}}]}";
    assert_eq!(
        files(source, &foo_bar()),
        Err("configmap \"absent\" not found; references non-existent secret key: k1; \
             references non-existent secret key: k2; container none not found; \
             serviceAccountToken \"token\" needs an API server that issues it; give podfs --kubeconfig"
            .into())
    );
}

#[test]
fn pr_06_only_tokens_and_certificates_need_an_api_client() {
    assert!(files("projected: {sources: [{configMap: {name: o}}]}", &foo_bar()).is_ok());
    let rows = [
        (
            "{serviceAccountToken: {path: token}}",
            r#"serviceAccountToken "token" needs an API server that issues it; give podfs --kubeconfig"#,
        ),
        ("{clusterTrustBundle: {path: ca.pem, name: ca}}", r#"clustertrustbundle "ca" not found"#),
        (
            "{podCertificate: {keyType: ED25519, signerName: x/y, keyPath: key}}",
            r#"podCertificate "key" needs an API server that issues it; give podfs --kubeconfig"#,
        ),
    ];
    for (source, expected) in rows {
        assert_eq!(files(&format!("projected: {{sources: [{source}]}}"), &foo_bar()), Err(expected.to_owned()));
    }
}

#[test]
fn aw_20_a_file_cannot_be_a_directory_too() {
    let items = "items: [{key: foo, path: a/b/c}, {key: bar, path: a}]";
    let expected = "\"a\" of key \"bar\" of configMap \"o\" is a file, \
                    and \"a/b/c\" of key \"foo\" of configMap \"o\" needs a directory in its place";
    assert_eq!(files(&format!("configMap: {{name: o, {items}}}"), &foo_bar()), Err(expected.into()));
    // Across sources, and for keys under their own names, in either order.
    let (keys, below) = ("{configMap: {name: o}}", "{secret: {name: o, items: [{key: foo, path: foo/below}]}}");
    for sources in [format!("{keys}, {below}"), format!("{below}, {keys}")] {
        let error = files(&format!("projected: {{sources: [{sources}]}}"), &foo_bar()).expect_err("foo is a file");
        assert!(error.starts_with("\"foo\" of key \"foo\" of configMap \"o\" is a file, and \"foo/below\""), "{error}");
    }
}

#[test]
fn aw_15_an_empty_payload_is_a_payload() {
    for source in ["projected: {}", "downwardAPI: {}"] {
        assert_eq!(files(source, &Objects::default()), lines(&[]));
    }
}

#[test]
fn a_decimal_mode_with_the_digits_of_an_octal_one_is_a_warning() {
    let warnings = |volume: &str| assembled(&pod(volume, "containers: []"), &foo_bar()).expect("valid").1;
    let items =
        "items: [{key: foo, path: a, mode: 440}, {key: foo, path: b, mode: 0440}, {key: foo, path: c, mode: 288}]";
    assert_eq!(
        warnings(&format!("configMap: {{name: o, defaultMode: 400, {items}}}")),
        [
            "defaultMode 400 is a decimal number, so the mode is 0620; write 0400 in YAML, or 256 in JSON",
            "mode of \"a\" 440 is a decimal number, so the mode is 0670; write 0440 in YAML, or 288 in JSON",
        ]
    );
    for mode in ["0400", "256", "0644", "420", "0o440", "511", "0", "0777", "0620"] {
        let usual = warnings(&format!("configMap: {{name: o, defaultMode: {mode}}}"));
        assert_eq!(usual.is_empty(), mode != "0620", "{mode}: {usual:?}");
    }
}
