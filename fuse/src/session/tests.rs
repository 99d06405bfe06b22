//! Sessions that are resumed, on real mounts. The dead server is a device that was read from and not answered.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::*;
use crate::mount::private::{MountOptions, PrivateMount, open_device};
use crate::region::{BegunRequest, VolumeKind};

/// The parts of a request that the service sends to the test.
#[derive(Debug, PartialEq, Eq)]
struct SeenRequest {
    number: u64,
    resent: bool,
    note: Option<u64>,
}

/// An empty directory.
struct Empty(Mutex<Sender<SeenRequest>>);

impl Filesystem for Empty {
    fn longest_request(&self) -> usize {
        0
    }

    fn answer(&self, request: &Request<'_>, exchange: &mut Exchange<'_>) -> Result<Answer, Errno> {
        let note = exchange.earlier().map(|BegunRequest { note, .. }| note);
        let received = SeenRequest { number: request.number(), resent: exchange.is_resent(), note };
        // The test may have seen enough.
        let _ = self.0.lock().expect("one thread").send(received);
        match request.operation {
            FuseOperation::GetAttr { .. } => {
                let attr = abi::Attr { ino: 1, mode: libc::S_IFDIR | 0o755, nlink: 2, ..Default::default() };
                Ok(Answer::Attributes(abi::AttrOut { attr, ..Default::default() }))
            }
            _ => Err(Errno::NOENT),
        }
    }

    fn begin_thread(&self) {}

    fn may_wait(&self, _: &FuseOperation<'_>) -> bool {
        false
    }

    fn interrupt(&self, _: u64) {}
}

/// A mount whose server has shaken hands and read one request, of a caller that looks for a name.
struct Orphaned {
    device: OwnedFd,
    region: Arc<Region>,
    number: u64,
    caller: thread::JoinHandle<Errno>,
}

impl Orphaned {
    fn new() -> Self {
        let device = open_device().expect("/dev/fuse");
        let mount = PrivateMount::new(device.as_fd(), &MountOptions::default()).expect("a mount");
        let region = Arc::new(Region::create(VolumeKind::Projection).expect("a region"));
        let copy = device.try_clone().expect("a descriptor");
        drop(Session::open(copy, WantedFeatures::default(), Arc::clone(&region)).expect("the handshake"));
        let caller = thread::spawn(move || {
            let name = format!("/proc/self/fd/{}/name", mount.as_fd().as_raw_fd());
            rustix::fs::stat(name).expect_err("there is no such file")
        });
        let mut input = InputBuffer::new(0).expect("memory");
        let length = read(&device, input.as_mut_bytes()).expect("a request");
        let number = Request::parse(&input.as_bytes()[..length]).expect("a request").number();
        Self { device, region, number, caller }
    }

    fn resume(&self) -> Session {
        let device = self.device.try_clone().expect("a descriptor");
        Session::resume(device, Arc::clone(&self.region)).expect("the handshake was done")
    }
}

fn run(session: Session) -> Receiver<SeenRequest> {
    let (sender, receiver) = channel();
    session.run(Arc::new(Empty(Mutex::new(sender))), 1).expect("a thread");
    receiver
}

/// Whether the kernel can send unanswered requests again.
fn asks_again(device: &OwnedFd) -> bool {
    let kernel = Responder::of_device(&Arc::new(device.try_clone().expect("a descriptor")), 0);
    kernel.write(abi::NOTIFY_RESEND, &[], &[]).is_ok()
}

#[test]
fn the_kernel_resends_the_requests_of_a_dead_server_and_no_call_fails() {
    let orphaned = Orphaned::new();
    if !asks_again(&orphaned.device) {
        return;
    }
    orphaned.region.in_flight().slot(2).take(orphaned.number);
    orphaned.region.in_flight().slot(2).begin(None, 42);
    let requests = run(orphaned.resume());
    let first = requests.recv().expect("a request");
    assert_eq!(first, SeenRequest { number: orphaned.number, resent: true, note: Some(42) });
    assert_eq!(orphaned.caller.join().expect("no panic"), Errno::NOENT);
    assert!(orphaned.region.session_thread().is_some());
    assert!(orphaned.region.requests() > 0);
}

#[test]
fn a_request_that_was_read_and_not_begun_is_executed_as_a_new_one() {
    let orphaned = Orphaned::new();
    if !asks_again(&orphaned.device) {
        return;
    }
    let requests = run(orphaned.resume());
    let first = requests.recv().expect("a request");
    assert_eq!(first, SeenRequest { number: orphaned.number, resent: true, note: None });
    assert_eq!(orphaned.caller.join().expect("no panic"), Errno::NOENT);
}

#[test]
fn calls_end_with_an_error_on_a_kernel_without_resend() {
    for resent_before in [false, true] {
        let orphaned = Orphaned::new();
        orphaned.region.in_flight().slot(0).take(orphaned.number);
        if resent_before && asks_again(&orphaned.device) {
            let mut input = InputBuffer::new(0).expect("memory");
            read(&orphaned.device, input.as_mut_bytes()).expect("the same request, with a mark");
        }
        let _requests = run(orphaned.resume().without_resend());
        assert_eq!(orphaned.caller.join().expect("no panic"), Errno::IO);
        assert_eq!(orphaned.region.in_flight().all_to_replay().count(), 0);
    }
}

#[test]
fn a_request_that_reached_no_slot_ends_with_an_error() {
    let orphaned = Orphaned::new();
    let slot = orphaned.region.in_flight().slot(0);
    slot.take(orphaned.number - 2);
    slot.clear();
    let _requests = run(orphaned.resume().without_resend());
    assert_eq!(orphaned.caller.join().expect("no panic"), Errno::IO);
}

#[test]
fn a_deferred_request_ends_with_an_error_on_a_kernel_without_resend() {
    let orphaned = Orphaned::new();
    orphaned.region.waits().add(orphaned.number).expect("room");
    let _requests = run(orphaned.resume().without_resend());
    assert_eq!(orphaned.caller.join().expect("no panic"), Errno::IO);
    assert_eq!(orphaned.region.waits().all().count(), 0);
}

#[test]
fn a_session_without_handshake_cannot_be_resumed() {
    let device = open_device().expect("/dev/fuse");
    let region = Arc::new(Region::create(VolumeKind::Projection).expect("a region"));
    assert!(Session::resume(device, region).is_err());
}
