//! The text of the pod's `/etc/hosts`, byte for byte the kubelet's (MT-07).

use std::fmt::Write;
use std::net::IpAddr;

use crate::manifest::pod::HostAlias;

const HEADER: &str = "# Kubernetes-managed hosts file.\n";
const HEADER_OF_HOST_NETWORK: &str = "# Kubernetes-managed hosts file (host network).\n";
const LOCAL: &str = "\
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
fe00::0\tip6-mcastprefix
fe00::1\tip6-allnodes
fe00::2\tip6-allrouters
";

/// The hosts file of a pod with a network of its own.
pub fn of_pod(addresses: &[IpAddr], host: &str, domain: Option<&str>, aliases: &[HostAlias]) -> String {
    let mut text = format!("{HEADER}{LOCAL}");
    for address in addresses {
        // Writing to a string does not fail.
        let _ = match domain {
            Some(domain) => writeln!(text, "{address}\t{host}.{domain}\t{host}"),
            None => writeln!(text, "{address}\t{host}"),
        };
    }
    text + &of_aliases(aliases)
}

/// The hosts file of a pod in the host's network: the file of the node, and the pod's own aliases.
pub fn of_host_network(of_node: &[u8], aliases: &[HostAlias]) -> Vec<u8> {
    [HEADER_OF_HOST_NETWORK.as_bytes(), of_node, of_aliases(aliases).as_bytes()].concat()
}

fn of_aliases(aliases: &[HostAlias]) -> String {
    if aliases.is_empty() {
        return String::new();
    }
    let line = |alias: &HostAlias| format!("{}\t{}\n", alias.address, alias.names.join("\t"));
    format!("\n# Entries added by HostAliases.\n{}", aliases.iter().map(line).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aliases() -> Vec<HostAlias> {
        let alias = |address: &str, names: &[&str]| HostAlias {
            address: address.to_owned(),
            names: names.iter().map(ToString::to_string).collect(),
        };
        vec![alias("123.45.67.89", &["foo", "bar", "baz"]), alias("456.78.90.123", &["park"])]
    }

    #[test]
    fn mt_07_the_file_of_a_pod_is_the_kubelets() {
        let addresses = ["198.51.100.7".parse().expect("an address"), "2001:db8::7".parse().expect("an address")];
        let text = of_pod(&addresses, "pod", Some("ns.svc.cluster.local"), &aliases());
        assert_eq!(
            text,
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
             fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n\
             198.51.100.7\tpod.ns.svc.cluster.local\tpod\n2001:db8::7\tpod.ns.svc.cluster.local\tpod\n\n\
             # Entries added by HostAliases.\n123.45.67.89\tfoo\tbar\tbaz\n456.78.90.123\tpark\n"
        );
        let plain = of_pod(&addresses[..1], "pod", None, &[]);
        assert!(plain.ends_with("fe00::2\tip6-allrouters\n198.51.100.7\tpod\n"), "{plain}");
    }

    #[test]
    fn mt_07_in_the_hosts_network_it_is_a_copy_of_the_nodes() {
        let node = b"127.0.0.1 localhost\n# ours\n";
        let header = "# Kubernetes-managed hosts file (host network).\n";
        assert_eq!(of_host_network(node, &[]), format!("{header}127.0.0.1 localhost\n# ours\n").into_bytes());
        let with = String::from_utf8(of_host_network(node, &aliases())).expect("text");
        assert!(with.ends_with(
            "# ours\n\n# Entries added by HostAliases.\n123.45.67.89\tfoo\tbar\tbaz\n456.78.90.123\tpark\n"
        ));
    }
}
