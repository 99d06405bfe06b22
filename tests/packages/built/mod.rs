//! The packages: their content, which has no path of the build machine, and the verdict of lintian and rpmlint.
//!
//! A release build takes minutes, so `tests/run` makes one for all tests. Without it, the tests pack the podfs that cargo has
//! built for them, and skip those that need a release build. With `PODFS_TEST_REPRODUCE=1`, a second release build tests that
//! both are equal byte for byte. Without it, this test only covers the packing.
//!
//! | module | owns |
//! |---|---|
//! | [`contents`] | the files of each package, and its dependencies |
//! | [`licences`] | the copyright file has every crate |
//! | [`deny`] | licences, bans and sources of the crates |
//! | [`symbols`] | the symbols belong to the programs; neither has paths of this machine |
//! | [`checkers`] | lintian and rpmlint |
//! | [`rpm_root`] | rpm installs the package into a root directory and removes it |
//! | [`equal_builds`] | builds from two directories are equal |
//! | [`refusals`] | errors of `packaging/build` |

mod advisories;
mod checkers;
mod contents;
mod deny;
mod equal_builds;
mod licences;
mod refusals;
mod rpm_root;
mod symbols;
mod unpacked;
