//! Checks of the machine, and the runtime of a supervisor.

use anyhow::anyhow;
use podfs_fuse::memory_lock;
use podfs_fuse::mount::private::open_device;
use tracing::warn;

use super::failure::Failure;
use crate::supervisor::server::program::ServerProgram;
use crate::volume::{Volume, VolumeSource};

/// Checks what every command that mounts needs, before it makes anything. Returns the program of its servers.
pub(crate) fn check_machine() -> Result<ServerProgram, Failure> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::machine(anyhow!("podfs mounts file systems, so it must run as root")));
    }
    open_device()?;
    let server_program = ServerProgram::find().map_err(Failure::machine)?;
    if let Err(error) = memory_lock::protect_memory() {
        warn!(
            "the kernel may swap secrets out, because podfs cannot lock its memory ({error}); give podfs CAP_IPC_LOCK"
        );
    }
    raise_descriptor_limit();
    Ok(server_program)
}

/// Each volume takes a few descriptors; the soft limit is often 1024.
fn raise_descriptor_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _as_it_was = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// Runs `future` on one thread. Threads for system calls that may block are apart: a few dozen, and one for each volume
/// that shows something of the host, because its source may not answer. More volumes may be published later.
pub(crate) fn block_on<T>(volumes: &[Volume], future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    const BLOCKING_THREADS: usize = 64;
    let of_host =
        |volume: &&Volume| !matches!(volume.source, VolumeSource::Projection(_) | VolumeSource::Unsupported(_));
    let of_host = volumes.iter().filter(of_host).count();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(BLOCKING_THREADS + of_host)
        .on_thread_stop(memory_lock::return_own_stack)
        .build()
        .map_err(|error| Failure::general(anyhow!("cannot start: {error}")))?;
    let outcome = runtime.block_on(future);
    // The process does not wait for threads that are blocked on a source which does not answer.
    runtime.shutdown_background();
    outcome
}
