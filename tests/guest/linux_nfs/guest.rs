//! The tests in the guest: the kernel's client and server, without podfs.

use std::env::var;
use std::fs;
use std::path::Path;

use nix::mount::{MsFlags, mount, umount};

use crate::machine::nfs::MOUNT_PORT;
use crate::nfs_rig::caller::Caller;
use crate::nfs_rig::protocol::procedure::GETPORT;
use crate::nfs_rig::protocol::{MOUNT, NFS, PORTMAP};
use crate::nfs_rig::xdr::Writer;

/// The address of the kernel's server.
const SERVER: ([u8; 4], u16) = ([127, 0, 0, 1], 2049);

/// Mounts `source` with the kernel's client, calls `inspect` with the mount point, and unmounts it.
fn with_mount(source: &str, options: &str, inspect: impl FnOnce(&Path)) {
    let mount_point = Path::new("/mounted");
    fs::create_dir_all(mount_point).expect("a directory");
    let kind = if options.contains("vers=4") { "nfs4" } else { "nfs" };
    mount(Some(source), mount_point, Some(kind), MsFlags::empty(), Some(options)).expect(options);
    inspect(mount_point);
    umount(mount_point).expect("unmounted");
}

#[test]
#[ignore = "runs in the guest"]
fn the_kernels_client_writes_and_reads_on_the_kernels_server() {
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|index| (index % 251) as u8).collect();
    let version_3 = format!("vers=3,proto=tcp,addr=127.0.0.1,mountport={MOUNT_PORT},mountproto=tcp,nolock");
    let mounts = [("127.0.0.1:/export", version_3), ("127.0.0.1:/", "vers=4.1,proto=tcp,addr=127.0.0.1".to_owned())];
    for (source, options) in mounts {
        with_mount(source, &options, |mount_point| {
            fs::write(mount_point.join("file"), &bytes).expect("written");
            assert!(fs::read("/export/file").expect("there") == bytes);
            fs::write("/export/other", &options).expect("written");
            assert_eq!(fs::read_to_string(mount_point.join("other")).expect("read"), options);
        });
        fs::remove_file("/export/file").expect("removed");
    }
}

#[test]
#[ignore = "runs in the guest"]
fn the_kernels_client_writes_and_reads_on_the_server_outside() {
    let ports = var("PORTS").expect("the variable is set");
    let (nfs_port, mount_port) = ports.split_once(' ').expect("two ports");
    for version in ["3", "4.1"] {
        let options = format!(
            "vers={version},proto=tcp,addr=10.0.2.2,port={nfs_port},mountport={mount_port},mountproto=tcp,nolock"
        );
        with_mount("10.0.2.2:/export", &options, |mount_point| {
            assert_eq!(fs::read_to_string(mount_point.join("from-outside")).expect("read"), "1");
            fs::write(mount_point.join(format!("from-guest-{version}")), version).expect("written");
        });
    }
}

#[test]
#[ignore = "runs in the guest"]
fn the_kernels_server_answers_the_plain_client_and_a_real_rpcbind_knows_it() {
    let root = Caller::mount((SERVER.0, MOUNT_PORT).into(), "/export").expect("an answer").expect("a root");
    let mut caller = Caller::connect(SERVER.into()).expect("connected");
    let file = caller.create(&root, "by-caller").expect("an answer").expect("created");
    let verifier = caller.write(&file, 0, b"hello").expect("an answer").expect("written");
    assert_eq!(caller.commit(&file).expect("an answer"), Ok(verifier));
    assert_eq!(fs::read("/export/by-caller").expect("there"), b"hello");

    let mut mapper = Caller::connect((SERVER.0, 111).into()).expect("connected");
    for ((program, version), port) in [(NFS, SERVER.1), (MOUNT, MOUNT_PORT)] {
        let request = Writer::default().u32(program).u32(version).u32(6).u32(0);
        let answer = mapper.call(PORTMAP, GETPORT, request).expect("an answer");
        assert_eq!(answer, u32::from(port).to_be_bytes());
    }
}
