//! From a NodePublishVolume request to a publication. This module checks all fields, so later code need not check them.

use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path, PathBuf};

use secrecy::SecretString;
use serde::Deserialize;
use serde_json::{Value, json};
use tonic::Status;

use super::AllowList;
use super::attributes::{AttributesError, describe};
use crate::csi::v1::volume_capability::access_mode::Mode;
use crate::csi::v1::volume_capability::{AccessMode, AccessType, MountVolume};
use crate::csi::v1::{NodePublishVolumeRequest, VolumeCapability};
use crate::manifest::pod::{Pod, PodUid};
use crate::manifest::{Document, Origin};
use crate::node::publication::{Publication, PublishedPod, name_of_target};
use crate::types::{is_dns_label, mount_options};
use crate::volume::NfsOptions;

/// The keys of the volume's context that kubelets set.
const NAMESPACE: &str = "csi.storage.k8s.io/pod.namespace";
const NAME: &str = "csi.storage.k8s.io/pod.name";
const UID: &str = "csi.storage.k8s.io/pod.uid";
const SERVICE_ACCOUNT: &str = "csi.storage.k8s.io/serviceAccount.name";
/// The tokens of the pod's service account. The CSIDriver object decides whether the kubelet sends them among the secrets or
/// in the volume's context.
const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// The publication that a request asks for.
///
/// # Errors
/// INVALID_ARGUMENT with a sentence about the problem.
pub fn parse(
    request: &NodePublishVolumeRequest,
    kubelet_root: &Path,
    allow: &AllowList,
) -> Result<Publication, Status> {
    required("volume_id", &request.volume_id)?;
    required("target_path", &request.target_path)?;
    let capability =
        request.volume_capability.as_ref().ok_or_else(|| Status::invalid_argument("volume_capability is required"))?;
    let mount = mount(capability)?;
    let group = group(mount)?;
    let target = target(&request.target_path, kubelet_root)?;
    let pod = pod(&request.volume_context, &target, kubelet_root)?;
    let attributes: BTreeMap<_, _> = request.volume_context.clone().into_iter().collect();
    let described = describe(&attributes, allow).map_err(|error| Status::invalid_argument(error.to_string()))?;
    let name = name(&target);
    check(&name, &described.volume).map_err(|error| Status::invalid_argument(error.to_string()))?;
    let mut publication = Publication::new(request.volume_id.clone(), target, pod, name, described.volume);
    publication.needs_pod = described.needs_pod;
    publication.within = described.within;
    let (mount_options, is_read_only) = options(mount, &publication.volume)?;
    publication.mount_options = mount_options;
    publication.read_only = request.readonly || is_read_only || is_read_only_mode(capability);
    publication.group = group;
    Ok(publication)
}

/// The token of the pod's service account for the API server, if the kubelet sends one.
///
/// # Errors
/// INVALID_ARGUMENT when the tokens cannot be read. The sentence quotes no part of the tokens.
pub fn token(request: &NodePublishVolumeRequest) -> Result<Option<SecretString>, Status> {
    let mut token_lists = [&request.secrets, &request.volume_context].into_iter().filter_map(|map| map.get(TOKENS));
    let Some(text) = token_lists.find(|text| !text.is_empty()) else { return Ok(None) };
    let mut tokens: BTreeMap<String, KubeletToken> = serde_json::from_str(text)
        .map_err(|_| Status::invalid_argument(format!("{TOKENS} is not what a kubelet sends: tokens by audience")))?;
    // The empty audience is the API server. An operator may have written the server's name instead.
    let token = match tokens.remove("") {
        Some(token) => Some(token),
        None if tokens.len() == 1 => tokens.into_values().next(),
        None => None,
    };
    Ok(token.map(|issued| issued.token))
}

/// A token as a kubelet sends it.
#[derive(Deserialize)]
struct KubeletToken {
    token: SecretString,
}

/// Checks that a field is not empty.
///
/// # Errors
/// INVALID_ARGUMENT when it is empty.
pub fn required(field: &str, value: &str) -> Result<(), Status> {
    match value.is_empty() {
        true => Err(Status::invalid_argument(format!("{field} is required"))),
        false => Ok(()),
    }
}

/// A target below the kubelet's directory.
///
/// # Errors
/// INVALID_ARGUMENT when it is elsewhere.
pub fn target(target: &str, kubelet_root: &Path) -> Result<PathBuf, Status> {
    let path = Path::new(target);
    let is_plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !is_plain || !path.starts_with(kubelet_root) || path == kubelet_root {
        return Err(Status::invalid_argument(format!(
            "target_path {target:?} is not below {}, the directory of the kubelet; if the kubelet has another --root-dir, \
             give it to podfs node with --kubelet-root",
            kubelet_root.display()
        )));
    }
    Ok(path.components().collect())
}

/// The file system volume in a capability.
fn mount(capability: &VolumeCapability) -> Result<&MountVolume, Status> {
    match &capability.access_type {
        Some(AccessType::Mount(mount)) => Ok(mount),
        Some(AccessType::Block(_)) => Err(Status::invalid_argument(
            "volume_capability: podfs has no block volumes; use the volume mode Filesystem",
        )),
        None => Err(Status::invalid_argument("volume_capability: give an access type")),
    }
}

/// The group that owns the volume.
fn group(mount: &MountVolume) -> Result<Option<u32>, Status> {
    match mount.volume_mount_group.as_str() {
        "" => Ok(None),
        group => group.parse().map(Some).map_err(|_| {
            Status::invalid_argument("volume_capability: volume_mount_group must be the number of a group")
        }),
    }
}

