//! The checks of csi-sanity 5.5 for a node plugin, one by one, and registration.

use podfs::csi::v1::node_service_capability::{Type, rpc};
use podfs::csi::v1::*;
use tonic::Code;

use super::kubelet::Kubelet;
use crate::common::config_map;

const APP: &[(&str, &str)] = &[("kind", "configMap"), ("name", "app")];

fn kubelet() -> Kubelet {
    let kubelet = Kubelet::new();
    kubelet.node.put("app.yaml", &config_map("app", &[("key", "value")]));
    kubelet
}

#[test]
fn the_kubelet_registers_the_driver_though_its_authority_is_a_path() {
    let kubelet = kubelet();
    let _daemon = kubelet.start();
    let info = kubelet.register("podfs.io@reg.sock").expect("registered");
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", "podfs.io"));
    assert_eq!(info.endpoint, kubelet.socket().to_str().expect("text"));
    assert_eq!(info.supported_versions, ["1.0.0"]);
    assert!(kubelet.node.log().contains("the kubelet has registered podfs.io"));
    // Without the `@`, a client of this library cannot even send what a kubelet sends.
    assert!(kubelet.register("podfs.io-reg.sock").is_err());
}

#[test]
fn identity_and_node_say_what_they_are() {
    let kubelet = kubelet();
    let _daemon = kubelet.start();
    let info = kubelet.identity(async |mut one| one.get_plugin_info(GetPluginInfoRequest {}).await).expect("an answer");
    assert_eq!(info.get_ref().name, "podfs.io");
    assert_eq!(info.get_ref().vendor_version, env!("CARGO_PKG_VERSION"));
    let capabilities =
        kubelet.identity(async |mut one| one.get_plugin_capabilities(GetPluginCapabilitiesRequest {}).await);
    assert!(capabilities.expect("an answer").get_ref().capabilities.is_empty(), "it is no controller");
    let probed = kubelet.identity(async |mut one| one.probe(ProbeRequest {}).await).expect("an answer");
    assert_eq!(probed.get_ref().ready, Some(true));
    let node = kubelet.call(async |mut node| node.node_get_info(NodeGetInfoRequest {}).await).expect("an answer");
    assert!(node.get_ref().node_id == "n1" && node.get_ref().max_volumes_per_node >= 0);
    let capabilities = kubelet.call(async |mut node| node.node_get_capabilities(NodeGetCapabilitiesRequest {}).await);
    let kinds: Vec<_> = capabilities
        .expect("an answer")
        .into_inner()
        .capabilities
        .iter()
        .map(|capability| match &capability.r#type {
            Some(Type::Rpc(rpc)) => rpc.r#type(),
            None => panic!("each has an rpc"),
        })
        .collect();
    assert_eq!(kinds, [rpc::Type::GetVolumeStats, rpc::Type::VolumeCondition, rpc::Type::VolumeMountGroup]);
}

#[test]
fn a_field_that_is_missing_is_an_invalid_argument() {
    let kubelet = kubelet();
    let _daemon = kubelet.start();
    let whole = kubelet.volume("web", "config", APP).request;
    let id = NodePublishVolumeRequest { volume_id: String::new(), ..whole.clone() };
    let target = NodePublishVolumeRequest { target_path: String::new(), ..whole.clone() };
    let capability = NodePublishVolumeRequest { volume_capability: None, ..whole };
    for (request, field) in [(id, "volume_id"), (target, "target_path"), (capability, "volume_capability")] {
        let status = kubelet.publish_request(request).expect_err("it is refused");
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, format!("{field} is required").as_str()));
    }
    for (volume_id, target_path, field) in [("", "/x", "volume_id"), ("x", "", "target_path")] {
        let request =
            NodeUnpublishVolumeRequest { volume_id: volume_id.to_owned(), target_path: target_path.to_owned() };
        let status = kubelet.call(async |mut node| node.node_unpublish_volume(request).await).expect_err("refused");
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, format!("{field} is required").as_str()));
    }
    for (id, path) in [("", "/x"), ("x", "")] {
        assert_eq!(kubelet.stats(id, path.as_ref()).expect_err("refused").code(), Code::InvalidArgument);
    }
}

#[test]
fn a_volume_is_published_measured_and_unpublished_and_an_unknown_one_is_none() {
    let kubelet = kubelet();
    let _daemon = kubelet.start();
    let volume = kubelet.volume("web", "config", APP);
    assert_eq!(kubelet.stats(&volume.id, &volume.target).expect_err("not yet").code(), Code::NotFound);
    kubelet.unpublish(&volume).expect("an unknown volume is gone");
    kubelet.published(&volume);
    let stats = kubelet.stats(&volume.id, &volume.target).expect("stats");
    assert!(stats.usage.iter().any(|usage| usage.unit() == volume_usage::Unit::Bytes), "{stats:?}");
    assert!(!stats.volume_condition.expect("a condition").abnormal);
    assert_eq!(kubelet.stats(&volume.id, &kubelet.root()).expect_err("another path").code(), Code::NotFound);
    assert_eq!(kubelet.stats("other", &volume.target).expect_err("another volume").code(), Code::NotFound);
    kubelet.end_pod("web", std::slice::from_ref(&volume));
    kubelet.unpublish(&volume).expect("again");
}
