//! Reads and changes through a volume reach the files on the NFS server.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};

use crate::common::{Fixture, config_map, eventually};
use crate::nfs_rig::protocol::{error, procedure};
use crate::nfs_rig::scripted::trouble::{ALWAYS, fails};
use crate::nfs_rig::{Ganesha, Scripted};
use crate::pod_volumes::pods::{VOLUMES, claim, fixture, named, volume, volume_path};

#[test]
fn a_claim_shows_its_export_and_changes_reach_the_server() {
    let ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("there"), "before").expect("written");
    let fixture = fixture("nfs-served", &ganesha, "");
    let mut running = fixture.run();
    let volume = volume_path(&running);
    assert_eq!(fs::read_to_string(volume.join("there")).expect("read"), "before");
    fs::create_dir(volume.join("directory")).expect("made");
    fs::write(volume.join("directory/file"), "content").expect("written");
    assert_eq!(fs::read_to_string(ganesha.exported().join("directory/file")).expect("on the server"), "content");
    fs::rename(volume.join("directory/file"), volume.join("moved")).expect("renamed");
    assert!(ganesha.exported().join("moved").exists());
    assert_eq!(ganesha.libnfs().cat("moved"), b"content");
    assert_eq!(running.json()["volumes"][0]["mode"], "nfs");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
    assert!(ganesha.exported().join("moved").exists(), "an export outlives its pods");
}

#[test]
fn files_that_the_server_did_not_remove_at_first_are_removed_at_the_end_of_the_pod() {
    const FILES: usize = 200;
    let server = Scripted::start();
    let fixture = Fixture::new(&named("nfs-removed", VOLUMES));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture.write("objects/claim.yaml", &claim());
    fixture.write("objects/volume.yaml", &volume(server.address(), server.address(), ""));
    let mut running = fixture.run();
    let path = volume_path(&running);
    for number in 0..FILES {
        fs::write(path.join(format!("file-{number}")), "content").expect("written");
        let file = File::open(path.join(format!("file-{number}"))).expect("opened");
        fs::remove_file(path.join(format!("file-{number}"))).expect("removed");
        if number == 0 {
            server.rule(fails(procedure::REMOVE, error::IO, ALWAYS));
        }
        drop(file);
    }
    // podfs tries it as the caller, as root and as the owner of the directory.
    eventually("podfs has tried", || server.calls(procedure::REMOVE) >= 3 * FILES);
    server.clear_rules();
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    assert_eq!(server.files(|files| files.node("").entries.len()), 0);
}

#[test]
fn the_status_names_the_nfs_client() {
    let ganesha = Ganesha::start();
    let fixture = fixture("nfs-status", &ganesha, ",nfsvers=3");
    let running = fixture.run();
    let volume = &fixture.pods()[0]["volumes"][0];
    assert_eq!((&volume["backend"], &volume["mode"]), (&"user".into(), &"nfs".into()), "{volume}");
    drop(running);
}

