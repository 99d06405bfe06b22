//! The commands of the README's section on `podfs node` work.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::outcome::finish;
use crate::common::packages::top;
use crate::common::{Fixture, PODFS};

#[test]
fn the_example_of_the_readme_runs() {
    let fixture = Fixture::new("");
    let readme = fs::read_to_string(top().join("README.md")).expect("the README");
    let section = readme.split("\n## All pods of a node\n").nth(1).expect("the section");
    let script = section.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a script");
    assert!(script.lines().count() <= 10, "it is short");
    let programs = Path::new(PODFS).parent().expect("a directory").display().to_string();
    let path = programs + ":" + &std::env::var("PATH").expect("a PATH");
    std::os::unix::fs::symlink(top().join("packaging"), fixture.path("packaging")).expect("a link");
    // With job control, as in an interactive shell.
    let script = format!("set -em\n{script}wait\n");
    let mut command = Command::new("bash");
    command.arg("-c").arg(script).current_dir(fixture.path("")).env("PATH", path).env("PODFS_CONFIG", "/dev/null");
    command.env("PODFS_ROOT_DIR", fixture.path("root")).env("PODFS_RUN_DIR", fixture.path("run"));
    let outcome = finish(fixture.mark(&mut command).stdin(Stdio::null()));
    assert_eq!(outcome.stdout.trim(), "80809090", "{}", outcome.stderr);
    assert_eq!(fixture.mounts(), Vec::<std::path::PathBuf>::new());
    assert_eq!(fixture.processes(), [], "{}", outcome.stderr);
}
