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

/// Runs the pod, and asserts that the log contains `parts` and that podfs mounts the pod's other volume.
#[track_caller]
fn assert_reported(uid: &str, fixture: &Fixture, parts: &[&str]) {
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
        assert_reported(&uid, &fixture(&uid, &ganesha, options), &parts);
    }
}

#[test]
fn an_export_that_is_not_there_is_named() {
    let ganesha = Ganesha::start();
    let fixture = fixture("nfs-no-export", &ganesha, "");
    let volume = volume(ganesha.address(), ganesha.mount_address(), "").replace("/export", "/elsewhere");
    fixture.write("objects/volume.yaml", &volume);
    assert_reported("nfs-no-export", &fixture, &["127.0.0.1", "/elsewhere"]);
}

#[test]
fn a_host_that_has_no_address_is_named() {
    let fixture = Fixture::new(&named("nfs-no-host", crate::pod_volumes::pods::VOLUMES));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture.write("objects/claim.yaml", &claim());
    let nowhere = "127.0.0.1:9".parse().expect("an address");
    fixture.write("objects/volume.yaml", &volume(nowhere, nowhere, "").replace("127.0.0.1", "nowhere.invalid"));
    assert_reported("nfs-no-host", &fixture, &["nowhere.invalid: its address cannot be found"]);
}

#[test]
fn options_of_the_kernels_client_are_refused_where_the_kernel_has_none() {
    if kernel_nfs::is_available() {
        // tests/guest/kernel_nfs tests a kernel with the client.
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
        assert_reported(&uid, &fixture(&uid, &ganesha, options), &[&format!("127.0.0.1:/export: {sentence}")]);
    }
}

/// Starts the subcommand `mount-nfs` of a program as a supervisor does, and sends it a request. Returns the answer.
fn mount_with(program: &str, request: &str) -> Vec<u8> {
    let (mut ours, theirs) = UnixStream::pair().expect("a socket pair");
    let mut command = Command::new(program);
    let mut child = command.arg("mount-nfs").stdin(OwnedFd::from(theirs)).spawn().expect("it starts");
    drop(command);
    let length = u32::try_from(request.len()).expect("a short request").to_ne_bytes();
    ours.write_all(&[&length[..], request.as_bytes()].concat()).expect("written");
    ours.shutdown(Shutdown::Write).expect("shut down");
    let mut answer = Vec::new();
    ours.read_to_end(&mut answer).expect("an answer");
    child.wait().expect("the process ends");
    answer
}

#[test]
fn the_process_that_mounts_answers_with_a_sentence_and_ends() {
    for program in [PODFS, PODFS_SUPERVISOR] {
        let error_for = |server: &str| {
            let request = serde_json::json!({
                "server": server, "path": "/export", "versions": ["4.1"], "port": 1, "mount_host": null, "words": ["hard"],
                "read_only": false, "no_suid": false, "no_dev": false, "no_exec": false,
            });
            let answer = mount_with(program, &request.to_string());
            let answer = answer.get(4..).unwrap_or_else(|| panic!("{program} ends without an answer"));
            let answer: Result<(), String> = serde_json::from_slice(answer).expect("an answer");
            answer.expect_err("no server is there")
        };
        assert!(error_for("nowhere.invalid").starts_with("nowhere.invalid: its address cannot be found: "));
        let error = error_for("127.0.0.1");
        let expected =
            if kernel_nfs::is_available() { "NFS server 127.0.0.1 " } else { "this kernel has no NFS client" };
        assert!(error.starts_with(expected), "{error}");
        assert_eq!(mount_with(program, ""), b"", "an empty request gets no answer");
    }
}
