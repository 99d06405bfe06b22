//! A client of the Kubernetes API: requests, watches that survive outages, and credentials. It knows objects by kind and name,
//! and nothing of what podfs does with them.
//!
//! | module | owns |
//! |---|---|
//! | `settings` | address and credentials, from a kubeconfig or from inside of a cluster |
//! | `exec` | credentials from a program that the kubeconfig names |
//! | `tls` | certificates, for rustls |
//! | `client` | requests, answers and their limits; up-to-date credentials |
//! | `address` | the URLs of objects |
//! | `error` | errors, and whether waiting helps |
//! | `retry`, `outage`, `backoff` | pauses before a failed request is repeated |
//! | `follower` | the objects of a collection and every change of them, also across outages |
//! | `poller` | one object that may be got and not watched |
//! | `version` | resource versions: which of two is newer |

pub(crate) mod address;
mod backoff;
pub(crate) mod client;
pub(crate) mod error;
mod exec;
pub(crate) mod follower;
mod outage;
pub(crate) mod poller;
pub(crate) mod retry;
pub(crate) mod settings;
mod tls;
mod version;
