//! Passthrough volumes.

use std::path::PathBuf;

use podfs_fuse::passthrough::CacheMode;

use super::*;
use crate::manifest::parse_documents;
use crate::manifest::pod::Pod;
use crate::volume::NfsOptions;
use crate::volume::SubPathMode;
use crate::volume::nfs_options::Backend;

fn source(yaml: &str) -> VolumeSource {
    parse(&format!("{{name: v, {yaml}}}")).expect(yaml).source
}

/// Checks the field and the beginning of the sentence.
#[track_caller]
fn assert_error(yaml: &str, field: &str, sentence: &str) {
    let expected = format!("{field}: volume \"v\": {sentence}");
    let error = error(&format!("{{name: v, {yaml}}}"));
    assert!(error.starts_with(&expected), "{error}");
}

#[test]
fn fu_11_passthrough_volumes_have_the_kubelets_directory_names() {
    let rows = [
        ("hostPath: {path: /srv}", "hostPath", Some("kubernetes.io~host-path")),
        ("emptyDir: {}", "emptyDir", Some("kubernetes.io~empty-dir")),
        ("persistentVolumeClaim: {claimName: data}", "persistentVolumeClaim", None),
        ("ephemeral: {volumeClaimTemplate: {spec: {}}}", "ephemeral", None),
    ];
    for (yaml, word, directory) in rows {
        let volume = parse(&format!("{{name: v, {yaml}}}")).expect(yaml);
        assert_eq!((volume.kind.field, volume.kind.directory), (word, directory));
    }
}

#[test]
fn hp_01_hp_04_a_host_path_has_one_of_eight_types() {
    use HostPathType::*;
    let rows = [
        ("\"\"", Unchecked),
        ("DirectoryOrCreate", DirectoryOrCreate),
        ("Directory", Directory),
        ("FileOrCreate", FileOrCreate),
        ("File", File),
        ("Socket", Socket),
        ("CharDevice", CharDevice),
        ("BlockDevice", BlockDevice),
    ];
    for (word, kind) in rows {
        let expected = VolumeSource::HostPath(HostPath { path: PathBuf::from("/srv/data"), kind, within: None });
        assert_eq!(source(&format!("hostPath: {{path: /srv/data, type: {word}}}")), expected);
    }
    assert_error("hostPath: {path: /srv, type: directory}", "hostPath.type", "directory is an invalid volume type");
}

#[test]
fn hp_06_a_host_path_is_absolute_and_never_goes_up() {
    assert_error("hostPath: {path: ''}", "hostPath.path", "is required");
    assert_error("hostPath: {path: srv}", "hostPath.path", "must be absolute");
    for path in ["/srv/../etc", "..", "../srv", "/srv/.."] {
        let sentence = format!("invalid HostPath `{path}`: must not contain '..'");
        assert_error(&format!("hostPath: {{path: {path}}}"), "hostPath.path", &sentence);
    }
    source("hostPath: {path: /srv/..data/a..b}");
}

#[test]
fn ed_09_an_empty_dir_has_a_known_medium() {
    let medium = |yaml: &str| match source(&format!("emptyDir: {yaml}")) {
        VolumeSource::EmptyDir(source) => source.medium,
        other => panic!("{other:?}"),
    };
    assert_eq!(medium("{}"), Storage::Disk);
    assert_eq!(medium("{medium: ''}"), Storage::Disk);
    assert_eq!(medium("{medium: Memory}"), Storage::Memory);
    assert_eq!(medium("{medium: HugePages}"), Storage::HugePages(None));
    assert_eq!(medium("{medium: HugePages-2Mi}"), Storage::HugePages(Some(2 << 20)));
    assert_eq!(Storage::HugePages(Some(1 << 30)).to_string(), "HugePages-1Gi");
    for word in ["foo", "HugePages-", "HugePages-many", "HugePages-0", "memory"] {
        let sentence = format!("unknown storage medium {word:?}");
        assert_error(&format!("emptyDir: {{medium: {word}}}"), "emptyDir.medium", &sentence);
    }
}

#[test]
fn a_size_limit_is_a_quantity_and_zero_is_none() {
    let limit = |text: &str| match source(&format!("emptyDir: {{sizeLimit: {text}}}")) {
        VolumeSource::EmptyDir(source) => source.size_limit,
        other => panic!("{other:?}"),
    };
    assert_eq!(limit("1Mi"), Some(1 << 20));
    assert_eq!(limit("1000"), Some(1000));
    assert_eq!(limit("0"), None);
    assert_error("emptyDir: {sizeLimit: -1Gi}", "emptyDir.sizeLimit", "must not be negative; write a quantity");
    assert_error("emptyDir: {sizeLimit: -1}", "emptyDir.sizeLimit", "must not be negative; write a quantity");
    assert_error("emptyDir: {sizeLimit: lots}", "emptyDir.sizeLimit", "\"lots\" is not a quantity");
}

