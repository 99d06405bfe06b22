//! The messages of the Node Resource Interface and of ttrpc, which the build makes from `proto/nri.proto` and
//! `proto/ttrpc.proto`.
//!
//! The `Debug` output of a container has no environment, and the `Debug` output of an envelope has no payload: both may
//! be secret.

use std::fmt;

/// The package `nri.pkg.api.v1alpha1`.
#[allow(missing_docs, clippy::all)]
pub mod nri {
    tonic::include_proto!("nri.pkg.api.v1alpha1");
}

/// The package `ttrpc`.
#[allow(missing_docs, clippy::all)]
pub mod ttrpc {
    tonic::include_proto!("ttrpc");
}

impl fmt::Debug for nri::Container {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Container")
            .field("id", &self.id)
            .field("name", &self.name)
            .field("mounts", &self.mounts)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for ttrpc::Request {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { service, method, .. } = self;
        out.debug_struct("Request").field("service", service).field("method", method).finish_non_exhaustive()
    }
}

impl fmt::Debug for ttrpc::Response {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Response").field("status", &self.status).finish_non_exhaustive()
    }
}
