use std::os::unix::ffi::OsStrExt;

use serde_json::{Value, json};

use super::*;
use crate::mounts::{MountSource, Propagation};

fn mount(name: &str, target: &str) -> ContainerMount {
    ContainerMount {
        name: name.to_owned(),
        container_path: target.to_owned(),
        source: MountSource::HostPath(format!("/pods/{name}").into()),
        read_only: false,
        recursive_read_only: false,
        propagation: Propagation::Private,
        selinux_relabel: false,
        id_mapped: false,
        uid_mappings: Vec::new(),
        gid_mappings: Vec::new(),
        nosuid: false,
        nodev: false,
        noexec: false,
    }
}

/// A mount with all properties.
fn full() -> ContainerMount {
    ContainerMount {
        read_only: true,
        recursive_read_only: true,
        propagation: Propagation::HostToContainer,
        selinux_relabel: true,
        id_mapped: true,
        uid_mappings: vec!["0:100000:65536".parse().expect("a mapping")],
        gid_mappings: vec!["0:200000:1000".parse().expect("a mapping"), "1000:0:1".parse().expect("a mapping")],
        nosuid: true,
        nodev: true,
        noexec: true,
        ..mount("full", "/a/b")
    }
}

fn image(sub_path: &str) -> ContainerMount {
    let source = MountSource::Image { reference: "registry/app:1".to_owned(), sub_path: sub_path.to_owned() };
    ContainerMount { source, read_only: true, ..mount("image", "/image") }
}

fn printed(format: OutputFormat, mounts: &[ContainerMount]) -> Value {
    serde_json::from_str(&format.print(mounts).expect("a format")).expect("JSON")
}

#[test]
fn runc_and_crun_get_outer_mounts_first() {
    let mounts = [full(), mount("outer", "/a/"), mount("root", "/")];
    let expected = json!([
        {"destination": "/", "type": "bind", "source": "/pods/root", "options": ["rbind", "rprivate", "rw"]},
        {"destination": "/a/", "type": "bind", "source": "/pods/outer", "options": ["rbind", "rprivate", "rw"]},
        {
            "destination": "/a/b",
            "type": "bind",
            "source": "/pods/full",
            "options": ["rbind", "rslave", "ro", "rro", "nosuid", "nodev", "noexec", "idmap"],
        },
    ]);
    assert_eq!(printed(OutputFormat::Oci, &mounts), expected);
}

#[test]
fn a_cri_gets_its_own_messages() {
    let both = ContainerMount { propagation: Propagation::Bidirectional, ..mount("both", "/c") };
    let expected = json!([
        {
            "container_path": "/a/b",
            "host_path": "/pods/full",
            "propagation": 1,
            "readonly": true,
            "recursive_read_only": true,
            "selinux_relabel": true,
            "uidMappings": [{"container_id": 0, "host_id": 100_000, "length": 65536}],
            "gidMappings": [
                {"container_id": 0, "host_id": 200_000, "length": 1000},
                {"container_id": 1000, "host_id": 0, "length": 1},
            ],
        },
        {"container_path": "/b", "host_path": "/pods/plain"},
        {"container_path": "/c", "host_path": "/pods/both", "propagation": 2},
        {"container_path": "/image", "image": {"image": "registry/app:1"}, "readonly": true},
        {"container_path": "/image", "image": {"image": "registry/app:1"}, "image_sub_path": "bin", "readonly": true},
    ]);
    let mounts = [full(), mount("plain", "/b"), both, image(""), image("bin")];
    assert_eq!(printed(OutputFormat::Cri, &mounts), expected);
}

#[test]
fn docker_gets_bindings_and_no_colon() {
    let options = ContainerMount { id_mapped: false, ..full() };
    let text = OutputFormat::Docker.print(&[options, mount("plain", "/b")]).expect("arguments");
    assert_eq!(text, "--volume=/pods/full:/a/b:ro,Z,rslave\n--volume=/pods/plain:/b:rw\n");
    let refused = OutputFormat::Docker.print(&[mount("data", "/a:b")]).expect_err("a colon").to_string();
    assert_eq!(
        refused,
        "volumeMount \"data\": \"/a:b\" has a ':', which a binding of Docker cannot have; use --output podman or oci"
    );
}

