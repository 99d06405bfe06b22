//! projected volumes.

use super::*;

#[test]
fn pr_01_all_kinds_of_sources_are_parsed() {
    let yaml = "
        name: v
        projected:
          sources:
          - configMap: {name: app, optional: true}
          - secret: {name: db}
          - downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}
          - serviceAccountToken: {path: token, expirationSeconds: 3600}
          - clusterTrustBundle: {path: ca.pem, name: ca}
          - podCertificate: {keyType: ED25519, signerName: x/y, keyPath: key.pem, certificateChainPath: chain.pem}
          - {}
    ";
    let volume = projection(yaml);
    let names: Vec<String> = volume.sources.iter().map(ToString::to_string).collect();
    assert_eq!(
        names,
        [
            r#"configMap "app""#,
            r#"secret "db""#,
            "downwardAPI",
            r#"serviceAccountToken "token""#,
            r#"clusterTrustBundle "ca.pem""#,
            r#"podCertificate "key.pem, chain.pem""#,
        ]
    );
    let references: Vec<String> = volume.references().map(|reference| reference.to_string()).collect();
    assert_eq!(references, ["ConfigMap app (optional)", "Secret db"]);
}

#[test]
fn pr_05_a_source_has_one_kind() {
    assert_eq!(
        error("{name: v, projected: {sources: [{configMap: {name: a}, secret: {name: b}}]}}"),
        "projected.sources[0]: volume \"v\": may not specify more than 1 volume type per source"
    );
}

#[test]
fn pc_01_a_certificate_needs_a_path() {
    assert_eq!(
        error("{name: v, projected: {sources: [{podCertificate: {keyType: ED25519, signerName: x/y}}]}}"),
        "projected.sources[0].podCertificate: volume \"v\": \
         one of credentialBundlePath, keyPath and certificateChainPath is required"
    );
}

#[test]
fn pr_02_a_path_given_twice_is_refused_as_the_api_does() {
    let twice = |first: &str, second: &str| parse(&format!("{{name: v, projected: {{sources: [{first}, {second}]}}}}"));
    let item = "configMap: {name: a, items: [{key: k, path: x}]}";
    let field = "downwardAPI: {items: [{path: ./x, fieldRef: {fieldPath: metadata.name}}]}";
    let error = twice(&format!("{{{item}}}"), &format!("{{{field}}}")).expect_err("x twice");
    assert_eq!(
        error.to_string(),
        "projected.sources[1]: volume \"v\": conflicting duplicate paths: \"x\" is given twice"
    );
    // Tokens are outside of the rule.
    assert!(twice(&format!("{{{item}}}"), "{serviceAccountToken: {path: x}}").is_ok());
    // So are volumes with one source, where the API only warns.
    assert!(parse("{name: v, configMap: {name: a, items: [{key: k, path: x}, {key: l, path: x}]}}").is_ok());
}

#[test]
fn tk_01_a_token_lives_an_hour_unless_the_source_says_otherwise() {
    let token = |fields: &str| {
        parse(&format!("{{name: v, projected: {{sources: [{{serviceAccountToken: {{path: t{fields}}}}}]}}}}"))
    };
    let key = |fields: &str| {
        let VolumeSource::Projection(projection) = token(fields).expect(fields).source else { panic!("a projection") };
        let ProjectionSource::ServiceAccountToken(file) = &projection.sources[0] else { panic!("a token") };
        (file.token.audience.clone(), file.token.expiration_seconds)
    };
    assert_eq!(key(""), (None, 3600));
    assert_eq!(key(", audience: ''"), (None, 3600));
    assert_eq!(key(", audience: vault, expirationSeconds: 600"), (Some("vault".to_owned()), 600));
    let at = "projected.sources[0].serviceAccountToken.expirationSeconds: volume \"v\"";
    for (seconds, expected) in [
        ("599", "may not specify a duration less than 10 minutes"),
        ("4294967297", "may not specify a duration larger than 2^32 seconds"),
    ] {
        let error = token(&format!(", expirationSeconds: {seconds}")).expect_err(seconds);
        assert_eq!(error.to_string(), format!("{at}: {expected}"));
    }
}

#[test]
fn cb_01_a_trust_bundle_is_named_or_selected_and_not_both() {
    let at = "projected.sources[0].clusterTrustBundle";
    let rows = [
        ("", ": volume \"v\": either name or signerName must be specified"),
        ("name: ca, signerName: x/y", ": volume \"v\": only one of name and signerName may be used"),
        ("name: ca, labelSelector: {}", ".labelSelector: volume \"v\": must be unset if name is specified"),
        (
            "signerName: xy",
            ".signerName: volume \"v\": must be a fully qualified domain and path of the form 'example.com/signer-name'",
        ),
        (
            "signerName: x/y, labelSelector: {matchExpressions: [{key: a, operator: Near}]}",
            ".labelSelector.matchExpressions[0].operator: volume \"v\": must be In, NotIn, Exists or DoesNotExist",
        ),
    ];
    for (fields, expected) in rows {
        let yaml = format!("{{name: v, projected: {{sources: [{{clusterTrustBundle: {{path: p, {fields}}}}}]}}}}");
        assert_eq!(error(&yaml), format!("{at}{expected}"));
    }
}
