//! `podfs render`: the same entries as `podfs run`, without privileges, and without the content of secrets unless
//! `--reveal` is given.

pub mod archives;
mod diff;
mod generator;
mod manifests;
mod outputs;

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::outcome::{Outcome, finish};
use crate::common::packages::top;
use crate::common::*;

/// A user without privileges.
const NOBODY: u32 = 65534;
/// The content of the Secret in the examples.
const SECRET: &str = "correct horse battery staple";

/// `podfs render` of this pod and these objects.
fn render(pod: &Path, objects: &Path) -> Command {
    let mut command = Command::new(PODFS);
    command.arg("render").arg("--pod").arg(pod).arg("--objects").arg(objects).stdin(Stdio::null());
    command.env("PODFS_CONFIG", "/dev/null").env_remove("RUST_LOG");
    command
}

impl Fixture {
    fn render(&self, arguments: &[&str]) -> Outcome {
        finish(render(&self.pod(), &self.objects()).args(arguments))
    }
}

/// `podfs render` of the examples, as a user without privileges.
fn examples(arguments: &[&str]) -> Outcome {
    let examples = top().join("packaging/examples");
    let podfs = render(&examples.join("pod.yaml"), &examples.join("objects"));
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]);
    command.arg(PODFS).args(podfs.get_args()).args(arguments).env("PODFS_CONFIG", "/dev/null").stdin(Stdio::null());
    finish(&mut command)
}