#[test]
fn podman_gets_mounts_with_any_path() {
    let odd = mount("odd", "/a,\"b\":c");
    let text = OutputFormat::Podman.print(&[full(), odd, image("")]).expect("arguments");
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(
        lines,
        [
            "--mount=type=bind,source=/pods/full,target=/a/b,ro=true,bind-propagation=rslave,relabel=private,idmap",
            "--mount=type=bind,source=/pods/odd,\"target=/a,\"\"b\"\":c\",ro=false,bind-propagation=rprivate",
            "--mount=type=image,source=registry/app:1,target=/image",
        ]
    );
}

#[test]
fn mounts_that_a_format_cannot_express_are_refused_by_name() {
    for (format, mount) in
        [(OutputFormat::Oci, image("")), (OutputFormat::Docker, image("")), (OutputFormat::Podman, image("bin"))]
    {
        let refused = format.print(&[mount]).expect_err("an image").to_string();
        assert!(refused.starts_with("volumeMount \"image\": ") && refused.ends_with("; use --output cri"), "{refused}");
    }
    assert_eq!(
        OutputFormat::Docker.print(&[full()]).expect_err("ids").to_string(),
        "volumeMount \"full\": the pod has a user namespace, and Docker cannot map the ids of a mount; use --output podman, oci \
         or cri"
    );
    for (format, what) in [(OutputFormat::Docker, "Docker"), (OutputFormat::Podman, "podman")] {
        let device = DeviceNode { path: "/dev/a:b".into(), major: 7, minor: 0 };
        let mount = ContainerMount { source: MountSource::Device(device), ..mount("disk", "/dev/disk") };
        let refused = format.print(&[mount]).expect_err("a colon").to_string();
        let expected = format!(
            "volumeMount \"disk\": \"/dev/a:b\" has a ':', which a device of {what} cannot have; use --output oci"
        );
        assert_eq!(refused, expected);
    }
    let unmapped = ContainerMount { uid_mappings: Vec::new(), gid_mappings: Vec::new(), ..full() };
    assert_eq!(
        OutputFormat::Cri.print(std::slice::from_ref(&unmapped)).expect_err("no ids").to_string(),
        "volumeMount \"full\": the pod has a user namespace, so a Mount message needs its ids; give them with --uid-map and \
         --gid-map"
    );
    assert!(OutputFormat::Oci.print(&[unmapped]).is_ok(), "runc and crun map the ids of the container");
    let path = std::ffi::OsStr::from_bytes(b"/pods/\xff").into();
    let odd = ContainerMount { source: MountSource::HostPath(path), ..mount("odd", "/a") };
    for format in [OutputFormat::Oci, OutputFormat::Cri, OutputFormat::Docker, OutputFormat::Podman] {
        assert!(matches!(format.print(std::slice::from_ref(&odd)), Err(FormatError::NotText { .. })), "{format:?}");
    }
}

#[test]
fn json_says_everything_and_can_be_read_back() {
    let mounts = [full(), image("bin")];
    let text = OutputFormat::Json.print(&mounts).expect("JSON");
    assert_eq!(serde_json::from_str::<Vec<ContainerMount>>(&text).expect("the same"), mounts);
}

#[test]
fn a_path_with_a_line_break_adds_no_argument() {
    let mounts = [mount("a", "/x\n--privileged"), image("")];
    for format in [OutputFormat::Docker, OutputFormat::Podman] {
        let error = format.print(&mounts[..1]).expect_err("refused").to_string();
        assert!(error.contains("has a control character"), "{error}");
    }
    let mut broken = image("");
    broken.source = MountSource::Image { reference: "app\n--privileged".to_owned(), sub_path: String::new() };
    assert!(OutputFormat::Podman.print(&[broken]).is_err());
    assert!(OutputFormat::Oci.print(&mounts[..1]).is_ok());
}
