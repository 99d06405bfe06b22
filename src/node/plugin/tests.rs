use super::*;
use crate::node::sample;

struct Greedy(&'static str);

impl VolumePlugin for Greedy {
    fn name(&self) -> &'static str {
        self.0
    }

    fn can_support(&self, _: &Volume) -> bool {
        true
    }
}

#[test]
fn each_kind_of_volume_has_one_plugin_with_the_kubelets_name() {
    let volumes = [
        ("{name: a, configMap: {name: x}}", "kubernetes.io/configmap"),
        ("{name: b, secret: {secretName: x}}", "kubernetes.io/secret"),
        ("{name: c, downwardAPI: {}}", "kubernetes.io/downward-api"),
        ("{name: d, projected: {sources: []}}", "kubernetes.io/projected"),
        ("{name: e, hostPath: {path: /x}}", "kubernetes.io/host-path"),
        ("{name: f, emptyDir: {}}", "kubernetes.io/empty-dir"),
        ("{name: g, nfs: {server: s, path: /x}}", "kubernetes.io/nfs"),
        ("{name: i, flexVolume: {driver: a/b}}", "kubernetes.io/flexvolume"),
        ("{name: j, csi: {driver: d}}", "kubernetes.io/csi"),
        ("{name: h, persistentVolumeClaim: {claimName: x}}", "kubernetes.io/persistent-claim"),
    ];
    let pod = sample::pod("u", &volumes.map(|(volume, _)| volume), &[]).pod;
    let registry = PluginRegistry::built_in();
    for (volume, (_, name)) in pod.volumes.iter().zip(volumes) {
        let plugin = registry.find(volume).expect("a plugin");
        assert_eq!(plugin.name(), name);
        let unique = plugin.unique_volume_name(&pod.identity.uid, volume.name.as_str());
        assert_eq!(unique, format!("{name}/u-{}", volume.name));
        if let Some(directory) = volume.kind.directory {
            assert_eq!(directory.replace('~', "/"), name, "the directory's name leads to the plugin");
        }
    }
}

#[test]
fn a_volume_without_a_plugin_or_with_several_is_refused_by_name() {
    let pod = sample::pod("u", &["{name: x, iscsi: {targetPortal: a, iqn: b, lun: 0}}"], &[]).pod;
    let error = PluginRegistry::built_in().find(&pod.volumes[0]).err().expect("no plugin").to_string();
    assert!(
        error.starts_with("no volume plugin matched") && error.contains("iscsi") && error.contains("\"x\""),
        "{error}"
    );
    let both = PluginRegistry::new(vec![Box::new(Greedy("a")), Box::new(Greedy("b"))]).expect("two plugins");
    let error = both.find(&pod.volumes[0]).err().expect("two plugins").to_string();
    assert_eq!(error, "multiple volume plugins matched: a,b");
    let twice =
        PluginRegistry::new(vec![Box::new(Greedy("a")), Box::new(Greedy("a"))]).expect_err("one name").to_string();
    assert_eq!(twice, "volume plugin \"a\" was registered more than once");
}
