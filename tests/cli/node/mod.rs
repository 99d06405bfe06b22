//! `podfs node` with real pods: static manifests, real supervisors, real mounts; and the part that manages supervisors
//! alone.

mod agent;
mod containers;
mod csi;
mod daemon;
mod faults;
mod lifecycle;
mod logs;
mod nri;
mod program;
mod publications;
mod readme;
mod recovery;
mod rows;
mod service;
mod storm;
mod supervisors;