#[test]
fn ex_02_an_empty_dir_may_have_a_mode() {
    let mode = |text: &str| match source(&format!("emptyDir: {{mode: {text}}}")) {
        VolumeSource::EmptyDir(source) => source.mode,
        other => panic!("{other:?}"),
    };
    assert_eq!((mode("01777"), mode("0")), (Some(0o1777), Some(0)));
    let range = "must be a number between 0 and 01777 (octal), both inclusive; it is ";
    assert_error("emptyDir: {mode: 02000}", "emptyDir.mode", range);
    assert_error("emptyDir: {mode: -1}", "emptyDir.mode", range);
}

#[test]
fn a_claim_is_named_or_goes_by_pod_and_volume() {
    let VolumeSource::Claim(claim) = source("persistentVolumeClaim: {claimName: data, readOnly: true}") else {
        panic!("a claim")
    };
    assert_eq!((claim.reference.name("web", "v").as_str(), claim.read_only), ("data", true));
    let VolumeSource::Claim(claim) = source("ephemeral: {volumeClaimTemplate: {spec: {}}}") else { panic!("a claim") };
    assert_eq!((claim.reference.name("web", "v").as_str(), claim.read_only), ("web-v", false));
    assert_error("persistentVolumeClaim: {}", "persistentVolumeClaim.claimName", "is required");
    assert_error("ephemeral: {}", "ephemeral.volumeClaimTemplate", "is required");
}

fn pod(annotations: &str) -> Result<Pod, String> {
    let text = format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: web, annotations: {annotations}}}, spec: {{containers: \
         [{{name: c, volumeMounts: [{{name: data, mountPath: /d}}]}}, \
           {{name: d, volumeDevices: [{{name: data, devicePath: /dev/d}}]}}], volumes: [\
         {{name: config, configMap: {{name: app}}}}, {{name: host, hostPath: {{path: /srv}}}}, \
         {{name: scratch, emptyDir: {{}}}}, {{name: data, persistentVolumeClaim: {{claimName: data}}}}, \
         {{name: files, nfs: {{server: nfs, path: /srv}}}}]}}}}"
    );
    let document = parse_documents(Path::new("pod.yaml"), text.as_bytes()).expect(&text).remove(0);
    Pod::parse(document).map_err(|error| error.to_string())
}

#[test]
fn an_annotation_has_the_mount_options_of_an_nfs_volume() {
    let options = |annotations: &str| match &pod(annotations).expect(annotations).volumes[4].source {
        VolumeSource::Nfs(_, options) => NfsOptions::clone(options),
        other => panic!("{other:?}"),
    };
    assert_eq!(options("{}"), NfsOptions::default());
    let given = options("{podfs.io/mount-options.files: \"nolock,ro,port=2050\"}");
    assert_eq!(given, NfsOptions::parse(["nolock", "ro", "port=2050"]).expect("options"));
    for (annotation, expected) in [
        ("podfs.io/mount-options.files: nolokc", "nolokc"),
        ("podfs.io/mount-options.data: nolock", "a claim has the mountOptions of its PersistentVolume"),
        ("podfs.io/mount-options.none: nolock", "the pod has no volume \"none\""),
    ] {
        let refused = pod(&format!("{{{annotation}}}")).expect_err(annotation);
        assert!(
            refused.contains("metadata.annotations[podfs.io/mount-options.") && refused.contains(expected),
            "{refused}"
        );
    }
}

