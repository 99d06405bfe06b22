//! What the fuzz targets have in common.
//!
//! | module | owns |
//! |---|---|
//! | [`memory`] | how much memory a decoder asks for |
//! | [`server`] | results as a server writes them |
//! | [`stream`] | a stream that is read in pieces |
//! | [`decoded`] | what has to be true of everything that was decoded |

pub mod decoded;
pub mod memory;
pub mod server;
pub mod stream;
