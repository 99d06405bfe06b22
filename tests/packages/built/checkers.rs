//! lintian and rpmlint: no errors, and no warning without a reason.

use std::process::Command;

use crate::common::packages::{packages, told_by, top};

#[test]
fn lintian_finds_no_error_and_no_warning() {
    let packages = packages();
    // Tests run as root, of which lintian warns without `--allow-root`.
    let options = ["--allow-root", "--fail-on=error,warning", "--tag-display-limit=0", "--info"];
    told_by(Command::new("lintian").args(options).args([&packages.deb, &packages.dbgsym]));
}

#[test]
fn rpmlint_finds_no_error_and_no_warning() {
    let packages = packages();
    let report = told_by(
        Command::new("rpmlint")
            .arg("--config")
            .arg(top().join("packaging/rpmlint.toml"))
            .args([&packages.rpm, &packages.debuginfo]),
    );
    assert!(report.contains(" 0 errors, 0 warnings"), "{report}");
}
