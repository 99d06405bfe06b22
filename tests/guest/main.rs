//! Tests that need another kernel: they run podfs in a virtual machine with a Linux kernel of Debian.

#[path = "../common/mod.rs"]
mod common;
mod failing_disk;
mod kernel_nfs;
mod linux_nfs;
#[path = "../machine/mod.rs"]
mod machine;
#[path = "../nfs_rig/mod.rs"]
mod nfs_rig;
mod old_kernel;
