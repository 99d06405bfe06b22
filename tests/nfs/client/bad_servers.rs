//! Servers that fail, and servers that send wrong or meaningless replies: a call ends with the right answer or a clear error,
//! and the next call works.

use std::rc::Rc;
use std::time::Duration;

use podfs_nfs::mount::{MountRequest, mount};
use podfs_nfs::rpc::{Denial, Persistence, Policy, RpcError};
use podfs_nfs::server::Servers;
use podfs_nfs::v3::{AttributeChanges, Creation, NfsFileHandle, NfsStatus, Stability};
use podfs_nfs::{CallOptions, Error, Export, ExportAddress};
use rustix::io::Errno;
use tokio::time::timeout;

use crate::client::{BUDGET, as_root, run};
use crate::nfs_rig::protocol::procedure::{GETATTR, MKDIR, READ};
use crate::nfs_rig::rpc::{Call, accepted, framed, header};
use crate::nfs_rig::scripted::trouble::{self, ALWAYS};
use crate::nfs_rig::scripted::{Reply, Scripted};

/// A policy under which the client soon sends a call again, and waits for its reply without limit.
fn impatient() -> Policy {
    Policy { timeo: Duration::from_millis(100), ..Policy::default() }
}

/// A mount request for the export of `server`.
fn request(server: &Scripted) -> MountRequest {
    let export = ExportAddress::parse("bad-server", "/export").expect("an address");
    let port = server.address().port();
    MountRequest { portmap_port: port, policy: impatient(), ..MountRequest::new(export, server.address().ip(), BUDGET) }
}

async fn export(server: &Scripted) -> Rc<Export> {
    Rc::new(mount(&Servers::default(), &request(server)).await.expect("the export is mounted"))
}

/// A new file with some data.
async fn file(export: &Export) -> NfsFileHandle {
    let creation = Creation::Unchecked(AttributeChanges::default());
    let created = export.create(as_root(), &export.root(), b"file", &creation).await.expect("created");
    let file = created.handle.expect("this server sends handles");
    export.write(as_root(), &file, 0, &b"some data".to_vec().into(), Stability::FileSync).await.expect("written");
    file
}

#[test]
fn the_portmapper_says_where_services_are() {
    let server = Scripted::start();
    run(async {
        let export = export(&server).await;
        export.getattr(as_root(), &export.root()).await.expect("attributes");
        assert_eq!(export.server().address(), server.address());
    });
}

#[test]
fn after_jukebox_the_call_is_repeated_with_another_xid() {
    let server = Scripted::start();
    run(async {
        let export = export(&server).await;
        server.rule(trouble::jukebox(MKDIR, 2));
        let xids = std::cell::RefCell::new(Vec::new());
        let announce = |xid| xids.borrow_mut().push(xid);
        let options = CallOptions { announce: Some(&announce), ..as_root() };
        let root = export.root();
        export.mkdir(options, &root, b"dir", &AttributeChanges::default()).await.expect("created in the end");
        let xids = xids.into_inner();
        assert!(xids.len() == 3 && xids[0] != xids[1] && xids[1] != xids[2], "{xids:?}");
    });
}

#[test]
fn a_soft_call_does_not_wait_for_ever_for_a_server_that_has_no_time() {
    let server = Scripted::start();
    run(async {
        let export = export(&server).await;
        server.rule(trouble::jukebox(GETATTR, ALWAYS));
        for (persistence, errno) in [(Persistence::Soft, Errno::IO), (Persistence::SoftErr, Errno::TIMEDOUT)] {
            let policy = Policy { persistence, ..impatient() };
            let soft = CallOptions { policy: Some(policy), ..as_root() };
            assert_eq!(export.getattr(soft, &export.root()).await.expect_err("no time").errno(), errno);
        }
    });
}

#[test]
fn a_refusal_of_rpc_is_an_error_with_a_reason() {
    let server = Scripted::start();
    run(async {
        let export = export(&server).await;
        let failure = async || match export.getattr(as_root(), &export.root()).await {
            Err(Error::RpcError(failure)) => failure,
            outcome => panic!("{outcome:?}"),
        };
        for (reason, denial) in
            [(1, Denial::Credential), (3, Denial::Verifier), (5, Denial::TooWeak), (7, Denial::Other)]
        {
            server.rule(trouble::denied(GETATTR, reason, 1));
            let failure = failure().await;
            assert_eq!((failure, failure.errno()), (RpcError::Denied(denial), Errno::ACCESS));
        }
        for (status, expected, errno) in [
            (1, RpcError::ProgramUnavailable, Errno::PROTONOSUPPORT),
            (3, RpcError::ProcedureUnavailable, Errno::OPNOTSUPP),
            (4, RpcError::GarbageArguments, Errno::IO),
            (5, RpcError::SystemError, Errno::IO),
        ] {
            server.rule(trouble::not_executed(GETATTR, status, 1));
            let failure = failure().await;
            assert_eq!((failure, failure.errno()), (expected, errno));
        }
        export.getattr(as_root(), &export.root()).await.expect("attributes");
    });
}

