//! Makes the messages and services of gRPC from the files below `proto/`. protox reads them, so no protoc is needed.

use std::error::Error;

/// The files, below `proto/`.
const FILES: [&str; 1] = ["podfs/volumemanager/v1/volumemanager.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let described = protox::compile(FILES, ["proto"])?;
    tonic_prost_build::configure().compile_fds(described)?;
    Ok(())
}
