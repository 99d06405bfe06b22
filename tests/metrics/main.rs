//! Metrics: each of them is told, read by the parsers of Prometheus, and moves when it should.

#[path = "../api_server/mod.rs"]
mod api_server;
#[path = "../common/mod.rs"]
mod common;
#[path = "../api_source/rig.rs"]
mod rig;

mod api;
mod examples;
mod http;
mod labels;
mod moves;
mod pods;
mod scrape;
mod survival;
