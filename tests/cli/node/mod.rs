//! `podfs node` with real pods: static manifests, real supervisors, real mounts.

mod lifecycle;
mod recovery;
