//! What file systems of devices and volumes of drivers cost a pod that starts, and what the data of a device costs:
//! `cargo bench --bench drivers`. Needs root, `/dev/fuse`, loop devices and fio.
//!
//! | figure | how it is measured |
//! |---|---|
//! | mounting a device | a pod with a formatted device of 1 GiB, less a pod with a directory of the node, less mount(8) of the device |
//! | calling a driver | a pod with a volume of a CSI driver that stages and publishes, less a pod with a directory, less the time that the driver works |
//! | data of a device | fio on a file in the page cache, through the pod's volume and at the mount that podfs serves |
//!
//! The pod with a directory shows what any pod costs. Figures are medians of rounds in which all pods take turns.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/csi_driver.rs"]
#[allow(dead_code, reason = "the tests need more of it")]
mod csi_driver;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::loop_device::LoopDevice;
use common::{Fixture, Running};
use csi_driver::{CsiDriver, DRIVER};
use podfs::csi::v1::node_service_capability::rpc::Type;

const ROUNDS: usize = 21;
const ROUNDS_OF_DATA: usize = 6;

/// What fio does with a file of 256 MiB, and its arguments: those of the passthrough bench.
const JOBS: [(&str, &[&str]); 4] = [
    ("sequential read, 1 MiB", &["--rw=read", "--bs=1m"]),
    ("sequential write, 1 MiB", &["--rw=write", "--bs=1m"]),
    ("random read, 4 KiB", &["--rw=randread", "--bs=4k"]),
    ("random write, 4 KiB", &["--rw=randwrite", "--bs=4k"]),
];

fn main() {
    let device = LoopDevice::new(1024);
    device.run("mkfs.ext4", &["-q"]);
    let local = |path: &Path| format!("local: {{path: {}}}", path.display());
    let directory = Fixture::new("");
    let of_device = pod(&local(device.path()));
    starts(&device, &directory, &of_device);
    data(&of_device);
}

/// Prints how long pods take to start.
fn starts(device: &LoopDevice, directory: &Fixture, of_device: &Fixture) {
    let of_directory = pod(&format!("local: {{path: {}}}", directory.path("").display()));
    let of_driver = pod(&format!("csi: {{driver: {DRIVER}, volumeHandle: h}}"));
    let driver = CsiDriver::start(&of_driver.path("root"), &directory.path(""), &[Type::StageUnstageVolume]);
    let (mut bases, mut devices, mut drivers, mut mounts) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut own = Vec::new();
    for round in 0..=ROUNDS {
        let base = start(&of_directory);
        let with_device = start(of_device);
        let before = driver.spent();
        let (mut running, with_driver) = timed(&of_driver);
        let worked = driver.spent() - before;
        assert!(running.stop().success(), "{}", running.log());
        let mounted = mount(device, &directory.path("at"));
        // The first round warms everything.
        if round > 0 {
            bases.push(base);
            devices.push(with_device);
            drivers.push(with_driver);
            mounts.push(mounted);
            own.push(worked);
        }
    }
    let [base, with_device, with_driver] = [bases, devices, drivers].map(median);
    let [mounted, worked] = [mounts, own].map(median);
    println!("a pod with a directory is ready after          {}", shown(base));
    println!("a pod with a device is ready after             {}", shown(with_device));
    println!("a pod with a driver's volume is ready after    {}", shown(with_driver));
    println!("mount(8) of the device takes                   {}", shown(mounted));
    println!("the driver works for                           {}", shown(worked));
    println!("a device costs more than mount(8)              {}", difference(with_device, base + mounted));
    println!("a driver's volume costs more than the driver   {}", difference(with_driver, base + worked));
}

/// Prints what fio reads and writes through the pod's volume and at the mount beside it, in the same file. The data of one job is
/// on the device before the next job begins. In every other round the volume is first.
fn data(of_device: &Fixture) {
    let mut running = of_device.run();
    let volume = running.volume("data");
    let native = of_device.path("root/plugins/kubernetes.io/local-volume/mounts/pv-1");
    println!("\n256 MiB of a device in the page cache (MiB/s)      native       podfs   of native");
    for (what, job) in JOBS {
        let (mut natives, mut shown) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS_OF_DATA {
            let mut of_native = || natives.push(fio(&native, job));
            let mut of_podfs = || shown.push(fio(&volume, job));
            if round % 2 == 0 {
                of_native();
                of_podfs();
            } else {
                of_podfs();
                of_native();
            }
        }
        // The first round warms everything.
        let [native, podfs] = [natives.split_off(1), shown.split_off(1)].map(middle);
        println!("{what:<44} {native:>11.0} {podfs:>11.0} {:>11.2}", podfs / native);
    }
    assert!(running.stop().success(), "{}", running.log());
}

/// MiB/s of two seconds of a job on a file.
fn fio(directory: &Path, job: &[&str]) -> f64 {
    rustix::fs::sync();
    let output = Command::new("fio")
        .args(["--name=cached", "--size=256m", "--ioengine=psync", "--fallocate=none", "--invalidate=0"])
        .args(["--overwrite=1", "--time_based", "--runtime=2", "--output-format=json", "--filename=data"])
        .args(job)
        .current_dir(directory)
        .output()
        .expect("fio is installed (apt-get install fio)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
    let moved = ["read", "write"].map(|direction| report["jobs"][0][direction]["bw_bytes"].as_f64().expect("a figure"));
    (moved[0] + moved[1]) / f64::from(1 << 20)
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

/// How long a pod takes to be ready. Stops the pod again.
fn start(fixture: &Fixture) -> Duration {
    let (mut running, took) = timed(fixture);
    assert!(running.stop().success(), "{}", running.log());
    took
}

fn timed(fixture: &Fixture) -> (Running, Duration) {
    let begun = Instant::now();
    let running = fixture.run();
    (running, begun.elapsed())
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

fn middle(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn shown(time: Duration) -> String {
    format!("{:7.1} ms", time.as_secs_f64() * 1e3)
}

/// The difference of two medians, which may be negative.
fn difference(time: Duration, other: Duration) -> String {
    format!("{:7.1} ms", (time.as_secs_f64() - other.as_secs_f64()) * 1e3)
}
