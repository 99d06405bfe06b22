//! Exports that cannot be mounted: the mount ends in time with an error, which is a sentence.

use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use podfs_nfs::CallOptions;
use podfs_nfs::mount::{MountRequest, mount};
use podfs_nfs::rpc::Credential;
use podfs_nfs::server::Servers;
use podfs_nfs::v3::{AttributeChanges, Creation};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::client::{BUDGET, as_root, export, export_with, run};
use crate::nfs_rig::Ganesha;

/// Long enough for a reply of a server on this machine.
const SHORT: Duration = Duration::from_secs(1);

#[test]
fn an_export_that_does_not_exist_is_refused() {
    let server = Ganesha::start();
    run(async {
        let error =
            export_with(&server, |request| request.export.path = "/nothing".to_owned()).await.expect_err("refused");
        assert_eq!(
            error.to_string(),
            "NFS server the-server refuses to mount /nothing: \
             the server has no such export, or does not export it to this machine"
        );
        let error =
            export_with(&server, |request| request.export.path = "relative".to_owned()).await.expect_err("refused");
        assert_eq!(error.to_string(), "the path of an NFS export begins with a slash and has at most 1024 bytes");
    });
}

#[test]
fn ports_where_nothing_listens_are_named() {
    let server = Ganesha::start();
    let closed = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr()).expect("a free port");
    run(async {
        let refused = async |change: &dyn Fn(&mut MountRequest)| {
            export_with(&server, |request| {
                request.budget = SHORT;
                change(request);
            })
            .await
            .expect_err("nothing listens there")
            .to_string()
        };
        let sentence =
            |service| format!("{service} of NFS server the-server ({closed}): Connection refused (os error 111)");
        assert_eq!(refused(&|request| request.mount_port = Some(closed.port())).await, sentence("the mountd"));
        assert_eq!(refused(&|request| request.port = Some(closed.port())).await, sentence("NFS"));
        // Without a MOUNT port in the request, the client asks the portmapper for it.
        let asks_portmapper =
            |request: &mut MountRequest| (request.mount_port, request.portmap_port) = (None, closed.port());
        assert_eq!(refused(&asks_portmapper).await, sentence("the portmapper"));
    });
}

#[test]
fn another_service_on_the_port_is_recognised() {
    let server = Ganesha::start();
    run(async {
        let nfs = server.address().port();
        let error = export_with(&server, |request| request.mount_port = Some(nfs)).await.expect_err("refused");
        let expected =
            format!("the mountd of NFS server the-server ({}): the server has no such service", server.address());
        assert!(error.to_string().starts_with(&expected), "{error}");
    });
}

#[test]
fn a_server_that_does_not_answer_ends_the_mount_and_not_the_next_one() {
    let server = Ganesha::start();
    run(async {
        let servers = Servers::default();
        let mut request = crate::client::request(&server);
        server.stop();
        request.budget = SHORT;
        let error = mount(&servers, &request).await.expect_err("no answer").to_string();
        assert!(error.ends_with("the server does not answer in time"), "{error}");
        server.cont();
        request.budget = BUDGET;
        mount(&servers, &request).await.expect("the export is mounted");
    });
}

#[test]
fn exports_of_a_server_share_its_connections_and_files_keep_to_theirs() {
    let server = Ganesha::start();
    run(async {
        let servers = Servers::default();
        let mut request = crate::client::request(&server);
        let first = mount(&servers, &request).await.expect("the export is mounted");
        request.connections = 4;
        let second = mount(&servers, &request).await.expect("the export is mounted");
        assert!(std::rc::Rc::ptr_eq(first.server(), second.server()));
        for index in 0..50 {
            let creation = Creation::Unchecked(AttributeChanges::default());
            let name = format!("file {index}");
            let created = second.create(as_root(), &second.root(), name.as_bytes(), &creation).await.expect("created");
            second.getattr(as_root(), &created.handle.expect("a handle")).await.expect("attributes");
        }
        assert_eq!(second.server().health().connected, 4);
        let ports = second.server().local_ports();
        assert!(ports.len() == 4 && ports.iter().all(|port| *port < 1024 && *port > 0), "{ports:?}");
    });
}

#[test]
fn a_call_is_made_with_the_callers_groups_and_no_more_than_sixteen() {
    use std::os::unix::fs::{PermissionsExt, chown};
    let server = Ganesha::start();
    let secret = server.exported().join("secret");
    std::fs::write(&secret, "for 3000").expect("written");
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o040)).expect("changed");
    chown(&secret, Some(1), Some(3000)).expect("changed");
    run(async {
        let export = export(&server).await;
        let file = export.lookup(as_root(), &export.root(), b"secret").await.expect("found").handle;
        let read = async |groups: Vec<u32>| {
            let caller = Credential::User { uid: 1000, gid: 1000, groups };
            export.read(CallOptions::new(&caller), &file, 0, 100).await.map(|read| read.data.to_vec())
        };
        assert_eq!(read(vec![]).await.expect_err("refused").errno(), Errno::ACCESS);
        assert_eq!(read(vec![5, 3000]).await.expect("read"), b"for 3000");
        let twenty: Vec<u32> = (2985..3005).collect();
        assert_eq!(read(twenty).await.expect("read"), b"for 3000");
        assert_eq!(read((2984..3004).collect()).await.expect_err("the 17th").errno(), Errno::ACCESS);
    });
}

#[test]
fn a_process_that_may_not_use_low_ports_uses_others() {
    let server = Ganesha::start();
    let thread = std::thread::spawn(move || {
        // Capabilities belong to a thread: the test program's other threads keep theirs.
        let mut sets = capabilities(None).expect("the thread's capabilities");
        sets.effective -= CapabilitySet::NET_BIND_SERVICE;
        set_capabilities(None, sets).expect("a thread may always drop a capability");
        run(async { export(&server).await.server().local_ports() })
    });
    let ports = thread.join().expect("no panic");
    assert!(ports[0] > 1023, "{ports:?}");
}

#[test]
fn ports_above_1023_are_used_where_the_volume_says_so() {
    let server = Ganesha::start();
    run(async {
        let export =
            export_with(&server, |request| request.reserved_port = false).await.expect("the export is mounted");
        assert!(export.server().local_ports()[0] > 1023);
    });
}
