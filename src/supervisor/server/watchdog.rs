//! The watchdog: the supervisor looks from time to time whether its server makes progress.
//!
//! A volume is stuck while requests wait and the server reads or answers none. The region shows which request each thread of
//! the server works on, and fusectl shows how many requests wait. While no request waits and the server answers none, a look
//! costs a few system calls on the supervisor's own thread, and wakes one other thread for a moment. Otherwise the supervisor
//! decides whether the server is at fault:
//!
//! 1. The server hangs, and the supervisor replaces it, if its process is stopped, if each look finds a thread running or
//!    waiting for another thread of the server, or if the server does not answer the supervisor.
//! 2. A thread in any other system call waits for the source of its volume. Another server would wait there too, so the
//!    supervisor does nothing: each volume has threads of its own, and the other volumes go on.
//! 3. A server that was killed and cannot end, because one of its threads waits for a source in a system call that no signal
//!    ends, counts as ended (`unkillable`).
//! 4. Volumes of podfs's own NFS client share one thread, which never blocks. The region shows since when an NFS server
//!    has owed answers. Again the supervisor does nothing.

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use podfs_fuse::client::{ServerClient, VolumeActivity, VolumeNumber};
use tokio::task::{JoinHandle, spawn_blocking};
use tracing::warn;

use super::alarm::Alarm;
use super::call::{Call, CpuTime, call};
use super::source_errors::SourceErrors;
use super::{fusectl, unkillable};

/// The time between two looks at an idle server. It is long, because each look wakes an idle machine.
const IDLE_INTERVAL: Duration = Duration::from_secs(8);
/// The time between two looks while requests are under way.
const BUSY_INTERVAL: Duration = Duration::from_secs(1);
/// How long a volume may be stuck, or a server stopped, before the supervisor acts.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a server may take to end once it was killed.
const KILLED_TIMEOUT: Duration = Duration::from_millis(500);
/// How long the server may take to answer the watchdog.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The watchdog, between two looks at the server or during a look.
pub(super) enum WatchdogState {
    /// The next look is due at `until`. The supervisor sets the alarm when it first waits for that.
    Waiting { watchdog: Watchdog, until: Instant, alarm: Option<Alarm> },
    /// A blocking thread looks at the server. This takes as long as the server takes to answer.
    InProgress(JoinHandle<(Option<String>, Watchdog)>),
}

impl Default for WatchdogState {
    fn default() -> Self {
        Self::until_next_look(Watchdog::default())
    }
}

impl WatchdogState {
    fn until_next_look(watchdog: Watchdog) -> Self {
        Self::Waiting { until: Instant::now() + watchdog.interval(), watchdog, alarm: None }
    }

    /// Waits for the next look at a server that is not at rest, and for its outcome. Returns the problem if the server hangs.
    /// Cancel-safe: the next call continues.
    pub(super) async fn next_look(
        &mut self,
        pid: i32,
        client: &Arc<ServerClient>,
        errors: &mut SourceErrors,
    ) -> Option<String> {
        if let Self::Waiting { watchdog, until, alarm } = self {
            loop {
                alarm.get_or_insert_with(|| Alarm::at(*until)).expires().await;
                let has_errors = errors.look(client);
                if has_errors || !watchdog.is_idle() || !is_at_rest(pid, client) {
                    break;
                }
                // The pool keeps a thread that has had work. Without a thread, work would end the process if the kernel makes no
                // more threads at that moment (`crate::supervisor::program::machine`).
                drop(spawn_blocking(|| ()));
                *until = Instant::now() + IDLE_INTERVAL;
                *alarm = None;
            }
            let (mut watchdog, client) = (std::mem::take(watchdog), Arc::clone(client));
            *self = Self::InProgress(spawn_blocking(move || (watchdog.look(pid, &client), watchdog)));
        }
        let Self::InProgress(look) = self else { return None };
        let (problem, watchdog) = look.await.expect("a blocking thread that panics ends the process");
        *self = Self::until_next_look(watchdog);
        problem
    }

    /// The volumes whose sources do not answer.
    pub(super) fn silent_sources(&self) -> Vec<String> {
        match self {
            Self::Waiting { watchdog, .. } => watchdog.silent_sources(),
            Self::InProgress(_) => Vec::new(),
        }
    }
}

