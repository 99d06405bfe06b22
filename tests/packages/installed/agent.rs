//! The example of an agent of single pods, on a machine with systemd, where it runs podfs as units. `tests/cli/agent.rs` tests
//! it on a machine without systemd.

use std::io::{Write, stderr};
use std::path::Path;
use std::process::Command;

use crate::common::{PODFS, PODFS_FUSE, PODFS_SUPERVISOR};
use crate::installed::machine::{Init, Machine};
use crate::installed::pods::assert_nothing_served;

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/examples");
const WORKER: &str = "b2a7d1c8-83f5-4f0b-8a36-7c2e94d0f502";

/// A machine with podfs, the examples in `/examples`, and jq.
pub(super) fn machine(test: &str) -> Option<Machine> {
    let machine = match Machine::start(Init::Systemd) {
        Ok(machine) => machine,
        Err(missing) => {
            // `writeln!` bypasses the test harness, which captures `eprintln!` and shows it only if the test fails.
            let _ = writeln!(stderr(), "skipped: {test}: {missing}; tests/run makes a Debian tree");
            return None;
        }
    };
    machine.copy(Path::new(PODFS), "/usr/bin/podfs");
    machine.output_of("mkdir -p /usr/libexec/podfs");
    machine.copy(Path::new(PODFS_FUSE), "/usr/libexec/podfs/podfs-fuse");
    machine.copy(Path::new(PODFS_SUPERVISOR), "/usr/libexec/podfs/podfs-supervisor");
    let status = Command::new("cp").arg("-r").arg(EXAMPLES).arg(machine.path("/examples")).status();
    assert!(status.expect("cp").success());
    machine.copy(Path::new("/usr/bin/jq"), "/usr/bin/jq");
    let libraries = Command::new("ldd").arg("/usr/bin/jq").output().expect("ldd");
    let libraries = String::from_utf8(libraries.stdout).expect("text");
    for library in libraries.split_whitespace().filter(|word| word.starts_with("/lib")) {
        if machine.run(&format!("[ -e {library} ]")).code != Some(0) {
            machine.copy(Path::new(library), library);
        }
    }
    machine.output_of("mkdir -p /run/podfs /var/lib/podfs");
    Some(machine)
}

/// Asserts that no unit, no process and no file of the agent is left.
#[track_caller]
pub(super) fn assert_nothing_left(machine: &Machine) {
    assert_eq!(machine.output_of("systemctl list-units --all --no-legend 'podfs-example-*'"), "");
    assert_eq!(machine.output_of("ls /tmp"), "");
    assert_nothing_served(machine);
}

#[test]
fn the_example_of_an_agent_starts_units_and_leaves_none() {
    let Some(machine) = machine("the_example_of_an_agent_starts_units_and_leaves_none") else { return };
    let outcome = machine.run("bash /examples/single/agent.sh");
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    for line in
        ["web: I listen on 9090 now", "worker: my password is the second one now", "agent: all pods have stopped well"]
    {
        assert!(outcome.out.lines().any(|printed| printed == line), "{line:?} is not in: {outcome:?}");
    }
    let journal = machine.output_of(&format!("journalctl --no-pager --output cat --unit podfs-example-{WORKER}"));
    assert!(journal.contains("podfs: pod default/worker is ready"), "podfs ran as a unit: {journal}");
    assert_nothing_left(&machine);
}

#[test]
fn the_example_of_an_agent_tells_where_the_reason_of_a_failure_stands() {
    let Some(machine) = machine("the_example_of_an_agent_tells_where_the_reason_of_a_failure_stands") else { return };
    machine.write(&format!("/examples/single/pods/{WORKER}/pod.yaml"), "kind: [");
    let outcome = machine.run("bash /examples/single/agent.sh");
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    let sentence = format!("agent: pod {WORKER}: podfs failed; journalctl -u podfs-example-{WORKER} says why");
    assert!(outcome.out.contains(&sentence) && outcome.out.contains("web: I listen on 9090 now"), "{outcome:?}");
    assert_nothing_left(&machine);
}
