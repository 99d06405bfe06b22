//! projected volumes: several sources in one directory, switched together.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{ProjectedVolumeSource, Volume, VolumeProjection};

use super::certificate::CertificateFiles;
use super::credential::{BundleFile, TokenFile};
use super::projection::{self, Medium, ObjectSource, Projection, ProjectionSource};
use super::{VolumeSource, VolumeType, downward_file};
use crate::types::InvalidField;
use crate::types::PayloadPath;

pub(super) const KIND: VolumeType = VolumeType {
    field: "projected",
    directory: Some("kubernetes.io~projected"),
    parse: |volume: &Volume, _| volume.projected.as_ref().map(parse),
};

fn parse(volume: &ProjectedVolumeSource) -> Result<VolumeSource, InvalidField> {
    let default_mode = projection::default_mode(volume.default_mode)?;
    let default_user = projection::default_user(volume.default_user)?;
    let mut taken = BTreeSet::new();
    let mut sources = Vec::new();
    for (index, source) in volume.sources.as_deref().unwrap_or_default().iter().enumerate() {
        let at = |error: InvalidField| error.under(format!("sources[{index}]"));
        // A source of no kind is accepted, as the API does, and shows nothing.
        let Some(source) = parse_source(source).map_err(at)? else {
            continue;
        };
        claim_paths(&source, &mut taken).map_err(at)?;
        sources.push(source);
    }
    Ok(VolumeSource::Projection(Projection { default_mode, default_user, medium: Medium::Memory, sources }))
}

fn parse_source(source: &VolumeProjection) -> Result<Option<ProjectionSource>, InvalidField> {
    let kinds = [
        source.config_map.as_ref().map(|object| {
            ObjectSource::parse("name", Some(&object.name), object.items.as_deref(), object.optional)
                .map(ProjectionSource::ConfigMap)
                .map_err(|error| error.under("configMap"))
        }),
        source.secret.as_ref().map(|object| {
            ObjectSource::parse("name", Some(&object.name), object.items.as_deref(), object.optional)
                .map(ProjectionSource::Secret)
                .map_err(|error| error.under("secret"))
        }),
        source.downward_api.as_ref().map(|downward| {
            downward_file::files(downward.items.as_deref())
                .map(ProjectionSource::DownwardApi)
                .map_err(|error| error.under("downwardAPI"))
        }),
        source.service_account_token.as_ref().map(|token| {
            TokenFile::parse(token)
                .map(ProjectionSource::ServiceAccountToken)
                .map_err(|error| error.under("serviceAccountToken"))
        }),
        source.cluster_trust_bundle.as_ref().map(|bundle| {
            BundleFile::parse(bundle)
                .map(ProjectionSource::ClusterTrustBundle)
                .map_err(|error| error.under("clusterTrustBundle"))
        }),
        source.pod_certificate.as_ref().map(|certificate| {
            CertificateFiles::parse(certificate)
                .map(ProjectionSource::PodCertificate)
                .map_err(|error| error.under("podCertificate"))
        }),
    ];
    let mut given = kinds.into_iter().flatten();
    match (given.next(), given.next()) {
        (_, Some(_)) => Err(InvalidField::new("", "may not specify more than 1 volume type per source")),
        (source, None) => source.transpose(),
    }
}

/// Checks the API's rule that a path in the manifest belongs to one file. The rule covers neither tokens nor keys that
/// are shown under their own names: if two sources have such a path, the last one wins.
fn claim_paths(source: &ProjectionSource, taken: &mut BTreeSet<PayloadPath>) -> Result<(), InvalidField> {
    if matches!(source, ProjectionSource::ServiceAccountToken(_)) {
        return Ok(());
    }
    for path in source.explicit_paths() {
        if !taken.insert(path.clone()) {
            return Err(InvalidField::new(
                "",
                format!("conflicting duplicate paths: {:?} is given twice", path.as_str()),
            ));
        }
    }
    Ok(())
}
