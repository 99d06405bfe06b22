//! lintian and rpmlint: the packages have no errors and no warnings, except those for which an override gives the
//! reason.

use std::process::Command;

use crate::common::packages::{packages, stdout_of, top};

#[test]
fn lintian_finds_no_error_and_no_warning() {
    let packages = packages();
    // Tests run as root; without `--allow-root`, lintian warns of that.
    let options = ["--allow-root", "--fail-on=error,warning", "--tag-display-limit=0", "--info"];
    stdout_of(Command::new("lintian").args(options).args([&packages.deb, &packages.dbgsym]));
}

#[test]
fn rpmlint_finds_no_error_and_no_warning() {
    let packages = packages();
    let report = stdout_of(
        Command::new("rpmlint")
            .arg("--config")
            .arg(top().join("packaging/rpmlint.toml"))
            .args([&packages.rpm, &packages.debuginfo]),
    );
    assert!(report.contains(" 0 errors, 0 warnings"), "{report}");
}
