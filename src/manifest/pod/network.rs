//! The fields of a pod that decide its `/etc/hosts`.

use k8s_openapi::api::core::v1::PodSpec;

/// The network fields of a pod's manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodNetwork {
    /// It shares the node's network.
    pub host_network: bool,
    /// Its field `hostname`. Without it, the host name is the pod's name.
    pub hostname: Option<String>,
    /// Names of other hosts.
    pub aliases: Vec<HostAlias>,
}

/// An address and its names (`hostAliases`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAlias {
    /// The IP address, as in the manifest.
    pub address: String,
    /// The host names, as in the manifest.
    pub names: Vec<String>,
}

impl PodNetwork {
    /// Reads a pod's spec.
    pub(super) fn of(spec: &PodSpec) -> PodNetwork {
        let aliases = spec
            .host_aliases
            .iter()
            .flatten()
            .map(|alias| HostAlias { address: alias.ip.clone(), names: alias.hostnames.clone().unwrap_or_default() });
        PodNetwork {
            host_network: spec.host_network.unwrap_or_default(),
            hostname: spec.hostname.clone().filter(|name| !name.is_empty()),
            aliases: aliases.collect(),
        }
    }
}
