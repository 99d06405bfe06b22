//! Volumes that a kubelet publishes: their files, restarts of the daemon, and pods that end.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use nix::sys::signal::Signal;

use super::kubelet::Kubelet;
use crate::common::identity::identity;
use crate::common::kubelet::capability;
use crate::common::stoppable::Stoppable;
use crate::common::{config_map, eventually, secret, unmount_below, wait_content};

const WEB: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: web, uid: uid-web, labels: {tier: front}}
spec:
  containers:
  - {name: c, image: none}
";

fn kubelet() -> Kubelet {
    let kubelet = Kubelet::new();
    kubelet.node.put("app.yaml", &config_map("app", &[("a.conf", "first"), ("b", "other")]));
    kubelet.node.put("late.yaml", &secret("login", &[("password", "s3cr3t")]));
    kubelet.node.put("web.yaml", WEB);
    kubelet
}

fn read(path: impl AsRef<std::path::Path>) -> String {
    fs::read_to_string(path).expect("a file")
}

#[test]
fn volumes_with_fields_of_a_static_pod_survive_restarts_while_its_file_is_absent_or_invalid() {
    let kubelet = kubelet();
    let mut daemon = kubelet.start();
    let fields =
        |name: &str| kubelet.volume("web", name, &[("kind", "downwardAPI"), ("items", "labels=metadata.labels")]);
    let mut volumes = vec![fields("labels")];
    kubelet.published(&volumes[0]);
    let before = identity(&volumes[0].target);
    let manifests = kubelet.node.fixture.path("manifests");
    let (file, aside) = (manifests.join("web.yaml"), kubelet.node.fixture.path("aside"));
    let absent = || fs::rename(&file, &aside).expect("renamed");
    let invalid = || fs::write(&file, "a: [").expect("written");
    let without_directory = || fs::rename(&manifests, &aside).expect("renamed");
    let restore: [&dyn Fn(); 3] =
        [&|| fs::rename(&aside, &file).expect("renamed"), &|| kubelet.node.put("web.yaml", WEB), &|| {
            fs::rename(&aside, &manifests).expect("renamed")
        }];
    let faults: [&dyn Fn(); 3] = [&absent, &invalid, &without_directory];
    for (number, (fault, restore)) in faults.into_iter().zip(restore).enumerate() {
        daemon.signal(Signal::SIGTERM);
        daemon.wait();
        fault();
        daemon = kubelet.start();
        // The daemon has worked on the pod when the next volume is there.
        let more = fields(&format!("more-{number}"));
        kubelet.published(&more);
        assert_eq!(identity(&volumes[0].target), before, "fault {number}: it stays mounted");
        assert_eq!(read(volumes[0].target.join("labels")), "tier=\"front\"");
        assert_eq!(read(more.target.join("labels")), "tier=\"front\"");
        volumes.push(more);
        restore();
    }
    kubelet.node.put("web.yaml", &WEB.replace("front", "back"));
    for volume in &volumes {
        wait_content(&volume.target.join("labels"), "tier=\"back\"");
    }
    kubelet.end_pod("web", &volumes);
}

#[test]
fn inline_volumes_of_each_kind_appear_follow_their_objects_and_go() {
    let kubelet = kubelet();
    let _daemon = kubelet.start();
    let items = [("kind", "configMap"), ("name", "app"), ("items", "a.conf=x/a.conf:0400")];
    let config = kubelet.volume("web", "config", &items);
    let mut login = kubelet.volume("web", "login", &[("kind", "secret"), ("name", "login"), ("defaultMode", "0440")]);
    login.request.volume_capability = Some(capability("4711"));
    let labels = [("kind", "downwardAPI"), ("items", "labels=metadata.labels,uid=metadata.uid")];
    let info = kubelet.volume("web", "info", &labels);
    let sources = "- configMap: {name: app}\n- secret: {name: login}\n";
    let all = kubelet.volume("web", "all", &[("kind", "projected"), ("sources", sources)]);
    let plain = kubelet.volume("web", "plain", &[("volume", "{configMap: {name: app}}")]);
    let volumes = [config, login, info, all, plain];
    volumes.iter().for_each(|volume| kubelet.published(volume));
    let [config, login, info, all, plain] = &volumes;
    assert_eq!(read(config.target.join("x/a.conf")), "first");
    assert!(!config.target.join("b").exists(), "it is no item");
    let mode = fs::metadata(config.target.join("x/a.conf")).expect("a file").permissions().mode();
    assert_eq!(mode & 0o7777, 0o440, "the group of the pod may read it, too");
    let of_login = fs::metadata(login.target.join("password")).expect("a file");
    assert_eq!((of_login.gid(), of_login.mode() & 0o777), (4711, 0o440));
    assert_eq!(read(info.target.join("labels")), "tier=\"front\"");
    assert_eq!(read(info.target.join("uid")), "uid-web");
    assert_eq!(
        (read(all.target.join("b")), read(all.target.join("password"))),
        ("other".to_owned(), "s3cr3t".to_owned())
    );
    assert_eq!(read(plain.target.join("b")), "other");
    let refused = fs::write(plain.target.join("new"), "x").expect_err("it can be read only");
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    kubelet.node.put("app.yaml", &config_map("app", &[("a.conf", "second"), ("b", "other")]));
    wait_content(&config.target.join("x/a.conf"), "second");
    wait_content(&all.target.join("a.conf"), "second");
    assert!(!kubelet.node.log().contains("t0ken-of-the-pod"), "no token is logged");
    kubelet.end_pod("web", &volumes);
}

