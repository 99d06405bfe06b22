//! The real server (nfs-ganesha): tests can start, end, restart and limit it.

use std::env::current_exe;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::kill;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::nfs_rig::TIMEOUT;
use crate::nfs_rig::caller::Caller;
use crate::nfs_rig::ganesha::{Access, Export, Ganesha, Setup, Squash, Storage};
use crate::nfs_rig::protocol::NFS;
use crate::nfs_rig::protocol::error::{ACCES, IO, NOSPC, ROFS, STALE};
use crate::nfs_rig::protocol::procedure::{FSINFO, NULL};
use crate::nfs_rig::rpc::Identity;
use crate::nfs_rig::xdr::Writer;
use crate::rig_itself::connect;

#[test]
fn writes_through_the_server_are_in_the_exported_directory_and_other_clients_read_them() {
    let server = Ganesha::start();
    let (mut caller, root) = connect(&server);
    let file = caller.create(&root, "file").expect("an answer").expect("created");
    caller.write(&file, 0, b"hello").expect("an answer").expect("written");
    caller.commit(&file).expect("an answer").expect("committed");
    assert_eq!(fs::read(server.exported().join("file")).expect("there"), b"hello");
    let libnfs = server.libnfs();
    assert_eq!((libnfs.names(""), libnfs.cat("file")), (vec!["file".to_owned()], b"hello".to_vec()));
    libnfs.put(Path::new("/etc/hostname"), "copy");
    let copied = caller.lookup(&root, "copy").expect("an answer").expect("found");
    assert_eq!(caller.read(&copied, 0, 4096).expect("an answer"), Ok(fs::read("/etc/hostname").expect("a file")));
}

#[test]
fn a_killed_server_comes_back_at_the_same_ports_with_the_same_handles_and_another_verifier() {
    let mut server = Ganesha::start();
    let (mut caller, root) = connect(&server);
    let file = caller.create(&root, "file").expect("an answer").expect("created");
    let before = caller.write(&file, 0, b"x").expect("an answer").expect("written");
    let (address, pid) = (server.address(), server.pid());
    server.kill();
    assert!(kill(pid, None).is_err(), "the process has ended");
    assert!(caller.getattr(&file).is_err(), "the connection has ended");
    assert!(Caller::connect(address).is_err(), "no process listens");

    server.restart();
    assert_eq!(server.address(), address);
    let (mut caller, again) = connect(&server);
    assert_eq!(again, root);
    assert_eq!(caller.getattr(&file).expect("an answer").expect("attributes").size, 1);
    assert_ne!(caller.commit(&file).expect("an answer").expect("committed"), before);
}

#[test]
fn a_server_that_moved_has_the_same_files_with_other_handles() {
    let mut server = Ganesha::start();
    let (mut caller, root) = connect(&server);
    let before = caller.getattr(&root).expect("an answer").expect("attributes");
    server.restart_elsewhere();
    let (mut caller, moved) = connect(&server);
    assert_eq!(caller.getattr(&root).expect("an answer"), Err(STALE));
    assert_eq!(caller.getattr(&moved).expect("an answer").expect("attributes").fileid, before.fileid);
}

#[test]
fn a_stopped_server_takes_calls_and_answers_them_when_it_continues() {
    let server = Ganesha::start();
    let (mut caller, root) = connect(&server);
    server.stop();
    let mut second = Caller::connect(server.address()).expect("the kernel accepts");
    let call = std::thread::spawn(move || second.getattr(&root));
    server.cont();
    call.join().expect("the thread does not panic").expect("an answer").expect("attributes");
    caller.call(NFS, NULL, Writer::default()).expect("an answer");
}

#[test]
fn a_server_ends_cleanly_when_it_is_asked_to() {
    let mut server = Ganesha::start();
    assert!(server.terminate().success(), "{}", server.log());
    server.restart();
    connect(&server);
}

#[test]
fn servers_run_side_by_side_with_files_of_their_own() {
    let (one, two) = (Ganesha::start(), Ganesha::start());
    let (mut caller, root) = connect(&one);
    caller.mkdir(&root, "only-here").expect("an answer").expect("made");
    let (mut caller, root) = connect(&two);
    caller.lookup(&root, "only-here").expect("an answer").expect_err("the second server does not have it");
}

