//! configMap volumes: the keys of a ConfigMap as files.

use k8s_openapi::api::core::v1::{ConfigMapVolumeSource, Volume};

use super::projection::{self, Medium, ObjectSource, Projection, ProjectionSource};
use super::{VolumeSource, VolumeType};
use crate::types::InvalidField;

pub(super) const KIND: VolumeType = VolumeType {
    field: "configMap",
    directory: Some("kubernetes.io~configmap"),
    parse: |volume: &Volume, _| volume.config_map.as_ref().map(parse),
};

fn parse(source: &ConfigMapVolumeSource) -> Result<VolumeSource, InvalidField> {
    let object = ObjectSource::parse("name", Some(&source.name), source.items.as_deref(), source.optional)?;
    Ok(VolumeSource::Projection(Projection {
        default_mode: projection::default_mode(source.default_mode)?,
        default_user: projection::default_user(source.default_user)?,
        medium: Medium::Disk,
        sources: vec![ProjectionSource::ConfigMap(object)],
    }))
}
