//! From `volumeAttributes` to a volume of a pod, as core/v1 describes it. Does no I/O, except to find the real path
//! of a directory of the node.
//!
//! Volumes that show objects are always allowed: their fields have no namespace, so they are objects of the pod's namespace.
//! Volumes that show a directory of the node or an NFS export are allowed only if the node's list (`csi-allow`) has it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::ParseBoolError;

use serde_json::{Map, Value, json};

use super::AllowList;
use crate::manifest::{ManifestError, parse_bare};

/// The prefixes of attributes that a kubelet or a provisioner adds.
const FOREIGN_PREFIXES: [&str; 3] = ["csi.storage.k8s.io/", "storage.kubernetes.io/", "kubernetes.io/"];
/// The similarity (Jaro-Winkler) above which podfs suggests a word.
const MIN_SIMILARITY: f64 = 0.75;

/// The kinds that `kind` can name, and the attributes of each besides `kind`.
const KINDS: &[(&str, &[&str])] = &[
    ("configMap", &["name", "items", "defaultMode", "optional"]),
    ("secret", &["name", "items", "defaultMode", "optional"]),
    ("downwardAPI", &["items", "defaultMode"]),
    ("projected", &["sources", "defaultMode"]),
    ("hostPath", &["path"]),
    ("nfs", &["server", "path"]),
];
/// The kinds that only the attribute `volume` can describe.
const MORE_KINDS: &[&str] = &["emptyDir"];

/// A volume of a pod, without its name.
#[derive(Clone, Debug, PartialEq)]
pub struct DescribedVolume {
    /// The entry of `spec.volumes` without its name.
    pub volume: Value,
    /// Whether its files come from fields of the pod.
    pub needs_pod: bool,
    /// The directory that the node allows, if the volume shows it or a directory below it.
    pub within: Option<PathBuf>,
}

/// Which attribute is wrong, and what to write instead.
#[derive(Debug, thiserror::Error)]
pub enum AttributesError {
    /// An attribute `namespace`: objects of other namespaces are not for the pod.
    #[error(
        "volumeAttributes: objects are always those of the pod's own namespace; remove the attribute \"namespace\""
    )]
    Namespace,
    /// Both `kind` and `volume`: two descriptions of the volume.
    #[error("volumeAttributes: give either \"kind\" or \"volume\", not both")]
    KindAndVolume,
    /// Neither `kind` nor `volume`: no description of the volume.
    #[error("volumeAttributes: \"kind\" is required, such as configMap, with \"name\", the name of the object")]
    NoKind,
    /// An attribute or a kind that podfs does not know.
    #[error("volumeAttributes: unknown {what} {word:?}; {hint}")]
    Unknown {
        /// `attribute` or `kind`.
        what: &'static str,
        /// The word, as the user wrote it.
        word: String,
        /// A suggestion.
        hint: String,
    },
    /// The kind needs another attribute.
    #[error("volumeAttributes: {attribute:?} is required for the kind {kind}")]
    Missing {
        /// The attribute.
        attribute: &'static str,
        /// The kind.
        kind: String,
    },
    /// A mode that is no octal number of permissions.
    #[error("volumeAttributes: {attribute}: {text:?} is no mode; write it in octal, such as 0400")]
    Mode {
        /// The attribute.
        attribute: String,
        /// The value, as the user wrote it.
        text: String,
    },
    /// A flag that is no bool.
    #[error("volumeAttributes: {attribute} must be \"true\" or \"false\"")]
    Flag {
        /// The attribute.
        attribute: String,
        /// The parser's error.
        #[source]
        cause: ParseBoolError,
    },
    /// An attribute that is no valid YAML.
    #[error("volumeAttributes: {0}")]
    Yaml(#[source] ManifestError),
    /// The YAML is no volume.
    #[error("volumeAttributes: volume must be a volume as spec.volumes has it, such as {{configMap: {{name: app}}}}")]
    NoVolume,
    /// A kind that podfs does not serve as a CSI volume.
    #[error("volumeAttributes: volume: podfs serves no {kind} as a CSI volume; served are {served}")]
    NotServed {
        /// The kind.
        kind: String,
        /// The kinds that podfs serves.
        served: String,
    },
    /// A volume of no kind, or of several.
    #[error("volumeAttributes: volume: give one kind, such as {{configMap: {{name: app}}}}")]
    SeveralKinds,
    /// A directory of the node that the administrator has not allowed.
    #[error(
        "volumeAttributes: the directory {0:?} of the node is not allowed for CSI volumes, or is not there; the node's \
         administrator allows directories with csi-allow in podfs.toml"
    )]
    Directory(String),
    /// An NFS server that the administrator has not allowed.
    #[error(
        "volumeAttributes: the NFS server {0:?} is not allowed for CSI volumes; the node's administrator allows servers with \
         csi-allow in podfs.toml"
    )]
    Server(String),
    /// The API server would not accept the volume.
    #[error(transparent)]
    Invalid(ManifestError),
    /// podfs does not serve such a volume.
    #[error("volumeAttributes: {0}")]
    Unsupported(String),
}

