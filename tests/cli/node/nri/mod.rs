//! Transparent volumes: podfs node as a plugin of a container runtime, over its real socket.

mod containerd;
mod cost;
mod cri;
mod lifecycle;
mod prepared;
mod protocol;
mod real;
mod replaced;
mod runtime;
