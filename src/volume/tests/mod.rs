//! Volumes of a pod's manifest. Each kind is parsed by `Volume::parse`.

mod downward;
mod passthrough;
mod projected;

use std::path::Path;

use super::*;
use crate::manifest::parse_bare;

fn parse(yaml: &str) -> Result<Volume, InvalidField> {
    let volume: core::Volume = parse_bare(Path::new("volume.yaml"), yaml.as_bytes()).expect(yaml);
    let fields = VolumeFields::of(&parse_bare(Path::new("volume.yaml"), yaml.as_bytes()).expect(yaml));
    Volume::parse(&volume, &fields, &VolumeUses::default())
}

fn projection(yaml: &str) -> Projection {
    let VolumeSource::Projection(projection) = parse(yaml).expect(yaml).source else { panic!("a projection") };
    projection
}

/// `field: sentence`
fn error(yaml: &str) -> String {
    parse(yaml).expect_err(yaml).to_string()
}

fn path(text: &str) -> PayloadPath {
    PayloadPath::parse(text).expect(text)
}

#[test]
fn fu_11_each_kind_goes_by_the_kubelets_names() {
    let rows = [
        ("{name: v, configMap: {name: app}}", "configMap", "kubernetes.io~configmap", Medium::Disk),
        ("{name: v, secret: {secretName: db}}", "secret", "kubernetes.io~secret", Medium::Memory),
        ("{name: v, downwardAPI: {}}", "downwardAPI", "kubernetes.io~downward-api", Medium::Memory),
        ("{name: v, projected: {}}", "projected", "kubernetes.io~projected", Medium::Memory),
    ];
    for (yaml, field, directory, medium) in rows {
        let volume = parse(yaml).expect(yaml);
        assert_eq!((volume.kind.field, volume.kind.directory), (field, Some(directory)));
        assert_eq!(projection(yaml).medium, medium, "CM-11 SE-02 {field}");
    }
}

#[test]
fn a_kind_that_podfs_does_not_serve_is_kept_by_its_name_and_a_misspelled_one_is_refused() {
    let supported = "supported are configMap, secret, downwardAPI, projected, hostPath, emptyDir, nfs, \
                     persistentVolumeClaim, ephemeral, flexVolume, csi";
    for (yaml, field, instead) in [
        (
            "{name: data, iscsi: {targetPortal: files, iqn: i, lun: 0}}",
            "iscsi",
            "use a PersistentVolume of the CSI driver iscsi.csi.k8s.io, or a local one on the mounted disk",
        ),
        (
            "{name: data, image: {reference: r}}",
            "image",
            "the container runtime mounts it, and podfs leaves it to the runtime",
        ),
        ("{name: data, ofALaterApi: {some: [thing]}}", "ofALaterApi", supported),
        (
            "{name: data, storageos: {}}",
            "storageos",
            "Kubernetes has removed the kind; use a PersistentVolume of the vendor's CSI driver",
        ),
        (
            "{name: data, gitRepo: {repository: r}}",
            "gitRepo",
            "clone the repository into an emptyDir with an init container",
        ),
    ] {
        let volume = parse(yaml).expect(yaml);
        assert_eq!(volume.field(), field);
        let expected = format!("{field} volumes are not supported by this version; {instead}");
        assert_eq!(volume.unsupported_reason(), Some(expected));
    }
    assert_eq!(
        error("{name: data, configmap: {name: app}}"),
        r#"configmap: volume "data": "configmap" is no kind of volume; did you mean "configMap"?"#
    );
    assert!(
        error("{name: data, csi: {driver: d}, image: {}}").contains("more than 1 volume type; it has csi and image")
    );
}

#[test]
fn a_volume_without_a_source_is_an_empty_dir_as_the_api_server_makes_it() {
    for yaml in ["{name: data}", "{name: data, emptyDir: null}"] {
        let volume = parse(yaml).expect(yaml);
        assert!(volume.field() == "emptyDir" && matches!(volume.source, VolumeSource::EmptyDir(_)), "{yaml}");
    }
}

#[test]
fn a_volume_has_one_source_at_most() {
    assert_eq!(
        error("{name: data, emptyDir: {}, secret: {secretName: db}}"),
        "volume \"data\": may not specify more than 1 volume type; it has emptyDir and secret"
    );
}

#[test]
fn a_name_is_a_dns_label_and_so_a_path_element() {
    assert_eq!(error("{configMap: {name: app}}"), "name: is required");
    for name in ["..", "a/b", "A", "a_b", "-a"] {
        let error = error(&format!("{{name: '{name}', configMap: {{name: app}}}}"));
        assert!(error.starts_with(&format!("name: volume {name:?}: ")), "{error}");
    }
}

#[test]
fn cm_03_cm_13_modes_default_to_0644_and_items_may_differ() {
    let volume =
        projection("{name: v, configMap: {name: app, items: [{key: k, path: p, mode: 0400}, {key: l, path: q}]}}");
    assert_eq!(volume.default_mode, 0o644);
    let ProjectionSource::ConfigMap(object) = &volume.sources[0] else { panic!("a configMap source") };
    assert_eq!(object.items[0], KeyPath { key: "k".into(), path: path("p"), mode: Some(0o400), user: None });
    assert_eq!(object.items[1].mode, None);
    assert_eq!(projection("{name: v, configMap: {name: app, defaultMode: 0}}").default_mode, 0);
    assert_eq!(projection("{name: v, configMap: {name: app, defaultMode: 511}}").default_mode, 0o777);
}

