//! Tokens and trust bundles.

use super::*;
use crate::volume::{CredentialKey, TokenKey};

/// Tokens for these audiences, with the default lifetime. An empty audience is that of the API server.
fn issued(tokens: &[(&str, Result<&str, &str>)]) -> Tokens {
    let issue = |(audience, token): &(&str, Result<&str, &str>)| {
        let audience = Some(audience.to_string()).filter(|audience| !audience.is_empty());
        (key(audience, 3600), token.map(|text| text.as_bytes().to_vec()).map_err(str::to_owned))
    };
    tokens.iter().map(issue).collect()
}

fn key(audience: Option<String>, expiration_seconds: i64) -> CredentialKey {
    CredentialKey::Token(TokenKey { audience, expiration_seconds })
}

/// The files of a projected volume with these sources, in a pod with these further fields in its spec.
fn projected(sources: &str, spec: &str, objects: &Objects, tokens: &Tokens) -> Result<Vec<String>, String> {
    let pod = pod(&format!("projected: {{sources: [{sources}]}}"), spec);
    let view = view(&pod, objects, tokens);
    let assembled = payload(&pod, &view).map_err(|error| error.to_string())?;
    Ok(shown(&assembled.payload))
}

fn with_token(source: &str, spec: &str, tokens: &Tokens) -> Result<Vec<String>, String> {
    projected(&format!("{{serviceAccountToken: {{{source}}}}}"), spec, &Objects::default(), tokens)
}

fn bundle(source: &str, objects: &Objects) -> Result<Vec<String>, String> {
    projected(&format!("{{clusterTrustBundle: {{path: ca, {source}}}}}"), "containers: []", objects, &Tokens::default())
}

fn pem(bodies: &[&str]) -> String {
    bodies.iter().map(|body| format!("-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n")).collect()
}

/// Two bundles of one signer, one without a signer, and one of another signer.
fn bundles() -> Objects {
    let bundle = |name: &str, rest: &str, bodies: &[&str]| {
        let pem = pem(bodies).replace('\n', "\\n");
        format!(
            "{{apiVersion: certificates.k8s.io/v1beta1, kind: ClusterTrustBundle, metadata: {{name: '{name}', \
             labels: {{live: '{name}'}}}}, spec: {{{rest} trustBundle: \"{pem}\"}}}}"
        )
    };
    let yaml = [
        bundle("plain", "", &["BBBB", "AAAA"]),
        bundle("x:y:one", "signerName: x/y,", &["CCCC", "BBBB"]),
        bundle("x:y:two", "signerName: x/y,", &["AAAA", "CCCC"]),
        bundle("x:z:one", "signerName: x/z,", &["DDDD"]),
    ];
    objects(&yaml.join("\n---\n"))
}

#[test]
fn tk_01_tk_02_a_token_file_shows_the_token_it_asks_for() {
    let mut tokens = issued(&[("", Ok("own")), ("vault", Ok("for vault"))]);
    let spec = "containers: []";
    assert_eq!(with_token("path: token", spec, &tokens), lines(&["token=own@0644"]));
    assert_eq!(with_token("path: a/b, audience: vault", spec, &tokens), lines(&["a/b=for vault@0644"]));
    tokens = [(key(None, 7200), Ok(b"long".to_vec()))].into_iter().collect();
    assert_eq!(with_token("path: token, expirationSeconds: 7200", spec, &tokens), lines(&["token=long@0644"]));
    assert!(with_token("path: token", spec, &tokens).is_err());
}

#[test]
fn tk_03_tk_04_ex_01_a_token_is_private_to_the_pods_user_or_group() {
    let tokens = issued(&[("", Ok("own"))]);
    let user = "securityContext: {runAsUser: 1000}, containers: [{name: c}]";
    let group = "securityContext: {fsGroup: 2000}, containers: [{name: c}]";
    assert_eq!(with_token("path: token", user, &tokens), lines(&["token=own@0600:1000"]));
    assert_eq!(with_token("path: token", group, &tokens), lines(&["token=own@0640"]));
    assert_eq!(with_token("path: token, user: 7", user, &tokens), lines(&["token=own@0600:7"]));
}

#[test]
fn tk_06_without_a_token_the_reason_is_in_the_kubelets_words() {
    let tokens = issued(&[("", Err("connection refused"))]);
    assert_eq!(
        with_token("path: token", "containers: []", &tokens),
        Err("failed to fetch token: connection refused".to_owned())
    );
}

#[test]
fn tk_09_a_token_is_in_one_payload_with_its_other_sources() {
    let sources = "{serviceAccountToken: {path: token}}, \
                   {configMap: {name: o, items: [{key: foo, path: ca.crt}]}}, \
                   {downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}}";
    let tokens = issued(&[("", Ok("own"))]);
    assert_eq!(
        projected(sources, "containers: []", &foo_bar(), &tokens),
        lines(&["ca.crt=foo@0644", "namespace=shop@0644", "token=own@0644"])
    );
}

#[test]
fn cb_01_cb_02_a_bundle_by_name_shows_each_certificate_once_in_the_order_of_its_bytes() {
    assert_eq!(bundle("name: plain", &bundles()), Ok(vec![format!("ca={}@0644", pem(&["AAAA", "BBBB"]))]));
    assert_eq!(bundle("name: absent", &bundles()), Err("clustertrustbundle \"absent\" not found".to_owned()));
    assert_eq!(bundle("name: absent, optional: true", &bundles()), lines(&["ca=@0644"]));
}

#[test]
fn cb_01_cb_03_bundles_by_signer_and_labels() {
    let all = pem(&["AAAA", "BBBB", "CCCC"]);
    let none = "combination of signerName and labelSelector matched zero ClusterTrustBundles";
    let by = |selector: &str| bundle(&format!("signerName: x/y{selector}"), &bundles());
    assert_eq!(by(", labelSelector: {}"), Ok(vec![format!("ca={all}@0644")]));
    assert_eq!(
        by(", labelSelector: {matchLabels: {live: 'x:y:one'}}"),
        Ok(vec![format!("ca={}@0644", pem(&["BBBB", "CCCC"]))])
    );
    assert_eq!(by(", labelSelector: {matchLabels: {live: 'x:z:one'}}"), Err(none.to_owned()));
    assert_eq!(by(""), Err(none.to_owned()));
    assert_eq!(by(", optional: true"), lines(&["ca=@0644"]));
}

#[test]
fn tk_03_a_bundle_is_as_private_as_a_token() {
    let source = "{clusterTrustBundle: {path: ca, name: absent, optional: true}}";
    let spec = "securityContext: {runAsUser: 1000, fsGroup: 2000}, containers: [{name: c}]";
    assert_eq!(projected(source, spec, &Objects::default(), &Tokens::default()), lines(&["ca=@0640:1000"]));
}

#[test]
fn debug_output_shows_no_token() {
    let shown = format!("{:?}", issued(&[("vault", Ok("hunter2")), ("", Err("no"))]));
    assert!(shown.contains("vault") && shown.contains("7 bytes") && !shown.contains("hunter2"), "{shown}");
}
