//! Rounds under load in which a supervisor or a whole pod is replaced, and finds everything as it was.

use super::{Pod, Running};
use crate::common::identity::identity;

/// In each round, kills the supervisor and starts a podfs that adopts its server. `prepare` chooses what is installed then.
pub fn adopt(mut pod: Pod, rounds: u64, mut prepare: impl FnMut(&mut Pod)) {
    repeat(&mut pod, rounds, |pod, running| {
        prepare(pod);
        let server = pod.fixture.kill_supervisor(running);
        *running = pod.builds.run(&pod.fixture);
        assert_eq!(running.server(), server, "the supervisor has adopted the server");
    });
}

/// In each round, upgrades the pod to the build that is not installed.
pub fn upgrade(mut pod: Pod, rounds: u64) {
    repeat(&mut pod, rounds, |pod, running| {
        let (supervisor, server) = (running.pid(), running.server());
        pod.builds.upgrade(&pod.fixture);
        assert_eq!(running.pid(), supervisor, "the supervisor is the same process");
        assert_ne!(running.server(), server, "another server has replaced the first one");
    });
}

/// Repeats `act` under load. Checks after each round that directories which no caller changes are as they were before it.
fn repeat(pod: &mut Pod, rounds: u64, mut act: impl FnMut(&mut Pod, &mut Running)) {
    let mut remaining = rounds;
    let mut quiet = None;
    pod.under_load(|pod, running| {
        let quiet = quiet.get_or_insert_with(|| pod.quiet_directory(&running.volume("host")));
        let still = running.volume("still");
        let before = (identity(&still), identity(quiet));
        act(pod, running);
        assert_eq!((identity(&still), identity(quiet)), before);
        remaining -= 1;
        remaining > 0
    });
}