#[test]
fn publishing_again_changes_nothing_and_a_refresh_that_fails_fails_no_mounted_volume() {
    let kubelet = kubelet();
    let _daemon = kubelet.start();
    let volume = kubelet.volume("web", "config", &[("kind", "configMap"), ("name", "app")]);
    kubelet.published(&volume);
    let mounts = kubelet.node.fixture.mounts();
    kubelet.published(&volume);
    assert_eq!(kubelet.node.fixture.mounts(), mounts);
    kubelet.node.remove("app.yaml");
    eventually("the volume is behind", || {
        let stats = kubelet.stats(&volume.id, &volume.target).expect("stats");
        stats.volume_condition.is_some_and(|condition| condition.abnormal && condition.message.contains("app"))
    });
    kubelet.published(&volume);
    assert_eq!(read(volume.target.join("a.conf")), "first");
    // Another process has unmounted it: the next call mounts it again.
    nix::mount::umount2(&volume.target, nix::mount::MntFlags::MNT_DETACH).expect("unmounted");
    kubelet.published(&volume);
    assert_eq!(read(volume.target.join("a.conf")), "first");
    kubelet.end_pod("web", &[volume]);
}

#[test]
fn another_daemon_knows_the_volumes_and_retires_those_of_pods_that_are_gone() {
    let kubelet = kubelet();
    let mut daemon = kubelet.start();
    let attributes = [("kind", "configMap"), ("name", "app")];
    let (stays, goes) = (kubelet.volume("web", "config", &attributes), kubelet.volume("gone", "config", &attributes));
    [&stays, &goes].into_iter().for_each(|volume| kubelet.published(volume));
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    assert_eq!(read(stays.target.join("b")), "other", "the volume is served on");
    // The kubelet has forgotten a pod: its directory is gone.
    nix::mount::umount2(&goes.target, nix::mount::MntFlags::MNT_DETACH).expect("unmounted");
    fs::remove_dir_all(kubelet.root().join("pods/uid-gone")).expect("removed");
    let supervisor = kubelet.node.fixture.pods().iter().find(|pod| pod["uid"] == "uid-web").expect("it runs").clone();
    let _daemon = kubelet.start();
    eventually("the volume of the pod that is gone is retired", || kubelet.node.is_clean("uid-gone"));
    kubelet.published(&stays);
    let now = kubelet.node.fixture.pods().iter().find(|pod| pod["uid"] == "uid-web").expect("it runs").clone();
    assert_eq!(now["supervisor"]["pid"], supervisor["supervisor"]["pid"], "the same supervisor serves the pod");
    kubelet.node.put("app.yaml", &config_map("app", &[("a.conf", "second"), ("b", "other")]));
    wait_content(&stays.target.join("a.conf"), "second");
    kubelet.end_pod("web", &[stays]);
}

