//! Each kind as it was in a manifest, and its translation for the CSI driver.

use serde_json::json;

use super::*;

fn translated(field: &str, fields: Value, context: Context<'_>) -> Result<Csi, String> {
    translate(field, &fields, context).expect(field).map_err(|error| error.to_string())
}

/// Driver, handle and attributes.
fn short(csi: &Csi) -> (String, String, Vec<String>) {
    let attributes = csi.attributes.iter().map(|(key, value)| format!("{key}={value}")).collect();
    (csi.driver.clone(), csi.handle.clone().expect("a handle"), attributes)
}

#[test]
fn cd_01_each_kind_that_moved_to_a_driver_is_translated_for_it() {
    let rows = [
        ("awsElasticBlockStore", json!({"volumeID": "vol-1", "fsType": "ext4"}), "ebs.csi.aws.com vol-1 [partition=0]"),
        (
            "awsElasticBlockStore",
            json!({"volumeID": "aws://us-east-1a/vol-2", "partition": 3}),
            "ebs.csi.aws.com vol-2 [partition=3]",
        ),
        ("awsElasticBlockStore", json!({"volumeID": "aws:///vol-3"}), "ebs.csi.aws.com vol-3 [partition=0]"),
        ("azureDisk", json!({"diskName": "d", "diskURI": "/x/d"}), "disk.csi.azure.com /x/d [kind=Managed]"),
        (
            "azureDisk",
            json!({"diskName": "d", "diskURI": "/x/d", "cachingMode": "None", "fsType": "xfs", "kind": "Dedicated"}),
            "disk.csi.azure.com /x/d [cachingMode=None,fsType=xfs,kind=Dedicated]",
        ),
        (
            "azureFile",
            json!({"secretName": "azure-storage-account-acme-secret", "shareName": "s", "secretNamespace": "n"}),
            "file.csi.azure.com group#acme#s#pv-1#n [sharename=s]",
        ),
        (
            "azureFile",
            json!({"secretName": "other", "shareName": "s"}),
            "file.csi.azure.com group#other#s#pv-1#shop [sharename=s]",
        ),
        ("cinder", json!({"volumeID": "c-1"}), "cinder.csi.openstack.org c-1 []"),
        (
            "gcePersistentDisk",
            json!({"pdName": "d", "partition": 2}),
            "pd.csi.storage.gke.io projects/UNSPECIFIED/zones/europe-west1-b/disks/d [partition=2]",
        ),
        ("portworxVolume", json!({"volumeID": "p-1"}), "pxd.portworx.com p-1 []"),
        (
            "vsphereVolume",
            json!({"volumePath": "[ds] a/b.vmdk", "storagePolicyName": "gold"}),
            "csi.vsphere.vmware.com [ds] a/b.vmdk [storagepolicyname=gold]",
        ),
    ];
    let labels = BTreeMap::from([("topology.kubernetes.io/zone".to_owned(), "europe-west1-b".to_owned())]);
    let annotations = BTreeMap::from([(RESOURCE_GROUP.to_owned(), "group".to_owned())]);
    let context =
        Context { name: "pv-1", labels: Some(&labels), annotations: Some(&annotations), claim_namespace: Some("shop") };
    for (field, fields, expected) in rows {
        let (driver, handle, attributes) = short(&translated(field, fields, context).expect(field));
        assert_eq!(format!("{driver} {handle} [{}]", attributes.join(",")), expected);
    }
}

#[test]
fn cd_01_fields_that_all_drivers_have_are_kept() {
    let csi = translated("cinder", json!({"volumeID": "c", "fsType": "xfs", "readOnly": true}), Context::default());
    let csi = csi.expect("translated");
    assert_eq!((csi.fs_type.as_deref(), csi.read_only, csi.is_ephemeral()), (Some("xfs"), true, false));
    let secret = json!({"secretName": "k", "shareName": "s"});
    let mut csi = translated("azureFile", secret, Context { name: "v", ..Context::default() }).expect("translated");
    assert_eq!(csi.stage_secret, Some(SecretReference { namespace: None, name: "k".to_owned() }));
    complete(&mut csi, "shop");
    assert_eq!(csi.handle.as_deref(), Some("#k#s#v#shop"), "the pod's namespace is part of the handle");
}