#[test]
fn exports_are_read_only_refused_squashed_small_and_full_as_ordered() {
    let export = |name: &str| Export::named(name);
    let server = Ganesha::with(Setup {
        exports: vec![
            Export { access: Access::ReadOnly, ..export("/read-only") },
            Export { access: Access::None, ..export("/refused") },
            Export { squash: Squash::Root, anonymous: (1000, 1001), ..export("/root") },
            Export { squash: Squash::Everybody, anonymous: (1000, 1001), ..export("/everybody") },
            Export { max_read: 8192, max_write: 4096, ..export("/small") },
            Export { storage: Storage::Tmpfs("size=64k"), ..export("/full") },
        ],
        ..Setup::default()
    });
    let mount = |name: &str| Caller::mount(server.mount_address(), name).expect("an answer");
    let mut caller = Caller::connect(server.address()).expect("connected");

    assert_eq!(mount("/missing"), Err(ACCES));
    assert_eq!(mount("/refused"), Err(ACCES));
    let read_only = mount("/read-only").expect("a root");
    assert_eq!(caller.create(&read_only, "file").expect("an answer"), Err(ROFS));

    let owner = |export: &str, name: &str| {
        let metadata = fs::metadata(server.directory_of(export).join(name)).expect("there");
        (metadata.uid(), metadata.gid())
    };
    let (root, everybody) = (mount("/root").expect("a root"), mount("/everybody").expect("a root"));
    caller.create(&root, "by-root").expect("an answer").expect("created");
    caller.identity = Some(Identity { uid: 7, gid: 8, groups: Vec::new() });
    caller.create(&root, "by-7").expect("an answer").expect("created");
    caller.create(&everybody, "by-7").expect("an answer").expect("created");
    assert_eq!([owner("/root", "by-root"), owner("/root", "by-7")], [(1000, 1001), (7, 8)]);
    assert_eq!(owner("/everybody", "by-7"), (1000, 1001));
    caller.identity = Some(Identity::default());

    let small = mount("/small").expect("a root");
    let information = caller.call(NFS, FSINFO, Writer::default().opaque(&small)).expect("an answer");
    let word = |offset: usize| u32::from_be_bytes(information[offset..offset + 4].try_into().expect("four bytes"));
    let attributes = 8 + if word(4) == 1 { 84 } else { 0 };
    assert_eq!((word(attributes), word(attributes + 12)), (8192, 4096), "rtmax and wtmax");

    let full = mount("/full").expect("a root");
    let file = caller.create(&full, "file").expect("an answer").expect("created");
    caller.write(&file, 0, &[0; 1 << 16]).expect("an answer").expect("it fits");
    assert_eq!(caller.write(&file, 1 << 16, b"x").expect("an answer"), Err(NOSPC));
}

#[test]
fn a_server_with_few_descriptors_fails_to_create() {
    let server = Ganesha::with(Setup { descriptors: Some(200), ..Setup::default() });
    let (mut caller, root) = connect(&server);
    let failed = (0..400).find_map(|number| caller.create(&root, &format!("file-{number}")).expect("an answer").err());
    assert_eq!(failed, Some(IO));
}

#[test]
fn settings_change_with_a_restart() {
    let mut server = Ganesha::start();
    server.restart_with(|setup| {
        setup.exports[0].access = Access::ReadOnly;
        setup.exports.push(Export::named("/second"));
    });
    let (mut caller, root) = connect(&server);
    assert_eq!(caller.mkdir(&root, "new").expect("an answer"), Err(ROFS));
    Caller::mount(server.mount_address(), "/second").expect("an answer").expect("a root");
}

#[test]
fn a_panic_leaves_no_process_no_mount_and_no_file() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let exports = vec![Export { storage: Storage::Tmpfs("size=1m"), ..Export::default() }];
        let server = Ganesha::with(Setup { exports, ..Setup::default() });
        sender.send((server.pid(), server.exported())).expect("the test receives the message");
        panic!("on purpose, for a test");
    });
    let (pid, exported): (_, PathBuf) = receiver.recv().expect("the thread sends a message");
    thread.join().expect_err("the thread panics");
    assert!(kill(pid, None).is_err(), "the process has ended");
    assert!(!exported.exists());
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("a mount table");
    assert!(!mounts.contains(exported.to_str().expect("text")));
}

#[test]
fn a_server_outlives_the_thread_that_started_it() {
    let server = std::thread::spawn(Ganesha::start).join().expect("the thread does not panic");
    let (mut caller, root) = connect(&server);
    caller.getattr(&root).expect("an answer").expect("attributes");
}

#[test]
fn a_server_does_not_outlive_the_test_program() {
    let mut program = Command::new(current_exe().expect("the path of this program"));
    program.args(["--exact", "--ignored", "--nocapture", "rig_itself::servers::a_program_with_a_server"]);
    let mut program = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
    let lines = BufReader::new(program.stdout.take().expect("a pipe")).lines();
    let line = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("server ").map(str::to_owned));
    let (pid, directory) = line.as_deref().and_then(|line| line.split_once(' ')).expect("a line about the server");
    let pid = Pid::from_raw(pid.parse().expect("a number")).expect("a pid");
    let server = pidfd_open(pid, PidfdFlags::empty()).expect("the server runs");
    program.kill().expect("the program runs");
    program.wait().expect("the program ends");
    // A pidfd is readable when the process has ended, also if the process has got another parent.
    let timeout = Timespec::try_from(TIMEOUT).expect("a short time");
    let ready = poll(&mut [PollFd::new(&server, PollFlags::IN)], Some(&timeout));
    if ready != Ok(1) {
        let _ = pidfd_send_signal(&server, Signal::KILL);
        panic!("the server still runs");
    }
    // The killed program could not remove its directory.
    fs::remove_dir_all(directory).expect("removed");
}

#[test]
#[ignore = "runs in a program that is killed"]
fn a_program_with_a_server() {
    let server = Ganesha::start();
    let exports = server.exported();
    let directory = exports.ancestors().nth(2).expect("the server's directory");
    println!("\nserver {} {}", server.pid(), directory.display());
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn a_server_of_version_4_alone_starts() {
    let server = Ganesha::with(Setup { protocols: "4", grace: Some(1), ..Setup::default() });
    let mut caller = Caller::connect(server.address()).expect("connected");
    caller.call((NFS.0, 4), NULL, Writer::default()).expect("an answer");
    caller.call(NFS, NULL, Writer::default()).expect_err("there is no version 3");
}

#[test]
fn the_machine_has_no_socket_of_rpcbind() {
    let _server = Ganesha::start();
    assert!(!Path::new("/run/rpcbind.sock").exists());
}