#[test]
fn ed_05_content_stays_for_a_pod_of_the_kubelet_whose_record_is_lost() {
    for is_reboot in [false, true] {
        let kubelet = kubelet();
        let mut daemon = kubelet.start();
        let mut scratch = kubelet.volume("web", "scratch", &[("volume", "{emptyDir: {}}")]);
        scratch.request.readonly = false;
        kubelet.published(&scratch);
        fs::write(scratch.target.join("file"), "data").expect("written");
        if is_reboot {
            kubelet.node.fixture.kill_all();
            unmount_below(&kubelet.node.fixture.path("kubelet"));
            unmount_below(&kubelet.node.fixture.path("root"));
            fs::remove_dir_all(kubelet.node.fixture.path("run")).expect("the machine starts without a run directory");
        } else {
            daemon.signal(Signal::SIGKILL);
            let records = kubelet.node.fixture.path("run/node/csi").read_dir().expect("a directory");
            records.for_each(|record| fs::write(record.expect("an entry").path(), "{").expect("written"));
        }
        daemon.wait();
        let _daemon = kubelet.start();
        kubelet.node.wait_for_pass();
        kubelet.published(&scratch);
        assert_eq!(read(scratch.target.join("file")), "data", "{is_reboot}\n{}", kubelet.node.log());
        kubelet.end_pod("web", &[scratch]);
    }
}

#[test]
fn publications_are_written_down_again_when_another_process_has_deleted_them() {
    let kubelet = kubelet();
    let mut daemon = kubelet.start();
    let volume = kubelet.volume("web", "config", &[("kind", "configMap"), ("name", "app")]);
    kubelet.published(&volume);
    let written = kubelet.node.fixture.path("run/node/csi");
    let files = || fs::read_dir(&written).map_or(0, |files| files.count());
    assert_eq!(files(), 1);
    fs::remove_dir_all(kubelet.node.fixture.path("run/node")).expect("removed");
    // The log line says that the file is complete. Before that, podfs writes it under another name.
    daemon.wait_log("another process has deleted the record of a CSI volume; podfs writes it again");
    assert_eq!(files(), 1);
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    let _daemon = kubelet.start();
    kubelet.node.put("app.yaml", &config_map("app", &[("a.conf", "second"), ("b", "other")]));
    wait_content(&volume.target.join("a.conf"), "second");
    kubelet.end_pod("web", &[volume]);
    assert_eq!(files(), 0);
}

#[test]
fn a_persistent_volume_of_a_node_directory_is_shared_by_pods_and_stays_for_the_last() {
    let kubelet = kubelet();
    let shared = kubelet.node.fixture.path("shared");
    fs::create_dir(&shared).expect("a directory");
    let mut command = kubelet.command();
    command.arg("--csi-allow").arg(&shared);
    let _daemon = kubelet.node.start_command(command);
    let attributes = [("kind", "hostPath"), ("path", shared.to_str().expect("text"))];
    let publish = |pod: &str| {
        // The kubelet names the directory by the PersistentVolume, and the volume by the handle in it.
        let mut volume = kubelet.volume(pod, "pv-shared", &attributes);
        volume.id = "shared-1".to_owned();
        volume.request.volume_id = volume.id.clone();
        volume.request.readonly = false;
        volume.request.volume_context.remove("csi.storage.k8s.io/ephemeral");
        kubelet.published(&volume);
        volume
    };
    let (one, two) = (publish("one"), publish("two"));
    fs::write(one.target.join("file"), "of one").expect("it can be written");
    assert_eq!((read(two.target.join("file")), read(shared.join("file"))), ("of one".to_owned(), "of one".to_owned()));
    assert!(kubelet.stats("shared-1", &two.target).expect("stats").usage[0].total > 0);
    let mut other = two.clone();
    other.request.volume_context.insert("path".to_owned(), "/etc".to_owned());
    assert!(kubelet.publish(&other).is_err(), "the handle is that of another directory");
    kubelet.end_pod("one", &[one]);
    fs::write(two.target.join("file"), "of two").expect("it is there still");
    kubelet.end_pod("two", &[two]);
    assert_eq!(read(shared.join("file")), "of two", "the content stays");
}

#[test]
fn a_volume_of_a_node_directory_needs_the_nodes_allow_list() {
    let kubelet = kubelet();
    let shared = kubelet.node.fixture.path("shared");
    fs::create_dir(&shared).expect("a directory");
    fs::write(shared.join("file"), "of the node").expect("written");
    let mut command = kubelet.command();
    command.arg("--csi-allow").arg(&shared);
    let _daemon = kubelet.node.start_command(command);
    let at = |name: &str, path: &std::path::Path| {
        kubelet.volume("web", name, &[("kind", "hostPath"), ("path", path.to_str().expect("text"))])
    };
    let volume = at("shared", &shared);
    kubelet.published(&volume);
    assert_eq!(read(volume.target.join("file")), "of the node");
    let refused = kubelet.publish(&at("etc", "/etc".as_ref())).expect_err("it is not allowed");
    assert!(refused.message().contains("csi-allow"), "{refused:?}");
    fs::remove_dir(kubelet.root().join("pods/uid-web/volumes/kubernetes.io~csi/etc")).expect("it is empty");
    kubelet.end_pod("web", &[volume]);
}

