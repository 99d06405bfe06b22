//! The installed podfs: the package in a fresh Debian, its units under systemd, upgrade, removal and purge.
//!
//! Each test has its own machine: namespaces in which Debian's systemd runs, or no init. The machine is no virtual machine: it
//! uses the host's kernel. `tests/run` makes the Debian tree; without it, the tests are skipped.
//!
//! | module | owns |
//! |---|---|
//! | [`machine`] | machines: start, scripts, end |
//! | [`versions`] | the packages that the tests install |
//! | [`pods`] | the pod that podfs serves |
//! | [`load`] | a process that uses the volumes of the pod |
//! | [`units`] | tests of the units |
//! | [`life`] | tests of installation, upgrade and removal |
//! | [`agent`] | tests of the example of an agent of single pods |
//! | [`daemonset`] | tests of the image, and of the container of the DaemonSet |
//! | [`node`] | tests of `podfs node` as a unit, and of the example of an agent that uses it |

mod agent;
mod daemonset;
mod life;
mod load;
mod machine;
mod node;
mod pods;
mod units;
mod versions;

use std::io::{Write, stderr};

use crate::installed::machine::{Init, Machine};
use versions::{Versions, path_in_machine};

/// A machine with the packages in `/root`. Without a Debian tree, prints that the test is skipped.
fn machine(test: &str, init: Init) -> Option<Machine> {
    match Machine::start(init) {
        Ok(machine) => {
            let versions = Versions::get();
            for package in [versions.first(), versions.second(), versions.stranger()] {
                machine.copy(&package, &path_in_machine(&package));
            }
            Some(machine)
        }
        Err(missing) => {
            // `writeln!` bypasses the test harness, which captures `eprintln!` and shows it only if the test fails.
            let _ = writeln!(stderr(), "skipped: {test}: {missing}; tests/run makes a Debian tree");
            None
        }
    }
}

/// A [`machine`] on which the first package is installed.
fn installed(test: &str, init: Init) -> Option<Machine> {
    let machine = machine(test, init)?;
    install(&machine, &Versions::get().first());
    Some(machine)
}

/// Installs a package. Returns the output of dpkg.
#[track_caller]
fn install(machine: &Machine, package: &std::path::Path) -> String {
    machine.output_of(&format!("dpkg --install {} 2>&1", path_in_machine(package)))
}
