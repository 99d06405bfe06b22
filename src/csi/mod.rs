//! The messages and services of the Container Storage Interface and of a kubelet's plugin registration. The build makes them from
//! `proto/csi.proto` and `proto/plugin_registration.proto`, which explain them. podfs uses the servers when it is itself a CSI
//! driver, and the clients when it calls drivers of other vendors.
//!
//! The debugging output of a request names only its volume and its paths, because everything else may be secret.

use std::fmt;

use v1::volume_capability::MountVolume;
use v1::{NodeExpandVolumeRequest, NodePublishVolumeRequest, NodeStageVolumeRequest};

/// The package `csi.v1`.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    tonic::include_proto!("csi.v1");
}

/// The package `pluginregistration`.
#[allow(missing_docs, clippy::all)]
pub mod registration {
    tonic::include_proto!("pluginregistration");
}

impl fmt::Debug for NodeStageVolumeRequest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("NodeStageVolumeRequest")
            .field("volume_id", &self.volume_id)
            .field("staging_target_path", &self.staging_target_path)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for NodePublishVolumeRequest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("NodePublishVolumeRequest")
            .field("volume_id", &self.volume_id)
            .field("target_path", &self.target_path)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for NodeExpandVolumeRequest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("NodeExpandVolumeRequest")
            .field("volume_id", &self.volume_id)
            .field("volume_path", &self.volume_path)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for MountVolume {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("MountVolume").field("fs_type", &self.fs_type).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debugging_output_has_no_secret() {
        let secrets = || [("token".to_owned(), "s3cr3t".to_owned())].into();
        let publish = NodePublishVolumeRequest {
            volume_id: "csi-1".to_owned(),
            target_path: "/target".to_owned(),
            secrets: secrets(),
            volume_context: secrets(),
            ..NodePublishVolumeRequest::default()
        };
        let stage = NodeStageVolumeRequest { secrets: secrets(), ..NodeStageVolumeRequest::default() };
        let expand = NodeExpandVolumeRequest { secrets: secrets(), ..NodeExpandVolumeRequest::default() };
        let mount = MountVolume { mount_flags: vec!["password=s3cr3t".to_owned()], ..MountVolume::default() };
        let text = format!("{publish:?} {stage:?} {expand:?} {mount:?}");
        assert!(text.contains("csi-1") && text.contains("/target"), "{text}");
        assert!(!text.contains("s3cr3t"), "{text}");
    }
}
