//! secret volumes: the keys of a Secret as files, never on a disk.

use k8s_openapi::api::core::v1::{SecretVolumeSource, Volume};

use super::projection::{self, Medium, ObjectSource, Projection, ProjectionSource};
use super::{VolumeSource, VolumeType};
use crate::types::InvalidField;

pub(super) const KIND: VolumeType = VolumeType {
    field: "secret",
    directory: Some("kubernetes.io~secret"),
    parse: |volume: &Volume, _| volume.secret.as_ref().map(parse),
};

fn parse(source: &SecretVolumeSource) -> Result<VolumeSource, InvalidField> {
    let name = source.secret_name.as_deref();
    let object = ObjectSource::parse("secretName", name, source.items.as_deref(), source.optional)?;
    Ok(VolumeSource::Projection(Projection {
        default_mode: projection::default_mode(source.default_mode)?,
        default_user: projection::default_user(source.default_user)?,
        medium: Medium::Memory,
        sources: vec![ProjectionSource::Secret(object)],
    }))
}
