//! Projections: the content of configMap, secret, downwardAPI and projected volumes, and its changes.

mod attributes;
mod commit_repair;
#[path = "../common/mod.rs"]
mod common;
mod container;
mod content;
mod events;
mod kernel_fallbacks;
mod layout;
mod live;
mod model;
mod objects;
mod pod;
mod read_only;
mod refused_payload;
mod reloaders;
mod secrecy;
mod zero_messages;
