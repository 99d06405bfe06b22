//! Bad input of a kubelet, of users and of operators: podfs refuses it with a status code and one sentence.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use podfs::csi::v1::NodePublishVolumeRequest;
use tonic::Code;

use super::kubelet::Kubelet;
use crate::common::kubelet::context;
use crate::common::outcome::finish;
use crate::common::{PODFS, config_map};

const APP: &[(&str, &str)] = &[("kind", "configMap"), ("name", "app")];

fn kubelet() -> Kubelet {
    let kubelet = Kubelet::new();
    kubelet.node.put("app.yaml", &config_map("app", &[("key", "value")]));
    kubelet
}

#[test]
fn bad_requests_are_refused_with_a_sentence() {
    let kubelet = kubelet();
    let _daemon = kubelet.start();
    let good = kubelet.volume("web", "config", APP);
    let refused = |change: &dyn Fn(&mut NodePublishVolumeRequest), code: Code, sentence: &str| {
        let mut request = good.request.clone();
        change(&mut request);
        let status = kubelet.publish_request(request).expect_err(sentence);
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(sentence), "{status:?}");
        assert!(!good.target.exists(), "nothing is left of it");
    };
    let attributes = |attributes: &'static [(&'static str, &'static str)]| {
        move |request: &mut NodePublishVolumeRequest| request.volume_context = context("web", "uid-web", attributes)
    };
    let invalid = Code::InvalidArgument;
    refused(&attributes(&[("kind", "configMap"), ("nmae", "app")]), invalid, "did you mean \"name\"?");
    refused(
        &attributes(&[("volume", "{persistentVolumeClaim: {claimName: a}}")]),
        invalid,
        "serves no persistentVolumeClaim",
    );
    refused(&attributes(&[("kind", "secret"), ("name", "a"), ("namespace", "b")]), invalid, "pod's own namespace");
    refused(&attributes(&[("kind", "hostPath"), ("path", "/etc")]), invalid, "is not allowed");
    refused(&attributes(&[("kind", "configMap"), ("name", "app"), ("items", "a=../b")]), invalid, "..");
    refused(&|request| request.target_path = "/somewhere/else".to_owned(), invalid, "--kubelet-root");
    refused(&|request| request.target_path.push_str("/../../x"), invalid, "is not below");
    let other = kubelet.root().join("pods/uid-other/x/mount");
    refused(&|request| request.target_path = other.to_str().expect("text").to_owned(), invalid, "another pod");
    refused(&|request| request.volume_context.clear(), invalid, "podInfoOnMount");
    let away = kubelet.node.fixture.path("away");
    fs::create_dir(&away).expect("a directory");
    symlink(&away, &good.target).expect("a link");
    let status = kubelet.publish(&good).expect_err("the target is a link");
    assert_eq!(status.code(), invalid, "{status:?}");
    assert!(status.message().contains("symbolic link"), "{status:?}");
    fs::remove_file(&good.target).expect("removed");
    let parent = good.target.parent().expect("a parent");
    fs::remove_dir(parent).expect("removed");
    symlink(&away, parent).expect("a link");
    let status = kubelet.publish(&good).expect_err("a directory above the target is a link");
    assert!(status.message().contains("symbolic link") && !away.join("mount").exists(), "{status:?}");
}

#[test]
fn a_volume_id_with_other_attributes_is_refused() {
    let kubelet = kubelet();
    let _daemon = kubelet.start();
    let volume = kubelet.volume("web", "config", APP);
    kubelet.published(&volume);
    let mut other = volume.clone();
    other.request.volume_context.insert("optional".to_owned(), "true".to_owned());
    let status = kubelet.publish(&other).expect_err("it is another volume");
    assert_eq!(status.code(), Code::AlreadyExists, "{status:?}");
    kubelet.published(&volume);
    kubelet.end_pod("web", &[volume]);
}

#[test]
fn the_first_call_for_a_volume_says_soon_what_the_volume_waits_for() {
    let kubelet = kubelet();
    let _daemon = kubelet.start();
    for (pod, attributes, reason) in [
        ("web", &[("kind", "configMap"), ("name", "late")][..], "configmap \"late\" not found"),
        (
            "other",
            &[("kind", "configMap"), ("name", "app"), ("items", "k=p")],
            "configmap references non-existent config key: k",
        ),
    ] {
        let volume = kubelet.volume(pod, "config", attributes);
        let status = kubelet.publish_request(volume.request.clone()).expect_err("it waits");
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
        let message = status.message();
        assert!(message.contains(reason) && !message.contains("after 60 s"), "{message}");
        kubelet.node.put("late.yaml", &config_map("late", &[("key", "value")]));
        kubelet.node.put("app.yaml", &config_map("app", &[("k", "value")]));
        kubelet.published(&volume);
        kubelet.end_pod(pod, &[volume]);
        kubelet.node.put("app.yaml", &config_map("app", &[("key", "value")]));
    }
}

