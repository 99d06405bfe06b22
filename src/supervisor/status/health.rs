//! The health of a pod's server: the history of its servers, and whether that is a problem.
//!
//! A replaced server is no problem by itself. There is a problem while there is no server, for a minute after a server
//! ended that had answered nothing, and for a minute after several servers ended.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::pod_status::{ProcessStatus, ServerStatus};
use crate::supervisor::server::ServerHistory;

/// How long the end of a server counts as recent.
const RECENT: Duration = Duration::from_secs(60);
/// How many recent restarts are a problem.
const MANY: usize = 3;

/// The servers of a pod, as far as the supervisor knows them.
#[derive(Default)]
pub(in crate::supervisor) struct ServerHealth {
    history: ServerHistory,
    version: Option<String>,
    /// The times of the last restarts, at most [`MANY`].
    restarted: VecDeque<Instant>,
}

impl ServerHealth {
    /// Records the history of the servers. `restarts` is how many servers have replaced another one since the last
    /// call.
    pub(in crate::supervisor) fn note(
        &mut self,
        history: &ServerHistory,
        restarts: u32,
        version: Option<String>,
        now: Instant,
    ) {
        for _ in 0..restarts {
            self.restarted.push_back(now);
        }
        while self.restarted.len() > MANY {
            self.restarted.pop_front();
        }
        self.history = history.clone();
        self.version = version;
    }

    /// The status of the server, if there is one, with this count of restarts.
    pub(in crate::supervisor) fn status(&self, restarts: u64) -> Option<ServerStatus> {
        let pid = self.history.pid.and_then(|pid| u32::try_from(pid).ok())?;
        let process = ProcessStatus { pid, version: self.version.clone() };
        Some(ServerStatus { process, restarts })
    }

    /// If there is no server: how the last server ended, and how many servers in a row have answered nothing.
    pub(in crate::supervisor) fn dead(&self) -> Option<String> {
        let ServerHistory { pid: None, last_end: Some(end), unanswered, .. } = &self.history else { return None };
        Some(format!(
            "no server answers, podfs starts another one; the last one ended ({end}){}",
            unanswered_words(*unanswered)
        ))
    }

    /// The problem with the servers, if there is one. `restarts` is the count of restarts, for the sentence.
    pub(in crate::supervisor) fn trouble(&self, restarts: u64, now: Instant) -> Option<String> {
        let is_recent = |at: &&Instant| now.duration_since(**at) < RECENT;
        let recent = self.restarted.iter().rev().take_while(is_recent).count();
        let ServerHistory { last_end, unanswered, .. } = &self.history;
        self.dead().or_else(|| {
            let is_healthy = recent < MANY && (recent == 0 || *unanswered == 0);
            let end = last_end.as_deref().unwrap_or("for an unknown reason");
            let text = format!("the server does not stay up: {} so far, the last one ended ({end})", times(restarts));
            (!is_healthy).then(|| text + &unanswered_words(*unanswered))
        })
    }
}

fn times(restarts: u64) -> String {
    if restarts == 1 { "1 restart".to_owned() } else { format!("{restarts} restarts") }
}

fn unanswered_words(unanswered: u32) -> String {
    match unanswered {
        0 => String::new(),
        1 => ", and had answered nothing".to_owned(),
        count => format!(", and {count} in a row had answered nothing"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(pid: Option<i32>, unanswered: u32) -> ServerHistory {
        let last_end = Some("killed by SIGKILL".to_owned());
        ServerHistory { pid, last_end, unanswered, ..ServerHistory::default() }
    }

    #[test]
    fn one_restart_is_no_trouble_and_many_are_for_a_minute() {
        let (mut health, now) = (ServerHealth::default(), Instant::now());
        health.note(&ServerHistory { last_end: None, ..history(Some(1), 0) }, 0, None, now);
        assert_eq!(health.trouble(4, now), None, "those of earlier supervisors are long over");
        health.note(&history(Some(2), 0), 2, None, now);
        assert_eq!(health.trouble(6, now), None);
        health.note(&history(Some(3), 0), 1, None, now);
        let text = "the server does not stay up: 7 restarts so far, the last one ended (killed by SIGKILL)";
        assert_eq!(health.trouble(7, now).as_deref(), Some(text));
        assert_eq!(health.trouble(7, now + RECENT), None);
        assert_eq!(health.status(7).expect("a server").restarts, 7);
    }

    #[test]
    fn a_server_that_answered_nothing_is_trouble_and_so_is_none() {
        let (mut health, now) = (ServerHealth::default(), Instant::now());
        health.note(&history(None, 2), 0, None, now);
        let text = health.trouble(0, now).expect("trouble");
        assert!(text.starts_with("no server answers") && text.ends_with("2 in a row had answered nothing"), "{text}");
        assert_eq!((health.dead(), health.status(0)), (Some(text), None));
        health.note(&history(Some(2), 1), 1, None, now);
        let text = health.trouble(1, now).expect("trouble");
        assert!(text.contains("1 restart so far") && text.ends_with("had answered nothing"), "{text}");
        assert_eq!((health.dead(), health.trouble(1, now + RECENT)), (None, None));
    }
}