/// What the looks so far have found.
#[derive(Default)]
pub(super) struct Watchdog {
    /// The stuck volumes.
    stuck: HashMap<VolumeNumber, StuckVolume>,
    /// The names of volumes whose NFS servers do not answer, and whether that has lasted for [`TIMEOUT`].
    silences: HashMap<String, bool>,
    /// Since when the server process is stopped.
    stopped: Option<Instant>,
    /// When the supervisor last asked the server for an answer.
    asked: Option<Instant>,
}

/// A volume that makes no progress.
struct StuckVolume {
    activity: VolumeActivity,
    since: Instant,
    /// Since when each look has found the volume's requests in the server's own code.
    in_server_since: Option<Instant>,
    /// The CPU time that the threads that work on the requests had used at the last look.
    cpu_times: HashMap<i32, CpuTime>,
    /// Whether the supervisor has reported that the volume's source does not answer.
    is_reported: bool,
}

/// What the supervisor does about a stuck volume.
#[derive(Debug, PartialEq, Eq)]
enum StuckVolumeAction {
    /// Nothing now.
    Wait,
    /// Reports that the source does not answer.
    SourceIsSilent,
    /// Asks the server for an answer, because the server may not read requests any more.
    Ask,
    /// Replaces the server, because the server hangs.
    Hangs,
}

impl Watchdog {
    /// Looks at a server. Returns the problem if the server hangs. This takes at most as long as the server may take to answer.
    fn look(&mut self, pid: i32, client: &ServerClient) -> Option<String> {
        if stays_inert(pid) {
            return Some("it was killed, and waits for a source".to_owned());
        }
        let now = Instant::now();
        match is_stopped(pid) {
            true if now - *self.stopped.get_or_insert(now) >= TIMEOUT => return Some("it is stopped".to_owned()),
            true => return None,
            false => self.stopped = None,
        }
        if client.is_disconnected() {
            return Some("it has closed the connection to its supervisor".to_owned());
        }
        let activities = client.activities();
        let is_blind = activities.iter().any(|activity| waiting(activity).is_none());
        let mut must_ask = false;
        self.note_silent_servers(&activities);
        let mut still_stuck = HashMap::new();
        for activity in activities {
            let volume = activity.volume.clone();
            if activity.busy.is_empty() && waiting(&activity).is_none_or(|waiting| waiting <= activity.waits) {
                continue;
            }
            let before = self.stuck.remove(&activity.number).filter(|before| before.activity == activity);
            let mut stuck = before.unwrap_or_else(|| StuckVolume::new(activity, now));
            let place = stuck.place(pid);
            match stuck.take_look(place, now) {
                StuckVolumeAction::Wait => {}
                StuckVolumeAction::SourceIsSilent => report_silent_source(&volume),
                StuckVolumeAction::Ask => must_ask = true,
                StuckVolumeAction::Hangs => {
                    return Some(format!("a request of volume {volume:?} makes no progress"));
                }
            }
            still_stuck.insert(stuck.activity.number, stuck);
        }
        self.stuck = still_stuck;
        must_ask |= is_blind && self.asked.is_none_or(|asked| now - asked >= TIMEOUT);
        if !must_ask {
            return None;
        }
        self.asked = Some(now);
        (!client.is_responsive(ANSWER_TIMEOUT)).then(|| "it does not answer its supervisor".to_owned())
    }

    /// Reports NFS servers that do not answer.
    fn note_silent_servers(&mut self, activities: &[VolumeActivity]) {
        let silence = |activity: &VolumeActivity| Some((activity.volume.clone(), activity.silent_since?.elapsed()));
        let before = std::mem::take(&mut self.silences);
        for (volume, silence) in activities.iter().filter_map(silence) {
            let is_silent = silence >= TIMEOUT;
            if is_silent && !before.get(&volume).copied().unwrap_or_default() {
                report_silent_source(&volume);
            }
            self.silences.insert(volume, is_silent);
        }
    }

    /// How long after the last look the next one is due.
    fn interval(&self) -> Duration {
        if self.is_idle() { IDLE_INTERVAL } else { BUSY_INTERVAL }
    }

    /// Whether the last look found nothing that needs another look soon.
    fn is_idle(&self) -> bool {
        self.stuck.is_empty() && self.silences.is_empty() && self.stopped.is_none()
    }

