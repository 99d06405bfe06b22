//! Annotations of the pod about single volumes: `podfs.io/host-path.<volume>`, `podfs.io/cache.<volume>`,
//! `podfs.io/nfs-backend.<volume>`, `podfs.io/mount-options.<volume>`, `podfs.io/audit.<volume>`, `podfs.io/sub-path.<volume>`
//! and `podfs.io/within.<volume>`; and the annotation about all volumes, `podfs.io/volumes`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::{Path, PathBuf};

use podfs_fuse::passthrough::CacheMode;
use serde_json::{Value, json};

use super::nfs_options::{Backend, NfsOptions};
use super::{Volume, VolumeSource};
use crate::types::InvalidField;

const SERVED_BY: &str = "podfs.io/host-path.";
const CACHE: &str = "podfs.io/cache.";
const AUDIT: &str = "podfs.io/audit.";
const SUB_PATH: &str = "podfs.io/sub-path.";
const NFS_BACKEND: &str = "podfs.io/nfs-backend.";
const MOUNT_OPTIONS: &str = "podfs.io/mount-options.";
const WITHIN: &str = "podfs.io/within.";
/// The prefixes of annotations about single volumes.
const ABOUT_VOLUMES: [&str; 7] = [SERVED_BY, CACHE, AUDIT, SUB_PATH, NFS_BACKEND, MOUNT_OPTIONS, WITHIN];

/// The least similarity (normalised Damerau-Levenshtein, 0 to 1) at which podfs takes an annotation for a misspelled one.
const ALIKE: f64 = 0.75;

/// The label or annotation of a pod, and the label of a namespace, that says whether containers get podfs's volumes instead of
/// the kubelet's (`podfs node --nri`): `"true"` or `"false"`.
pub const VOLUMES_KEY: &str = "podfs.io/volumes";

/// The user's choices for a volume, from the pod's annotations or the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preferences {
    /// FUSE or a bind mount; without this choice, podfs chooses.
    pub served_by: Option<ServedBy>,
    /// The caching of names and attributes of a host path by the kernel.
    pub cache: CacheMode,
    /// Whether podfs logs each open of a file of a projection.
    pub audit: bool,
    /// The NFS client; without this choice, the mount options decide.
    pub nfs_backend: Option<Backend>,
    /// Whether a container that mounts a part of the volume sees later changes; without this choice, the node decides.
    pub sub_path: Option<SubPathMode>,
}

/// Whether a container that mounts a part of a projection sees later changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SubPathMode {
    /// The container sees the generation that was current when the container started, as with the kubelet (SP-05).
    #[default]
    Pinned,
    /// The container always sees the current content.
    Live,
}

/// The way in which containers get a volume of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServedBy {
    /// A FUSE mount, served by podfs.
    Fuse,
    /// A bind mount, served by the kernel alone.
    Bind,
}

