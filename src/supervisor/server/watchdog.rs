//! The watchdog: notices a server that lives and makes no progress.
//!
//! A volume is stuck while requests wait and none is read or answered. The region shows what each thread does, and
//! fusectl how many requests wait. While no request waits and none is being answered, a look costs a few system calls
//! on the supervisor's own thread, and wakes no other. Otherwise the supervisor decides from outside whether the server
//! is at fault:
//!
//! 1. The server hangs, and podfs replaces it, if its process is stopped, if each look finds a thread running or
//!    waiting for another thread of the server, or if it does not answer its supervisor.
//! 2. A thread in any other system call waits for the source of its volume. Another server would wait there too, so the
//!    supervisor does nothing: each volume has threads of its own, and the others go on.
//! 3. A server that was killed and cannot end, because a thread of it waits for a source in a call that ends by no
//!    signal, counts as ended (`unkillable`).
//! 4. Volumes of podfs's own NFS client share one thread, which never blocks. The region shows since when an NFS server
//!    has owed answers. Again the supervisor does nothing.

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use podfs_fuse::client::{ServerClient, VolumeActivity};
use tokio::task::{JoinHandle, spawn_blocking};
use tracing::warn;

use super::alarm::Alarm;
use super::call::{Call, call};
use super::{fusectl, unkillable};

/// How often the watchdog looks at an idle server: each look wakes an idle machine.
const IDLE_INTERVAL: Duration = Duration::from_secs(8);
/// How often it looks while requests are under way.
const BUSY_INTERVAL: Duration = Duration::from_secs(1);
/// How long a volume may be stuck.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a server may take to end once it was killed.
const ENDING: Duration = Duration::from_millis(500);
/// How long the server may take to answer the watchdog.
const ANSWER: Duration = Duration::from_secs(2);

/// The watchdog, between two looks at the server or during one.
pub(super) enum WatchdogState {
    /// Waits until the next look is due. The alarm is set when the supervisor first waits for it.
    Waiting { watchdog: Watchdog, until: Instant, alarm: Option<Alarm> },
    /// Looks at the server, on a blocking thread. This takes as long as the server takes to answer.
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

    /// Waits for the next look at a server that is not at rest. Returns the problem if the server hangs. Cancel-safe:
    /// the next call continues.
    pub(super) async fn next_look(&mut self, pid: i32, client: &Arc<ServerClient>) -> Option<String> {
        if let Self::Waiting { watchdog, until, alarm } = self {
            loop {
                alarm.get_or_insert_with(|| Alarm::at(*until)).expires().await;
                if !watchdog.is_idle() || !is_at_rest(pid, client) {
                    break;
                }
                *until = Instant::now() + IDLE_INTERVAL;
                *alarm = None;
            }
            let (mut watchdog, client) = (std::mem::take(watchdog), Arc::clone(client));
            *self = Self::InProgress(spawn_blocking(move || (watchdog.look(pid, &client), watchdog)));
        }
        let Self::InProgress(look) = self else { return None };
        let (found, watchdog) = look.await.expect("a blocking thread that panics ends the process");
        *self = Self::until_next_look(watchdog);
        found
    }

    /// The volumes whose sources do not answer.
    pub(super) fn silent_sources(&self) -> Vec<String> {
        match self {
            Self::Waiting { watchdog, .. } => watchdog.silent_sources(),
            Self::InProgress(_) => Vec::new(),
        }
    }
}

/// What the last look saw.
#[derive(Default)]
pub(super) struct Watchdog {
    stuck: HashMap<String, StuckVolume>,
    /// Volumes whose NFS servers do not answer, and whether that has lasted for [`TIMEOUT`].
    silences: HashMap<String, bool>,
    stopped: Option<Instant>,
    asked: Option<Instant>,
}

/// A volume that makes no progress.
struct StuckVolume {
    activity: VolumeActivity,
    since: Instant,
    /// Since when each look has found its requests in the server's own code.
    in_server_since: Option<Instant>,
    /// Whether podfs has reported that its source does not answer.
    in_source: bool,
}

/// The verdict on a stuck volume.
#[derive(Debug, PartialEq, Eq)]
enum StuckVolumeAction {
    /// Nothing yet, or nothing new.
    Wait,
    /// Its source has been silent for so long that podfs reports it.
    SourceIsSilent,
    /// The server may not read requests: podfs asks it.
    Ask,
    /// It is the server's fault.
    Hangs,
}

impl Watchdog {
    /// Looks at a server. Returns the problem if it hangs. This may take as long as the server may take to answer.
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
        let activities = client.activities();
        let blind = activities.iter().any(|activity| waiting(activity).is_none());
        let mut ask = false;
        self.note_silent_servers(&activities);
        let mut seen = HashMap::new();
        for activity in activities {
            let volume = activity.volume.clone();
            if activity.busy.is_empty() && waiting(&activity).is_none_or(|waiting| waiting <= activity.waits) {
                continue;
            }
            let before = self.stuck.remove(&volume).filter(|before| before.activity == activity);
            let mut stuck = before.unwrap_or_else(|| StuckVolume::new(activity, now));
            match stuck.seen(place(pid, &stuck.activity), now) {
                StuckVolumeAction::Wait => {}
                StuckVolumeAction::SourceIsSilent => report_silent_source(&volume),
                StuckVolumeAction::Ask => ask = true,
                StuckVolumeAction::Hangs => {
                    return Some(format!("it does not get on with a request of volume {volume:?}"));
                }
            }
            seen.insert(volume, stuck);
        }
        self.stuck = seen;
        ask |= blind && self.asked.is_none_or(|asked| now - asked >= TIMEOUT);
        if !ask {
            return None;
        }
        self.asked = Some(now);
        (!client.is_responsive(ANSWER)).then(|| "it does not answer its supervisor".to_owned())
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

