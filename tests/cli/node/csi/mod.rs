//! The CSI driver over its real sockets: the checks of csi-sanity for node plugins, the calls of a kubelet, and failures.

mod authority;
mod conformance;
mod deployment;
pub mod kubelet;
mod lifecycle;
mod own_client;
mod refusals;
mod storm;
