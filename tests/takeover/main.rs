//! Servers, keepers and supervisors that are killed, hang or are replaced: no system call of a container fails.

mod adoption;
mod changed_manifest;
mod commits;
#[path = "../common/mod.rs"]
mod common;
mod confinement;
mod containers;
mod crash;
mod held;
mod io_uring;
mod isolation;
mod live;
mod next_server;
mod operations;
mod other_version;
mod publishing;
mod replaced_sources;
mod soak;
mod upgrade;
mod watchdog;
