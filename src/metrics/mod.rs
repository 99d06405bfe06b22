//! Metrics: what podfs tells a Prometheus of the pods of a node.
//!
//! A pod's supervisor takes a [`Reading`] of itself; whoever wants to know puts the readings of pods together as one
//! [`Exposition`] and writes that as text, or serves it. Nothing here knows where the numbers come from.
//!
//! | module | owns |
//! |---|---|
//! | [`families`] | the names of all metrics, what they mean, and their labels |
//! | [`reading`] | the numbers of one pod, as they travel between programs |
//! | [`exposition`] | the numbers of many pods, as text |
//! | [`exporter`] | the text over HTTP |

pub mod exporter;
pub mod exposition;
pub mod families;
pub mod reading;

pub use exposition::{Exposition, Format};
pub use families::{FAMILIES, Family, Kind};
pub use reading::{PodLabels, Reading};
