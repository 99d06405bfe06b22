//! Errors of `packaging/build`: the script prints one sentence before it builds anything.

use std::path::Path;
use std::process::Command;

use crate::common::PODFS;
use crate::common::outcome::finish;
use crate::common::packages::top;

#[test]
fn bad_options_are_refused_in_one_sentence() {
    for (arguments, sentence) in [
        (&["--colour"][..], "--colour is not an option: see packaging/build --help"),
        (&["--output"], "--output needs a value: see packaging/build --help"),
        (&["--revision", "0"], "--revision 0 is not a positive number"),
        (&["--program", "/nonexistent"], "there is no program /nonexistent to pack"),
        (&["--program", "/etc/hostname"], "there is no podfs-fuse beside /etc/hostname to pack"),
    ] {
        let refused = finish(Command::new(top().join("packaging/build")).args(arguments));
        assert_eq!(refused.stderr.trim(), format!("packaging/build: {sentence}"));
        assert_eq!((refused.code, refused.stdout.as_str()), (Some(1), ""));
    }
}

#[test]
fn programs_that_are_missing_are_named_by_the_packages_to_install() {
    let target = if cfg!(target_arch = "aarch64") { "x86_64-unknown-linux-gnu" } else { "aarch64-unknown-linux-gnu" };
    let debian = target.replace("-unknown", "").replace('_', "-");
    if Path::new("/usr/bin").join(format!("{}-gcc", target.replace("-unknown", ""))).exists() {
        return;
    }
    let mut command = Command::new(top().join("packaging/build"));
    let refused = finish(command.args(["--program", PODFS, "--target", target]));
    assert!(refused.stderr.contains("programs are missing; run: apt-get install "), "{}", refused.stderr);
    assert!(refused.stderr.contains(&format!(" gcc-{debian}")), "{}", refused.stderr);
}
