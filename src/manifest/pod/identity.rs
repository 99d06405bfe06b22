//! The namespace, name and uid of a pod.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use uuid::Uuid;

use crate::types::{DNS_LABEL_RULE, DNS_NAME_RULE, InvalidField, is_dns_label, is_domain, required};

/// The UUID namespace (version 5) for uids that podfs derives from pod names. It never changes, because the paths of volumes
/// depend on it.
const UID_NAMESPACE: Uuid = Uuid::from_u128(0x9a8108f7_80b0_46e0_9e0d_a80b8f5e918c);
/// Longest name of a directory, in bytes.
const MAX_UID: usize = 255;
const UID_RULE: &str = "must be letters, digits and '-', with no '-' at the beginning, and at most 255 characters; leave it \
                        out to have one derived from namespace and name";
/// The namespace of objects that name none.
pub const DEFAULT_NAMESPACE: &str = "default";

/// Namespace, name and uid of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodIdentity {
    /// Its namespace, and that of the objects its volumes show.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: PodUid,
}

impl PodIdentity {
    /// Why podfs, which serves this pod, cannot serve `other`: it is this pod, by its uid, under another name. `None` if it is not.
    pub fn refuse_rename(&self, other: &PodIdentity) -> Option<String> {
        let is_renamed = other != self && other.uid == self.uid;
        is_renamed.then(|| {
            format!(
                "pod {other} has the uid of pod {self}, which podfs serves; a pod cannot be renamed: give {other} another uid, or \
                 delete {self} first"
            )
        })
    }

    /// Parses a pod's metadata. Errors are relative to it.
    pub(super) fn parse(metadata: &ObjectMeta) -> Result<PodIdentity, InvalidField> {
        let name = required("name", metadata.name.as_deref())?;
        let namespace = metadata.namespace.as_deref().filter(|namespace| !namespace.is_empty());
        let namespace = namespace.unwrap_or(DEFAULT_NAMESPACE);
        if !is_domain(name) {
            return Err(InvalidField::new("name", DNS_NAME_RULE));
        }
        if !is_dns_label(namespace) {
            return Err(InvalidField::new("namespace", DNS_LABEL_RULE));
        }
        let uid = match metadata.uid.as_deref() {
            Some(uid) => PodUid::parse(uid)?,
            None => PodUid::derived(namespace, name),
        };
        Ok(PodIdentity { namespace: namespace.to_owned(), name: name.to_owned(), uid })
    }

    /// The identity of a volume that is served without its pod.
    pub fn placeholder() -> PodIdentity {
        let name = "podfs";
        PodIdentity {
            namespace: DEFAULT_NAMESPACE.to_owned(),
            name: name.to_owned(),
            uid: PodUid::derived(DEFAULT_NAMESPACE, name),
        }
    }
}

/// Reads `default/web`.
impl fmt::Display for PodIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The uid of a pod: the name of its directory, and so safe as a path element.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(String);

impl PodUid {
    /// Parses a uid.
    ///
    /// # Errors
    /// When it holds anything but letters, digits and `-`, or could be taken for an option.
    pub fn parse(uid: &str) -> Result<PodUid, InvalidField> {
        let plain = uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if !plain || uid.is_empty() || uid.starts_with('-') || uid.len() > MAX_UID {
            return Err(InvalidField::new("uid", UID_RULE));
        }
        Ok(PodUid(uid.to_owned()))
    }

    /// The uid of a pod that has none: the same for the same namespace and name, at any time and on any machine.
    fn derived(namespace: &str, name: &str) -> PodUid {
        PodUid(Uuid::new_v5(&UID_NAMESPACE, format!("{namespace}/{name}").as_bytes()).to_string())
    }

    /// The uid as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_with_another_name_and_the_same_uid_is_refused() {
        let pod = |name: &str, uid: &str| PodIdentity {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: PodUid::parse(uid).expect("a uid"),
        };
        let served = pod("web", "u");
        assert_eq!((served.refuse_rename(&served), served.refuse_rename(&pod("api", "v"))), (None, None));
        let refused = served.refuse_rename(&pod("api", "u")).expect("it is renamed");
        assert_eq!(
            refused,
            "pod default/api has the uid of pod default/web, which podfs serves; a pod cannot be renamed: give default/api another \
             uid, or delete default/web first"
        );
    }
}
