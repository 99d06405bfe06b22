//! The registration of a CSI driver, as with a kubelet: the driver sends its name and its id of the node, and gets an answer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::timeout;

use super::client::channel;
use crate::csi::registration::registration_client::RegistrationClient;
use crate::csi::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use crate::csi::v1::node_client::NodeClient;
use crate::csi::v1::{NodeGetInfoRequest, NodeGetInfoResponse};
use crate::driver::DriverError;

/// The type under which a CSI driver registers.
const CSI_PLUGIN: &str = "CSIPlugin";
/// How long a registration may take to answer.
const ANSWER: Duration = Duration::from_secs(2);
/// How long NodeGetInfo may take: a driver may have to ask its cloud.
const NODE_INFO: Duration = Duration::from_secs(120);
/// Most characters of a driver's own words in an error.
const MOST_WORDS: usize = 300;

/// A CSI driver of the node, as the cluster is to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeDriver {
    /// Its name.
    pub name: String,
    /// The driver's id of the node.
    pub node_id: String,
    /// Where the node is, in the driver's words: labels of the node.
    pub topology: BTreeMap<String, String>,
    /// How many volumes of the driver the node can have. Nothing if the driver leaves that to the cluster.
    pub most_volumes: Option<i32>,
}

/// A plugin that has registered.
pub(super) struct Registered {
    /// The name of the driver.
    pub(super) name: String,
    /// Where it listens.
    pub(super) endpoint: PathBuf,
    versions: Vec<String>,
}

/// Asks a socket of the registry for its driver, and the driver for the node. Nothing if the socket registers no CSI driver.
///
/// # Errors
/// When one of them does not answer, or the driver does not fit.
pub async fn node_driver(socket: &Path) -> Result<Option<NodeDriver>, DriverError> {
    let Some(Registered { name, endpoint, versions }) = registered(socket).await? else { return Ok(None) };
    if !versions.iter().any(|version| version.trim_start_matches('v').split('.').next() == Some("1")) {
        return Err(DriverError::refused(format!(
            "CSI driver {name} speaks version {} of CSI, and podfs speaks version 1; install another version of the driver",
            versions.join(", ")
        )));
    }
    let failed = |what: String| DriverError::refused(format!("CSI driver {name}: NodeGetInfo {what}"));
    let asked = async {
        let node = channel(&endpoint).await;
        let node = node
            .map_err(|error| DriverError::because(format!("CSI driver {name}: NodeGetInfo failed: {error}"), error))?;
        let answer = NodeClient::new(node).node_get_info(NodeGetInfoRequest {}).await;
        answer.map_err(|status| failed(format!("failed ({:?}): {}", status.code(), words(status.message()))))
    };
    let late = || failed(format!("has not answered for {} s; see the driver's log", NODE_INFO.as_secs()));
    let info = timeout(NODE_INFO, asked).await.map_err(|_| late())??.into_inner();
    NodeDriver::new(name.clone(), info).map(Some).ok_or_else(|| failed("names no node id".to_owned()))
}

/// Answers a registration: whether the cluster knows the driver, or why not. Gives whether the driver has taken the answer.
pub async fn answer(socket: &Path, refusal: Option<&str>) -> bool {
    let status =
        RegistrationStatus { plugin_registered: refusal.is_none(), error: refusal.unwrap_or_default().to_owned() };
    let told = async {
        let channel = channel(socket).await.ok()?;
        RegistrationClient::new(channel).notify_registration_status(status).await.ok()
    };
    timeout(ANSWER, told).await.ok().flatten().is_some()
}

/// The CSI driver that a socket of the registry registers, if it is one.
pub(super) async fn registered(socket: &Path) -> Result<Option<Registered>, DriverError> {
    let failed = |what: &str| DriverError::refused(format!("the registration at {} {what}", socket.display()));
    let asked = async {
        let channel = channel(socket).await.map_err(|_| failed("accepts no connection"))?;
        let answer = RegistrationClient::new(channel).get_info(InfoRequest {}).await;
        answer.map_err(|status| failed(&format!("failed ({:?}): {}", status.code(), words(status.message()))))
    };
    let info = timeout(ANSWER, asked).await.map_err(|_| failed("does not answer"))??.into_inner();
    let PluginInfo { r#type, name, endpoint, supported_versions: versions } = info;
    // A plugin that names no endpoint listens where it registers.
    let endpoint = match endpoint.trim_start_matches("unix://") {
        "" => socket.to_owned(),
        endpoint => PathBuf::from(endpoint),
    };
    Ok((r#type == CSI_PLUGIN).then_some(Registered { name, endpoint, versions }))
}

impl NodeDriver {
    fn new(name: String, info: NodeGetInfoResponse) -> Option<NodeDriver> {
        let NodeGetInfoResponse { node_id, max_volumes_per_node, accessible_topology } = info;
        let topology = accessible_topology.map(|topology| topology.segments).unwrap_or_default();
        (!node_id.is_empty()).then(|| NodeDriver {
            name,
            node_id,
            topology: topology.into_iter().collect(),
            // The cluster's number has 32 bits.
            most_volumes: (max_volumes_per_node > 0).then(|| i32::try_from(max_volumes_per_node).unwrap_or(i32::MAX)),
        })
    }
}

fn words(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MOST_WORDS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_leaves_the_number_of_volumes_to_the_cluster_has_none() {
        let info = |most| NodeGetInfoResponse {
            node_id: "w".to_owned(),
            max_volumes_per_node: most,
            ..NodeGetInfoResponse::default()
        };
        for (most, expected) in [(0, None), (-1, None), (24, Some(24)), (i64::MAX, Some(i32::MAX))] {
            let driver = NodeDriver::new("d".to_owned(), info(most)).expect("it names the node");
            assert_eq!(driver.most_volumes, expected, "{most}");
        }
        assert_eq!(NodeDriver::new("d".to_owned(), NodeGetInfoResponse::default()), None);
    }
}