    fn silent_sources(&self) -> Vec<String> {
        let stuck = self.stuck.iter().filter(|(_, stuck)| stuck.is_reported).map(|(_, stuck)| &stuck.activity.volume);
        let silent = self.silences.iter().filter(|(_, is_silent)| **is_silent).map(|(volume, _)| volume);
        stuck.chain(silent).cloned().collect()
    }
}

impl StuckVolume {
    fn new(activity: VolumeActivity, now: Instant) -> Self {
        Self { activity, since: now, in_server_since: None, cpu_times: HashMap::new(), is_reported: false }
    }

    /// Where the volume's requests are, according to the system calls of the threads that work on them.
    fn place(&mut self, pid: i32) -> WaitPlace {
        let threads: Vec<_> = self.activity.busy.iter().map(|(thread, _)| *thread).collect();
        let now = threads.iter().filter_map(|thread| Some((*thread, CpuTime::of(pid, *thread)?))).collect();
        let before = std::mem::replace(&mut self.cpu_times, now);
        // `/proc` does not show the call of a thread that works in the kernel, for example to look for data in a sparse file.
        let is_in_kernel = |thread: i32| {
            let times = before.get(&thread).zip(self.cpu_times.get(&thread));
            times.is_some_and(|(before, now)| now.is_in_kernel_since(*before))
        };
        let calls: Vec<_> = threads.iter().map(|thread| (call(pid, *thread), is_in_kernel(*thread))).collect();
        let is_in_server = calls.iter().any(|(call, in_kernel)| *call == Some(Call::Running) && !in_kernel);
        let calls: Vec<_> = calls.iter().filter_map(|(call, _)| *call).collect();
        match calls.as_slice() {
            _ if threads.is_empty() => WaitPlace::Nowhere,
            _ if is_in_server => WaitPlace::Server,
            // If one thread is in a call on the source, a thread that waits for it waits for the source, too.
            calls if !calls.is_empty() && calls.iter().all(is_wait) => WaitPlace::Server,
            _ => WaitPlace::Source,
        }
    }

    /// Records where a look found the volume's requests, and decides what to do. A thread that was in a system call on the
    /// source a moment ago may now run the server's own code, with the same request. So the server hangs only if each look for
    /// [`TIMEOUT`] finds the thread in the server's own code.
    fn take_look(&mut self, place: WaitPlace, now: Instant) -> StuckVolumeAction {
        self.in_server_since = (place == WaitPlace::Server).then(|| self.in_server_since.unwrap_or(now));
        let is_long_ago = |since: Instant| now - since >= TIMEOUT;
        match place {
            WaitPlace::Server if self.in_server_since.is_some_and(is_long_ago) => StuckVolumeAction::Hangs,
            WaitPlace::Source if is_long_ago(self.since) && !self.is_reported => {
                self.is_reported = true;
                StuckVolumeAction::SourceIsSilent
            }
            WaitPlace::Nowhere if is_long_ago(self.since) => StuckVolumeAction::Ask,
            WaitPlace::Server | WaitPlace::Source | WaitPlace::Nowhere => StuckVolumeAction::Wait,
        }
    }
}

/// Logs that a source does not answer. The watchdog calls it once for each period without an answer.
fn report_silent_source(volume: &str) {
    warn!(volume, "volume {volume:?}: its source does not answer; the other volumes go on");
}

/// Where a stuck volume's requests are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WaitPlace {
    /// In the server's own code.
    Server,
    /// In a system call on the source.
    Source,
    /// No thread of the server has read them.
    Nowhere,
}

/// Whether a thread in this call waits for another thread.
fn is_wait(call: &Call) -> bool {
    *call == Call::In(libc::SYS_futex)
}

/// Whether a server was killed and does not end within [`KILLED_TIMEOUT`]. The watchdog does not report a server that ends, because its
/// pidfd shows its end.
fn stays_inert(pid: i32) -> bool {
    unkillable::is_inert(pid) && {
        thread::sleep(KILLED_TIMEOUT);
        unkillable::is_inert(pid)
    }
}

/// Whether a signal or a debugger has stopped a process.
pub(super) fn is_stopped(pid: i32) -> bool {
    matches!(state(pid), Some(b'T' | b't'))
}

