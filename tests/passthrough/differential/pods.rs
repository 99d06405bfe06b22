//! Pods that show a directory through volumes of several kinds, and what happens to their processes.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};

use nix::unistd::Pid;

use super::program::Disturbance;
use super::sources::SourceDisk;
use crate::claims::{claim, volume};
use crate::common::forgetting::forget_unused;
use crate::common::load::faults::kill_all;
use crate::common::{Fixture, Running, eventually};

/// Locked for writing while a server and its keeper are killed at once, and for reading during each call: a process of the host may get a
/// lock that the dead server had for a caller.
static KILLING_BOTH: RwLock<()> = RwLock::new(());
/// How often a server and its keeper were killed at once.
static KILLS_OF_BOTH: AtomicU64 = AtomicU64::new(0);

/// Lets no server be killed together with its keeper as long as the result lives.
pub fn without_kill_of_both() -> RwLockReadGuard<'static, ()> {
    KILLING_BOTH.read().unwrap_or_else(PoisonError::into_inner)
}

/// How often a server and its keeper were killed at once, in all pods.
pub fn kills_of_both() -> u64 {
    KILLS_OF_BOTH.load(Ordering::Relaxed)
}

/// A pod with its processes. Its volumes `auto`, `auto2`, `none`, `none2` and `always` show the directory of the source, with the caching
/// that their names say. So does `claimed`, by a claim of a local volume, with the caching of `auto`. `empty` and `limited` are emptyDirs on the same file system.
pub struct TestPod {
    // The processes end before the mounts do.
    running: Mutex<Running>,
    fixture: Fixture,
}

impl TestPod {
    pub fn start(source: &SourceDisk, is_over_io_uring: bool) -> TestPod {
        let host =
            |name: &str| format!("{{name: {name}, hostPath: {{path: {}, type: Directory}}}}", source.shown().display());
        let mut volumes: Vec<_> = ["auto", "auto2", "none", "none2", "always"].map(host).into();
        volumes.push("{name: claimed, persistentVolumeClaim: {claimName: data}}".to_owned());
        if source.has_empty_dirs() {
            volumes.push("{name: empty, emptyDir: {}}, {name: limited, emptyDir: {sizeLimit: 100Gi}}".to_owned());
        }
        let annotations = ["none: none", "none2: none", "always: always"].map(|words| {
            let (volume, cache) = words.split_once(": ").expect("two words");
            format!("podfs.io/cache.{volume}: {cache}, podfs.io/host-path.{volume}: fuse")
        });
        let manifest = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web-{is_over_io_uring}, annotations: {{{}, \
             podfs.io/host-path.auto: fuse, podfs.io/host-path.auto2: fuse}}}}\n\
             spec:\n  containers: [{{name: web, image: web}}]\n  volumes: [{}]\n",
            annotations.join(", "),
            volumes.join(", ")
        );
        let fixture =
            if source.has_empty_dirs() { Fixture::new_in(source.base(), &manifest) } else { Fixture::new(&manifest) };
        fixture.write("objects/claim.yaml", &claim("data", ""));
        fixture
            .write("objects/volume.yaml", &volume("data", &format!("local: {{path: {}}}", source.shown().display())));
        let mut command = fixture.command();
        command.args(["--io-uring", if is_over_io_uring { "on" } else { "off" }]);
        let mut running = fixture.start_command(command);
        running.wait_ready();
        TestPod { running: Mutex::new(running), fixture }
    }

    pub fn volume(&self, name: &str) -> PathBuf {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).volume(name)
    }

    /// Lets something happen to the pod or to one of its volumes. Calls `meanwhile` while it happens.
    pub fn disturb<T>(&self, disturbance: Disturbance, volume: &PathBuf, meanwhile: impl FnOnce() -> T) -> T {
        let kills_both = disturbance == Disturbance::KillServerAndKeeper;
        let _no_call_runs = kills_both.then(|| KILLING_BOTH.write().unwrap_or_else(PoisonError::into_inner));
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        match disturbance {
            Disturbance::KillServerAndKeeper => {
                KILLS_OF_BOTH.fetch_add(1, Ordering::Relaxed);
                running.kill_server_and_keeper(|| ());
            }
            Disturbance::DropCaches => forget_unused(volume),
            Disturbance::KillServer | Disturbance::KillServerDuring => {
                kill_all(running.servers());
            }
            Disturbance::KillKeeper => {
                kill_all(running.keepers());
            }
        }
        let result = meanwhile();
        if disturbance != Disturbance::DropCaches {
            // The next disturbance must not kill the other process, too: together they hold the only descriptors of open files without
            // a name.
            running.freed(|| {
                eventually("one server serves, with one keeper", || {
                    let _answered = rustix::fs::statvfs(volume);
                    let (servers, keepers) = (running.servers(), running.keepers());
                    (servers.len(), keepers.len()) == (1, 1) && !(kills_both && is_reopening(servers[0]))
                });
            });
        }
        result
    }

    pub fn log(&self) -> String {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).log()
    }

    /// Ends calls that hang.
    pub fn kill_all(&self) {
        self.fixture.kill_all();
    }

    /// Stops the pod, which must leave nothing behind.
    pub fn stop(self) {
        let mut running = self.running.into_inner().unwrap_or_else(PoisonError::into_inner);
        assert!(running.stop().success(), "{}", running.log());
        self.fixture.assert_nothing_left();
    }
}

/// Whether a server still reopens files and takes locks again, after it followed one that was killed together with its keeper.
fn is_reopening(server: Pid) -> bool {
    let threads = fs::read_dir(format!("/proc/{server}/task"));
    let names = threads.into_iter().flatten().flatten().map(|thread| fs::read(thread.path().join("comm")));
    names.flatten().any(|name| name == b"reopen\n")
}
