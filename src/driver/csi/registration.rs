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
use crate::driver::{DriverError, quoted};

/// The type under which a CSI driver registers.
const CSI_PLUGIN: &str = "CSIPlugin";
/// Longest wait for an answer of a registration.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest duration of NodeGetInfo, for which a driver may have to call its cloud.
const NODE_INFO_TIMEOUT: Duration = Duration::from_secs(120);

/// A CSI driver of the node, with its fields in the CSINode object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeDriver {
    /// Its name.
    pub name: String,
    /// The driver's id of the node.
    pub node_id: String,
    /// The topology of the node, as labels of the driver.
    pub topology: BTreeMap<String, String>,
    /// Most volumes of the driver on the node. `None` if the driver has no limit.
    pub most_volumes: Option<i32>,
}

/// A plugin that has registered.
pub(super) struct RegisteredPlugin {
    /// The name of the driver.
    pub(super) name: String,
    /// Its socket.
    pub(super) endpoint: PathBuf,
    versions: Vec<String>,
}

/// Gets the driver that a socket of the registry registers, with the driver's data of the node. `None` if the socket registers no
/// CSI driver.
///
/// # Errors
/// When the socket or the driver does not answer, or an answer is invalid.
pub async fn node_driver(socket: &Path) -> Result<Option<NodeDriver>, DriverError> {
    let Some(RegisteredPlugin { name, endpoint, versions }) = registered(socket).await? else { return Ok(None) };
    if !versions.iter().any(|version| version.trim_start_matches('v').split('.').next() == Some("1")) {
        return Err(DriverError::refused(format!(
            "CSI driver {name} speaks version {} of CSI, and podfs speaks version 1; install another version of the driver",
            versions.join(", ")
        )));
    }
    let failed = |what: String| DriverError::refused(format!("CSI driver {name}: NodeGetInfo {what}"));
    let call = async {
        let node = channel(&endpoint).await;
        let node = node
            .map_err(|error| DriverError::because(format!("CSI driver {name}: NodeGetInfo failed: {error}"), error))?;
        let answer = NodeClient::new(node).node_get_info(NodeGetInfoRequest {}).await;
        answer.map_err(|status| failed(format!("failed ({:?}): {}", status.code(), quoted(status.message()))))
    };
    let late = || failed(format!("has not answered for {} s; see the driver's log", NODE_INFO_TIMEOUT.as_secs()));
    let info = timeout(NODE_INFO_TIMEOUT, call).await.map_err(|_| late())??.into_inner();
    NodeDriver::new(name.clone(), info).map(Some).ok_or_else(|| failed("names no node id".to_owned()))
}

/// Answers a registration: success, or the reason `refusal`. Returns whether the driver has accepted the answer.
pub async fn answer(socket: &Path, refusal: Option<&str>) -> bool {
    let status =
        RegistrationStatus { plugin_registered: refusal.is_none(), error: refusal.unwrap_or_default().to_owned() };
    let call = async {
        let channel = channel(socket).await.ok()?;
        RegistrationClient::new(channel).notify_registration_status(status).await.ok()
    };
    timeout(ANSWER_TIMEOUT, call).await.ok().flatten().is_some()
}

/// The CSI driver that a socket of the registry registers, if it is one.
pub(super) async fn registered(socket: &Path) -> Result<Option<RegisteredPlugin>, DriverError> {
    let failed = |what: &str| DriverError::refused(format!("the registration at {} {what}", socket.display()));
    let call = async {
        let channel = channel(socket).await.map_err(|_| failed("accepts no connection"))?;
        let answer = RegistrationClient::new(channel).get_info(InfoRequest {}).await;
        answer.map_err(|status| failed(&format!("failed ({:?}): {}", status.code(), quoted(status.message()))))
    };
    let info = timeout(ANSWER_TIMEOUT, call).await.map_err(|_| failed("does not answer"))??.into_inner();
    let PluginInfo { r#type, name, endpoint, supported_versions: versions } = info;
    // A plugin without an endpoint listens at its registration socket.
    let endpoint = match endpoint.trim_start_matches("unix://") {
        "" => socket.to_owned(),
        endpoint => PathBuf::from(endpoint),
    };
    Ok((r#type == CSI_PLUGIN).then_some(RegisteredPlugin { name, endpoint, versions }))
}

impl NodeDriver {
    fn new(name: String, info: NodeGetInfoResponse) -> Option<NodeDriver> {
        let NodeGetInfoResponse { node_id, max_volumes_per_node, accessible_topology } = info;
        let topology = accessible_topology.map(|topology| topology.segments).unwrap_or_default();
        (!node_id.is_empty()).then(|| NodeDriver {
            name,
            node_id,
            topology: topology.into_iter().collect(),
            // The field of CSINode has 32 bits.
            most_volumes: (max_volumes_per_node > 0).then(|| i32::try_from(max_volumes_per_node).unwrap_or(i32::MAX)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_without_a_limit_of_volumes_has_none_in_the_cluster() {
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
