//! The example of an agent of single pods where systemd runs, which then runs podfs. `tests/cli/agent.rs` has it elsewhere.

use std::io::{Write, stderr};
use std::path::Path;
use std::process::Command;

use crate::common::{PODFS, PODFS_FUSE, PODFS_SUPERVISOR};
use crate::installed::machine::{Init, Machine};
use crate::installed::pods::nothing_is_served;

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/examples");
const WORKER: &str = "b2a7d1c8-83f5-4f0b-8a36-7c2e94d0f502";

/// A machine with podfs, the examples in `/examples`, and jq.
pub(super) fn machine(test: &str) -> Option<Machine> {
    let machine = match Machine::start(Init::Systemd) {
        Ok(machine) => machine,
        Err(missing) => {
            // Past the test harness, which shows what a test prints only if it fails.
            let _ = writeln!(stderr(), "skipped: {test}: {missing}; tests/run makes a Debian tree");
            return None;
        }
    };
    machine.copy(Path::new(PODFS), "/usr/bin/podfs");
    machine.does("mkdir -p /usr/libexec/podfs");
    machine.copy(Path::new(PODFS_FUSE), "/usr/libexec/podfs/podfs-fuse");
    machine.copy(Path::new(PODFS_SUPERVISOR), "/usr/libexec/podfs/podfs-supervisor");
    let copied = Command::new("cp").arg("-r").arg(EXAMPLES).arg(machine.path("/examples")).status();
    assert!(copied.expect("cp").success());
    machine.copy(Path::new("/usr/bin/jq"), "/usr/bin/jq");
    let libraries = Command::new("ldd").arg("/usr/bin/jq").output().expect("ldd");
    let libraries = String::from_utf8(libraries.stdout).expect("text");
    for library in libraries.split_whitespace().filter(|word| word.starts_with("/lib")) {
        if machine.run(&format!("[ -e {library} ]")).code != Some(0) {
            machine.copy(Path::new(library), library);
        }
    }
    machine.does("mkdir -p /run/podfs /var/lib/podfs");
    Some(machine)
}

/// Checks that no unit, no process and no file of the agent is left.
#[track_caller]
pub(super) fn nothing_is_left(machine: &Machine) {
    assert_eq!(machine.does("systemctl list-units --all --no-legend 'podfs-example-*'"), "");
    assert_eq!(machine.does("ls /tmp"), "");
    nothing_is_served(machine);
}

#[test]
fn the_example_of_an_agent_starts_units_and_leaves_none() {
    let Some(machine) = machine("the_example_of_an_agent_starts_units_and_leaves_none") else { return };
    let said = machine.run("bash /examples/single/agent.sh");
    assert_eq!(said.code, Some(0), "{said:?}");
    for line in
        ["web: I listen on 9090 now", "worker: my password is the second one now", "agent: all pods have stopped well"]
    {
        assert!(said.out.lines().any(|told| told == line), "{line:?} is not in: {said:?}");
    }
    let journal = machine.does(&format!("journalctl --no-pager --output cat --unit podfs-example-{WORKER}"));
    assert!(journal.contains("podfs: pod default/worker is ready"), "podfs ran as a unit: {journal}");
    nothing_is_left(&machine);
}

#[test]
fn the_example_of_an_agent_tells_where_the_reason_of_a_failure_stands() {
    let Some(machine) = machine("the_example_of_an_agent_tells_where_the_reason_of_a_failure_stands") else { return };
    machine.write(&format!("/examples/single/pods/{WORKER}/pod.yaml"), "kind: [");
    let said = machine.run("bash /examples/single/agent.sh");
    assert_eq!(said.code, Some(1), "{said:?}");
    let told = format!("agent: pod {WORKER}: podfs failed; journalctl -u podfs-example-{WORKER} says why");
    assert!(said.out.contains(&told) && said.out.contains("web: I listen on 9090 now"), "{said:?}");
    nothing_is_left(&machine);
}
