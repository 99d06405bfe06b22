//! What file systems of devices and volumes of drivers cost a pod that starts: `cargo bench --bench drivers`. Needs root,
//! `/dev/fuse` and loop devices.
//!
//! In each round, a pod starts with a directory of the node, another one with a formatted device of 1 GiB, a third one with a
//! volume of a CSI driver, which stages and publishes; and mount(8) mounts the device. The directory stands for what each pod costs.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/csi_driver.rs"]
#[allow(dead_code, reason = "the tests need more of it")]
mod csi_driver;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::Fixture;
use common::loop_device::LoopDevice;
use csi_driver::{CsiDriver, DRIVER};
use podfs::csi::v1::node_service_capability::rpc::Type;

const ROUNDS: usize = 21;

fn main() {
    let device = LoopDevice::new(1024);
    device.run("mkfs.ext4", &["-q"]);
    let directory = Fixture::new("");
    let local = |path: &Path| format!("local: {{path: {}}}", path.display());
    let pods = [
        ("a directory", pod(&local(&directory.path("")))),
        ("a device", pod(&local(device.path()))),
        ("a driver", pod(&format!("csi: {{driver: {DRIVER}, volumeHandle: h}}"))),
    ];
    let _driver = CsiDriver::start(&pods[2].1.path("root"), &directory.path(""), &[Type::StageUnstageVolume]);
    let (mut starts, mut mounts) = (pods.each_ref().map(|_| Vec::new()), Vec::new());
    for _ in 0..ROUNDS {
        for ((_, fixture), times) in pods.iter().zip(&mut starts) {
            let begun = Instant::now();
            let mut running = fixture.run();
            times.push(begun.elapsed());
            assert!(running.stop().success(), "{}", running.log());
        }
        mounts.push(mount(&device, &directory.path("at")));
    }
    let mount = median(mounts);
    let [base, of_device, of_driver] = starts.map(median);
    println!("mount(8) of the device:               {}", shown(mount));
    for ((name, _), time) in pods.iter().zip([base, of_device, of_driver]) {
        println!("a pod with {name:<12} is ready after {}", shown(time));
    }
    println!("a device costs more than mount(8):    {}", shown(of_device.saturating_sub(base + mount)));
    println!("a driver costs more than a directory: {}", shown(of_driver.saturating_sub(base)));
}

/// A pod with a claim of a PersistentVolume with this source.
fn pod(source: &str) -> Fixture {
    let fixture = Fixture::new(&common::pod("[{name: data, persistentVolumeClaim: {claimName: data}}]"));
    let claim = "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data}, spec: {volumeName: pv-1}}";
    let volume = format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, \
         spec: {{claimRef: {{namespace: default, name: data}}, {source}}}}}"
    );
    let driver = format!(
        "{{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {{name: {DRIVER}}}, spec: {{attachRequired: false}}}}"
    );
    fixture.write("objects/all.yaml", &[claim, &volume, &driver].join("\n---\n"));
    fixture
}

/// How long mount(8) takes.
fn mount(device: &LoopDevice, at: &Path) -> Duration {
    fs::create_dir_all(at).expect("a directory");
    let begun = Instant::now();
    let mounted = Command::new("mount").arg(device.path()).arg(at).status().expect("mount runs");
    let took = begun.elapsed();
    assert!(mounted.success());
    nix::mount::umount(at).expect("unmounted");
    took
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn shown(time: Duration) -> String {
    format!("{:7.1} ms", time.as_secs_f64() * 1e3)
}
