//! projected volumes: several sources in one directory, switched together.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{PodCertificateProjection, ProjectedVolumeSource, Volume, VolumeProjection};

use super::credential::{BundleFile, TokenFile};
use super::projection::{self, Medium, ObjectSource, Projection, Source};
use super::{Kind, VolumeSource, downward_api};
use crate::types::PayloadPath;
use crate::types::{self, InvalidField};

pub(super) const KIND: Kind = Kind {
    word: "projected",
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

fn parse_source(source: &VolumeProjection) -> Result<Option<Source>, InvalidField> {
    let kinds = [
        source.config_map.as_ref().map(|object| {
            ObjectSource::parse("name", Some(&object.name), object.items.as_deref(), object.optional)
                .map(Source::ConfigMap)
                .map_err(|error| error.under("configMap"))
        }),
        source.secret.as_ref().map(|object| {
            ObjectSource::parse("name", Some(&object.name), object.items.as_deref(), object.optional)
                .map(Source::Secret)
                .map_err(|error| error.under("secret"))
        }),
        source.downward_api.as_ref().map(|downward| {
            downward_api::files(downward.items.as_deref())
                .map(Source::DownwardApi)
                .map_err(|error| error.under("downwardAPI"))
        }),
        source.service_account_token.as_ref().map(|token| {
            TokenFile::parse(token).map(Source::ServiceAccountToken).map_err(|error| error.under("serviceAccountToken"))
        }),
        source.cluster_trust_bundle.as_ref().map(|bundle| {
            BundleFile::parse(bundle).map(Source::ClusterTrustBundle).map_err(|error| error.under("clusterTrustBundle"))
        }),
        source.pod_certificate.as_ref().map(|certificate| {
            pod_certificate(certificate)
                .map(|paths| Source::PodCertificate { paths })
                .map_err(|error| error.under("podCertificate"))
        }),
    ];
    let mut given = kinds.into_iter().flatten();
    match (given.next(), given.next()) {
        (_, Some(_)) => Err(InvalidField::new("", "may not specify more than 1 volume type per source")),
        (source, None) => source.transpose(),
    }
}

fn pod_certificate(certificate: &PodCertificateProjection) -> Result<Vec<PayloadPath>, InvalidField> {
    certificate.user.map(|user| types::numeric_id("user", user)).transpose()?;
    let paths: Vec<PayloadPath> = [
        ("credentialBundlePath", &certificate.credential_bundle_path),
        ("keyPath", &certificate.key_path),
        ("certificateChainPath", &certificate.certificate_chain_path),
    ]
    .into_iter()
    .filter_map(|(field, path)| path.as_deref().map(|path| projection::path(field, path)))
    .collect::<Result<_, _>>()?;
    if paths.is_empty() {
        return Err(InvalidField::new("", "one of credentialBundlePath, keyPath and certificateChainPath is required"));
    }
    Ok(paths)
}

/// The API's rule for paths the manifest gives: each belongs to one file. Tokens are outside of it, as are keys shown
/// under their own names; there the last source wins.
fn claim_paths(source: &Source, taken: &mut BTreeSet<PayloadPath>) -> Result<(), InvalidField> {
    if matches!(source, Source::ServiceAccountToken(_)) {
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