/// The mount options of the volume, from `mountOptions` of its PersistentVolume, and whether they make it read-only. An NFS export
/// may have any option of NFS; the options of other volumes may only be `ro` and `rw`, and are not in the list.
fn options(mount: &MountVolume, volume: &Value) -> Result<(Vec<String>, bool), Status> {
    let invalid = |sentence: &str| Status::invalid_argument(format!("volume_capability: mount options: {sentence}"));
    let options: Vec<String> = mount.mount_flags.iter().filter(|flag| !flag.is_empty()).cloned().collect();
    if volume["nfs"].is_object() {
        let parsed = NfsOptions::parse(options.iter().map(String::as_str));
        return parsed.map(|parsed| (options, parsed.read_only)).map_err(|error| invalid(&error.to_string()));
    }
    let words: Vec<&str> =
        options.iter().flat_map(|entry| mount_options(entry)).filter(|word| !word.is_empty()).collect();
    match words.iter().find(|word| !matches!(**word, "ro" | "rw")) {
        None => Ok((Vec::new(), words.last() == Some(&"ro"))),
        Some(word) => Err(invalid(&format!(
            "{word:?} is for NFS exports; this volume takes ro and rw; correct mountOptions of the PersistentVolume"
        ))),
    }
}

/// Whether the access mode lets no container write (accessModes: ReadOnlyMany).
fn is_read_only_mode(capability: &VolumeCapability) -> bool {
    let mode = capability.access_mode.as_ref().map(AccessMode::mode);
    matches!(mode, Some(Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly))
}

fn pod(context: &HashMap<String, String>, target: &Path, kubelet_root: &Path) -> Result<PublishedPod, Status> {
    let value = |key: &str| context.get(key).filter(|value| !value.is_empty()).cloned();
    let required_value = |key: &str| {
        value(key).ok_or_else(|| {
            Status::invalid_argument(format!(
                "volume_context has no {key}; the CSIDriver object of podfs.io must have podInfoOnMount: true"
            ))
        })
    };
    let pod = PublishedPod {
        uid: required_value(UID)?,
        namespace: required_value(NAMESPACE)?,
        name: required_value(NAME)?,
        service_account: value(SERVICE_ACCOUNT).unwrap_or_default(),
    };
    PodUid::parse(&pod.uid).map_err(|error| Status::invalid_argument(format!("volume_context: {UID}: {error}")))?;
    let of_pod = target.strip_prefix(kubelet_root.join("pods")).ok().and_then(|below| below.iter().next());
    match of_pod.is_none_or(|directory| directory == pod.uid.as_str()) {
        true => Ok(pod),
        false => Err(Status::invalid_argument(format!(
            "target_path is in the directory of another pod than {}, which volume_context names",
            pod.uid
        ))),
    }
}

/// The name of a volume in its pod: `VOLUME` in the kubelet's path `VOLUME/mount` if that is a valid name of a volume, otherwise
/// a name derived from the target.
fn name(target: &Path) -> String {
    let parent = target.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    let is_mount = target.file_name().is_some_and(|name| name == "mount");
    let name = parent.filter(|name| is_mount && is_dns_label(name)).map(str::to_owned);
    name.unwrap_or_else(|| name_of_target(target))
}

/// Checks that the API server would accept the volume.
fn check(name: &str, volume: &Value) -> Result<(), AttributesError> {
    let mut volume = volume.clone();
    volume["name"] = json!(name);
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", "uid": "pod"},
        "spec": {"volumes": [volume], "containers": []},
    });
    let document = Document::of_server(Origin::file("volumeAttributes".as_ref()), pod);
    let parsed = document.and_then(Pod::parse).map_err(AttributesError::Invalid)?;
    match parsed.volumes.first().and_then(|volume| volume.unsupported_reason()) {
        Some(reason) => Err(AttributesError::Unsupported(reason.to_string())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::*;

    fn token_of(secrets: &str, context: &str) -> Result<Option<String>, String> {
        let with_tokens = |text: &str| HashMap::from([(TOKENS.to_owned(), text.to_owned())]);
        let (secrets, volume_context) = (with_tokens(secrets), with_tokens(context));
        let request = NodePublishVolumeRequest { secrets, volume_context, ..NodePublishVolumeRequest::default() };
        let token = token(&request).map_err(|status| status.message().to_owned())?;
        Ok(token.map(|token| token.expose_secret().to_owned()))
    }

    #[test]
    fn the_token_is_that_for_the_api_server_from_either_place() {
        let both = r#"{"": {"token": "own", "expirationTimestamp": "x"}, "vault": {"token": "other"}}"#;
        assert_eq!(token_of(both, ""), Ok(Some("own".to_owned())));
        assert_eq!(token_of("", both), Ok(Some("own".to_owned())));
        let named = r#"{"https://kubernetes.default.svc": {"token": "named"}}"#;
        assert_eq!(token_of(named, both), Ok(Some("named".to_owned())), "secrets come first");
        assert_eq!(token_of("", r#"{"vault": {"token": "a"}, "bank": {"token": "b"}}"#), Ok(None));
        assert_eq!(token_of("", ""), Ok(None));
        let sentence = token_of("", "s3cr3t").expect_err("that is not JSON");
        assert!(sentence.contains("tokens by audience") && !sentence.contains("s3cr3t"), "{sentence}");
    }
}
