//! FlexVolume and CSI drivers: programs and services of the node that mount volumes for podfs, as for a kubelet.
//!
//! A driver mounts a volume at a directory that only podfs uses, the volume's [`DriverHome`]; podfs shows it to the pod like
//! a directory of the node. So containers never see the driver's own mount, and the code for hostPath volumes serves it.
//!
//! | module | owns |
//! |---|---|
//! | `home` | the directory in which a driver mounts a volume for a pod, with its record |
//! | `unfinished` | the call that has not ended, for the process that makes the next one |
//! | `process` | the process of a FlexVolume driver |
//! | `node_mount` | the mount of a volume for the node, from which the pods' mounts are made |
//! | [`csi`] | CSI drivers: services that speak gRPC |
//! | [`flex`] | FlexVolume drivers: programs that print JSON |
//!
//! After podfs was killed, the next podfs can undo all calls to a driver:
//! 1. podfs writes the record of a home before the first call to the driver, and updates it before each further
//!    call. It removes the record after the last call.
//! 2. Calls for one volume are serial, also those of two processes (`unfinished`).
//! 3. A call that ended without a definite answer counts as done: podfs repeats it, or undoes it.
//! 4. [`undo`] needs only a home. The process that removes the pod calls it: the pod's supervisor, the next supervisor of the pod,
//!    or `podfs cleanup`.

pub mod csi;
pub mod flex;
mod home;
mod node_mount;
mod process;
mod unfinished;

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

pub use home::{DriverHome, DriverRecord, DriverRecordError};
pub use node_mount::NodeMount;

use podfs_fuse::mount::MountError;

use crate::host::HostError;
use home::HomeLock;
use unfinished::CallRecord;

/// The pause before another look whether the calls to a FlexVolume driver have ended.
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// Most characters of a driver's message in an error.
const MOST_CHARACTERS: usize = 300;

/// The directories of the node's drivers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drivers {
    /// The root directory, below which pods and drivers have their directories.
    pub root: PathBuf,
    /// The directory with a directory for each FlexVolume driver.
    pub flex_volumes: PathBuf,
}

/// Learns when a call that may make a driver mount a volume begins and ends. Cheap to clone.
#[derive(Clone)]
pub struct CallObserver(Arc<dyn Fn(AwaitedAnswer) + Send + Sync>);

/// The answer of a driver that podfs waits for.
pub struct AwaitedAnswer {
    /// The name of the volume in the pod.
    pub volume: String,
    /// The driver and the call, a sentence; `None` after the answer.
    pub sentence: Option<String>,
}

/// A call in progress. Dropping this reports its end.
struct AwaitedCall<'a> {
    observer: &'a CallObserver,
    volume: &'a str,
}

impl Drop for AwaitedCall<'_> {
    fn drop(&mut self) {
        self.observer.0(AwaitedAnswer { volume: self.volume.to_owned(), sentence: None });
    }
}

impl CallObserver {
    /// Calls `observe` before and after each call to a driver.
    pub fn new(observe: impl Fn(AwaitedAnswer) + Send + Sync + 'static) -> CallObserver {
        CallObserver(Arc::new(observe))
    }

    fn begins<'a>(&'a self, volume: &'a str, driver: &str, call: &str, limit: Duration) -> AwaitedCall<'a> {
        let seconds = limit.as_secs();
        let sentence = format!("{driver} has not answered {call} yet; podfs waits at most {seconds} s for each call");
        self.0(AwaitedAnswer { volume: volume.to_owned(), sentence: Some(sentence) });
        AwaitedCall { observer: self, volume }
    }
}

/// Why a call to a driver failed.
#[derive(Clone, Debug)]
pub struct DriverError {
    /// The failure, and the advice.
    pub sentence: String,
    /// Whether the driver may have executed the call.
    pub is_uncertain: bool,
    /// Whether a retry with these arguments cannot succeed.
    pub is_infeasible: bool,
    /// The cause, if it is not the driver's error.
    cause: Option<Arc<dyn Error + Send + Sync>>,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

/// Unlike thiserror, it returns the cause itself, not its `Arc`.
impl Error for DriverError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.as_deref().map(|cause| cause as &(dyn Error + 'static))
    }
}

impl DriverError {
    /// An error after which the driver has not executed the call.
    pub(crate) fn refused(sentence: impl Into<String>) -> DriverError {
        DriverError { sentence: sentence.into(), is_uncertain: false, is_infeasible: false, cause: None }
    }

