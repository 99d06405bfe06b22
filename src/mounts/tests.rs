//! The rows of the tables in the kubelet's tests.

use std::collections::BTreeMap;
use std::path::Path;

use super::*;
use crate::manifest::parse_documents;
use crate::manifest::pod::Pod;

/// A pod with the volumes `disk`, `disk4`, `config` and `image`, and these further fields in its spec.
fn pod(spec: &str) -> Pod {
    let yaml = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  volumes:\n  - {{name: disk, emptyDir: {{}}}}\n  \
         - {{name: disk4, emptyDir: {{}}}}\n  - {{name: config, configMap: {{name: app}}}}\n  \
         - {{name: image, image: {{reference: registry/app:1}}}}\n{spec}"
    );
    let mut documents = parse_documents(Path::new("pod.yaml"), yaml.as_bytes()).expect(&yaml);
    Pod::parse(documents.remove(0)).unwrap_or_else(|error| panic!("{error}: {yaml}"))
}

/// A pod with a container `c` with these `volumeMounts`.
fn container(mounts: &str) -> Pod {
    pod(&format!("  containers:\n  - {{name: c, volumeMounts: [{mounts}]}}\n"))
}

fn volumes() -> BTreeMap<String, Result<MountedPodVolume, NotMounted>> {
    let mounted = |path: &str, read_only| {
        Ok(MountedPodVolume { path: PathBuf::from(path), read_only, selinux_relabel: false, device: None })
    };
    [
        ("disk".to_owned(), mounted("/mnt/disk", false)),
        ("disk4".to_owned(), mounted("/mnt/host", false)),
        ("config".to_owned(), mounted("/mnt/config", true)),
        ("waits".to_owned(), Err(NotMounted::Waiting("it is not mounted yet: configmap \"app\" not found".to_owned()))),
    ]
    .into()
}

const FEATURES: Features = Features { recursive_read_only: true, selinux: false };

fn planned_with(pod: &Pod, environment: &AgentFacts, features: Features) -> Result<Vec<PlannedMount>, String> {
    let volumes = volumes();
    let request = ContainerMountRequest { pod, container: "c", volumes: &volumes, environment, features };
    plan(request).map_err(|error| error.to_string())
}

fn planned(mounts: &str) -> Result<Vec<PlannedMount>, String> {
    planned_with(&container(mounts), &AgentFacts::default(), FEATURES)
}

fn refused(mounts: &str) -> String {
    planned(mounts).expect_err(mounts)
}

/// A pod with an address.
fn in_network() -> AgentFacts {
    AgentFacts { pod_ips: vec!["198.51.100.7".parse().expect("an address")], ..AgentFacts::default() }
}

#[test]
fn mt_01_mounts_keep_their_order_their_modes_and_their_propagation() {
    let mounts = planned(
        "{name: disk, mountPath: /etc/hosts}, {name: disk, mountPath: /mnt/path3, readOnly: true, mountPropagation: None},
         {name: disk4, mountPath: /mnt/path4, mountPropagation: HostToContainer}, {name: disk4, mountPath: relative/path}",
    )
    .expect("a plan");
    let seen: Vec<_> = mounts
        .iter()
        .map(|mount| (mount.name.as_str(), mount.container_path.as_str(), mount.read_only, mount.propagation))
        .collect();
    use Propagation::{HostToContainer, Private};
    assert_eq!(
        seen,
        [
            ("disk", "/etc/hosts", false, Private),
            ("disk", "/mnt/path3", true, Private),
            ("disk4", "/mnt/path4", false, HostToContainer),
            ("disk4", "/relative/path", false, Private),
            ("termination-log", "/dev/termination-log", false, Private),
        ]
    );
    assert_eq!(mounts[0].source, PlannedSource::Volume("/mnt/disk".into()));
}

