//! Tests of the tests' API server: it behaves as a real one. Without that, other tests would prove nothing.

mod caller;
mod connections;
mod creating;
mod faults;
mod objects;
mod permissions;
mod reading;
mod requests;
mod watching;
