//! Makes the messages and services of gRPC from the files below `proto/`. protox reads them, so no protoc is needed.

use std::error::Error;

/// The files, below `proto/`.
const FILES: [&str; 5] = [
    "podfs/volumemanager/v1/volumemanager.proto",
    "csi.proto",
    "plugin_registration.proto",
    "nri.proto",
    "ttrpc.proto",
];

/// The messages with fields that may be secret. `src/csi` and `src/node/nri` say what they show in debugging output.
const SECRET: [&str; 7] = [
    "csi.v1.NodeStageVolumeRequest",
    "csi.v1.NodePublishVolumeRequest",
    "csi.v1.NodeExpandVolumeRequest",
    "csi.v1.VolumeCapability.MountVolume",
    "nri.pkg.api.v1alpha1.Container",
    "ttrpc.Request",
    "ttrpc.Response",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let described = protox::compile(FILES, ["proto"])?;
    tonic_prost_build::configure().skip_debug(SECRET).compile_fds(described)?;
    Ok(())
}
