//! The end of a supervisor: SIGTERM, SIGKILL if that takes too long, and reports of what podfs waits for.

use rustix::process::Signal;
use tracing::{info, warn};

use super::super::launch::stop_unit;
use super::super::life::{ConnectingSupervisor, EndingSupervisor, RunningSupervisor, SupervisorLife};
use super::super::{SupervisorReport, blocking};
use super::PodTask;
use crate::supervisor::run_dir::cgroup;

impl PodTask {
    /// Stops the supervisor.
    pub(super) async fn stop(&mut self) {
        let process = match std::mem::replace(&mut self.life, SupervisorLife::Absent) {
            SupervisorLife::Up(RunningSupervisor { process, .. })
            | SupervisorLife::Calling(ConnectingSupervisor { process: Some(process), .. }) => process,
            other => return self.life = other,
        };
        let (uid, pid) = (self.uid.clone(), process.pid().unsigned_abs());
        let stopped = blocking(move || (stop_unit(&uid, pid), cgroup::found_of_supervisor(&uid, pid)));
        let (stopped, cgroup) = stopped.await;
        match stopped {
            Ok(true) => {}
            Ok(false) => process.signal(Signal::TERM),
            Err(reason) => {
                warn!("{reason}; podfs sends SIGTERM to the supervisor itself");
                process.signal(Signal::TERM);
            }
        }
        self.life = SupervisorLife::Ending(EndingSupervisor::new(process, cgroup));
    }

    /// Reports that the supervisor has not ended yet.
    pub(super) async fn report_slow_end(&mut self) {
        let SupervisorLife::Ending(ending) = &mut self.life else { return };
        ending.report_at = None;
        let awaited = ending.awaited();
        info!("pod {}: {awaited}", self.uid);
        self.report(SupervisorReport::Ending(Some(awaited))).await;
    }

    /// Kills the supervisor, which has not ended in time. Reports that the first time.
    pub(super) async fn kill_overdue(&mut self) {
        let SupervisorLife::Ending(ending) = &mut self.life else { return };
        if ending.kill() {
            warn!("the supervisor of pod {} does not end; podfs kills it", self.uid);
            let awaited = ending.awaited();
            self.report(SupervisorReport::Ending(Some(awaited))).await;
        }
    }
}