/// The state of the main thread of a process (`proc_pid_stat(5)`).
fn state(pid: i32) -> Option<u8> {
    // The beginning of the file has it, in one read.
    let (mut text, mut file) = ([0; 512], fs::File::open(format!("/proc/{pid}/stat")).ok()?);
    let length = file.read(&mut text).ok()?;
    // The name of the program, in parentheses before the state, may contain parentheses itself.
    let end = text[..length].windows(2).rposition(|pair| pair == b") ")?;
    text[..length].get(end + 2).copied()
}

/// Whether the server waits for requests, and no request waits for the server. A killed or stopped server is not at rest: its
/// main thread has ended, is stopped, or is in a system call that no signal ends. Nor is one whose connection has failed.
fn is_at_rest(pid: i32, client: &ServerClient) -> bool {
    let is_idle = |activity: &VolumeActivity| {
        activity.busy.is_empty()
            && activity.silent_since.is_none()
            && waiting(activity).is_some_and(|waiting| waiting <= activity.waits)
    };
    matches!(state(pid), Some(b'S' | b'R')) && !client.is_disconnected() && client.activities().iter().all(is_idle)
}

/// How many requests of the volume wait in the kernel or in the server; `None` if fusectl cannot be read.
fn waiting(activity: &VolumeActivity) -> Option<usize> {
    fusectl::waiting(activity.connection?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The actions after looks, a second apart, that find the volume's requests at these places.
    fn looks(places: &[WaitPlace]) -> Vec<StuckVolumeAction> {
        let activity = VolumeActivity {
            number: VolumeNumber(0),
            volume: String::new(),
            requests: 1,
            busy: vec![(1, 2)],
            waits: 0,
            silent_since: None,
            connection: None,
        };
        let begin = Instant::now();
        let mut stuck = StuckVolume::new(activity, begin);
        let at = |number: usize| begin + BUSY_INTERVAL * u32::try_from(number).expect("few");
        places.iter().enumerate().map(|(number, place)| stuck.take_look(*place, at(number))).collect()
    }

    fn last(places: &[WaitPlace]) -> StuckVolumeAction {
        looks(places).pop().expect("a look")
    }

    #[test]
    fn a_server_that_every_look_finds_in_its_own_code_hangs() {
        assert!(looks(&[WaitPlace::Server; 5]).iter().all(|verdict| *verdict == StuckVolumeAction::Wait));
        assert_eq!(last(&[WaitPlace::Server; 6]), StuckVolumeAction::Hangs);
    }

    #[test]
    fn a_source_that_does_not_answer_is_reported_once() {
        assert!(looks(&[WaitPlace::Source; 5]).iter().all(|verdict| *verdict == StuckVolumeAction::Wait));
        assert_eq!(last(&[WaitPlace::Source; 6]), StuckVolumeAction::SourceIsSilent);
        assert_eq!(last(&[WaitPlace::Source; 7]), StuckVolumeAction::Wait);
    }

    #[test]
    fn a_server_whose_source_has_just_answered_does_not_hang() {
        let places = [vec![WaitPlace::Source; 10], vec![WaitPlace::Server; 5]].concat();
        let verdicts = looks(&places);
        assert!(!verdicts.contains(&StuckVolumeAction::Hangs), "{verdicts:?}");
        assert_eq!(last(&[places, vec![WaitPlace::Server]].concat()), StuckVolumeAction::Hangs);
    }

    #[test]
    fn a_thread_that_enters_and_leaves_the_source_does_not_hang() {
        let round = [vec![WaitPlace::Server; 5], vec![WaitPlace::Source]].concat();
        let verdicts = looks(&round.repeat(5));
        assert!(!verdicts.contains(&StuckVolumeAction::Hangs), "{verdicts:?}");
        assert_eq!(
            verdicts.iter().filter(|verdict| **verdict == StuckVolumeAction::SourceIsSilent).count(),
            1,
            "{verdicts:?}"
        );
    }

    #[test]
    fn a_server_that_reads_nothing_is_asked() {
        assert_eq!(last(&[WaitPlace::Nowhere; 5]), StuckVolumeAction::Wait);
        assert_eq!(last(&[WaitPlace::Nowhere; 6]), StuckVolumeAction::Ask);
    }
}
