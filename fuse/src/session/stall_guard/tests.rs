//! A source that is unreachable, on real mounts: a service that answers nothing until the test lets it.

use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::fs::{stat, statfs};

use super::*;
use crate::mount::private::{MountOptions, PrivateMount, open_device};
use crate::region::VolumeKind;
use crate::session::abi::{Attr, AttrOut, Kstatfs, init};
use crate::session::{Exchange, Session, WantedFeatures};

/// A number that only answers from memory have.
const REMEMBERED: u64 = 3;

/// An empty directory on a machine that is unreachable, or is not.
struct Remote {
    unreachable: Mutex<bool>,
    back: Condvar,
    /// Sends the test the name of each LOOKUP, and the operation of each other request.
    asked: Mutex<Sender<String>>,
}

impl Remote {
    fn set_unreachable(&self, unreachable: bool) {
        *self.unreachable.lock().expect("no panic") = unreachable;
        self.back.notify_all();
    }
}

impl Filesystem for Remote {
    fn longest_request(&self) -> usize {
        0
    }

    fn answer(&self, request: &Request<'_>, _: &mut Exchange<'_>) -> Result<Answer, Errno> {
        let asked = match &request.operation {
            FuseOperation::Lookup { name } => name.to_string_lossy().into_owned(),
            _ => request.name().to_owned(),
        };
        // The test may have seen enough.
        let _ = self.asked.lock().expect("no panic").send(asked);
        drop(
            self.back
                .wait_while(self.unreachable.lock().expect("no panic"), |unreachable| *unreachable)
                .expect("no panic"),
        );
        match request.operation {
            FuseOperation::GetAttr { .. } => Ok(Answer::Attributes(root(2))),
            FuseOperation::StatFs => {
                Ok(Answer::FileSystem(Kstatfs { blocks: 2, bsize: 1, frsize: 1, ..Default::default() }))
            }
            _ => Err(Errno::NOENT),
        }
    }

    fn begin_thread(&self) {}

    fn may_wait(&self, _: &FuseOperation<'_>) -> bool {
        true
    }

    fn interrupt(&self, _: u64) {}

    fn is_remote(&self) -> bool {
        true
    }

    fn answer_from_cache(&self, question: RootQuestion) -> Option<Answer> {
        match question {
            RootQuestion::Attributes => Some(Answer::Attributes(root(REMEMBERED as u32))),
            RootQuestion::Statx => None,
            RootQuestion::FileSystem => {
                Some(Answer::FileSystem(Kstatfs { blocks: REMEMBERED, bsize: 1, frsize: 1, ..Default::default() }))
            }
        }
    }
}

fn root(nlink: u32) -> AttrOut {
    AttrOut { attr: Attr { ino: 1, mode: libc::S_IFDIR | 0o755, nlink, ..Default::default() }, ..Default::default() }
}

/// A mounted [`Remote`].
struct Mounted {
    remote: Arc<Remote>,
    asked: Receiver<String>,
    mount: PrivateMount,
}

impl Mounted {
    fn new() -> Self {
        let device = open_device().expect("/dev/fuse");
        let mount = PrivateMount::new(device.as_fd(), &MountOptions::default()).expect("a mount");
        let region = Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"));
        let session =
            Session::open(device, WantedFeatures { flags: init::PARALLEL_DIROPS, ..WantedFeatures::default() }, region)
                .expect("the handshake");
        let (sender, asked) = channel();
        let remote =
            Arc::new(Remote { unreachable: Mutex::default(), back: Condvar::new(), asked: Mutex::new(sender) });
        session.run(Arc::clone(&remote) as Arc<dyn Filesystem>, 2).expect("threads");
        Self { remote, asked, mount }
    }

    fn at(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}/{name}", std::process::id(), self.mount.as_fd().as_raw_fd()))
    }

    /// Waits until the file system has this many requests.
    fn wait_asked(&self, count: usize) -> Vec<String> {
        (0..count).map(|_| self.asked.recv_timeout(Duration::from_secs(20)).expect("a question")).collect()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // No thread waits for ever, also when a test fails.
        self.remote.set_unreachable(false);
    }
}

#[test]
fn the_root_is_answered_from_memory_while_more_requests_than_threads_wait_for_the_source() {
    const CALLERS: usize = 3 * SLOTS;
    let mounted = Mounted::new();
    mounted.remote.set_unreachable(true);
    let callers: Vec<_> = (0..CALLERS)
        .map(|number| {
            let path = mounted.at(&format!("name-{number}"));
            thread::spawn(move || stat(path).expect_err("there is no such file"))
        })
        .collect();
    let mut asked = mounted.wait_asked(MOST_CALLS);
    assert_eq!(stat(mounted.at("")).expect("attributes").st_nlink, REMEMBERED);
    assert_eq!(statfs(mounted.at("")).expect("told").f_blocks, REMEMBERED);

    mounted.remote.set_unreachable(false);
    for caller in callers {
        assert_eq!(caller.join().expect("no panic"), Errno::NOENT);
    }
    asked.extend(mounted.asked.try_iter());
    asked.retain(|asked| asked.starts_with("name-"));
    asked.sort();
    asked.dedup();
    assert_eq!(asked.len(), CALLERS, "all were asked for");
    // The source still counts as unreachable until each thread that waited for the root's attributes has run again.
    let since = Instant::now();
    while stat(mounted.at("")).expect("attributes").st_nlink != 2 {
        assert!(since.elapsed() < Duration::from_secs(20), "the root is not asked for again");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_killed_caller_is_answered_whether_its_request_calls_the_source_or_is_parked() {
    let mounted = Mounted::new();
    mounted.remote.set_unreachable(true);
    let look = |number: usize| -> Child {
        let mut command = Command::new("stat");
        command.arg(mounted.at(&format!("name-{number}"))).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("stat")
    };
    let callers: Vec<_> = (0..2 * SLOTS).map(look).collect();
    mounted.wait_asked(MOST_CALLS);
    for mut caller in callers {
        caller.kill().expect("killed");
        // A test that hangs here has found something.
        caller.wait().expect("it ends");
    }
    mounted.remote.set_unreachable(false);
    let path = mounted.at("later");
    assert_eq!(stat(path).expect_err("there is no such file"), Errno::NOENT);
}
