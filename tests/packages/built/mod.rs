//! The packages: their content, without anything of the build machine, and the verdict of Debian's checkers.
//!
//! A published build takes minutes, so there is one, made by `tests/run`; without it the podfs of the tests is packed and
//! the tests that look into a published program are skipped. A second one, which shows that both are equal byte for byte,
//! is made when `PODFS_TEST_REPRODUCE=1` asks for it. Always shown is that packing adds no difference of its own.
//!
//! | module | owns |
//! |---|---|
//! | [`contents`] | the files of each package, and its dependencies |
//! | [`licences`] | every crate is in the copyright file |
//! | [`deny`] | licences, bans and sources of the crates |
//! | [`symbols`] | the symbols fit the program; no path of this machine is in either |
//! | [`checkers`] | lintian and rpmlint |
//! | [`rpm_root`] | the rpm is installed into a root, and removed |
//! | [`equal_builds`] | two builds from two directories |
//! | [`refusals`] | what the script says when it cannot work |

mod checkers;
mod contents;
mod deny;
mod equal_builds;
mod licences;
mod refusals;
mod rpm_root;
mod symbols;
mod unpacked;
