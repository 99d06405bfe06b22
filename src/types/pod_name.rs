//! The name of a pod in the cluster.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The namespace and name of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// A text does not name a pod.
#[derive(Debug, thiserror::Error)]
#[error("give a namespace and a name, such as default/web")]
pub struct InvalidPodName;

impl FromStr for PodName {
    type Err = InvalidPodName;

    fn from_str(text: &str) -> Result<PodName, InvalidPodName> {
        match text.split('/').collect::<Vec<_>>().as_slice() {
            [namespace, name] if !namespace.is_empty() && !name.is_empty() => {
                Ok(PodName { namespace: (*namespace).to_owned(), name: (*name).to_owned() })
            }
            _ => Err(InvalidPodName),
        }
    }
}

/// Reads `default/web`.
impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_goes_by_namespace_and_name() {
        let name: PodName = "shop/web-0".parse().expect("a name");
        assert_eq!((name.namespace.as_str(), name.name.as_str()), ("shop", "web-0"));
        for wrong in ["web", "/web", "shop/", "a/b/c", ""] {
            assert!(wrong.parse::<PodName>().is_err(), "{wrong}");
        }
    }
}