#[test]
fn mt_01_impossible_mounts_are_refused_in_the_kubelets_words() {
    let rows = [
        (
            "{name: disk, mountPath: /a, subPath: /must/not/be/absolute}",
            "error SubPath `/must/not/be/absolute` must not be an absolute path",
        ),
        (
            "{name: disk, mountPath: /a, subPath: no/backsteps/../allowed}",
            "unable to provision SubPath `no/backsteps/../allowed`: must not contain '..'",
        ),
        ("{name: disk, mountPath: /a, subPath: ..}", "unable to provision SubPath `..`: must not contain '..'"),
        ("{name: none, mountPath: /a}", "cannot find volume \"none\" to mount into container \"c\""),
        (
            "{name: waits, mountPath: /a}",
            "cannot find volume \"waits\" to mount into container \"c\": it is not mounted yet: configmap \"app\" not found",
        ),
        ("{name: disk, mountPath: /a, mountPropagation: Sideways}", "invalid MountPropagation mode: \"Sideways\""),
        (
            "{name: disk, mountPath: /a}, {name: disk4, mountPath: /a}",
            "container \"c\": mountPath \"/a\" must be unique; give each volumeMount a path of its own",
        ),
        (
            "{name: disk, mountPath: /a, subPath: a, subPathExpr: b}",
            "container \"c\", volumeMount \"disk\": subPath and subPathExpr are mutually exclusive",
        ),
        (
            "{name: disk, mountPath: /a, mountPropagation: Bidirectional}",
            "volumeMount \"disk\": Bidirectional mount propagation is available only to privileged containers",
        ),
    ];
    for (mounts, expected) in rows {
        assert_eq!(refused(mounts), expected, "{mounts}");
    }
    let error = plan(ContainerMountRequest {
        pod: &container(""),
        container: "d",
        volumes: &volumes(),
        environment: &AgentFacts::default(),
        features: FEATURES,
    });
    let error = error.expect_err("no such container").to_string();
    assert_eq!(error, "pod default/web has no container \"d\"; its containers are c");
}

#[test]
fn mt_01_a_block_device_that_is_not_there_is_refused_in_the_kubelets_words() {
    let with = |device: &str| {
        let pod = pod(&format!("  containers:\n  - {{name: c, volumeDevices: [{device}]}}\n"));
        planned_with(&pod, &AgentFacts::default(), FEATURES).expect_err(device)
    };
    assert_eq!(with("{name: raw, devicePath: /dev/xvda}"), "cannot find volume \"raw\" to pass into container \"c\"");
    assert_eq!(
        with("{name: disk, devicePath: /dev/xvda}"),
        "cannot find volume \"disk\" to pass into container \"c\": it is no block device"
    );
    assert_eq!(with("{name: raw, devicePath: dev/xvda}"), "error DevicePath `dev/xvda` must be an absolute path");
}

#[test]
fn mt_02_a_mount_is_read_only_by_its_mount_or_by_its_volume() {
    let mounts = planned(
        "{name: disk, mountPath: /a}, {name: disk, mountPath: /b, readOnly: true}, {name: config, mountPath: /c},
         {name: config, mountPath: /d, readOnly: false}",
    );
    let read_only: Vec<_> = mounts.expect("a plan").iter().map(|mount| mount.read_only).collect();
    assert_eq!(read_only, [false, true, true, true, false]);
}

#[test]
fn mt_04_a_privileged_container_may_mount_in_both_directions() {
    let spec = "  containers:\n  - {name: c, securityContext: {privileged: true}, volumeMounts: \
                [{name: disk, mountPath: /a, mountPropagation: Bidirectional}]}\n";
    let mounts = planned_with(&pod(spec), &AgentFacts::default(), FEATURES).expect("a plan");
    assert_eq!(mounts[0].propagation, Propagation::Bidirectional);
}

