//! Passthrough volumes: pods read and change files of the host through a mount.

mod attributes;
mod bind_mounts;
mod block_volumes;
mod claims;
mod coherence;
#[path = "../common/mod.rs"]
mod common;
mod csi_device;
#[path = "../common/csi_driver.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod csi_driver;
mod csi_settings;
mod csi_size;
mod csi_volume;
mod data;
mod descriptors;
mod devices;
mod differential;
mod directories;
mod empty_dir;
mod escape;
mod failing_disks;
mod file_handles;
mod flex_volume;
mod forgetful_sources;
mod fuser_gaps;
mod host_path;
mod identity;
mod io_uring;
mod late_drivers;
mod limit;
mod locked_changes;
mod locks;
mod messages;
mod mounts;
mod names;
mod nested_mounts;
mod programs;
mod public_suites;
mod replaced;
mod setid;
mod several_devices;
mod shared;
#[path = "../suites/mod.rs"]
mod suites;
mod xfstests;