#[test]
fn an_annotation_has_the_directory_out_of_which_no_link_leads_a_host_path() {
    let within = |annotations: &str| match &pod(annotations).expect(annotations).volumes[1].source {
        VolumeSource::HostPath(source) => source.within.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(within("{}"), None);
    assert_eq!(within("{podfs.io/within.host: /srv}"), Some(PathBuf::from("/srv")));
    assert_eq!(within("{podfs.io/within.host: /}"), Some(PathBuf::from("/")));
    for (annotation, expected) in [
        ("podfs.io/within.host: /sr", "must be the directory /srv or one above it"),
        ("podfs.io/within.host: \"\"", "must be the directory /srv or one above it"),
        ("podfs.io/within.host: srv", "must be the directory /srv or one above it"),
        ("podfs.io/within.files: /srv", "is for hostPath volumes, and \"files\" is of kind nfs"),
    ] {
        let refused = pod(&format!("{{{annotation}}}")).expect_err(annotation);
        assert!(refused.contains("metadata.annotations[podfs.io/within.") && refused.contains(expected), "{refused}");
    }
}

#[test]
fn annotations_that_podfs_does_not_know_are_ignored() {
    for other in ["podfs.io/audt.config: open", "podfs.io/audit: open", "podfs.io/other: x", "example.com/audit: x"] {
        assert!(pod(&format!("{{{other}}}")).is_ok(), "{other}");
    }
}

#[test]
fn annotations_choose_for_single_volumes() {
    let of = |annotations: &str| -> Vec<Preferences> {
        pod(annotations).expect(annotations).volumes.iter().map(|volume| volume.preferences).collect()
    };
    let chosen = of("{podfs.io/host-path.host: bind, podfs.io/host-path.data: fuse, podfs.io/audit.config: open, \
                      podfs.io/cache.scratch: always, podfs.io/cache.host: none, podfs.io/cache.data: auto, \
                      podfs.io/nfs-backend.data: kernel, podfs.io/nfs-backend.files: user, podfs.io/other: x}");
    let default = Preferences::default();
    let expected = [
        Preferences { audit: true, ..default },
        Preferences { served_by: Some(ServedBy::Bind), cache: CacheMode::None, ..default },
        Preferences { cache: CacheMode::Always, ..default },
        Preferences { served_by: Some(ServedBy::Fuse), nfs_backend: Some(Backend::Kernel), ..default },
        Preferences { nfs_backend: Some(Backend::User), ..default },
    ];
    assert_eq!(chosen, expected);
    assert_eq!(of("{}"), [Preferences::default(); 5]);
    assert_eq!(of("{podfs.io/sub-path.config: live}")[0].sub_path, Some(SubPathMode::Live));
    assert_eq!(
        of("{podfs.io/sub-path.config: pinned, podfs.io/audit.config: open}")[0].sub_path,
        Some(SubPathMode::Pinned)
    );
    let error = pod("{podfs.io/sub-path.config: live, podfs.io/audit.config: open}").expect_err("one of the two");
    assert!(error.contains("opens of \"config\" are logged; remove podfs.io/audit.config"), "{error}");
}

#[test]
fn annotations_that_make_no_sense_are_refused() {
    let rows = [
        ("host-path.host: maybe", "must be fuse or bind"),
        ("cache.host: sometimes", "must be none, auto or always"),
        ("host-path.hots: bind", "the pod has no volume \"hots\""),
        ("cache.: none", "the pod has no volume \"\""),
        ("host-path.scratch: bind", "is for hostPath volumes and claims, and \"scratch\" is of kind emptyDir"),
        ("nfs-backend.files: fuse", "must be auto, kernel or user"),
        ("nfs-backend.host: user", "is for nfs volumes and claims, and \"host\" is of kind hostPath"),
        (
            "cache.files: none",
            "nfs volumes are cached as their mount options say (actimeo, lookupcache); remove the annotation",
        ),
        ("audit.config: close", "must be open; without the annotation nothing is written down"),
        (
            "audit.scratch: open",
            "is for files that podfs assembles (configMap, secret, downwardAPI, projected), and \"scratch\" is of kind \
             emptyDir, whose files the host can open without podfs",
        ),
        ("sub-path.config: follow", "must be pinned or live"),
        (
            "sub-path.host: live",
            "is for files that podfs assembles (configMap, secret, downwardAPI, projected), and \"host\" is of kind hostPath, \
             whose parts always show what the volume shows",
        ),
        ("cache.config: none", "configMap volumes are cached for ever; remove the annotation"),
    ];
    for (annotation, sentence) in rows {
        let key = annotation.split(": ").next().expect("a key");
        let expected = format!("pod.yaml: metadata.annotations[podfs.io/{key}]: {sentence}");
        assert_eq!(pod(&format!("{{podfs.io/{annotation}}}")).map(|_| ()), Err(expected));
    }
}

#[test]
fn pv_06_the_plan_knows_how_containers_use_a_claim() {
    let pod = pod("{}").expect("a pod");
    let VolumeSource::Claim(claim) = &pod.volumes[3].source else { panic!("a claim") };
    assert_eq!(claim.usage, ClaimUsage { mounted: true, device: true });
}

#[test]
fn nm_02_directories_that_others_are_mounted_on_are_the_users() {
    let volume: core::Volume = parse_bare(Path::new("v.yaml"), b"{name: v, emptyDir: {}}").expect("a volume");
    let mount = |name: &str, path: &str| core::VolumeMount {
        name: name.into(),
        mount_path: path.into(),
        ..core::VolumeMount::default()
    };
    let mounts = [mount("v", "/d"), mount("w", "/d/..data")];
    let volume =
        Volume::parse(&volume, &VolumeFields::default(), &VolumeUses { mounts: vec![&mounts], devices: vec![] })
            .expect("a volume");
    assert_eq!(volume.nested, []);
}
