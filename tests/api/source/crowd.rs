//! Many pods of a node that start at the same moment. The server limits their requests together, as those of one
//! client.

use std::time::Duration;

use crate::common::*;
use crate::rig::{NODE, Rig};

const PODS: usize = 4;

#[test]
fn pods_that_start_at_one_moment_retry_when_the_server_says_and_log_no_warning() {
    let rig = Rig::new("[]");
    let account = "{apiVersion: v1, kind: ServiceAccount, metadata: {name: default, namespace: default}}";
    rig.server.put(account);
    rig.server.put(&config_map("kube-root-ca.crt", &[("ca.crt", "anchors")]));
    for pod in 0..PODS {
        rig.server.put(&config_map(&format!("app-{pod}"), &[("key", "1")]));
        rig.server.put(&secret(&format!("keys-{pod}"), &[("key", "1")]));
        let uid = format!("6f0c1f0e-0000-4000-8000-{:012x}", fastrand::u64(..1 << 48));
        rig.server.put(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: web-{pod}, namespace: default, uid: {uid}}}, spec: {{\
             nodeName: {NODE}, containers: [{{name: web, image: web}}], volumes: [\
             {{name: config, configMap: {{name: app-{pod}}}}}, {{name: keys, secret: {{secretName: keys-{pod}}}}}, \
             {{name: access, projected: {{sources: [{{serviceAccountToken: {{path: token}}}}, \
             {{configMap: {{name: kube-root-ca.crt}}}}]}}}}]}}}}"
        ));
    }
    // The requests of a single pod already exceed the limit.
    rig.server.limit(4, Duration::from_millis(300));
    let mut all: Vec<Running> =
        (0..PODS).map(|pod| rig.fixture.start_command(rig.command_of(&format!("default/web-{pod}")))).collect();
    all.iter_mut().for_each(Running::wait_ready);
    let log = all[0].log();
    assert!(rig.server.too_many() > 0, "the limit is too high for this test");
    for words in ["MountVolume.SetUp failed", "WARN", "not as an API server does"] {
        let lines: Vec<_> = log.lines().filter(|line| line.contains(words)).collect();
        assert!(lines.iter().all(|line| line.contains("cgroup")), "{words}: {lines:?}");
    }
    assert!(rig.server.objects("Event").is_empty(), "{:?}", rig.server.objects("Event"));
    // For each pod, the server has answered for the pod itself, three objects and a token.
    let answered = rig.server.requests().len() - rig.server.too_many();
    assert_eq!(answered, PODS * 5, "{:?}", rig.server.requests());
}