    /// An error after which the driver may have executed the call.
    pub(crate) fn uncertain(sentence: impl Into<String>) -> DriverError {
        DriverError { sentence: sentence.into(), is_uncertain: true, is_infeasible: false, cause: None }
    }

    /// An error with a cause, after which the driver has not executed the call.
    pub(crate) fn because(sentence: impl Into<String>, cause: impl Error + Send + Sync + 'static) -> DriverError {
        DriverError { cause: Some(Arc::new(cause)), ..DriverError::refused(sentence) }
    }

    /// An error of the node's kernel.
    pub(crate) fn of_node(action: &str, path: &Path, cause: io::Error) -> DriverError {
        DriverError::because(format!("cannot {action} {}: {cause}", path.display()), cause)
    }
}

impl From<HostError> for DriverError {
    fn from(error: HostError) -> DriverError {
        DriverError::because(error.to_string(), error)
    }
}

impl From<DriverRecordError> for DriverError {
    fn from(error: DriverRecordError) -> DriverError {
        DriverError::because(error.to_string(), error)
    }
}

/// Why podfs cannot undo its calls to a driver.
#[derive(Debug, thiserror::Error)]
pub enum UndoError {
    /// The directory of the volume stays.
    #[error("cannot remove {}: {cause}", .home.display())]
    Home {
        /// The directory.
        home: PathBuf,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// podfs does not know the calls.
    #[error(transparent)]
    Record(#[from] DriverRecordError),
    /// The driver failed.
    #[error("volume {volume:?}: {cause}")]
    Volume {
        /// The volume.
        volume: String,
        /// The reason.
        #[source]
        cause: LeaveError,
    },
}

/// Why a volume cannot be unmounted from a pod, or from the node.
#[derive(Debug, thiserror::Error)]
pub enum LeaveError {
    /// The driver refuses, or does not answer.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The node's mount cannot be read.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The CSI driver reports success, but the mount is still there.
    #[error("CSI driver {driver} says that it has unpublished the volume, but {} is still mounted", .target.display())]
    StillPublished {
        /// The driver.
        driver: String,
        /// The mount.
        target: PathBuf,
    },
    /// A process that was killed had called the CSI driver to mount the volume, and the driver may still do so.
    #[error(
        "CSI driver {driver} may still execute {call}, which a podfs that was killed has called; podfs keeps the record of the volume; \
         it has the driver unmount the volume at the first try after the {} s of that call: a running podfs tries again by itself, and \
         podfs cleanup when it is called again",
        longest.as_secs()
    )]
    StillExecuting {
        /// The driver.
        driver: String,
        /// The method.
        call: String,
        /// The longest duration of a call.
        longest: Duration,
    },
    /// The FlexVolume driver reports success, but the mount is still there.
    #[error("cannot unmount {}: the driver says that it has, but it is still mounted", .0.display())]
    StillMounted(PathBuf),
    /// The kernel does not unmount it.
    #[error("cannot unmount {}: {cause}", .target.display())]
    Unmount {
        /// The mount.
        target: PathBuf,
        /// The reason.
        #[source]
        cause: UnmountError,
    },
    /// The kernel does not unmount a mount of the driver.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// podfs cannot change the record of the node's mount.
    #[error("cannot leave {}: {cause}", .directory.display())]
    Leave {
        /// The directory of the node's mount.
        directory: PathBuf,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The directory of the node's mount stays.
    #[error("cannot remove {}: {cause}", .directory.display())]
    Remove {
        /// The directory.
        directory: PathBuf,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
}

/// Why the kernel does not unmount a volume of a driver.
#[derive(Debug, thiserror::Error)]
pub enum UnmountError {
    /// The mount table cannot be read.
    #[error(transparent)]
    MountTable(#[from] io::Error),
    /// The mount stays.
    #[error(transparent)]
    Mount(#[from] MountError),
}

/// The message of a driver, for an error: without control characters, and at most [`MOST_CHARACTERS`].
fn quoted(message: &str) -> String {
    message.chars().filter(|c| !c.is_control()).take(MOST_CHARACTERS).collect()
}

/// Kills the program of a FlexVolume driver that executes a call for the volume with this home, and its process group. Returns whether
/// there is such a call. The thread that has made the call gets an error.
///
/// # Errors
/// When the processes do not end, or this version of podfs cannot read a record.
pub fn interrupt(home: &DriverHome) -> Result<bool, DriverError> {
    let node_mount = home.read()?.and_then(|record| record.node_mount);
    let of_node = node_mount.map(|directory| CallRecord::of_node_mount(&directory, home.path()));
    let mut has_interrupted = CallRecord::of_home(home.path()).interrupt_driver()?;
    if let Some(of_node) = of_node {
        has_interrupted |= of_node.interrupt_driver()?;
    }
    Ok(has_interrupted)
}

/// Takes the lock of a home whose calls are to be undone. Waits for the answer of a CSI driver, and kills the program of a FlexVolume
/// driver that executes a call. `None` if there is no home.
fn lock_to_undo(home: &DriverHome) -> Result<Option<HomeLock>, DriverError> {
    loop {
        // The thread that has the lock of a FlexVolume's home makes several calls, and each of them may have to be killed.
        let locked = if home.is_of_csi() { home.lock().map(Some) } else { home.try_lock() };
        match locked {
            Ok(Some(lock)) => return Ok(Some(lock)),
            Ok(None) => drop(interrupt(home)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DriverError::of_node("lock", home.path(), error)),
        }
        sleep(LOCK_PAUSE);
    }
}

/// Undoes the calls to a driver for a volume of a pod, and removes the volume's home. Blocks until the driver answers. If another
/// thread calls the driver for the volume, that call ends first.
///
/// # Errors
/// The reason why podfs could not undo a call, or could not remove the home. The caller may try again.
pub fn undo(home: &DriverHome) -> Result<(), UndoError> {
    let remove = || home.remove().map_err(|cause| UndoError::Home { home: home.path().to_owned(), cause });
    let locked = lock_to_undo(home);
    let record = home.read()?;
    let volume = record.as_ref().map(|record| record.volume.clone()).unwrap_or_default();
    let failed = |cause: LeaveError| UndoError::Volume { volume: volume.clone(), cause };
    let Some(_lock) = locked.map_err(|error| failed(error.into()))? else { return Ok(()) };
    let Some(record) = record else {
        return remove();
    };
    let undone = match &record.executable {
        Some(_) => flex::undo(home, &record),
        None => csi::undo(home, &record),
    };
    undone.map_err(failed)?;
    remove()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_that_undoes_the_calls_to_a_csi_driver_sleeps_until_the_answer() {
        let base = tempfile::tempdir().expect("a directory");
        let home = DriverHome::of(base.path(), "kubernetes.io~csi", "a");
        home.make_target().expect("made");
        let lock = home.lock().expect("free");
        let (started, waiting) = channel();
        let (undone, outcome) = channel();
        let undoing = home.clone();
        let undo = thread::spawn(move || {
            started.send(rustix::thread::gettid()).expect("it waits");
            undone.send(lock_to_undo(&undoing).expect("no error").is_none()).expect("it waits");
        });
        let status = format!("/proc/self/task/{}/status", waiting.recv().expect("started").as_raw_nonzero());
        let pauses = || {
            let status = fs::read_to_string(&status).expect("it runs");
            let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            count.expect("a count").trim().parse::<u64>().expect("a number")
        };
        // It begins to sleep.
        while !fs::read_to_string(&status).expect("it runs").contains("State:\tS") {
            thread::yield_now();
        }
        let before = pauses();
        assert!(outcome.recv_timeout(LOCK_PAUSE * 10).is_err());
        assert_eq!(pauses(), before);
        // Another process removes the home before it gives up the lock, as after the last call.
        home.remove().expect("removed");
        drop(lock);
        assert!(outcome.recv().expect("an outcome"), "there is no home any more");
        undo.join().expect("it ends");
    }

    #[test]
    fn an_error_of_the_node_keeps_its_causes() {
        let kernel = io::Error::from(io::ErrorKind::PermissionDenied);
        let error = DriverError::from(HostError::system("use", Path::new("/d"), kernel));
        assert_eq!(error.to_string(), "cannot use /d: permission denied");
        let host = error.source().and_then(|source| source.downcast_ref::<HostError>()).expect("the error of the node");
        let kernel = Error::source(host).and_then(|source| source.downcast_ref::<io::Error>()).expect("the kernel's");
        assert_eq!(kernel.kind(), io::ErrorKind::PermissionDenied);
    }
}
