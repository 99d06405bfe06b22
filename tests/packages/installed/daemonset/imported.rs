//! The archive of the image in a real containerd, imported as the documents say: the image has the name that the manifest of the
//! DaemonSet has, as the kubelet asks the runtime for it.

use std::fs;
use std::io::{Write, stderr};
use std::path::Path;
use std::process::Command;

use super::container::daemon_set;
use super::cri::{Cri, Nothing};
use super::image::{archive, images};
use crate::common::{Fixture, eventually};

/// The settings of a containerd in this directory, without network plugins.
fn settings(directory: &Path) -> String {
    let directory = directory.display();
    format!(
        r#"
version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = [
  "io.containerd.internal.v1.opt", "io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.nri.v1.nri",
]
[grpc]
address = "{directory}/c.sock"
[plugins."io.containerd.grpc.v1.cri"]
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{directory}/conf"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
"#
    )
}

#[test]
fn an_imported_image_has_the_name_by_which_the_daemon_set_asks_for_it_and_no_registry_is_asked() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is in the target directory");
    let programs = target.join("containerd/usr/bin");
    let skip = |missing: &str| drop(writeln!(stderr(), "skipped: the import of the image: {missing}"));
    if !programs.join("containerd").exists() {
        return skip("there is no containerd; tests/run fetches it");
    }
    if images().is_none() {
        return skip("Debian's packages for the image cannot be fetched");
    }
    let fixture = Fixture::new("");
    let directory = fixture.path("containerd");
    fs::create_dir_all(directory.join("conf")).expect("a directory");
    fs::write(directory.join("config.toml"), settings(&directory)).expect("written");
    let mut containerd = Command::new(programs.join("containerd"));
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs.display());
    let daemon = fixture.spawn(containerd.arg("--config").arg(directory.join("config.toml")).env("PATH", path));
    let socket = directory.join("c.sock");
    let cri = Cri::new(&socket);
    eventually("containerd answers", || cri.call::<_, Nothing>("Version", Nothing {}).is_ok());

    let pod = daemon_set().spec.template.spec.expect("a pod");
    let [container] = &pod.containers[..] else { panic!("one container") };
    let image = container.image.as_deref().expect("an image");
    assert_eq!(container.image_pull_policy.as_deref(), Some("Never"), "no registry has {image}");
    assert_eq!(cri.image(image).expect("an answer"), None, "it is not imported yet");
    let mut import = Command::new(programs.join("ctr"));
    import.arg("--address").arg(&socket).args(["--namespace", "k8s.io", "images", "import", "--snapshotter", "native"]);
    let output = import.arg(archive()).output().expect("ctr runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut found = None;
    eventually("the runtime knows the image", || {
        found = cri.image(image).expect("an answer");
        found.is_some()
    });
    assert_eq!(found.expect("it is there").repo_tags, [image]);
    drop(daemon);
}
