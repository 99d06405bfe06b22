//! The CSI driver over its real sockets: what csi-sanity checks of a node plugin, what a kubelet does, and what goes wrong.

mod authority;
mod conformance;
mod deployment;
pub mod kubelet;
mod lifecycle;
mod own_client;
mod refusals;
mod storm;
