use super::*;
use crate::manifest::parse_documents;
use crate::types::Quantity;

const FILE: &str = "pod.yaml";

fn documents(yaml: &str) -> Vec<Document> {
    parse_documents(Path::new(FILE), yaml.as_bytes()).expect(yaml)
}

fn try_parse(metadata: &str, spec: &str) -> Result<Pod, String> {
    let yaml = format!("{{apiVersion: v1, kind: Pod, metadata: {{{metadata}}}, spec: {{{spec}}}}}");
    Pod::parse(documents(&yaml).remove(0)).map_err(|error| error.to_string())
}

fn parse(metadata: &str, spec: &str) -> Pod {
    try_parse(metadata, spec).expect(spec)
}

fn error(metadata: &str, spec: &str) -> String {
    try_parse(metadata, spec).expect_err(spec)
}

#[test]
fn a_pod_without_uid_gets_the_same_one_every_time() {
    let uid = |metadata| parse(metadata, "containers: []").identity.uid;
    // Paths of running pods depend on this value: it must never change.
    assert_eq!(uid("name: web").as_str(), "c15bdfd1-80e6-5c53-bf5e-e426594a4c7e");
    assert_eq!(uid("name: web"), uid("name: web, namespace: default"));
    assert_ne!(uid("name: web"), uid("name: web, namespace: shop"));
    assert_ne!(uid("name: web"), uid("name: db"));
    assert_eq!(uid("name: web, uid: 0f-1").as_str(), "0f-1");
}

#[test]
fn a_uid_is_safe_as_a_path_element_and_as_an_argument() {
    let long = "u".repeat(256);
    for uid in ["", ".", "..", "a/b", "/", "../../etc", r"a\0b", r"a\u001b[2J", "-x", "--help", "a_b", "ü", &long] {
        let error = error(&format!("name: web, uid: \"{uid}\""), "containers: []");
        assert!(error.starts_with("pod.yaml: metadata.uid: must be letters, digits and '-'"), "{error}");
    }
}

#[test]
fn names_are_dns_names() {
    let (long_name, long_label) = ("n".repeat(254), "n".repeat(64));
    for name in [r"a\nb", r"a\u001b[2Jb", r"a\u202eb", "A", "a_b", "-a", "a..b", "a/b", &long_name] {
        let error = error(&format!("name: \"{name}\""), "containers: []");
        assert!(error.starts_with("pod.yaml: metadata.name: must be a DNS name"), "{error}");
    }
    for namespace in [r"a\nb", r"a\u009bb", "A", "a.b", "a/b", &long_label] {
        let error = error(&format!("name: web, namespace: \"{namespace}\""), "containers: []");
        assert!(error.starts_with("pod.yaml: metadata.namespace: must be a DNS label"), "{error}");
    }
    assert_eq!(parse("name: web.example, namespace: shop-1", "containers: []").identity.name, "web.example");
}

#[test]
fn a_pod_has_a_name_and_a_namespace() {
    assert_eq!(parse("name: web, namespace: shop", "containers: []").identity.to_string(), "shop/web");
    assert_eq!(parse("name: web", "containers: []").identity.namespace, "default");
    assert_eq!(error("namespace: shop", "containers: []"), "pod.yaml: metadata.name: is required");
}

#[test]
fn another_kind_is_no_pod() {
    let parse = |yaml| Pod::parse(documents(yaml).remove(0)).map_err(|error| error.to_string());
    assert_eq!(
        parse("{apiVersion: apps/v1, kind: Deployment}"),
        Err("pod.yaml: expected a Pod of v1, found a Deployment of apps/v1".into())
    );
    assert_eq!(parse("{apiVersion: v1, kind: Pod, metadata: {name: web}}"), Err("pod.yaml: spec: is required".into()));
}

#[test]
fn the_only_pod_is_found_among_other_documents() {
    let only = |yaml: &str| {
        let (pod, others) = only_pod(Path::new(FILE), documents(yaml));
        pod.map(|pod| (pod, others)).map_err(|error| error.to_string())
    };
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: web}}";
    let secret = "{apiVersion: v1, kind: Secret, metadata: {name: s}}";
    let (found, others) = only(&format!("{secret}\n---\n{pod}")).expect("one pod");
    assert_eq!((found.kind.as_str(), others.len()), ("Pod", 1));
    assert_eq!(only(secret).map(|_| ()), Err("pod.yaml: expected one Pod, found Secret".into()));
    assert_eq!(only("").map(|_| ()), Err("pod.yaml: expected one Pod, found nothing".into()));
    assert_eq!(
        only(&format!("{pod}\n---\n{pod}")).map(|_| ()),
        Err("pod.yaml: expected one Pod, found 2 (pod.yaml, document 1; pod.yaml, document 2)".into())
    );
}