#[test]
fn mt_05_recursive_read_only_is_refused_for_four_reasons() {
    let mount = |fields: &str| format!("{{name: disk, mountPath: /a, {fields}}}");
    let prefix = "failed to resolve recursive read-only mode: ";
    let rows = [
        ("recursiveReadOnly: Enabled", "volume \"disk\" requested recursive read-only mode, but it is not read-only"),
        (
            "readOnly: true, mountPropagation: HostToContainer, recursiveReadOnly: IfPossible",
            "volume \"disk\" requested recursive read-only mode, but it is not compatible with propagation \"HostToContainer\"",
        ),
        ("readOnly: true, recursiveReadOnly: Always", "unknown recursive read-only mode \"Always\""),
    ];
    for (fields, expected) in rows {
        assert_eq!(refused(&mount(fields)), format!("{prefix}{expected}"), "{fields}");
    }
    let lacking = Features { recursive_read_only: false, ..FEATURES };
    let with = |fields: &str, features| {
        let planned = planned_with(&container(&mount(fields)), &AgentFacts::default(), features);
        planned.map(|mounts| mounts[0].recursive_read_only)
    };
    let unsupported = "volume \"disk\" requested recursive read-only mode, but it is not supported by the runtime";
    assert_eq!(with("readOnly: true, recursiveReadOnly: Enabled", lacking), Err(format!("{prefix}{unsupported}")));
    assert_eq!(with("readOnly: true, recursiveReadOnly: IfPossible", lacking), Ok(false));
    assert_eq!(with("readOnly: true, recursiveReadOnly: IfPossible", FEATURES), Ok(true));
    assert_eq!(with("readOnly: true, mountPropagation: None, recursiveReadOnly: Enabled", FEATURES), Ok(true));
    assert_eq!(with("recursiveReadOnly: Disabled", FEATURES), Ok(false));
}

#[test]
fn mt_06_only_files_of_podfs_and_bind_mounts_are_relabelled() {
    let pod = container("{name: disk, mountPath: /a}, {name: huge, mountPath: /b}");
    let mut volumes = volumes();
    let huge = MountedPodVolume { path: "/mnt/huge".into(), read_only: false, selinux_relabel: true, device: None };
    volumes.insert("huge".to_owned(), Ok(huge));
    for selinux in [true, false] {
        let features = Features { selinux, ..FEATURES };
        let environment = in_network();
        let request =
            ContainerMountRequest { pod: &pod, container: "c", volumes: &volumes, environment: &environment, features };
        let relabelled: Vec<_> = plan(request).expect("a plan").iter().map(|mount| mount.selinux_relabel).collect();
        assert_eq!(relabelled, [false, selinux, selinux, selinux]);
    }
}

#[test]
fn mt_07_the_hosts_file_is_mounted_unless_there_is_no_network_or_another_file() {
    let mounts = "volumeMounts: [{name: disk, mountPath: /a}]";
    let own = "volumeMounts: [{name: disk, mountPath: /etc/hosts}]";
    let none = AgentFacts::default();
    let of_agent = AgentFacts { host_network: true, ..AgentFacts::default() };
    let rows = [
        ("false", mounts, in_network(), true),
        ("false", mounts, none.clone(), false),
        ("true", mounts, in_network(), true),
        ("true", mounts, none, true),
        ("false", mounts, of_agent, true),
        ("false", own, in_network(), false),
    ];
    for (host_network, mounts, environment, expected) in rows {
        let pod = pod(&format!("  hostNetwork: {host_network}\n  containers:\n  - {{name: c, {mounts}}}\n"));
        let planned = planned_with(&pod, &environment, FEATURES).expect("a plan");
        let hosts = planned.iter().find(|mount| mount.source == PlannedSource::Hosts);
        let row = format!("hostNetwork {host_network}, {mounts}, {environment:?}");
        assert_eq!(hosts.map(|mount| mount.container_path.as_str()), expected.then_some("/etc/hosts"), "{row}");
        assert!(hosts.is_none_or(|mount| mount.name == "k8s-managed-etc-hosts" && !mount.read_only), "{row}");
    }
}

#[test]
fn mt_07_the_name_in_the_network_is_the_agents_the_manifests_or_the_pods() {
    let bare = container("");
    let named = pod("  hostname: web-0\n  containers:\n  - {name: c}\n");
    let of_agent = AgentFacts { hostname: Some("web-1.web.default.svc".to_owned()), ..AgentFacts::default() };
    assert_eq!(AgentFacts::default().host_and_domain(&bare), ("web", None));
    assert_eq!(AgentFacts::default().host_and_domain(&named), ("web-0", None));
    assert_eq!(of_agent.host_and_domain(&named), ("web-1", Some("web.default.svc")));
}

#[test]
fn mt_08_the_termination_log_is_where_the_container_looks_for_it() {
    let spec = "  containers:\n  - {name: c, terminationMessagePath: /tmp/message}\n";
    let mounts = planned_with(&pod(spec), &AgentFacts::default(), FEATURES).expect("a plan");
    assert_eq!(mounts[0].container_path, "/tmp/message");
    assert_eq!(mounts[0].source, PlannedSource::TerminationLog);
}

