//! Pods and objects of an API server, and metrics.

#[path = "../api_server/mod.rs"]
mod api_server;
mod api_server_itself;
mod claims;
#[path = "../common/mod.rs"]
mod common;
mod csi;
#[path = "../common/csi_driver.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod csi_driver;
mod csi_nodes;
mod feed;
#[path = "../cli/node/csi/kubelet.rs"]
#[allow(dead_code)]
mod kubelet;
mod local_volumes;
mod metrics;
mod node;
mod rig;
mod roles;
#[path = "../cli/node/nri/runtime.rs"]
#[allow(dead_code)]
mod runtime;
mod signer;
mod soak;
mod source;
mod transparent;
