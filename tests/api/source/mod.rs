//! Volumes whose pod and objects come from an API server: changes, outages, refusals and requests.

mod bundles;
mod certificates;
mod credentials;
mod crowd;
mod drivers;
mod node;
mod objects;
mod outages;
mod pods;
mod refusals;
mod tokens;
mod view;
