//! Volumes that a kubelet published: a `podfs node --csi` of one version goes on with the publications of the other.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::Signal;

use crate::common::builds::Builds;
use crate::common::*;
use crate::kubelet::{Kubelet, Volume};
use crate::previous::First;

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: web, uid: uid-web, labels: {app: web}}
spec:
  containers: [{name: c, image: none}]
";

fn daemon(kubelet: &Kubelet, builds: &Builds) -> Running {
    let mut command = Command::new(builds.program());
    command.args(kubelet.command().get_args());
    kubelet.node.start_command(command)
}

#[test]
fn a_kubelet_finds_its_volumes_after_each_change_of_the_version() {
    for first in First::BOTH {
        let kubelet = Kubelet::new();
        let mut builds = first.builds(&kubelet.node.fixture);
        kubelet.node.put("app.yaml", &config_map("app", &[("a", "0")]));
        kubelet.node.put("web.yaml", POD);
        let mut daemon_now = daemon(&kubelet, &builds);
        let mut config = kubelet.volume("web", "config", &[("kind", "configMap"), ("name", "app")]);
        let items = [("kind", "downwardAPI"), ("items", "labels=metadata.labels")];
        let labels = kubelet.volume("web", "labels", &items);
        for volume in [&config, &labels] {
            kubelet.published(volume);
        }
        for (number, signal) in [(1, Signal::SIGTERM), (2, Signal::SIGKILL), (3, Signal::SIGTERM)] {
            builds.put_other();
            daemon_now.signal(signal);
            daemon_now.wait();
            daemon_now = daemon(&kubelet, &builds);
            kubelet.node.put("app.yaml", &config_map("app", &[("a", &number.to_string())]));
            wait_content(&config.target.join("a"), &number.to_string());
            assert_eq!(fs::read_to_string(labels.target.join("labels")).expect("a file"), "app=\"web\"");
            // A kubelet publishes again, because the driver requires republishing.
            kubelet.published(&config);
            kubelet.published(&labels);
            let more = kubelet.volume("web", &format!("more-{number}"), &[("kind", "configMap"), ("name", "app")]);
            kubelet.published(&more);
            wait_content(&more.target.join("a"), &number.to_string());
            unpublished(&kubelet, &config);
            config = more;
        }
        kubelet.end_pod("web", &[config, labels]);
        assert_eq!(kubelet.node.fixture.mounts(), Vec::<PathBuf>::new());
        drop(daemon_now);
    }
}

/// Ends a volume, as a kubelet does.
#[track_caller]
fn unpublished(kubelet: &Kubelet, volume: &Volume) {
    kubelet.unpublish(volume).expect("unpublished");
    fs::remove_dir(volume.target.parent().expect("a parent")).expect("it is empty");
}
