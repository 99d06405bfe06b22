//! Volumes whose pod and objects come from an API server: changes, outages, what is refused, and what is asked for.

mod bundles;
mod certificates;
mod credentials;
mod crowd;
mod drivers;
mod node;
mod objects;
mod outages;
pub mod permissions;
mod pods;
mod refusals;
mod tokens;
mod view;
