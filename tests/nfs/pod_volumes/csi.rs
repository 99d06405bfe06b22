//! PersistentVolumes of the CSI driver podfs.io that are NFS exports. The tests publish them as the kubelet does.

use std::fs;
use std::io::ErrorKind;

use nix::sys::signal::{Signal, kill};
use podfs::csi::v1::volume_capability::access_mode::Mode;
use podfs::csi::v1::volume_capability::{AccessMode, AccessType, MountVolume};
use podfs::csi::v1::{NodePublishVolumeRequest, VolumeCapability};

use crate::common::kubelet::{KubeletCalls, Volume};
use crate::common::node::Node;
use crate::common::{Running, eventually};
use crate::nfs_rig::Ganesha;

/// A node with the CSI calls of a kubelet, and an NFS server.
struct Rig {
    ganesha: Ganesha,
    node: Node,
    kubelet: KubeletCalls,
}

impl Rig {
    fn new() -> Rig {
        let (ganesha, node) = (Ganesha::start(), Node::new());
        let root = node.fixture.path("kubelet");
        Rig { ganesha, kubelet: KubeletCalls::new(&root, &root), node }
    }

    fn server(&self) -> String {
        self.ganesha.address().ip().to_string()
    }

    fn start(&self) -> Running {
        let mut command = self.node.command();
        command.arg("--csi").arg(self.kubelet.socket()).arg("--kubelet-root").arg(self.kubelet.root());
        self.node.start_command({
            command.args(["--node-name", "n1", "--csi-allow", &self.server()]);
            command
        })
    }

    /// A PersistentVolume in a pod, whose `mountOptions` are the server's ports and `options`. Other options make another
    /// PersistentVolume.
    fn volume(&self, pod: &str, options: &[&str], mode: Mode) -> Volume {
        let server = self.server();
        let mut volume =
            self.kubelet.volume(pod, "pv-share", &[("kind", "nfs"), ("server", &server), ("path", "/export")]);
        volume.id = format!("share {}", options.join(","));
        let ports = format!("port={},mountport={}", self.ganesha.address().port(), self.ganesha.mount_address().port());
        let mount_flags = [ports.as_str()].iter().chain(options).map(|option| (*option).to_owned()).collect();
        let mut volume_context = volume.request.volume_context.clone();
        volume_context.remove("csi.storage.k8s.io/ephemeral");
        volume.request = NodePublishVolumeRequest {
            volume_id: volume.id.clone(),
            volume_capability: Some(VolumeCapability {
                access_type: Some(AccessType::Mount(MountVolume { mount_flags, ..MountVolume::default() })),
                access_mode: Some(AccessMode { mode: mode.into() }),
            }),
            readonly: false,
            volume_context,
            ..volume.request
        };
        volume
    }

    #[track_caller]
    fn publish(&self, volume: &Volume) {
        if let Err(status) = self.kubelet.publish(volume) {
            panic!("{status:?}\n{}", self.node.log());
        }
    }
}

#[test]
fn a_persistent_volume_of_the_driver_shows_its_export_with_its_mount_options() {
    let rig = Rig::new();
    fs::write(rig.ganesha.exported().join("there"), "before").expect("written");
    let daemon = rig.start();
    let writer = rig.volume("writer", &["nolock", "timeo=100"], Mode::MultiNodeMultiWriter);
    let reader = rig.volume("reader", &["nolock", "ro"], Mode::MultiNodeMultiWriter);
    let guest = rig.volume("guest", &["nolock", "timeo=100"], Mode::MultiNodeReaderOnly);
    for volume in [&writer, &reader, &guest] {
        // This also tests that podfs uses the mount options: without the ports among them, it would not find the server.
        rig.publish(volume);
        assert_eq!(fs::read_to_string(volume.target.join("there")).expect("read"), "before");
    }
    fs::write(writer.target.join("new"), "content").expect("written");
    assert_eq!(rig.ganesha.libnfs().cat("new"), b"content");
    for volume in [&reader, &guest] {
        let refused = fs::write(volume.target.join("new"), "").expect_err("read-only");
        assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
    }
    // With `nolock`, locks hold on this node only. Without it, podfs's client refuses locks.
    let file = fs::OpenOptions::new().write(true).open(writer.target.join("new")).expect("opened");
    nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusive).expect("a lock of the node");

    // The next daemon and the next supervisor know the mount options.
    drop(daemon);
    let _daemon = rig.start();
    rig.publish(&writer);
    let supervisor = rig.node.supervisor("writer");
    kill(supervisor, Signal::SIGKILL).expect("the supervisor runs");
    eventually("another supervisor", || {
        rig.node
            .pod("writer")
            .is_some_and(|pod| pod["supervisor"].as_i64().is_some_and(|pid| pid != i64::from(supervisor.as_raw())))
    });
    fs::write(writer.target.join("later"), "content").expect("written");
    assert_eq!(rig.ganesha.libnfs().cat("later"), b"content");
    for (pod, volume) in [("writer", &writer), ("reader", &reader), ("guest", &guest)] {
        rig.kubelet.end_pod(pod, std::slice::from_ref(volume));
        eventually("nothing of the pod is left", || rig.node.is_clean(&format!("uid-{pod}")));
    }
    assert!(rig.ganesha.exported().join("later").exists(), "an export outlives its pods");
}

#[test]
fn mount_options_that_a_volume_cannot_have_are_refused_by_name() {
    let rig = Rig::new();
    let _daemon = rig.start();
    let refused = |volume: &Volume| {
        let status = rig.kubelet.publish(volume).expect_err("the volume cannot have these options");
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status:?}");
        assert!(!volume.target.exists());
        status.message().to_owned()
    };
    let misspelt = refused(&rig.volume("a", &["nolokc"], Mode::MultiNodeMultiWriter));
    assert!(misspelt.contains("mount options") && misspelt.contains("nolokc"), "{misspelt}");
    let mut config = rig.volume("b", &["noatime"], Mode::SingleNodeWriter);
    let context = &mut config.request.volume_context;
    ["server", "path"].iter().for_each(|key| drop(context.remove(*key)));
    context.extend([("kind", "configMap"), ("name", "app")].map(|(key, value)| (key.to_owned(), value.to_owned())));
    let useless = refused(&config);
    assert!(useless.contains("is for NFS exports"), "{useless}");
    let mut on_other_server = rig.volume("c", &[], Mode::MultiNodeMultiWriter);
    on_other_server.request.volume_context.insert("server".to_owned(), "nfs.example".to_owned());
    let forbidden = refused(&on_other_server);
    assert!(forbidden.contains("\"nfs.example\" is not allowed"), "{forbidden}");
    // A published volume cannot be published with other options.
    let first = rig.volume("d", &["nolock"], Mode::MultiNodeMultiWriter);
    rig.publish(&first);
    let second = rig.volume("d", &["nolock", "soft"], Mode::MultiNodeMultiWriter);
    let status = rig.kubelet.publish(&second).expect_err("the volume is published with other options");
    assert_eq!(status.code(), tonic::Code::AlreadyExists, "{status:?}");
    rig.kubelet.end_pod("d", &[first]);
}
