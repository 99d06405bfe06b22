//! Metrics: podfs prints each of them, the parsers of Prometheus read it, and its value changes when it should.

mod api;
mod examples;
mod frozen;
mod http;
mod labels;
mod moves;
mod pods;
mod scrape;
mod survival;