#[test]
fn volumes_keep_their_order_and_errors_name_field_and_volume() {
    let pod = parse(
        "name: web",
        "volumes: [{name: b, secret: {secretName: s}}, {name: a, configMap: {name: c}}], containers: []",
    );
    let names: Vec<&str> = pod.volumes.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(names, ["b", "a"]);
    assert_eq!(
        error(
            "name: web",
            "volumes: [{name: a, configMap: {name: c}}, {name: data, configmap: {name: c}}], containers: []"
        ),
        "pod.yaml: spec.volumes[1].configmap: volume \"data\": \"configmap\" is no kind of volume; did you mean \"configMap\"?"
    );
    assert_eq!(
        error("name: web", "volumes: [{name: a, configMap: {name: c, items: [{key: k, path: ..}]}}], containers: []"),
        "pod.yaml: spec.volumes[0].configMap.items[0].path: volume \"a\": invalid path: must not contain '..': .."
    );
}

#[test]
fn two_volumes_of_one_name_are_refused() {
    assert_eq!(
        error(
            "name: web",
            "volumes: [{name: a, configMap: {name: c}}, {name: a, secret: {secretName: s}}], containers: []"
        ),
        "pod.yaml: spec.volumes[1].name: volume \"a\": another volume of the pod has this name"
    );
}

#[test]
fn nm_01_mounts_of_all_three_kinds_of_containers_count() {
    let mounts = |at: &str| {
        format!("[{{name: x, volumeMounts: [{{name: a, mountPath: /m}}, {{name: o, mountPath: /m/{at}}}]}}]")
    };
    let spec = format!(
        "volumes: [{{name: a, configMap: {{name: c}}}}, {{name: o, configMap: {{name: c}}}}], \
         initContainers: {}, containers: {}, ephemeralContainers: {}",
        mounts("init"),
        mounts("regular"),
        mounts("ephemeral")
    );
    let pod = parse("name: web", &spec);
    let nested: Vec<&str> = pod.volumes[0].nested.iter().map(|path| path.as_str()).collect();
    assert_eq!(nested, ["ephemeral", "init", "regular"]);
    assert_eq!(pod.volumes[1].nested, []);
}

#[test]
fn tk_03_one_user_for_all_containers() {
    let user = |spec: &str| parse("name: web", spec).facts.fs_user;
    let container = |user: &str| format!("{{name: c, securityContext: {{runAsUser: {user}}}}}");
    let (one, two, none) = (container("1000"), container("1001"), "{name: c}");
    let root = container("0");
    assert_eq!(user(&format!("containers: [{one}]")), Some(1000));
    assert_eq!(user(&format!("containers: [{root}]")), Some(0));
    assert_eq!(user(&format!("containers: [{one}, {one}], initContainers: [{one}]")), Some(1000));
    assert_eq!(user(&format!("containers: [{one}, {two}]")), None);
    assert_eq!(user(&format!("containers: [{one}, {none}, {one}]")), None);
    assert_eq!(user(&format!("containers: [{one}], initContainers: [{two}]")), None);
    assert_eq!(user(&format!("containers: [{one}], ephemeralContainers: [{two}]")), None);
    assert_eq!(user(&format!("containers: [{one}], ephemeralContainers: [{one}]")), Some(1000));
    assert_eq!(user(&format!("securityContext: {{runAsUser: 1000}}, containers: [{none}, {one}]")), Some(1000));
    assert_eq!(user(&format!("securityContext: {{runAsUser: 1000}}, containers: [{none}, {two}]")), None);
    assert_eq!(user(&format!("securityContext: {{runAsUser: 1001}}, containers: [{one}]")), Some(1000));
    assert_eq!(user("securityContext: {runAsUser: 1000}, containers: []"), None);
    assert_eq!(user(&format!("containers: [{none}]")), None);
}

#[test]
fn ids_are_checked() {
    let range = "must be between 0 and 2147483647, inclusive";
    assert_eq!(
        error("name: web", "securityContext: {fsGroup: -1}, containers: []"),
        format!("pod.yaml: spec.securityContext.fsGroup: {range}")
    );
    assert_eq!(
        error("name: web", "containers: [{name: a}, {name: c, securityContext: {runAsUser: 2147483648}}]"),
        format!("pod.yaml: spec.containers[1].securityContext.runAsUser: {range}")
    );
    let group =
        |group| parse("name: web", &format!("securityContext: {{fsGroup: {group}}}, containers: []")).facts.fs_group;
    assert_eq!((group("0"), group("2147483647")), (Some(0), Some(2_147_483_647)));
}