/// The volume that these attributes describe.
///
/// # Errors
/// When an attribute is wrong; the error names it.
pub fn describe(attributes: &BTreeMap<String, String>, allow: &AllowList) -> Result<DescribedVolume, AttributesError> {
    let own: BTreeMap<&str, &str> = attributes
        .iter()
        .filter(|(name, _)| !FOREIGN_PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    if own.contains_key("namespace") {
        return Err(AttributesError::Namespace);
    }
    let (kind, body) = match (own.get("kind"), own.get("volume")) {
        (Some(_), Some(_)) => return Err(AttributesError::KindAndVolume),
        (None, None) => return Err(no_description(&own)),
        (None, Some(text)) => {
            refuse_unknown(&own, &["volume"])?;
            parse_volume(text)?
        }
        (Some(kind), None) => volume_of_kind(kind, &own)?,
    };
    let (body, within) = check_allowed(&kind, body, allow)?;
    let needs_pod = needs_pod(&kind, &body);
    Ok(DescribedVolume { volume: json!({ (kind): body }), needs_pod, within })
}

/// Whether files of the volume come from fields of the pod.
fn needs_pod(kind: &str, body: &Value) -> bool {
    let mut sources = body["sources"].as_array().into_iter().flatten();
    kind == "downwardAPI" || (kind == "projected" && sources.any(|source| source["downwardAPI"].is_object()))
}

fn no_description(own: &BTreeMap<&str, &str>) -> AttributesError {
    let all: Vec<&str> =
        ["kind", "volume"].into_iter().chain(KINDS.iter().flat_map(|(_, names)| *names).copied()).collect();
    match own.keys().find(|name| !all.contains(name)) {
        Some(name) => unknown("attribute", name, &all),
        None => AttributesError::NoKind,
    }
}

/// The volume of a kind, from its own attributes.
fn volume_of_kind(kind: &str, own: &BTreeMap<&str, &str>) -> Result<(String, Value), AttributesError> {
    let Some((_, names)) = KINDS.iter().find(|(word, _)| *word == kind) else {
        let all: Vec<&str> = KINDS.iter().map(|(word, _)| *word).collect();
        return Err(unknown("kind", kind, &all));
    };
    let all: Vec<&str> = ["kind"].into_iter().chain(names.iter().copied()).collect();
    refuse_unknown(own, &all)?;
    let mut body = Map::new();
    for (&name, &value) in own.iter().filter(|(name, _)| **name != "kind") {
        let (field, value) = match (kind, name) {
            ("secret", "name") => ("secretName", json!(value)),
            ("downwardAPI", "items") => ("items", Value::Array(items(value, downward_item)?)),
            (_, "items") => ("items", Value::Array(items(value, key_item)?)),
            (_, "defaultMode") => (name, json!(mode(name, value)?)),
            (_, "optional") => (name, json!(flag(name, value)?)),
            (_, "sources") => (name, yaml(name, value)?),
            _ => (name, json!(value)),
        };
        body.insert(field.to_owned(), value);
    }
    let required: &[&str] = match kind {
        "configMap" => &["name"],
        "secret" => &["secretName"],
        "projected" => &["sources"],
        "hostPath" => &["path"],
        "nfs" => &["server", "path"],
        _ => &["items"],
    };
    if let Some(missing) = required.iter().find(|field| !body.contains_key(**field)) {
        let missing = if *missing == "secretName" { "name" } else { missing };
        return Err(AttributesError::Missing { attribute: missing, kind: kind.to_owned() });
    }
    Ok((kind.to_owned(), Value::Object(body)))
}

fn refuse_unknown(own: &BTreeMap<&str, &str>, all: &[&str]) -> Result<(), AttributesError> {
    match own.keys().find(|name| !all.contains(name)) {
        Some(name) => Err(unknown("attribute", name, all)),
        None => Ok(()),
    }
}

fn unknown(what: &'static str, word: &str, all: &[&str]) -> AttributesError {
    let likeness = |known: &str| strsim::jaro_winkler(&known.to_lowercase(), &word.to_lowercase());
    let nearest = all.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    let hint = match nearest.filter(|known| likeness(known) > MIN_SIMILARITY) {
        Some(nearest) => format!("did you mean {nearest:?}?"),
        None => format!("known are {}", all.join(", ")),
    };
    AttributesError::Unknown { what, word: word.to_owned(), hint }
}

/// `a.conf=x/a.conf:0400, b`: keys with the paths of their files and their modes, separated by commas or line breaks.
fn items(text: &str, item: fn(&str, &str) -> Value) -> Result<Vec<Value>, AttributesError> {
    let entries = text.split([',', '\n']).map(str::trim).filter(|entry| !entry.is_empty());
    entries
        .map(|entry| {
            let (key, file) = entry.split_once('=').unwrap_or((entry, entry));
            let (path, octal) = match file.rsplit_once(':') {
                Some((path, octal)) => (path, Some(octal)),
                None => (file, None),
            };
            let key = if entry.contains('=') { key.trim() } else { path };
            let mut item = item(key, path.trim());
            if let Some(octal) = octal {
                item["mode"] = json!(mode("items", octal.trim())?);
            }
            Ok(item)
        })
        .collect()
}

fn key_item(key: &str, path: &str) -> Value {
    json!({"key": key, "path": path})
}

/// `labels=metadata.labels` is the field `metadata.labels` in the file `labels`; `limit=c/limits.cpu` is a resource of the
/// container `c`.
fn downward_item(path: &str, field: &str) -> Value {
    match field.split_once('/') {
        Some((container, resource)) if resource.starts_with("limits.") || resource.starts_with("requests.") => {
            json!({"path": path, "resourceFieldRef": {"containerName": container, "resource": resource}})
        }
        _ => json!({"path": path, "fieldRef": {"fieldPath": field}}),
    }
}

fn mode(name: &str, text: &str) -> Result<u32, AttributesError> {
    let bits = u32::from_str_radix(text, 8).ok().filter(|bits| *bits <= 0o777);
    bits.ok_or_else(|| AttributesError::Mode { attribute: name.to_owned(), text: text.to_owned() })
}

fn flag(name: &str, text: &str) -> Result<bool, AttributesError> {
    text.parse().map_err(|cause| AttributesError::Flag { attribute: name.to_owned(), cause })
}

fn yaml(name: &str, text: &str) -> Result<Value, AttributesError> {
    let text = format!("volume:\n  {}", text.trim_end().replace('\n', "\n  "));
    let parsed: Value = parse_bare(Path::new(name), text.as_bytes()).map_err(AttributesError::Yaml)?;
    Ok(parsed.get("volume").cloned().unwrap_or_default())
}

/// A volume of core/v1 as YAML: its kind, and the fields of the kind.
fn parse_volume(text: &str) -> Result<(String, Value), AttributesError> {
    let Value::Object(mut fields) = yaml("volume", text)? else {
        return Err(AttributesError::NoVolume);
    };
    fields.remove("name");
    let kinds: Vec<&str> = KINDS.iter().map(|(word, _)| *word).chain(MORE_KINDS.iter().copied()).collect();
    let mut fields = fields.into_iter();
    match (fields.next(), fields.next()) {
        (Some((kind, body)), None) if kinds.contains(&kind.as_str()) => Ok((kind, body)),
        (Some((kind, _)), None) => Err(AttributesError::NotServed { kind, served: kinds.join(", ") }),
        _ => Err(AttributesError::SeveralKinds),
    }
}

/// The volume, if podfs may show its source, and the directory of the list that has it. A directory of the node is replaced by its
/// real path.
fn check_allowed(kind: &str, mut body: Value, allow: &AllowList) -> Result<(Value, Option<PathBuf>), AttributesError> {
    let text = |body: &Value, field: &str| body.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    match kind {
        "hostPath" => {
            let path = text(&body, "path");
            let Some(allowed) = allow.directory(&path).filter(|allowed| allowed.real.is_dir()) else {
                return Err(AttributesError::Directory(path));
            };
            body = json!({"path": allowed.real.to_string_lossy(), "type": "Directory"});
            return Ok((body, Some(allowed.within)));
        }
        "nfs" => {
            let server = text(&body, "server");
            if !allow.has_server(&server) {
                return Err(AttributesError::Server(server));
            }
        }
        _ => {}
    }
    Ok((body, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(attributes: &[(&str, &str)]) -> Result<Value, String> {
        let attributes = attributes.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        describe(&attributes, &AllowList::new(["nfs.example"]))
            .map(|described| described.volume)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn attributes_describe_volumes() {
        let config_map = json!({"configMap": {
            "name": "app",
            "items": [{"key": "a.conf", "path": "x/a.conf", "mode": 0o400}, {"key": "b", "path": "b"}],
            "defaultMode": 0o640,
            "optional": true,
        }});
        let attributes = [
            ("kind", "configMap"),
            ("name", "app"),
            ("items", "a.conf=x/a.conf:0400, b"),
            ("defaultMode", "0640"),
            ("optional", "true"),
            ("csi.storage.k8s.io/pod.name", "web"),
        ];
        assert_eq!(described(&attributes), Ok(config_map));
        assert_eq!(described(&[("kind", "secret"), ("name", "s")]), Ok(json!({"secret": {"secretName": "s"}})));
        let downward = json!({"downwardAPI": {"items": [
            {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
            {"path": "cpu", "resourceFieldRef": {"containerName": "app", "resource": "limits.cpu"}},
        ]}});
        let items = "labels=metadata.labels\ncpu=app/limits.cpu";
        assert_eq!(described(&[("kind", "downwardAPI"), ("items", items)]), Ok(downward));
        let sources = json!({"projected": {"sources": [{"configMap": {"name": "a"}}]}});
        for text in ["[{configMap: {name: a}}]", "- configMap:\n    name: a\n"] {
            assert_eq!(described(&[("kind", "projected"), ("sources", text)]), Ok(sources.clone()), "{text}");
        }
        for text in ["{name: x, configMap: {name: a}}", "configMap:\n  name: a\n"] {
            assert_eq!(described(&[("volume", text)]), Ok(json!({"configMap": {"name": "a"}})), "{text}");
        }
        let nfs = json!({"nfs": {"server": "nfs.example", "path": "/x"}});
        assert_eq!(described(&[("kind", "nfs"), ("server", "nfs.example"), ("path", "/x")]), Ok(nfs));
    }

    #[test]
    fn a_volume_needs_the_pod_for_fields_of_the_pod_only() {
        for (volume, expected) in [
            ("{downwardAPI: {items: [{path: a, fieldRef: {fieldPath: metadata.name}}]}}", true),
            ("{projected: {sources: [{configMap: {name: a}}, {downwardAPI: {items: []}}]}}", true),
            ("{projected: {sources: [{configMap: {name: a, items: [{key: downwardAPI, path: a}]}}]}}", false),
            ("{configMap: {name: a, items: [{key: a, path: downwardAPI}]}}", false),
        ] {
            let attributes = BTreeMap::from([("volume".to_owned(), volume.to_owned())]);
            let described = describe(&attributes, &AllowList::default()).expect("a volume");
            assert_eq!(described.needs_pod, expected, "{volume}");
        }
    }

    #[test]
    fn an_error_names_the_attribute_and_a_correction() {
        for (attributes, sentence) in [
            (&[("kind", "configMap"), ("nmae", "a")][..], "unknown attribute \"nmae\"; did you mean \"name\"?"),
            (&[("knd", "configMap")], "unknown attribute \"knd\"; did you mean \"kind\"?"),
            (&[("kind", "configmap")], "unknown kind \"configmap\"; did you mean \"configMap\"?"),
            (&[("kind", "gitRepo")], "unknown kind \"gitRepo\"; known are"),
            (&[("kind", "configMap")], "\"name\" is required"),
            (&[("kind", "secret")], "\"name\" is required"),
            (&[], "\"kind\" is required"),
            (&[("kind", "secret"), ("name", "a"), ("namespace", "b")], "pod's own namespace"),
            (&[("kind", "secret"), ("name", "a"), ("defaultMode", "rw")], "\"rw\" is no mode"),
            (&[("kind", "secret"), ("name", "a"), ("items", "k=p:999")], "\"999\" is no mode"),
            (&[("kind", "secret"), ("name", "a"), ("optional", "yes")], "must be \"true\" or \"false\""),
            (&[("kind", "hostPath"), ("path", "/etc")], "is not allowed"),
            (&[("volume", "{hostPath: {path: /etc}}")], "is not allowed"),
            (&[("kind", "nfs"), ("server", "other"), ("path", "/")], "is not allowed"),
            (&[("volume", "{persistentVolumeClaim: {claimName: a}}")], "serves no persistentVolumeClaim"),
            (&[("volume", "{csi: {driver: x}}")], "serves no csi"),
            (&[("volume", "[")], "volume"),
            (&[("volume", "a"), ("kind", "secret")], "not both"),
        ] {
            let error = described(attributes).expect_err("it is wrong");
            assert!(error.starts_with("volumeAttributes: ") && error.contains(sentence), "{error}");
        }
    }

    #[test]
    fn a_directory_is_allowed_by_its_real_path() {
        let node = tempfile::tempdir().expect("a directory");
        let at = |name: &str| node.path().join(name).to_str().expect("text").to_owned();
        for name in ["shared", "shared/a", "private"] {
            std::fs::create_dir(at(name)).expect("a directory");
        }
        std::os::unix::fs::symlink(at("private"), at("shared/link")).expect("a link");
        let allow = AllowList::new([at("shared").as_str()]);
        let directory = |path: &str| allow.directory(path).is_some();
        assert!(directory(&at("shared")) && directory(&at("shared/a")));
        assert!(!directory(&at("private")) && !directory(&at("shared/link")) && !directory(&at("shared/../private")));
        let both = AllowList::new([at("shared/a").as_str(), at("shared").as_str()]);
        let within = both.directory(&at("shared/a")).expect("it is allowed").within;
        assert_eq!(within, node.path().join("shared").canonicalize().expect("a path"), "a user may replace shared/a");
    }
}