#[test]
fn mt_09_a_sub_path_may_come_from_the_environment() {
    let pod = container("{name: disk, mountPath: /a, subPathExpr: logs/$(POD)}");
    let refused = planned_with(&pod, &AgentFacts::default(), FEATURES).expect_err("no POD");
    assert_eq!(refused, "missing value for POD");
    let with = |value: &str| {
        let variables = [("POD".to_owned(), value.to_owned())].into();
        let environment = AgentFacts { variables, ..AgentFacts::default() };
        planned_with(&pod, &environment, FEATURES).map(|mut mounts| mounts.remove(0).source)
    };
    assert_eq!(with("web-0"), Ok(PlannedSource::SubPath("logs/web-0".to_owned())));
    assert_eq!(with("../.."), Err("unable to provision SubPath `logs/../..`: must not contain '..'".to_owned()));
}

#[test]
fn sp_01_a_sub_path_is_cleaned_as_by_the_kubelet() {
    for (written, clean) in [("a/", "a"), ("a/.", "a"), ("./x//y/", "x/y"), (".", "."), ("./", ".")] {
        let mounts = planned(&format!("{{name: disk, mountPath: /a, subPath: {written}}}")).expect(written);
        assert_eq!(mounts[0].source, PlannedSource::SubPath(clean.to_owned()), "{written}");
    }
}

#[test]
fn images_are_passed_on_with_and_without_a_sub_path() {
    let mounts = planned("{name: image, mountPath: /a}, {name: image, mountPath: /b, subPath: app/bin}");
    let mounts = mounts.expect("a plan");
    let image =
        |sub_path: &str| PlannedSource::Image { reference: "registry/app:1".to_owned(), sub_path: sub_path.to_owned() };
    assert_eq!([&mounts[0].source, &mounts[1].source], [&image(""), &image("app/bin")]);
    assert!(mounts[0].read_only && !mounts[0].id_mapped);
}

#[test]
fn mounts_of_a_pod_with_a_user_namespace_map_its_ids() {
    let pod = pod("  hostUsers: false\n  containers:\n  - {name: c, volumeMounts: [{name: disk, mountPath: /a}]}\n");
    let mounts = planned_with(&pod, &in_network(), FEATURES).expect("a plan");
    assert!(mounts.iter().all(|mount| mount.id_mapped), "{mounts:?}");
}

#[test]
fn the_ids_of_a_user_namespace_go_to_every_mount_of_its_pod_and_to_no_other() {
    let mapping = |text: &str| vec![text.parse::<IdMapping>().expect("a mapping")];
    let mapped =
        AgentFacts { uid_mappings: mapping("0:100000:65536"), gid_mappings: mapping("0:200000:65536"), ..in_network() };
    let mounts = "volumeMounts: [{name: disk, mountPath: /a}, {name: image, mountPath: /b}]";
    let with = |host_users: &str, environment: &AgentFacts| {
        let pod = pod(&format!("  hostUsers: {host_users}\n  containers:\n  - {{name: c, {mounts}}}\n"));
        planned_with(&pod, environment, FEATURES)
    };
    let mounts = with("false", &mapped).expect("a plan");
    let names: Vec<_> = mounts.iter().map(|mount| mount.name.as_str()).collect();
    assert_eq!(names, ["disk", "image", HOSTS_NAME, TERMINATION_LOG_NAME]);
    for mount in mounts {
        assert_eq!(
            (&mount.uid_mappings, &mount.gid_mappings),
            (&mapped.uid_mappings, &mapped.gid_mappings),
            "{mount:?}"
        );
    }
    assert_eq!(
        with("true", &mapped).expect_err("no user namespace"),
        "pod default/web shares the users of the node (hostUsers is not false), so no mount of it maps ids; leave the id \
         mappings out"
    );
    let halves = [
        AgentFacts { gid_mappings: Vec::new(), ..mapped.clone() },
        AgentFacts { uid_mappings: Vec::new(), ..mapped.clone() },
    ];
    for half in halves {
        assert_eq!(
            with("false", &half).expect_err("half of the ids"),
            "the id mappings of users and those of groups belong together; give both, or none"
        );
    }
}