#[test]
fn one_call_for_a_volume_runs_at_a_time() {
    let kubelet = kubelet();
    let _daemon = kubelet.start();
    let late = kubelet.volume("web", "late", &[("kind", "configMap"), ("name", "late")]);
    let target_path = late.request.target_path.clone();
    let unpublish = podfs::csi::v1::NodeUnpublishVolumeRequest { volume_id: late.id.clone(), target_path };
    let code = kubelet.call(async |node| {
        // The call waits for an object that does not exist yet.
        let (mut waits, request) = (node.clone(), late.request.clone());
        let publishing = tokio::spawn(async move { waits.node_publish_volume(request).await });
        let mut node = node;
        let written = kubelet.node.fixture.path("run/node/csi");
        while std::fs::read_dir(&written).is_ok_and(|mut files| files.next().is_none()) || !written.exists() {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        let aborted = node.node_unpublish_volume(unpublish.clone()).await.expect_err("the other call has not ended");
        kubelet.node.put("late.yaml", &config_map("late", &[("key", "value")]));
        // Like a kubelet, it calls again if podfs has said what the volume waits for.
        match publishing.await.expect("it ends") {
            Err(status) if status.code() == Code::DeadlineExceeded => {
                node.node_publish_volume(late.request.clone()).await?;
            }
            published => drop(published?),
        }
        Ok(aborted.code())
    });
    assert_eq!(code.expect("published"), Code::Aborted);
    kubelet.end_pod("web", &[late]);
}

#[test]
fn a_publish_waits_while_the_supervisor_still_unmounts_the_volume() {
    let kubelet = kubelet();
    let _daemon = kubelet.start();
    let volume = kubelet.volume("web", "config", APP);
    kubelet.published(&volume);
    let supervisor = kubelet.node.supervisor("web");
    kill(supervisor, Signal::SIGSTOP).expect("stopped");
    let unpublished = kubelet.unpublish(&volume);
    let again = kubelet.call(async |mut node| {
        let request = volume.request.clone();
        let publishing = tokio::spawn(async move { node.node_publish_volume(request).await });
        let written = kubelet.node.fixture.path("run/node/csi");
        while !std::fs::read_dir(&written).is_ok_and(|mut files| files.next().is_some()) {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        let is_early = publishing.is_finished();
        kill(supervisor, Signal::SIGCONT).expect("it goes on");
        publishing.await.expect("it ends").map(|_| is_early)
    });
    assert_eq!(unpublished.map_err(|status| status.to_string()), Ok(()), "the target is gone at once");
    assert!(!again.expect("published"), "the volume of before is not the new one");
    assert_eq!(fs::read_to_string(volume.target.join("key")).expect("a file"), "value");
    kubelet.end_pod("web", &[volume]);
}

#[test]
fn a_daemon_says_why_it_cannot_be_the_driver() {
    let kubelet = kubelet();
    let refused = |root: &Path, kubelet_root: &Path, run: &str, code: i32, sentence: &str| {
        let mut command = Command::new(PODFS);
        command.arg("node").arg("--manifests").arg(kubelet.node.fixture.path("manifests")).args(["--node-name", "n1"]);
        command.arg("--csi").arg(kubelet.socket()).arg("--kubelet-root").arg(kubelet_root);
        command.arg("--root-dir").arg(root).arg("--run-dir").arg(kubelet.node.fixture.path(run));
        finish(&mut command).says(code, &[sentence]);
    };
    let (root, empty) = (kubelet.node.fixture.path("root"), kubelet.node.fixture.path("objects"));
    let of_kubelet = kubelet.root();
    // The kubelet may start for the first time after podfs, so a restart helps.
    refused(&root, &empty, "run", 1, "is not the directory of a kubelet");
    refused(&of_kubelet, &of_kubelet, "run", 2, "is the directory of the kubelet");
    fs::create_dir_all(kubelet.socket().parent().expect("a parent")).expect("a directory");
    let listener = UnixListener::bind(kubelet.socket()).expect("a socket");
    refused(&root, &of_kubelet, "run", 1, "two podfs on one node");
    drop(listener);
    let _daemon = kubelet.start();
    refused(&kubelet.node.fixture.path("root2"), &of_kubelet, "run2", 1, "two podfs on one node");
    refused(&root, &of_kubelet, "run2", 1, "a podfs node with another --run-dir uses");
    refused(&root, &of_kubelet, "run", 1, "podfs node runs already here");
}
