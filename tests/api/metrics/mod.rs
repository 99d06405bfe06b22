//! Metrics: each of them is told, read by the parsers of Prometheus, and moves when it should.

mod api;
mod examples;
mod http;
mod labels;
mod moves;
mod pods;
mod scrape;
mod survival;
