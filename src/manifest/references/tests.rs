//! The objects that the volumes of a pod refer to.

use std::path::Path;

use super::*;
use crate::manifest::parse_documents;
use crate::manifest::pod::Pod;
use crate::volume::TokenKey;

fn of(volumes: &str, container_fields: &str) -> References {
    let yaml = format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: web}}, spec: {{volumes: [{volumes}], \
         containers: [{{name: c{container_fields}}}]}}}}"
    );
    let mut documents = parse_documents(Path::new("pod.yaml"), yaml.as_bytes()).expect(&yaml);
    let pod = Pod::parse(documents.remove(0)).expect(&yaml);
    references(&pod.volumes, &pod.identity, &pod.facts)
}

#[test]
fn mg_01_each_object_is_there_once_however_many_volumes_use_it() {
    let references = of(
        "{name: a, configMap: {name: app, optional: true}}, \
         {name: b, secret: {secretName: db}}, \
         {name: c, projected: {sources: [{configMap: {name: app}}, {configMap: {name: more}}, {secret: {name: db}}, \
          {serviceAccountToken: {path: t}}, {serviceAccountToken: {path: u, expirationSeconds: 3600}}, \
          {serviceAccountToken: {path: v, audience: vault}}, \
          {clusterTrustBundle: {path: ca1, name: ca}}, {clusterTrustBundle: {path: ca2, name: ca}}]}}, \
         {name: d, emptyDir: {}}",
        "",
    );
    assert_eq!(references.config_maps, ["app", "more"].map(str::to_owned).into());
    assert_eq!(references.secrets, ["db".to_owned()].into());
    let token = |audience: Option<&str>| CredentialKey::Token(TokenKey::new(audience.map(str::to_owned), None));
    assert_eq!(references.tokens, [token(None), token(Some("vault"))].into());
    assert_eq!(references.bundles, [BundleKey::Named("ca".to_owned())].into());
    assert!(references.claims.is_empty() && !references.node);
}

#[test]
fn pv_02_claims_go_by_their_own_name_or_by_that_of_the_pod_and_volume() {
    let references = of(
        "{name: a, persistentVolumeClaim: {claimName: data}}, \
         {name: scratch, ephemeral: {volumeClaimTemplate: {spec: {}}}}",
        "",
    );
    assert_eq!(references.claims, ["data", "web-scratch"].map(str::to_owned).into());
    assert!(references.node, "a PersistentVolume may be for some nodes only");
}

#[test]
fn da_09_the_node_is_needed_for_containers_without_a_limit() {
    let needs = |resource: &str, limits: &str| {
        let item = format!("{{path: p, resourceFieldRef: {{containerName: c, resource: {resource}}}}}");
        of(&format!("{{name: v, downwardAPI: {{items: [{item}]}}}}"), &format!(", resources: {{limits: {{{limits}}}}}"))
            .node
    };
    for resource in ["limits.cpu", "limits.memory", "limits.ephemeral-storage"] {
        assert!(needs(resource, ""), "{resource}");
    }
    assert!(!needs("limits.cpu", "cpu: 1"));
    assert!(needs("limits.cpu", "cpu: 0"));
    assert!(!needs("requests.cpu", ""));
    assert!(!needs("limits.hugepages-2Mi", ""));
}