#[test]
fn cm_03_modes_out_of_range_are_refused_for_every_kind() {
    let range = "must be a number between 0 and 0777 (octal), both inclusive";
    let rows = [
        ("{name: v, configMap: {name: a, defaultMode: 01000}}", "configMap.defaultMode", "; it is 512, octal 1000"),
        ("{name: v, configMap: {name: a, defaultMode: 644}}", "configMap.defaultMode", "; it is 644, octal 1204"),
        ("{name: v, secret: {secretName: a, defaultMode: -1}}", "secret.defaultMode", "; it is -1"),
        ("{name: v, downwardAPI: {defaultMode: 512}}", "downwardAPI.defaultMode", "; it is 512, octal 1000"),
        ("{name: v, projected: {defaultMode: 512}}", "projected.defaultMode", "; it is 512, octal 1000"),
        (
            "{name: v, secret: {secretName: a, items: [{key: k, path: p}, {key: l, path: q, mode: 1000}]}}",
            "secret.items[1].mode",
            "; it is 1000, octal 1750",
        ),
        (
            "{name: v, projected: {sources: [{}, {downwardAPI: {items: [{path: p, mode: 100000, fieldRef: {fieldPath: metadata.name}}]}}]}}",
            "projected.sources[1].downwardAPI.items[0].mode",
            "; it is 100000",
        ),
    ];
    for (yaml, field, it_is) in rows {
        assert_eq!(error(yaml), format!("{field}: volume \"v\": {range}{it_is}"));
    }
}

#[test]
fn ex_01_users_are_parsed_and_checked() {
    let volume = projection("{name: v, secret: {secretName: a, defaultUser: 7, items: [{key: k, path: p, user: 0}]}}");
    assert_eq!(volume.default_user, Some(7));
    let ProjectionSource::Secret(object) = &volume.sources[0] else { panic!("a secret source") };
    assert_eq!(object.items[0].user, Some(0));
    for (yaml, field) in [
        ("{name: v, configMap: {name: a, defaultUser: -1}}", "configMap.defaultUser"),
        ("{name: v, projected: {defaultUser: 2147483648}}", "projected.defaultUser"),
        ("{name: v, secret: {secretName: a, items: [{key: k, path: p, user: -1}]}}", "secret.items[0].user"),
        (
            "{name: v, projected: {sources: [{serviceAccountToken: {path: t, user: -1}}]}}",
            "projected.sources[0].serviceAccountToken.user",
        ),
    ] {
        assert_eq!(error(yaml), format!("{field}: volume \"v\": must be between 0 and 2147483647, inclusive"));
    }
}

#[test]
fn aw_08_paths_of_items_are_checked_with_the_kubelets_texts() {
    let rows = [
        ("''", "invalid path: must not be empty: \"\""),
        ("/etc/passwd", "invalid path: must be relative path: /etc/passwd"),
        ("a/../b", "invalid path: must not contain '..': a/../b"),
        ("..data", "invalid path: must not start with '..': ..data"),
    ];
    for (text, sentence) in rows {
        let item = format!("{{key: k, path: {text}}}");
        for (source, at) in [
            (format!("configMap: {{name: a, items: [{item}]}}"), "configMap.items[0].path"),
            (
                format!("projected: {{sources: [{{secret: {{name: a, items: [{item}]}}}}]}}"),
                "projected.sources[0].secret.items[0].path",
            ),
            (
                format!("projected: {{sources: [{{serviceAccountToken: {{path: {text}}}}}]}}"),
                "projected.sources[0].serviceAccountToken.path",
            ),
        ] {
            assert_eq!(error(&format!("{{name: v, {source}}}")), format!("{at}: volume \"v\": {sentence}"));
        }
    }
}

#[test]
fn names_and_keys_are_required() {
    assert_eq!(error("{name: v, configMap: {}}"), "configMap.name: volume \"v\": is required");
    assert_eq!(error("{name: v, secret: {}}"), "secret.secretName: volume \"v\": is required");
    assert_eq!(
        error("{name: v, configMap: {name: a, items: [{path: p}]}}"),
        "configMap.items[0].key: volume \"v\": is required"
    );
}

#[test]
fn fields_of_future_versions_are_ignored() {
    assert!(parse("{name: v, configMap: {name: a, future: 1, items: [{key: k, path: p, future: {}}]}}").is_ok());
}

#[test]
fn nm_01_a_bad_mount_path_names_the_volume() {
    let volume: core::Volume = parse_bare(Path::new("v.yaml"), b"{name: v, configMap: {name: a}}").expect("a volume");
    let mount = core::VolumeMount { name: "v".into(), mount_path: "foo/../../dir".into(), ..Default::default() };
    let error =
        Volume::parse(&volume, &VolumeFields::default(), &VolumeUses { mounts: vec![&[mount]], devices: vec![] })
            .expect_err("leaves the root");
    assert_eq!(error.to_string(), "volume \"v\": invalid container mount point ../dir");
}