impl Preferences {
    /// Sets the preferences of a pod's volumes from the pod's annotations.
    ///
    /// # Errors
    /// An invalid value, a volume that the pod does not have, or one of a kind without this choice. Annotations for a volume
    /// that podfs does not serve are ignored. The field is relative to the pod.
    pub(crate) fn apply(
        annotations: Option<&BTreeMap<String, String>>,
        volumes: &mut [Volume],
    ) -> Result<(), InvalidField> {
        for (key, value) in annotations.into_iter().flatten() {
            let invalid = |sentence: &dyn Display| InvalidField::new(format!("metadata.annotations[{key}]"), sentence);
            if let Some(name) = key.strip_prefix(SERVED_BY) {
                let volume = volume(volumes, name).map_err(|error| invalid(&error))?;
                if volume.unsupported_reason().is_some() {
                    continue;
                }
                let is_source = matches!(
                    volume.source,
                    VolumeSource::HostPath(_) | VolumeSource::Claim(_) | VolumeSource::Flex(_) | VolumeSource::Csi(_)
                );
                if !is_source {
                    let kind = volume.kind.field;
                    return Err(invalid(&format!(
                        "is for hostPath volumes and claims, and {name:?} is of kind {kind}"
                    )));
                }
                volume.preferences.served_by = Some(served_by(value).map_err(|error| invalid(&error))?);
            } else if let Some(name) = key.strip_prefix(CACHE) {
                let volume = volume(volumes, name).map_err(|error| invalid(&error))?;
                if volume.unsupported_reason().is_some() {
                    continue;
                }
                let kind = volume.kind.field;
                match volume.source {
                    VolumeSource::Projection(_) => {
                        return Err(invalid(&format!("{kind} volumes are cached for ever; remove the annotation")));
                    }
                    VolumeSource::Nfs(..) => {
                        let sentence = "nfs volumes are cached as their mount options say (actimeo, lookupcache); remove \
                                        the annotation";
                        return Err(invalid(&sentence));
                    }
                    _ => {}
                }
                volume.preferences.cache = cache(value).map_err(|error| invalid(&error))?;
            } else if let Some(name) = key.strip_prefix(AUDIT) {
                let volume = volume(volumes, name).map_err(|error| invalid(&error))?;
                if volume.unsupported_reason().is_some() {
                    continue;
                }
                volume.may_be_audited().map_err(|error| invalid(&error))?;
                volume.preferences.audit = audit(value).map_err(|error| invalid(&error))?;
            } else if let Some(name) = key.strip_prefix(NFS_BACKEND) {
                let volume = volume(volumes, name).map_err(|error| invalid(&error))?;
                if volume.unsupported_reason().is_some() {
                    continue;
                }
                if !matches!(volume.source, VolumeSource::Nfs(..) | VolumeSource::Claim(_)) {
                    let kind = volume.kind.field;
                    return Err(invalid(&format!("is for nfs volumes and claims, and {name:?} is of kind {kind}")));
                }
                volume.preferences.nfs_backend = Backend::parse(value).map_err(|error| invalid(&error))?;
            } else if let Some(name) = key.strip_prefix(MOUNT_OPTIONS) {
                let volume = volume(volumes, name).map_err(|error| invalid(&error))?;
                if volume.unsupported_reason().is_some() {
                    continue;
                }
                let VolumeSource::Nfs(_, options) = &mut volume.source else {
                    return Err(invalid(&format!(
                        "is for nfs volumes, and {name:?} is of kind {}; a claim has the mountOptions of its PersistentVolume",
                        volume.kind.field
                    )));
                };
                **options = NfsOptions::parse([value.as_str()]).map_err(|error| invalid(&error))?;
            } else if let Some(name) = key.strip_prefix(WITHIN) {
                let volume = volume(volumes, name).map_err(|error| invalid(&error))?;
                if volume.unsupported_reason().is_some() {
                    continue;
                }
                let VolumeSource::HostPath(source) = &mut volume.source else {
                    let kind = volume.kind.field;
                    return Err(invalid(&format!("is for hostPath volumes, and {name:?} is of kind {kind}")));
                };
                if !value.starts_with('/') || !source.path.starts_with(value) {
                    let path = source.path.display();
                    return Err(invalid(&format!("must be the directory {path} or one above it")));
                }
                source.within = Some(PathBuf::from(value));
            } else if let Some(name) = key.strip_prefix(SUB_PATH) {
                let volume = volume(volumes, name).map_err(|error| invalid(&error))?;
                if volume.unsupported_reason().is_some() {
                    continue;
                }
                if !matches!(volume.source, VolumeSource::Projection(_)) {
                    let kind = volume.kind.field;
                    return Err(invalid(&format!(
                        "is for files that podfs assembles (configMap, secret, downwardAPI, projected), and {name:?} is of \
                         kind {kind}, whose parts always show what the volume shows"
                    )));
                }
                let mode = sub_path(value).map_err(|error| invalid(&error))?;
                // The map is sorted, so this loop has applied `podfs.io/audit.` before `podfs.io/sub-path.`.
                if mode == SubPathMode::Live && volume.preferences.audit {
                    return Err(invalid(&format!(
                        "cannot be live, because opens of {name:?} are logged; remove podfs.io/audit.{name}"
                    )));
                }
                volume.preferences.sub_path = Some(mode);
            }
        }
        Ok(())
    }
}

/// Checks the spelling of the keys of a pod's annotations.
///
/// # Errors
/// A key that resembles one of podfs, or that names no volume.
pub(crate) fn check_annotation_keys<'a>(keys: impl Iterator<Item = &'a String>) -> Result<(), InvalidField> {
    for key in keys {
        let is_known = key == VOLUMES_KEY || ABOUT_VOLUMES.iter().any(|prefix| key.starts_with(prefix));
        if let Some(meant) = meant_annotation(key).filter(|_| !is_known) {
            let sentence = format!("is no annotation of podfs; did you mean {meant}<volume>?");
            return Err(InvalidField::new(format!("metadata.annotations[{key}]"), sentence));
        }
    }
    Ok(())
}

/// The annotation about single volumes that a key resembles.
fn meant_annotation(key: &str) -> Option<&'static str> {
    let name = key.strip_prefix("podfs.io/")?.split('.').next()?;
    let likeness = |known: &&str| {
        let known = known.trim_start_matches("podfs.io/").trim_end_matches('.');
        strsim::normalized_damerau_levenshtein(known, name)
    };
    let nearest = ABOUT_VOLUMES.into_iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)))?;
    (likeness(&nearest) >= ALIKE).then_some(nearest)
}