#[test]
fn fu_05_the_label_of_files_takes_user_and_level() {
    let label = |options: &str| {
        let spec = format!("securityContext: {{seLinuxOptions: {options}}}, containers: []");
        parse("name: web", &spec).facts.selinux_label
    };
    assert_eq!(parse("name: web", "containers: []").facts.selinux_label, None);
    assert_eq!(label("{level: 's0:c1,c2'}").as_deref(), Some("system_u:object_r:container_file_t:s0:c1,c2"));
    assert_eq!(label("{user: staff_u}").as_deref(), Some("staff_u:object_r:container_file_t:s0"));
    // These are of processes.
    assert_eq!(label("{type: spc_t, role: system_r}").as_deref(), Some("system_u:object_r:container_file_t:s0"));
    assert!(
        error("name: web", "securityContext: {seLinuxOptions: {level: 's0 x'}}, containers: []")
            .starts_with("pod.yaml: spec.securityContext.seLinuxOptions.level: ")
    );
}

#[test]
fn da_08_resources_are_quantities_and_numbers_are_fine() {
    let resources = "{limits: {cpu: 2, memory: 128Mi, 'hugepages-2Mi': 4Mi}, requests: {cpu: 0.5}}";
    let pod = parse(
        "name: web",
        &format!("initContainers: [{{name: i}}], containers: [{{name: c, resources: {resources}}}]"),
    );
    let container = pod.facts.container("c").expect("c");
    assert_eq!(container.limits.get("cpu"), Some(&Quantity::from_units(2)));
    assert_eq!(container.requests.get("cpu"), Some(&Quantity::from_milli(500)));
    assert_eq!(pod.facts.init_containers.len(), 1);
    assert!(
        error("name: web", "containers: [{name: c, resources: {limits: {cpu: two}}}]")
            .starts_with("pod.yaml: spec.containers[0].resources.limits.cpu: \"two\" is not a quantity")
    );
}

#[test]
fn da_09_a_request_defaults_to_the_limit_as_in_the_api() {
    let pod = parse("name: web", "containers: [{name: c, resources: {limits: {memory: 1Gi}}}, {name: d}]");
    assert_eq!(pod.facts.containers[0].requests.get("memory"), Some(&Quantity::from_units(1 << 30)));
    assert_eq!(pod.facts.containers[1].requests.get("memory"), None);
}

#[test]
fn da_06_a_changed_label_changes_the_facts_and_not_the_volumes() {
    let spec = "volumes: [{name: v, downwardAPI: {items: [{path: l, fieldRef: {fieldPath: metadata.labels}}]}}], containers: []";
    let (before, after) = (parse("name: web, labels: {a: b}", spec), parse("name: web, labels: {a: c}", spec));
    assert_ne!(before.facts, after.facts);
    assert_eq!((before.identity, before.volumes), (after.identity, after.volumes));
}

#[test]
fn fields_that_no_volume_depends_on_are_ignored() {
    parse(
        "name: web, future: 1",
        "nodeName: n1, future: {x: 1}, containers: [{name: c, image: '', ports: []}], os: {name: linux}",
    );
}

#[test]
fn a_definition_has_all_that_decides_its_volume() {
    let pod = parse(
        "name: web, annotations: {podfs.io/host-path.h: bind, podfs.io/audit.c: open, other/x.h: other}",
        "volumes: [{name: c, configMap: {name: c, defaultMode: 0400}}, {name: h, hostPath: {path: /srv}}, \
         {name: e, emptyDir: {sizeLimit: 1}}, \
         {name: p, persistentVolumeClaim: {claimName: p}}, {name: d, persistentVolumeClaim: {claimName: d}}, {name: q, quantumStore: {}}], \
         containers: [{name: one, volumeMounts: [{name: c, mountPath: /c}, {name: h, mountPath: /c/h}, {name: p, mountPath: /p}]}, \
         {name: none}, {name: two, volumeDevices: [{name: d, devicePath: /dev/d}]}]",
    );
    let text = serde_json::to_string(&pod.definitions).expect("JSON");
    let definitions: Vec<VolumeDefinition> = serde_json::from_str(&text).expect("definitions");
    let volumes: Vec<_> = definitions.iter().map(|definition| definition.parse().expect("a volume")).collect();
    assert_eq!(volumes, pod.volumes[..5], "all but that of a kind that podfs does not serve");
    assert!(!text.contains("other/x.h"), "{text}");
}
