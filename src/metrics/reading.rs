//! The metrics of one pod, or of the node, at one moment. A reading may come from a podfs of another version: the receiver ignores
//! metrics that it does not know.

use std::collections::BTreeMap;

use podfs_fuse::region::Distribution;
use serde::{Deserialize, Serialize};

use super::families::Family;

/// The pod that numbers are about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodLabels {
    /// Its namespace; empty if it is unknown.
    pub namespace: String,
    /// Its name, likewise.
    pub pod: String,
    /// Its uid.
    pub uid: String,
}

/// The numbers of one pod, or of the node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// The pod; none of the node.
    pub pod: Option<PodLabels>,
    /// By the name of their family.
    pub(super) families: BTreeMap<String, Vec<Sample>>,
}

/// A number, or a few that belong together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Sample {
    /// The values of the family's labels, in their order.
    pub(super) labels: Vec<String>,
    pub(super) value: Value,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Value {
    Number(f64),
    /// Of a histogram; the last group has no bound.
    Groups {
        bounds: Vec<f64>,
        groups: Vec<u64>,
        sum: f64,
    },
}

impl Reading {
    /// Of a pod, still without numbers.
    pub fn new(pod: PodLabels) -> Reading {
        Reading { pod: Some(pod), families: BTreeMap::new() }
    }

    /// Of the node, still without numbers.
    pub fn of_node() -> Reading {
        Reading { pod: None, families: BTreeMap::new() }
    }

    /// The reading without a family.
    #[must_use]
    pub fn without(mut self, family: &Family) -> Reading {
        self.families.remove(family.name);
        self
    }

    /// Tells one number. `labels` are the values of the family's own labels.
    pub fn tell(&mut self, family: &Family, labels: &[&str], number: f64) {
        self.add(family, labels, Value::Number(number));
    }

    /// Tells how many took how long.
    pub fn tell_durations(&mut self, family: &Family, labels: &[&str], durations: &Distribution) {
        let sum = durations.seconds();
        let Distribution { bounds, groups, .. } = durations.clone();
        self.add(family, labels, Value::Groups { bounds, groups, sum });
    }

    fn add(&mut self, family: &Family, labels: &[&str], value: Value) {
        debug_assert_eq!(labels.len(), family.labels.len(), "labels of {}", family.name);
        let labels = labels.iter().map(|label| (*label).to_owned()).collect();
        self.families.entry(family.name.to_owned()).or_default().push(Sample { labels, value });
    }
}
