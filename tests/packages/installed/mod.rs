//! podfs as it is installed: the package in a fresh Debian, its units under systemd, upgrade, removal and purge.
//!
//! Each test has a machine of its own: namespaces in which Debian's systemd runs, or no init. It is no virtual machine: the
//! kernel is that of the host. `tests/run` makes the Debian tree; where there is none, the tests are skipped.
//!
//! | module | owns |
//! |---|---|
//! | [`machine`] | machines: started, used, switched off |
//! | [`versions`] | the packages that are installed |
//! | [`pods`] | the pod that is served |
//! | [`load`] | a process that uses its volumes meanwhile |
//! | [`units`] | tests of the units |
//! | [`life`] | tests of a package's life |
//! | [`agent`] | tests of the example of an agent of single pods |
//! | [`daemonset`] | the image, and the container of the DaemonSet
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
use versions::{Versions, inside};

/// A machine with the packages in `/root`, unless it cannot be had.
fn machine(test: &str, init: Init) -> Option<Machine> {
    match Machine::start(init) {
        Ok(machine) => {
            let versions = Versions::get();
            for package in [versions.first(), versions.second(), versions.stranger()] {
                machine.copy(&package, &inside(&package));
            }
            Some(machine)
        }
        Err(missing) => {
            // Past the test harness, which shows what a test prints only if it fails.
            let _ = writeln!(stderr(), "skipped: {test}: {missing}; tests/run makes a Debian tree");
            None
        }
    }
}

/// [`machine`] on which the first package is installed.
fn installed(test: &str, init: Init) -> Option<Machine> {
    let machine = machine(test, init)?;
    install(&machine, &Versions::get().first());
    Some(machine)
}

/// Installs a package, and gives what that says.
#[track_caller]
fn install(machine: &Machine, package: &std::path::Path) -> String {
    machine.does(&format!("dpkg --install {} 2>&1", inside(package)))
}