#[test]
fn an_export_that_another_process_unmounts_is_mounted_again() {
    let ganesha = Ganesha::start();
    let fixture = fixture("nfs-unmounted", &ganesha, "");
    let mut running = fixture.run();
    let volume = volume_path(&running);
    let device = fs::metadata(&volume).expect("there").dev();
    let mut open = File::create(volume.join("open")).expect("created");
    umount2(&volume, MntFlags::MNT_DETACH).expect("unmounted");
    eventually("the volume is mounted again", || fs::metadata(&volume).is_ok_and(|root| root.dev() == device));
    open.write_all(b"content").and_then(|()| open.sync_all()).expect("written");
    assert_eq!(fs::read_to_string(volume.join("open")).expect("read"), "content");
    drop(open);
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

/// A process that writes lines to a file of a volume. The test program must not have such a file open: a child that
/// starts the NFS server closes its copy of the file before its exec, and this close would wait for that server.
struct Writer {
    process: Child,
    answers: BufReader<ChildStdout>,
}

impl Writer {
    fn start(file: &Path) -> Writer {
        const SCRIPT: &str = r#"exec 3>"$0"; while read -r line; do
            if [ "$line" = sync ]; then sync "$0"; else echo "$line" >&3; fi && echo done; done"#;
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT]).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("a shell");
        let answers = BufReader::new(process.stdout.take().expect("a pipe"));
        Writer { process, answers }
    }

    /// Lets the process write a line, or `sync` the file, and waits until it has done so.
    #[track_caller]
    fn execute(&mut self, line: &str) {
        let input = self.process.stdin.as_mut().expect("a pipe");
        writeln!(input, "{line}").expect("sent");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("an answer");
        assert_eq!(answer, "done\n", "{line}");
    }

    /// Ends the process, which closes the file.
    fn end(mut self) {
        drop(self.process.stdin.take());
        assert!(self.process.wait().expect("the process ends").success());
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn synchronised_data_survives_a_kill_of_every_process() {
    // NF-06
    let mut ganesha = Ganesha::start();
    let fixture = fixture("nfs-killed", &ganesha, "");
    let mut running = fixture.run();
    let volume = volume_path(&running);
    let mut writer = Writer::start(&volume.join("log"));
    let mut expected = String::new();
    for round in 0..30 {
        writer.execute(&format!("line {round}"));
        expected += &format!("line {round}\n");
        match round % 3 {
            0 => kill(running.server(), Signal::SIGKILL).expect("killed"),
            1 => {
                ganesha.kill();
                ganesha.restart();
            }
            _ => {}
        }
        if round % 4 == 0 {
            writer.execute("sync");
            assert_eq!(fs::read_to_string(ganesha.exported().join("log")).expect("on the server"), expected);
        }
    }
    writer.end();
    assert_eq!(fs::read_to_string(ganesha.exported().join("log")).expect("on the server"), expected);
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn nf_03_the_pods_claim_and_the_mount_options_make_a_volume_read_only_and_the_field_of_the_volume_does_not() {
    let ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("there"), "content").expect("written");
    for (name, mount_options, claim_read_only, nfs_read_only, read_only) in [
        ("option", ",ro", false, false, true),
        ("claim", "", true, false, true),
        ("field", "", false, true, false),
        ("claim-and-field", "", true, true, true),
    ] {
        let fixture = fixture(&format!("nfs-read-only-{name}"), &ganesha, mount_options);
        let edit = |file: &str, from: &str, to: &str| {
            let manifest = fs::read_to_string(fixture.path(file)).expect("a manifest");
            assert!(manifest.contains(from), "{manifest}");
            fixture.write(file, &manifest.replace(from, to));
        };
        if claim_read_only {
            edit("pod.yaml", "claimName: data}", "claimName: data, readOnly: true}");
        }
        if nfs_read_only {
            edit("objects/volume.yaml", "path: /export}", "path: /export, readOnly: true}");
        }
        let running = fixture.run();
        let volume = volume_path(&running);
        assert_eq!(fs::read_to_string(volume.join("there")).expect("read"), "content", "{name}");
        let written = fs::write(volume.join(name), "").map_err(|error| error.kind());
        let expected = if read_only { Err(std::io::ErrorKind::ReadOnlyFilesystem) } else { Ok(()) };
        assert_eq!(written, expected, "{name}");
    }
}

#[test]
fn nf_07_the_group_of_the_pod_is_not_applied() {
    let ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("there"), "").expect("written");
    let fixture = fixture("nfs-group", &ganesha, "");
    let manifest = fs::read_to_string(fixture.pod()).expect("a manifest");
    fixture.write("pod.yaml", &manifest.replace("spec:\n", "spec:\n  securityContext: {fsGroup: 4711}\n"));
    let running = fixture.run();
    assert_eq!(fs::metadata(volume_path(&running).join("there")).expect("attributes").gid(), 0);
}
