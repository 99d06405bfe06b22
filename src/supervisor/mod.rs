//! The supervisor: the life of one pod's volumes, from the first mount to the last unmount.
//!
//! Each module imports only those below it:
//!
//! | module | owns |
//! |---|---|
//! | [`program`] | `podfs-supervisor`, the program of supervisors that `podfs node` starts |
//! | [`run`](mod@run) | the main loop: start or adoption, work on volumes, signals, upgrade, shutdown |
//! | [`control`] | the socket on which the supervisor answers |
//! | [`status`] | the pod's status, readiness, counters, metrics |
//! | [`volume`] | one volume: waiting, live, or live with a refresh that failed |
//! | `server` | the server process: its start, its watch, its successors |
//! | [`run_dir`] | what the pod has on the node: its claim, its sockets, its mount points, its cgroup |
//! | `exec_state` | the state that a program passes to the one that it executes in an upgrade |
//! | `installed` | where the programs of podfs are on disk |
//! | [`log_format`] | the format of lines on standard error |
//! | `signal_record` | the signals that this program has not obeyed yet, for the next program of an upgrade |
//! | `ready_fd` | the descriptor to which the program writes when the pod is ready, also over an upgrade |
//! | `long_step` | a line in the log when a step waits for a disk |
//!
//! One asynchronous task runs the pod, and it never blocks. Work that makes system calls on a mount (mounting a volume,
//! committing) runs on a blocking thread, one per volume at a time, which owns the volume meanwhile. So a volume that
//! hangs delays no other volume. Separate threads answer on the control socket.

pub mod control;
pub(crate) mod exec_state;
pub(crate) mod installed;
pub mod log_format;
mod long_step;
pub mod program;
pub(crate) mod ready_fd;
pub mod run;
pub mod run_dir;
pub(crate) mod server;
mod signal_record;
pub mod status;
pub mod volume;

pub(crate) use run::table_watch::TableWatch;
pub use run::{Assignment, SupervisorError, run};
