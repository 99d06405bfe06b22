//! Checks of the machine, and the tokio runtime of a supervisor.

use std::time::Duration;

use anyhow::anyhow;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use podfs_fuse::memory_lock;
use podfs_fuse::mount::private::open_device;
use podfs_fuse::server::fd_keeper::FIRST_FREE;
use tracing::warn;

use super::failure::Failure;
use crate::supervisor::server::program::ServerProgram;
use crate::volume::{Volume, VolumeSource};

/// The lowest limit of open files: the numbers that a server reserves, and as many for a few volumes.
const LEAST_FILES: u64 = 2 * FIRST_FREE.unsigned_abs() as u64;

/// Checks the machine for a command that mounts, before the command changes anything: the user is root, `/dev/fuse` can
/// be opened, the process may open enough files, and podfs-fuse is installed. Returns podfs-fuse.
pub(crate) fn check_machine() -> Result<ServerProgram, Failure> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::machine(anyhow!(
            "podfs mounts file systems, so it must run as root; without root, podfs render prints what the volumes of a pod \
             contain, and podfs view shows it as files"
        )));
    }
    raise_file_limit()?;
    open_device()?;
    let server_program = ServerProgram::find().map_err(Failure::machine)?;
    if let Err(error) = memory_lock::protect_memory() {
        warn!(
            "the kernel may swap secrets out, because podfs cannot lock its memory ({error}); give podfs CAP_IPC_LOCK"
        );
    }
    Ok(server_program)
}

/// Raises the soft limit of open files to the hard limit. Each volume takes a few descriptors, and the soft limit is
/// often 1024.
fn raise_file_limit() -> Result<(), Failure> {
    let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return Ok(()) };
    let _as_it_was = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    if hard < LEAST_FILES {
        return Err(Failure::machine(anyhow!(
            "podfs may have no more than {hard} files open, and needs at least {LEAST_FILES}; raise the limit with ulimit -n, or with \
             LimitNOFILE= of its unit"
        )));
    }
    Ok(())
}

/// How long an idle blocking thread waits for work. One thread gets work more often, so it stays for ever: if the kernel makes no more
/// threads, tokio gives further work to a thread that it has, and panics if it has none.
pub(crate) const IDLE_THREAD: Duration = Duration::from_secs(30);

/// Gives a blocking thread work from time to time, so that tokio keeps it. (The watchdog does so in a supervisor, which it wakes
/// anyway.)
pub(crate) async fn keep_a_blocking_thread() {
    loop {
        let _ended = tokio::task::spawn_blocking(|| ()).await;
        tokio::time::sleep(IDLE_THREAD / 3).await;
    }
}

/// Runs `future` on one thread. System calls that may block have blocking threads: a few dozen, and one more for each
/// volume that shows a source of the node, because that source may not answer. The few dozen are also for volumes that
/// are published later.
pub(crate) fn block_on<T>(volumes: &[Volume], future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    const BLOCKING_THREADS: usize = 64;
    let of_host =
        |volume: &&Volume| !matches!(volume.source, VolumeSource::Projection(_) | VolumeSource::Unsupported(_));
    let of_host = volumes.iter().filter(of_host).count();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(BLOCKING_THREADS + of_host)
        .thread_keep_alive(IDLE_THREAD)
        .on_thread_stop(memory_lock::return_own_stack)
        .build()
        .map_err(|error| Failure::general(anyhow!("cannot start: {error}")))?;
    let outcome = runtime.block_on(future);
    // The process does not wait for threads that are blocked on a source which does not answer.
    runtime.shutdown_background();
    outcome
}
