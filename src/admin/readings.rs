//! The metrics of the pods of a run directory, again and again. It reports once what is wrong with a pod.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Mutex;

use super::survey;
use crate::metrics::Reading;
use crate::supervisor::status::metrics::unspoken;

/// Takes readings of pods.
#[derive(Debug, Default)]
pub struct Readings {
    /// The uids of the pods of which `complain` was told that they do not answer.
    silent: Mutex<BTreeSet<String>>,
}

impl Readings {
    /// The numbers of the pods of these directories. `complain` gets a sentence about each that does not tell them, when it
    /// stops to.
    pub fn take(&self, directories: &[PathBuf], complain: impl Fn(&str)) -> Vec<Reading> {
        let mut told = self.silent.lock().expect("whoever panics ends the process");
        let mut silent = BTreeSet::new();
        let readings = survey::metrics_of(directories).into_iter().map(|read| {
            read.unwrap_or_else(|status| {
                if !told.contains(&status.uid) {
                    let reason = status.reason.as_deref().unwrap_or_default();
                    complain(&format!("there are no metrics of pod {}: {reason}", status.title()));
                }
                silent.insert(status.uid.clone());
                unspoken(&status)
            })
        });
        let readings = readings.collect();
        *told = silent;
        readings
    }
}