#[test]
fn a_link_that_replaces_a_published_directory_is_not_followed_when_the_volume_is_mounted_again() {
    let kubelet = kubelet();
    // A bind mount has no server that keeps the source open.
    let bound = WEB.replace("labels", "annotations: {podfs.io/host-path.x: bind}, labels");
    kubelet.node.put("web.yaml", &format!("{bound}  volumes:\n  - {{name: x, csi: {{driver: podfs.io}}}}\n"));
    let at = |name: &str| kubelet.node.fixture.path(name);
    fs::create_dir_all(at("shared/x")).expect("a directory");
    fs::create_dir(at("private")).expect("a directory");
    fs::write(at("shared/x/file"), "of the volume").expect("written");
    fs::write(at("private/file"), "of the node").expect("written");
    let mut command = kubelet.command();
    command.arg("--csi-allow").arg(at("shared"));
    let _daemon = kubelet.node.start_command(command);
    let x = at("shared/x");
    let volume = kubelet.volume("web", "x", &[("kind", "hostPath"), ("path", x.to_str().expect("text"))]);
    kubelet.published(&volume);
    fs::rename(&x, at("shared/y")).expect("renamed");
    std::os::unix::fs::symlink("../private", &x).expect("a link");
    let own = at("root/pods/uid-web/volumes/kubernetes.io~host-path/x");
    nix::mount::umount2(&own, nix::mount::MntFlags::MNT_DETACH).expect("another process unmounts it");
    eventually("podfs refuses the link", || {
        assert!(!own.join("file").exists() || read(own.join("file")) != "of the node", "podfs has followed the link");
        let stats = kubelet.stats(&volume.id, &volume.target).expect("stats");
        stats.volume_condition.is_some_and(|condition| condition.message.contains("podfs follows none below"))
    });
    assert_eq!(read(volume.target.join("file")), "of the volume");
    kubelet.end_pod("web", &[volume]);
}

#[test]
fn calls_are_counted_by_method_and_status() {
    let kubelet = kubelet();
    let mut command = kubelet.command();
    command.args(["--metrics-addr", "127.0.0.1:0"]);
    let _daemon = kubelet.node.start_command(command);
    let volume = kubelet.volume("web", "config", &[("kind", "configMap"), ("name", "app")]);
    kubelet.published(&volume);
    let log = kubelet.node.log();
    let address = log.split("metrics are served at http://").nth(1).and_then(|url| url.split('/').next());
    let mut stream = std::net::TcpStream::connect(address.expect("an address")).expect("it listens");
    std::io::Write::write_all(&mut stream, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .expect("sent");
    let mut text = String::new();
    std::io::Read::read_to_string(&mut stream, &mut text).expect("an answer");
    let line = "csi_operations_seconds_count{driver_name=\"podfs.io\",method_name=\"/csi.v1.Node/NodePublishVolume\",grpc_status_code=\"OK\"} 1";
    assert!(text.contains(line), "{text}");
    kubelet.end_pod("web", &[volume]);
}

#[test]
fn a_volume_whose_source_does_not_answer_is_unpublished_although_its_statistics_are_awaited() {
    let kubelet = kubelet();
    let shared = kubelet.node.fixture.path("shared");
    fs::create_dir(&shared).expect("a directory");
    let silent = Stoppable::over(&shared);
    let mut command = kubelet.command();
    command.arg("--csi-allow").arg(&shared);
    let _daemon = kubelet.node.start_command(command);
    let volume = kubelet.volume("web", "host", &[("kind", "hostPath"), ("path", shared.to_str().expect("text"))]);
    kubelet.published(&volume);
    silent.signal(Signal::SIGSTOP);
    let condition =
        kubelet.stats(&volume.id, &volume.target).expect("an answer").volume_condition.expect("a condition");
    assert!(condition.abnormal && condition.message.contains("does not answer"), "{condition:?}");
    let again = kubelet.stats(&volume.id, &volume.target).expect_err("a thread still waits");
    let unpublished = kubelet.unpublish(&volume);
    silent.signal(Signal::SIGCONT);
    assert_eq!(again.code(), tonic::Code::Aborted);
    assert_eq!(unpublished.map_err(|status| status.to_string()), Ok(()), "{}", kubelet.node.log());
    kubelet.end_pod("web", &[volume]);
    drop(silent);
    unmount_below(&shared);
}
