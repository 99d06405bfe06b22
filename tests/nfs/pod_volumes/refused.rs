//! podfs reports in one sentence why it cannot mount a volume, and mounts the pod's other volumes.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;

use podfs::host::kernel_nfs;

use crate::common::*;
use crate::nfs_rig::Ganesha;
use crate::pod_volumes::pods::{claim, fixture, named, volume};

/// Waits for this in the log, with the other volume shown.
#[track_caller]
fn told(uid: &str, fixture: &Fixture, parts: &[&str]) {
    let mut running = fixture.start();
    running.wait_log("MountVolume.SetUp failed for volume \"data\" : ");
    wait_content(&fixture.path(&format!("root/pods/{uid}/volumes/kubernetes.io~configmap/config/a")), "1");
    for part in parts {
        running.wait_log(part);
    }
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn options_that_podfs_does_not_know_or_that_contradict_are_named() {
    let ganesha = Ganesha::start();
    for (number, (options, parts)) in [
        (",wombat=1", ["mount option \"wombat=1\"", "is not known to podfs"]),
        (",hard,soft", ["mount options \"hard\" and \"soft\" contradict each other", "keep one of them"]),
        (",sec=krb5p,podfs.backend=user", ["sec=krb5p needs the kernel's NFS client", "remove one of the two"]),
        (",proto=udp", ["mount option \"proto=udp\"", "another transport than TCP"]),
    ]
    .into_iter()
    .enumerate()
    {
        let uid = format!("nfs-options-{number}");
        told(&uid, &fixture(&uid, &ganesha, options), &parts);
    }
}

#[test]
fn an_export_that_is_not_there_is_named() {
    let ganesha = Ganesha::start();
    let fixture = fixture("nfs-no-export", &ganesha, "");
    let volume = volume(ganesha.address(), ganesha.mount_address(), "").replace("/export", "/elsewhere");
    fixture.write("objects/volume.yaml", &volume);
    told("nfs-no-export", &fixture, &["127.0.0.1", "/elsewhere"]);
}

#[test]
fn a_host_that_has_no_address_is_named() {
    let fixture = Fixture::new(&named("nfs-no-host", crate::pod_volumes::pods::VOLUMES));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture.write("objects/claim.yaml", &claim());
    let nowhere = "127.0.0.1:9".parse().expect("an address");
    fixture.write("objects/volume.yaml", &volume(nowhere, nowhere, "").replace("127.0.0.1", "nowhere.invalid"));
    told("nfs-no-host", &fixture, &["nowhere.invalid: its address cannot be found"]);
}

#[test]
fn options_of_the_kernels_client_are_refused_where_the_kernel_has_none() {
    if kernel_nfs::is_there() {
        // tests/guest/kernel_nfs has tests of it.
        return;
    }
    let ganesha = Ganesha::start();
    for (number, (options, sentence)) in [
        (",nfsvers=4.1", "nfsvers=4.1 needs the kernel's NFS client, and this kernel has none; load the module nfs"),
        (
            ",podfs.backend=kernel",
            "the volume asks for the kernel's NFS client, and this kernel has none; load the module nfs",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let uid = format!("nfs-no-kernel-{number}");
        told(&uid, &fixture(&uid, &ganesha, options), &[&format!("127.0.0.1:/export: {sentence}")]);
    }
}

/// Asks the process that mounts, as a supervisor does.
fn mount_with(request: &str) -> Vec<u8> {
    let (mut ours, theirs) = UnixStream::pair().expect("a socket pair");
    let mut command = Command::new(PODFS);
    let mut child = command.arg("mount-nfs").stdin(OwnedFd::from(theirs)).spawn().expect("it starts");
    drop(command);
    let length = u32::try_from(request.len()).expect("a short request").to_ne_bytes();
    ours.write_all(&[&length[..], request.as_bytes()].concat()).expect("written");
    ours.shutdown(Shutdown::Write).expect("shut down");
    let mut answer = Vec::new();
    ours.read_to_end(&mut answer).expect("an answer");
    child.wait().expect("it ends");
    answer
}

#[test]
fn the_process_that_mounts_answers_with_a_sentence_and_ends() {
    let ask = |server: &str| {
        let request = serde_json::json!({
            "server": server, "path": "/export", "versions": ["4.1"], "port": 1, "mount_host": null, "words": ["hard"],
            "read_only": false, "no_suid": false, "no_dev": false, "no_exec": false,
        });
        let answer = mount_with(&request.to_string());
        let answer: Result<(), String> = serde_json::from_slice(&answer[4..]).expect("an answer");
        answer.expect_err("no server is there")
    };
    assert!(ask("nowhere.invalid").starts_with("nowhere.invalid: its address cannot be found: "));
    let refused = ask("127.0.0.1");
    let expected = if kernel_nfs::is_there() { "NFS server 127.0.0.1 " } else { "this kernel has no NFS client" };
    assert!(refused.starts_with(expected), "{refused}");
    assert_eq!(mount_with(""), b"", "an empty request gets no answer");
}
