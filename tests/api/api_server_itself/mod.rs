//! The API server of the tests behaves as a real one: tests against it would show nothing otherwise.

mod caller;
mod connections;
mod creating;
mod faults;
mod objects;
mod permissions;
mod reading;
mod requests;
mod watching;
