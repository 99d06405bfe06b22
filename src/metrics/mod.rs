//! Metrics of the pods of a node for Prometheus.
//!
//! A pod's supervisor takes a [`PodReading`] of itself; `podfs metrics` or `podfs node` puts the readings of pods together as one
//! [`Exposition`] and prints or serves it. This module does not know where the numbers come from.
//!
//! | module | owns |
//! |---|---|
//! | [`families`] | the names of all metrics, their meanings and labels |
//! | [`reading`] | the numbers of one pod, as processes send them to each other |
//! | [`exposition`] | the numbers of many pods, as text |
//! | [`exporter`] | the text over HTTP |

pub mod exporter;
pub mod exposition;
pub mod families;
pub mod reading;

pub use exposition::{Exposition, ExpositionFormat};
pub use families::{FAMILIES, Family, FamilyType};
pub use reading::{PodLabels, PodReading};
