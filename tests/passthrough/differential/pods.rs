//! Pods that show a directory through volumes of several kinds, and what happens to their processes.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::program::Disturbance;
use super::sources::SourceDisk;
use crate::common::forgetting::forget_unused;
use crate::common::load::faults::kill_all;
use crate::common::{Fixture, Running, eventually};

/// A pod with its processes. Its volumes `auto`, `auto2`, `none`, `none2` and `always` show the directory of the source, with the caching
/// that their names say. `empty` and `limited` are emptyDirs on the same file system.
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
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        match disturbance {
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
            // Server and keeper must not both be gone: together they hold the only descriptors of open files without a name.
            running.freed(|| {
                eventually("one server serves, with one keeper", || {
                    let _answered = rustix::fs::statvfs(volume);
                    (running.servers().len(), running.keepers().len()) == (1, 1)
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