#[test]
fn nonsense_ends_the_connection_and_the_call_is_made_on_another() {
    let server = Scripted::start();
    run(async {
        let export = export(&server).await;
        let reconnects = || export.server().health().reconnects;
        server.rule(trouble::garbage(GETATTR, 1));
        export.getattr(as_root(), &export.root()).await.expect("attributes");
        assert_eq!(reconnects(), 1);
        for length in [0x7fff_ffff, 2 << 20] {
            server.rule(trouble::header_only(GETATTR, length, 1));
            export.getattr(as_root(), &export.root()).await.expect("attributes");
        }
        assert_eq!(reconnects(), 3);
        server.rule(trouble::instead(GETATTR, 1, |_| Reply::Bytes(vec![0; 100_000])));
        export.getattr(as_root(), &export.root()).await.expect("attributes");
        server.rule(trouble::instead(GETATTR, 1, |_| Reply::Bytes([&header(1000, true)[..], &[1; 10]].concat())));
        server.rule(trouble::instead(GETATTR, 1, |_| Reply::Close));
        export.getattr(as_root(), &export.root()).await.expect("attributes");
        assert!(reconnects() >= 5, "{:?}", export.server().health());
    });
}

#[test]
fn a_server_that_only_talks_nonsense_is_not_asked_without_pause() {
    let server = Scripted::start();
    run(async {
        let export = export(&server).await;
        server.rule(trouble::garbage(GETATTR, ALWAYS));
        let budget = Duration::from_secs(1);
        let soft = CallOptions { policy: Some(Policy::within(budget)), ..as_root() };
        assert_eq!(export.getattr(soft, &export.root()).await.expect_err("nonsense").errno(), Errno::TIMEDOUT);
        // The client pauses for 100, 200, 400 and 800 ms between its calls.
        assert!(server.calls(GETATTR) <= 6, "{}", server.calls(GETATTR));
    });
}

#[test]
fn unexpected_replies_and_calls_are_ignored() {
    let server = Scripted::start();
    run(async {
        let export = export(&server).await;
        let call = Call { xid: 5, program: 1, version: 1, procedure: 1, identity: None, arguments: vec![] }.write();
        let unexpected = [framed(&accepted(12345, 0, &[])), framed(&call)].concat();
        server.rule(trouble::instead(GETATTR, 1, move |_| Reply::Bytes(unexpected.clone())));
        export.getattr(as_root(), &export.root()).await.expect("attributes, for the call that is sent again");
        assert_eq!(export.server().health().reconnects, 0);
        server.rule(trouble::wrong_xid(GETATTR, 1));
        export.getattr(as_root(), &export.root()).await.expect("attributes, for the call that is sent again");
        assert_eq!(export.server().health().reconnects, 0);
    });
}

#[test]
fn results_that_are_cut_off_are_an_error_of_the_call_alone() {
    let server = Scripted::start();
    run(async {
        let export = export(&server).await;
        let file = file(&export).await;
        for bytes in [0, 2, 40] {
            server.rule(trouble::cut_short(GETATTR, bytes));
            let error = export.getattr(as_root(), &file).await.expect_err("too short");
            assert!(matches!(error, Error::RpcError(RpcError::Malformed(_))) && error.errno() == Errno::IO, "{error}");
        }
        server.clear_rules();
        export.getattr(as_root(), &file).await.expect("attributes");
        assert_eq!(export.server().health().reconnects, 0);
    });
}

#[test]
fn a_read_returns_the_requested_bytes_and_no_more() {
    let server = Scripted::start();
    run(async {
        let export = export(&server).await;
        let file = file(&export).await;
        server.rule(trouble::generous_read());
        assert_eq!(*export.read(as_root(), &file, 0, 100).await.expect("read").data, [b'x'; 100]);
        server.rule(trouble::huge_read());
        let error = export.read(as_root(), &file, 0, 100).await.expect_err("the data is missing");
        assert_eq!(error.errno(), Errno::IO);
        server.clear_rules();
        assert_eq!(*export.read(as_root(), &file, 0, 100).await.expect("read").data, *b"some data");
    });
}

#[test]
fn a_repeated_mkdir_whose_answer_was_lost_is_distinguished() {
    let server = Scripted::start();
    run(async {
        let export = export(&server).await;
        server.rule(trouble::executed_but(MKDIR, 1, Reply::Close));
        let error =
            export.mkdir(as_root(), &export.root(), b"dir", &AttributeChanges::default()).await.expect_err("it exists");
        assert_eq!((error.status(), error.is_retransmitted()), (Some(NfsStatus::EXIST), true));
        let error =
            export.mkdir(as_root(), &export.root(), b"dir", &AttributeChanges::default()).await.expect_err("it exists");
        assert_eq!((error.status(), error.is_retransmitted()), (Some(NfsStatus::EXIST), false));
    });
}

#[test]
fn a_call_on_a_connection_that_stays_silent_is_sent_again() {
    let server = Scripted::start();
    run(async {
        let export = export(&server).await;
        server.rule(trouble::silent(READ, 2));
        let file = file(&export).await;
        assert_eq!(*export.read(as_root(), &file, 5, 100).await.expect("read").data, *b"data");
        assert_eq!(server.calls(READ), 3);
        assert_eq!(export.server().health().retransmissions, 2);
    });
}

#[test]
fn a_call_that_the_server_was_executing_when_its_connection_was_lost_is_repeated_soon() {
    let server = Scripted::start();
    run(async {
        let mut request = request(&server);
        request.policy = Policy::default();
        let export = mount(&Servers::default(), &request).await.expect("the export is mounted");
        // A server that still executes the call sends its reply to the old connection, and ignores the repeated calls on the
        // new connection until then.
        server.rule(trouble::silent(GETATTR, 2));
        server.rule(trouble::instead(GETATTR, 1, |_| Reply::Close));
        let root = export.root();
        let call = export.getattr(as_root(), &root);
        timeout(request.policy.timeo / 2, call).await.expect("sooner than after `timeo`").expect("attributes");
        assert_eq!(server.calls(GETATTR), 4);
    });
}