/// Sets the mount options of the nfs volume `name` in a pod's manifest, by its annotation.
pub(crate) fn set_mount_options(manifest: &mut Value, name: &str, options: &[String]) {
    let value = (!options.is_empty()).then(|| options.join(","));
    set_annotation(manifest, format!("{MOUNT_OPTIONS}{name}"), value);
}

/// Sets the directory out of which no symbolic link leads the hostPath volume `name` in a pod's manifest, by its annotation.
pub(crate) fn set_within(manifest: &mut Value, name: &str, within: Option<&Path>) {
    let value = within.map(|within| within.to_string_lossy().into_owned());
    set_annotation(manifest, format!("{WITHIN}{name}"), value);
}

/// Gives a pod's manifest the definition that a volume has in an earlier manifest of the pod, and the annotations about it.
pub(crate) fn keep_volume(manifest: &mut Value, earlier: &Value, name: &str) {
    let is_named = |volume: &&Value| volume["name"] == name;
    let Some(definition) = earlier["spec"]["volumes"].as_array().into_iter().flatten().find(is_named) else { return };
    let volumes = &mut manifest["spec"]["volumes"];
    match volumes.as_array_mut() {
        Some(volumes) => match volumes.iter_mut().find(|volume| volume["name"] == name) {
            Some(volume) => volume.clone_from(definition),
            None => volumes.push(definition.clone()),
        },
        None => *volumes = json!([definition]),
    }
    for prefix in ABOUT_VOLUMES {
        let key = format!("{prefix}{name}");
        let value = earlier["metadata"]["annotations"][&key].as_str().map(str::to_owned);
        set_annotation(manifest, key, value);
    }
}

/// Sets an annotation in a pod's manifest, or removes it.
fn set_annotation(manifest: &mut Value, key: String, value: Option<String>) {
    let annotations = &mut manifest["metadata"]["annotations"];
    match (annotations.as_object_mut(), value) {
        (Some(all), None) => drop(all.remove(&key)),
        (Some(all), Some(value)) => drop(all.insert(key, json!(value))),
        (None, None) => {}
        (None, Some(value)) => *annotations = json!({ key: value }),
    }
}

/// Removes the annotations of a pod's manifest that are about single volumes which the manifest does not have any more.
pub(crate) fn forget_other_volumes(manifest: &mut Value) {
    let volumes = manifest["spec"]["volumes"].as_array().into_iter().flatten();
    let names: BTreeSet<String> = volumes.filter_map(|volume| volume["name"].as_str().map(str::to_owned)).collect();
    if let Some(annotations) = manifest["metadata"]["annotations"].as_object_mut() {
        annotations.retain(|key, _| {
            let of_volume = ABOUT_VOLUMES.iter().find_map(|prefix| key.strip_prefix(prefix));
            of_volume.is_none_or(|name| names.contains(name))
        });
    }
}

impl Volume {
    /// Checks that podfs can log each open of its files.
    ///
    /// # Errors
    /// When the volume is of a kind without audit.
    pub(crate) fn may_be_audited(&self) -> Result<(), PreferenceError> {
        match self.source {
            VolumeSource::Projection(_) => Ok(()),
            _ => Err(PreferenceError::Audit { volume: self.name.to_string(), kind: self.kind.field }),
        }
    }
}

/// Why a volume cannot be served as an annotation says.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PreferenceError {
    #[error("the pod has no volume {0:?}")]
    NoVolume(String),
    #[error(
        "is for files that podfs assembles (configMap, secret, downwardAPI, projected), and {volume:?} is of kind {kind}, whose \
         files the host can open without podfs"
    )]
    Audit { volume: String, kind: &'static str },
}

fn volume<'a>(volumes: &'a mut [Volume], name: &str) -> Result<&'a mut Volume, PreferenceError> {
    let found = volumes.iter_mut().find(|volume| volume.name.as_str() == name);
    found.ok_or_else(|| PreferenceError::NoVolume(name.to_owned()))
}

fn served_by(word: &str) -> Result<ServedBy, &'static str> {
    match word {
        "fuse" => Ok(ServedBy::Fuse),
        "bind" => Ok(ServedBy::Bind),
        _ => Err("must be fuse or bind"),
    }
}

fn cache(word: &str) -> Result<CacheMode, &'static str> {
    match word {
        "none" => Ok(CacheMode::None),
        "auto" => Ok(CacheMode::Auto),
        "always" => Ok(CacheMode::Always),
        _ => Err("must be none, auto or always"),
    }
}

fn sub_path(word: &str) -> Result<SubPathMode, &'static str> {
    match word {
        "pinned" => Ok(SubPathMode::Pinned),
        "live" => Ok(SubPathMode::Live),
        _ => Err("must be pinned or live"),
    }
}

fn audit(word: &str) -> Result<bool, &'static str> {
    match word {
        "open" => Ok(true),
        _ => Err("must be open; without the annotation nothing is written down"),
    }
}
