//! `podfs node` with real pods: static manifests, real supervisors, real mounts; and its supervisors without the rest.

mod daemon;
mod lifecycle;
mod recovery;
mod supervisors;
