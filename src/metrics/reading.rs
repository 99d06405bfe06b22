//! The metrics of one pod, or of the node, at one moment. A reading may come from a podfs of another version: the receiver ignores
//! metrics that it does not know.

use std::collections::BTreeMap;

use podfs_fuse::region::Distribution;
use serde::{Deserialize, Serialize};

use super::families::Family;

/// The pod of a reading.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodLabels {
    /// Its namespace; empty if it is unknown.
    pub namespace: String,
    /// Its name; empty if it is unknown.
    pub pod: String,
    /// Its uid.
    pub uid: String,
}

/// The numbers of one pod, or of the node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodReading {
    /// The pod; `None` for the node.
    pub pod: Option<PodLabels>,
    /// The samples by the name of their family.
    pub(super) families: BTreeMap<String, Vec<Sample>>,
}

/// One series of a family, with its value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Sample {
    /// The values of the family's labels, in their order.
    pub(super) labels: Vec<String>,
    pub(super) value: SampleValue,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum SampleValue {
    Number(f64),
    /// A histogram. `groups` are the counts between two `bounds` (not cumulative), so there is one more group than bounds.
    Groups {
        bounds: Vec<f64>,
        groups: Vec<u64>,
        sum: f64,
    },
}

impl PodReading {
    /// A reading of a pod, without numbers.
    pub fn new(pod: PodLabels) -> PodReading {
        PodReading { pod: Some(pod), families: BTreeMap::new() }
    }

    /// A reading of the node, without numbers.
    pub fn of_node() -> PodReading {
        PodReading { pod: None, families: BTreeMap::new() }
    }

    /// The reading without a family.
    #[must_use]
    pub fn without(mut self, family: &Family) -> PodReading {
        self.families.remove(family.name);
        self
    }

    /// Adds one number. `labels` are the values of the family's own labels.
    pub fn add(&mut self, family: &Family, labels: &[&str], number: f64) {
        self.push(family, labels, SampleValue::Number(number));
    }

    /// Adds a histogram of durations.
    pub fn add_durations(&mut self, family: &Family, labels: &[&str], durations: &Distribution) {
        let sum = durations.seconds();
        let Distribution { bounds, groups, .. } = durations.clone();
        self.push(family, labels, SampleValue::Groups { bounds, groups, sum });
    }

    fn push(&mut self, family: &Family, labels: &[&str], value: SampleValue) {
        debug_assert_eq!(labels.len(), family.labels.len(), "labels of {}", family.name);
        let labels = labels.iter().map(|label| (*label).to_owned()).collect();
        self.families.entry(family.name.to_owned()).or_default().push(Sample { labels, value });
    }
}