    /// Whether the last look found nothing that needs another one soon.
    fn is_idle(&self) -> bool {
        self.stuck.is_empty() && self.silences.is_empty() && self.stopped.is_none()
    }

    fn silent_sources(&self) -> Vec<String> {
        let stuck = self.stuck.iter().filter(|(_, stuck)| stuck.in_source).map(|(volume, _)| volume);
        let silent = self.silences.iter().filter(|(_, is_silent)| **is_silent).map(|(volume, _)| volume);
        stuck.chain(silent).cloned().collect()
    }
}

impl StuckVolume {
    fn new(activity: VolumeActivity, now: Instant) -> Self {
        Self { activity, since: now, in_server_since: None, in_source: false }
    }

    /// Takes in where a look found its requests. A thread that was in a call on the source a moment ago may now run the
    /// server's own code, with the same request: so the server hangs only if each look finds it there.
    fn seen(&mut self, place: WaitPlace, now: Instant) -> StuckVolumeAction {
        self.in_server_since = (place == WaitPlace::Server).then(|| self.in_server_since.unwrap_or(now));
        let is_long_ago = |since: Instant| now - since >= TIMEOUT;
        match place {
            WaitPlace::Server if self.in_server_since.is_some_and(is_long_ago) => StuckVolumeAction::Hangs,
            WaitPlace::Source if is_long_ago(self.since) && !self.in_source => {
                self.in_source = true;
                StuckVolumeAction::SourceIsSilent
            }
            WaitPlace::Nowhere if is_long_ago(self.since) => StuckVolumeAction::Ask,
            WaitPlace::Server | WaitPlace::Source | WaitPlace::Nowhere => StuckVolumeAction::Wait,
        }
    }
}

/// Logs that a source does not answer. Called once for each silence.
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

fn place(pid: i32, activity: &VolumeActivity) -> WaitPlace {
    let calls: Vec<_> = activity.busy.iter().map(|(thread, _)| call(pid, *thread)).collect();
    match calls.as_slice() {
        [] => WaitPlace::Nowhere,
        calls if calls.contains(&Some(Call::Running)) => WaitPlace::Server,
        // A thread that waits for a thread in the source waits for the source, too.
        calls if calls.iter().flatten().next().is_some() && calls.iter().flatten().all(is_wait) => WaitPlace::Server,
        _ => WaitPlace::Source,
    }
}

/// Whether a thread that is at this waits for another one.
fn is_wait(call: &Call) -> bool {
    *call == Call::In(libc::SYS_futex)
}

/// Whether a server was killed and does not end within [`ENDING`]. One that ends needs no report: its pidfd shows it.
fn stays_inert(pid: i32) -> bool {
    unkillable::is_inert(pid) && {
        thread::sleep(ENDING);
        unkillable::is_inert(pid)
    }
}

fn is_stopped(pid: i32) -> bool {
    matches!(state(pid), Some(b'T' | b't'))
}

/// The state of the main thread of a process (`proc_pid_stat(5)`).
fn state(pid: i32) -> Option<u8> {
    // The beginning of the file has it, in one read.
    let (mut text, mut file) = ([0; 512], fs::File::open(format!("/proc/{pid}/stat")).ok()?);
    let length = file.read(&mut text).ok()?;
    // The name may contain parentheses.
    let end = text[..length].windows(2).rposition(|pair| pair == b") ")?;
    text[..length].get(end + 2).copied()
}

/// Whether the server waits for requests, and no request waits for it. A server that was killed or stopped does not: its main thread
/// ends, stops, or is in a call that ends by no signal.
fn is_at_rest(pid: i32, client: &ServerClient) -> bool {
    let is_idle = |activity: &VolumeActivity| {
        activity.busy.is_empty()
            && activity.silent_since.is_none()
            && waiting(activity).is_some_and(|waiting| waiting <= activity.waits)
    };
    matches!(state(pid), Some(b'S' | b'R')) && client.activities().iter().all(is_idle)
}

/// How many requests wait in the kernel or in the server, where fusectl is mounted.
fn waiting(activity: &VolumeActivity) -> Option<usize> {
    fusectl::waiting(activity.connection?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The verdicts of looks that find a volume at these places, a second apart.
    fn looks(places: &[WaitPlace]) -> Vec<StuckVolumeAction> {
        let activity = VolumeActivity {
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
        places.iter().enumerate().map(|(number, place)| stuck.seen(*place, at(number))).collect()
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
