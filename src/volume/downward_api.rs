//! downwardAPI volumes: facts about the pod as files.

use k8s_openapi::api::core::v1::{DownwardAPIVolumeSource, Volume};

use super::projection::{self, Medium, Projection, ProjectionSource};
use super::{VolumeSource, VolumeType, downward_file};
use crate::types::InvalidField;

pub(super) const KIND: VolumeType = VolumeType {
    field: "downwardAPI",
    directory: Some("kubernetes.io~downward-api"),
    parse: |volume: &Volume, _| volume.downward_api.as_ref().map(parse),
};

fn parse(source: &DownwardAPIVolumeSource) -> Result<VolumeSource, InvalidField> {
    Ok(VolumeSource::Projection(Projection {
        default_mode: projection::default_mode(source.default_mode)?,
        default_user: projection::default_user(source.default_user)?,
        medium: Medium::Memory,
        sources: vec![ProjectionSource::DownwardApi(downward_file::files(source.items.as_deref())?)],
    }))
}
