//! The fuzz targets, without their callers: libFuzzer, and the test `nfs::fuzz_seeds` that reads the seeds.
//!
//! | module | owns |
//! |---|---|
//! | [`mount`], [`record`], [`reply`], [`results`] | one target each |
//! | [`memory`] | how much memory a decoder asks for |
//! | [`server`] | results as a server writes them |
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
