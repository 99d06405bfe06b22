//! The command line: `podfs run` and commands about it, arguments and settings, manuals and examples.

mod agent;
mod audit;
mod bad_input;
mod bad_machine;
mod cleanup;
#[path = "../common/mod.rs"]
mod common;
mod config;
mod frozen;
mod go_manifests;
mod lifecycle;
mod manual;
mod mount;
mod mounts;
mod node;
mod progress;
mod push;
mod render;
mod sources;
mod status;
mod trace;
mod unmounts;
mod view;
mod waiting;
