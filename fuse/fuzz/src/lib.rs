//! The fuzz targets as functions. libFuzzer calls them, and so does the test `nfs::fuzz_seeds`, with the seeds.
//!
//! | module | owns |
//! |---|---|
//! | [`mount`], [`record`], [`reply`], [`results`] | one target each |
//! | [`memory`] | the memory that a decoder allocates |
//! | [`server`] | results as a server encodes them |
//! | [`stream`] | a stream that is read in pieces |
//! | [`decoded`] | the properties of every decoded value |

pub mod decoded;
pub mod memory;
pub mod mount;
pub mod record;
pub mod reply;
pub mod results;
pub mod server;
pub mod stream;
