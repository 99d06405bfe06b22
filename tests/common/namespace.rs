//! Mount namespaces for tests, as containers have them.

use std::any::Any;
use std::fs::{self, File};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::Pid;

/// The propagation of later mounts of the host into the namespace.
#[derive(Clone, Copy)]
pub enum Propagation {
    /// Later mounts do not appear.
    Private,
    /// Later mounts appear if their parent mount is shared on the host.
    FromHost,
}

type Task = Box<dyn FnOnce() + Send>;

/// A thread with its own mount namespace. Dropping it ends the thread and the namespace; the kernel then unmounts every mount
/// of the namespace.
pub struct Container {
    tasks: Option<Sender<Task>>,
    thread: Option<JoinHandle<()>>,
}

impl Container {
    pub fn new(propagation: Propagation) -> Self {
        let (tasks, receiver) = channel::<Task>();
        let thread = thread::spawn(move || receiver.into_iter().for_each(|task| task()));
        let container = Self { tasks: Some(tasks), thread: Some(thread) };
        container.run(move || {
            unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_FS).expect("a mount namespace");
            let propagation = match propagation {
                Propagation::Private => MsFlags::MS_PRIVATE,
                Propagation::FromHost => MsFlags::MS_SLAVE,
            };
            change_mount(Path::new("/"), propagation | MsFlags::MS_REC);
        });
        container
    }

    /// Runs `inside` in the namespace. Commands that `inside` starts are in the namespace, too. A panic in `inside` continues
    /// in the calling thread.
    pub fn run<T: Send + 'static>(&self, inside: impl FnOnce() -> T + Send + 'static) -> T {
        let (result, ended) = channel::<Result<T, Box<dyn Any + Send>>>();
        let task = move || drop(result.send(catch_unwind(AssertUnwindSafe(inside))));
        self.tasks.as_ref().expect("it runs until it is dropped").send(Box::new(task)).expect("the thread is there");
        ended.recv().expect("every task ends").unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Runs `test` in a mount namespace in which the mounts below the build directory are shared, as systemd makes all mounts of a
/// node. The mounts of the test end with the namespace.
pub fn on_a_host_that_shares_mounts(test: impl FnOnce() + Send + 'static) {
    Container::new(Propagation::Private).run(move || {
        let disk = Path::new(env!("CARGO_TARGET_TMPDIR"));
        bind(disk, disk);
        change_mount(disk, MsFlags::MS_SHARED);
        test();
    });
}

/// Moves this thread into the mount namespace of a process: paths are those that the process sees.
pub fn enter(process: u32) {
    let namespace = File::open(format!("/proc/{process}/ns/mnt")).expect("a mount namespace");
    unshare(CloneFlags::CLONE_FS).expect("a working directory of its own");
    setns(namespace, CloneFlags::CLONE_NEWNS).expect("the namespace of the process");
}

/// Every directory that a process has open.
pub fn open_directories(process: Pid) -> Vec<PathBuf> {
    let all = fs::read_dir(format!("/proc/{process}/fd")).expect("descriptors").flatten();
    all.map(|entry| entry.path()).filter(|path| fs::metadata(path).is_ok_and(|metadata| metadata.is_dir())).collect()
}

/// A path to a file of this name that begins at a directory that a process has open, and goes up with `..`.
pub fn way_out(process: Pid, file: &str) -> Option<PathBuf> {
    const DEEPEST: usize = 40;
    let above = |directory: PathBuf| {
        std::iter::successors(Some(directory), |below| Some(below.join(".."))).take(DEEPEST).map(|at| at.join(file))
    };
    open_directories(process).into_iter().flat_map(above).find(|path| path.exists())
}

/// Changes the mount at `path`: its propagation, or with `MS_REMOUNT` its flags.
pub fn change_mount(path: &Path, flags: MsFlags) {
    mount(None::<&Path>, path, None::<&Path>, flags, None::<&Path>).expect("the mount is changed");
}

/// Shows `from` at `to` as well.
pub fn bind(from: &Path, to: &Path) {
    mount(Some(from), to, None::<&Path>, MsFlags::MS_BIND, None::<&Path>).expect("a bind mount");
}

/// Mounts an empty tmpfs, which only root can write to.
pub fn mount_tmpfs(at: &Path) {
    mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), Some("size=1m,mode=755")).expect("a tmpfs");
}
