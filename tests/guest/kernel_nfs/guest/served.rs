//! NFS volumes of a pod, with the kernel's client.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;

use super::{DIRECTORY, Emptied, assert_stops_clean, backend, exported, fixture, version_3, volume_path};
use crate::common::*;

/// The mount options of each version, with the path of the export in this version.
fn versions() -> [(&'static str, String); 6] {
    [
        ("/", "nfsvers=4.1".to_owned()),
        ("/", "nfsvers=4.2".to_owned()),
        ("/", "nfsvers=4.0".to_owned()),
        ("/", "nfsvers=4".to_owned()),
        ("/", "podfs.backend=kernel".to_owned()),
        ("/export", version_3()),
    ]
}

#[test]
#[ignore = "runs in the guest"]
fn a_claim_is_served_in_every_version() {
    for (path, options) in versions() {
        let _emptied = Emptied(DIRECTORY);
        let fixture = fixture(path, &options);
        fs::write(exported("there"), &options).expect("written");
        let running = fixture.run();
        assert_eq!(backend(&fixture), "kernel", "{options}");
        let volume = volume_path(&running);
        assert_eq!(fs::read_to_string(volume.join("there")).expect("read"), options);

        let bytes: Vec<u8> = (0..3_000_000_u32).map(|index| (index % 251) as u8).collect();
        let mut file = File::options().read(true).write(true).create_new(true).open(volume.join("a")).expect("created");
        file.write_all(&bytes).expect("written");
        drop(file);
        // The close has sent the data to the NFS server.
        assert!(fs::read(exported("a")).expect("there") == bytes, "{options}");
        fs::rename(volume.join("a"), volume.join("b")).expect("renamed");
        fs::create_dir(volume.join("d")).expect("made");
        fs::hard_link(volume.join("b"), volume.join("d/c")).expect("linked");
        assert_eq!(fs::metadata(exported("b")).expect("there").nlink(), 2);
        let mut names: Vec<_> =
            fs::read_dir(&volume).expect("a listing").map(|entry| entry.expect("one").file_name()).collect();
        names.sort();
        assert_eq!(names, ["b", "d", "there"], "{options}");

        // An open file can be read after its names are removed.
        let mut open = File::open(volume.join("b")).expect("opened");
        for name in ["b", "d/c"] {
            fs::remove_file(volume.join(name)).expect("removed");
        }
        let mut read = Vec::new();
        open.rewind().expect("rewound");
        open.read_to_end(&mut read).expect("read");
        assert!(read == bytes, "{options}");
        drop(open);
        // podfs gets the release of `d/c` only after the close. Until then, the NFS client keeps the file in `d`, under
        // a name that begins with `.nfs`; podfs waits for the end of this file before it removes `d`.
        fs::remove_dir(volume.join("d")).expect("removed");
        assert_stops_clean(running, &fixture);
    }
}

#[test]
#[ignore = "runs in the guest"]
fn an_inline_volume_uses_the_client_that_its_pod_asks_for() {
    let volumes = "[{name: data, nfs: {server: localhost, path: /, readOnly: true}}]";
    let annotated = pod(volumes).replace("name: web,", "name: web, annotations: {podfs.io/nfs-backend.data: kernel},");
    let _emptied = Emptied(DIRECTORY);
    let fixture = Fixture::new(&annotated);
    fs::write(exported("there"), "1").expect("written");
    let running = fixture.run();
    let volume = running.volume("data");
    assert!(volume.ends_with("volumes/kubernetes.io~nfs/data"), "{}", volume.display());
    assert_eq!(backend(&fixture), "kernel");
    assert_eq!(fs::read_to_string(volume.join("there")).expect("read"), "1");
    let refused = fs::write(volume.join("new"), "2").expect_err("it is read-only");
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn podfs_chooses_the_kernels_client_for_version_4_and_its_own_for_others() {
    let backend_of = |options: &str| {
        let fixture = fixture("/export", options);
        let running = fixture.run();
        let chosen = backend(&fixture);
        assert_stops_clean(running, &fixture);
        chosen
    };
    assert_eq!(backend_of(&version_3().replace(",podfs.backend=kernel", "")), "user");
    let fixture = fixture("/", "nfsvers=4.1");
    let running = fixture.run();
    assert_eq!(backend(&fixture), "kernel");
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn open_files_stay_open_when_the_server_is_killed() {
    let _emptied = Emptied(DIRECTORY);
    let fixture = fixture("/", "nfsvers=4.1");
    let running = fixture.run();
    let path = volume_path(&running).join("kept");
    let mut file = File::options().read(true).write(true).create_new(true).open(&path).expect("created");
    file.write_all(b"before").expect("written");
    let server = running.server();
    nix::sys::signal::kill(server, nix::sys::signal::Signal::SIGKILL).expect("killed");
    eventually("there is another server", || running.servers().last().is_some_and(|pid| *pid != server));
    running.freed(|| file.write_all(b" and after").expect("written"));
    drop(file);
    assert_eq!(fs::read_to_string(exported("kept")).expect("there"), "before and after");
    assert_stops_clean(running, &fixture);
}
