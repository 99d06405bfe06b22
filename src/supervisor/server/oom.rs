//! Which processes the kernel kills last when memory runs out (`proc_pid_oom_score_adj(5)`).
//!
//! | process | score | why |
//! |---|---|---|
//! | keeper | -1000 | the kernel never kills it: it takes next to no memory, and no other process has the descriptors that it holds. The score also exempts it where the kernel kills a cgroup as a whole (`memory.oom.group`) |
//! | supervisor | -999 | as the kubelet: it starts the next server |
//! | server | -998 | after every container (the best protected have -997); before the supervisor, which can replace it |
//!
//! Lowering a score takes `CAP_SYS_RESOURCE`. The supervisor sets all of these scores, because servers have no privileges.

use std::fs;
use std::io;

use tracing::debug;

const KEEPER: i32 = -1000;
const SUPERVISOR: i32 = -999;
const SERVER: i32 = -998;

/// Protects this process, a supervisor. If its score is lower already, the score stays.
pub(in crate::supervisor) fn protect_supervisor() {
    let own = fs::read_to_string("/proc/self/oom_score_adj").ok().and_then(|score| score.trim().parse().ok());
    if own.is_none_or(|own: i32| own > SUPERVISOR) {
        set("self", SUPERVISOR);
    }
}

/// Protects a server. Sets the score also if the server inherited a lower one: a server with a memory limit has to be
/// killable.
pub(in crate::supervisor) fn protect_server(pid: i32) {
    set(&pid.to_string(), SERVER);
}

/// Protects a keeper.
pub(in crate::supervisor) fn protect_keeper(pid: i32) {
    set(&pid.to_string(), KEEPER);
}

fn set(process: &str, score: i32) {
    match fs::write(format!("/proc/{process}/oom_score_adj"), score.to_string()) {
        // The process has ended.
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => {}
        Err(error) => debug!("the OOM score of process {process} stays as it is: {error}; give podfs CAP_SYS_RESOURCE"),
        Ok(()) => {}
    }
}
