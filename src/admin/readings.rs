//! The metrics of the pods of a run directory, for each scrape. If a pod stops answering, this module reports that
//! once.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Mutex;

use super::survey;
use crate::metrics::PodReading;
use crate::supervisor::status::PodStatus;
use crate::supervisor::status::metrics::without_answer;

/// Takes readings of pods.
#[derive(Debug, Default)]
pub struct Readings {
    /// The uids of the pods that did not answer the last time.
    silent: Mutex<BTreeSet<String>>,
}

impl Readings {
    /// The metrics of the pods of these directories. Calls `report` with a sentence for each pod that
    /// answered before, and does not now.
    pub fn take(&self, directories: &[PathBuf], report: impl Fn(&PodStatus, &str)) -> Vec<PodReading> {
        let mut silent_before = self.silent.lock().expect("a panic ends the process");
        let mut silent = BTreeSet::new();
        let readings = survey::metrics_of(directories).into_iter().map(|read| {
            read.unwrap_or_else(|status| {
                if !silent_before.contains(&status.uid) {
                    let reason = status.reason.as_deref().unwrap_or_default();
                    report(&status, &format!("there are no metrics of pod {}: {reason}", status.title()));
                }
                silent.insert(status.uid.clone());
                without_answer(&status)
            })
        });
        let readings = readings.collect();
        *silent_before = silent;
        readings
    }
}
