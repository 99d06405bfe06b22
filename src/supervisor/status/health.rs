//! The health of a pod's server: the history of its servers, and whether that is trouble.
//!
//! A replaced server is no trouble by itself. It is trouble while there is no server, and for a minute after a server died that
//! had answered nothing, or after several died.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::pod_status::{ProcessStatus, ServerStatus};
use crate::supervisor::server::ServerHistory;

/// For how long the death of a server is recent.
const RECENT: Duration = Duration::from_secs(60);
/// So many recent restarts are too many.
const MANY: usize = 3;

/// The servers of a pod, as far as they are known.
#[derive(Default)]
pub(in crate::supervisor) struct Health {
    history: ServerHistory,
    version: Option<String>,
    /// When the last servers were followed by another, at most [`MANY`].
    restarted: VecDeque<Instant>,
}

impl Health {
    /// Takes in the history of the servers. Returns how many were replaced since the last time.
    pub(in crate::supervisor) fn note(
        &mut self,
        history: &ServerHistory,
        version: Option<String>,
        now: Instant,
    ) -> u32 {
        let restarts = history.restarts.saturating_sub(self.history.restarts);
        for _ in 0..restarts {
            self.restarted.push_back(now);
        }
        while self.restarted.len() > MANY {
            self.restarted.pop_front();
        }
        self.history = history.clone();
        self.version = version;
        restarts
    }

    /// How many servers have taken the place of another one.
    pub(in crate::supervisor) fn restarts(&self) -> u32 {
        self.history.restarts
    }

    /// The process that serves, if one does.
    pub(in crate::supervisor) fn status(&self) -> Option<ServerStatus> {
        let pid = self.history.pid.and_then(|pid| u32::try_from(pid).ok())?;
        let process = ProcessStatus { pid, version: self.version.clone() };
        Some(ServerStatus { process, restarts: self.history.restarts })
    }

    /// There is no server: how the last one ended, and how many have answered nothing.
    pub(in crate::supervisor) fn dead(&self) -> Option<String> {
        let ServerHistory { pid: None, last_end: Some(how), in_vain, .. } = &self.history else { return None };
        Some(format!(
            "no server answers, podfs starts another one; the last one ended ({how}){}",
            in_vain_words(*in_vain)
        ))
    }

    /// What is wrong with the servers, if anything is.
    pub(in crate::supervisor) fn trouble(&self, now: Instant) -> Option<String> {
        let is_recent = |at: &&Instant| now.duration_since(**at) < RECENT;
        let recent = self.restarted.iter().rev().take_while(is_recent).count();
        let ServerHistory { restarts, last_end, in_vain, .. } = &self.history;
        self.dead().or_else(|| {
            let few = recent < MANY && (recent == 0 || *in_vain == 0);
            let how = last_end.as_deref().unwrap_or("for an unknown reason");
            let text = format!("the server does not stay up: {} so far, the last one ended ({how})", times(*restarts));
            (!few).then(|| text + &in_vain_words(*in_vain))
        })
    }
}

fn times(restarts: u32) -> String {
    if restarts == 1 { "1 restart".to_owned() } else { format!("{restarts} restarts") }
}

fn in_vain_words(in_vain: u32) -> String {
    match in_vain {
        0 => String::new(),
        1 => ", and had answered nothing".to_owned(),
        more => format!(", and {more} in a row had answered nothing"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(pid: Option<i32>, restarts: u32, in_vain: u32) -> ServerHistory {
        let last_end = (restarts > 0 || pid.is_none()).then(|| "killed by SIGKILL".to_owned());
        ServerHistory { pid, restarts, last_end, in_vain, silent_sources: Vec::new() }
    }

    #[test]
    fn one_restart_is_no_trouble_and_many_are_for_a_minute() {
        let (mut health, now) = (Health::default(), Instant::now());
        assert_eq!(health.note(&history(Some(1), 0, 0), None, now), 0);
        assert_eq!(health.trouble(now), None);
        assert_eq!(health.note(&history(Some(2), 2, 0), None, now), 2);
        assert_eq!(health.trouble(now), None);
        assert_eq!(health.note(&history(Some(3), 3, 0), None, now), 1);
        let text = "the server does not stay up: 3 restarts so far, the last one ended (killed by SIGKILL)";
        assert_eq!(health.trouble(now).as_deref(), Some(text));
        assert_eq!(health.trouble(now + RECENT), None);
        assert_eq!(health.status().expect("a server").restarts, 3);
    }

    #[test]
    fn a_server_that_answered_nothing_is_trouble_and_so_is_none() {
        let (mut health, now) = (Health::default(), Instant::now());
        health.note(&history(None, 0, 2), None, now);
        let text = health.trouble(now).expect("trouble");
        assert!(text.starts_with("no server answers") && text.ends_with("2 in a row had answered nothing"), "{text}");
        assert_eq!((health.dead(), health.status()), (Some(text), None));
        health.note(&history(Some(2), 1, 1), None, now);
        let text = health.trouble(now).expect("trouble");
        assert!(text.contains("1 restart so far") && text.ends_with("had answered nothing"), "{text}");
        assert_eq!((health.dead(), health.trouble(now + RECENT)), (None, None));
    }
}