#[test]
fn cd_01_a_volume_that_the_pod_describes_has_the_access_mode_of_its_kind() {
    let disk = |read_only: bool| json!({"pdName": "d", "volumeID": "v", "readOnly": read_only});
    let share = json!({"secretName": "k", "shareName": "s"});
    for (field, fields, expected) in [
        ("gcePersistentDisk", disk(false), "ReadWriteOnce"),
        ("gcePersistentDisk", disk(true), "ReadOnlyMany"),
        ("portworxVolume", disk(false), "ReadWriteOnce"),
        ("portworxVolume", disk(true), "ReadOnlyMany"),
        ("cinder", disk(true), "ReadWriteOnce"),
        ("azureFile", share, "ReadWriteMany"),
    ] {
        let csi = translated(field, fields, Context { name: "v", ..Context::default() }).expect(field);
        assert_eq!(inline_access_mode(&csi), expected, "{field}");
        let ephemeral = Csi { handle: None, ..csi };
        assert_eq!(inline_access_mode(&ephemeral), "ReadWriteOnce", "a csi volume of {}", ephemeral.driver);
    }
}

#[test]
fn cd_01_a_google_disk_has_an_access_mode_that_its_driver_takes() {
    let modes = |field: &str, modes: &[&str]| {
        access_modes(field, modes.iter().map(|mode| (*mode).to_owned()).collect()).join(",")
    };
    let (once, read, many) = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany");
    for (before, after) in [
        (&[once][..], once),
        (&[read], read),
        (&[many], once),
        (&[read, once], once),
        (&[read, many], once),
        (&[once, many], once),
        (&["ReadWriteOncePod"], "ReadWriteOncePod"),
        (&[], ""),
    ] {
        assert_eq!(modes("gcePersistentDisk", before), after, "{before:?}");
    }
    assert_eq!(modes("azureFile", &[read, many]), "ReadOnlyMany,ReadWriteMany");
}

#[test]
fn cd_01_the_zones_of_a_google_disk_are_in_its_handle() {
    let handle = |zones: Option<&str>| {
        let labels = zones.map(|zones| BTreeMap::from([(ZONES[1].to_owned(), zones.to_owned())]));
        let context = Context { labels: labels.as_ref(), ..Context::default() };
        translated("gcePersistentDisk", json!({"pdName": "d"}), context).map(|csi| csi.handle.expect("a handle"))
    };
    assert_eq!(handle(None), Ok("projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d".to_owned()));
    let regional = handle(Some("us-central1-a__us-central1-b"));
    assert_eq!(regional, Ok("projects/UNSPECIFIED/regions/us-central1/disks/d".to_owned()));
    for zones in ["us-central1-a__us-east1-b", "a__b"] {
        let error = handle(Some(zones)).expect_err(zones);
        assert_eq!(error, "pdName: the zones of the PersistentVolume's label are not those of one region");
    }
}

#[test]
fn cd_01_an_untranslatable_volume_is_reported_without_its_values() {
    let rows = [
        (
            "awsElasticBlockStore",
            json!({"volumeID": "aws://zone/disk"}),
            "volumeID: \"aws://zone/disk\" is no volume of AWS",
        ),
        ("awsElasticBlockStore", json!({}), "volumeID: is required"),
        ("azureFile", json!({"shareName": "s", "secretName": ""}), "secretName: is required"),
        ("cinder", json!({"volumeID": {"hunter2": 1}}), "has a field of the wrong type"),
    ];
    for (field, fields, expected) in rows {
        let error = translated(field, fields, Context::default()).expect_err(field);
        assert!(error.starts_with(expected) && !error.contains("hunter"), "{error}");
    }
    assert!(translate("iscsi", &json!({}), Context::default()).is_none());
}
