//! Makes the messages and services of gRPC from the files below `proto/`. protox reads them, so no protoc is needed. Links the
//! programs `podfs-supervisor` and `podfs-fuse` at fixed addresses.

use std::env;
use std::error::Error;

/// The files with messages and services, below `proto/`.
const FILES: [&str; 5] = [
    "podfs/volumemanager/v1/volumemanager.proto",
    "csi.proto",
    "plugin_registration.proto",
    "nri.proto",
    "ttrpc.proto",
];

/// The messages with fields that may be secret. For these, `src/csi` and `src/node/nri` define the debugging output.
const SECRET: [&str; 7] = [
    "csi.v1.NodeStageVolumeRequest",
    "csi.v1.NodePublishVolumeRequest",
    "csi.v1.NodeExpandVolumeRequest",
    "csi.v1.VolumeCapability.MountVolume",
    "nri.pkg.api.v1alpha1.Container",
    "ttrpc.Request",
    "ttrpc.Response",
];

/// The programs of which each pod has a process.
const PROGRAMS_OF_PODS: [&str; 2] = ["podfs-supervisor", "podfs-fuse"];

fn main() -> Result<(), Box<dyn Error>> {
    link_at_fixed_addresses();
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    tonic_prost_build::configure().skip_debug(SECRET).compile_fds(descriptors)?;
    Ok(())
}

/// A program that the kernel may load at any address relocates its pointers when it starts, and no two processes share those
/// pages: 490 KiB in each supervisor, 100 KiB in each server. If the program is linked at fixed addresses, all its processes share
/// them. Heap, stacks and libraries stay at random addresses, and so does all of `podfs`. See `docs/design/processes.md`.
fn link_at_fixed_addresses() {
    if env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|environment| environment == "gnu") {
        PROGRAMS_OF_PODS.iter().for_each(|program| println!("cargo::rustc-link-arg-bin={program}=-no-pie"));
    }
}
