//! A process that uses the volumes of a pod without pause, and checks that no call fails.

use std::fs;
use std::process::{Child, Stdio};

use crate::common::eventually;
use crate::installed::machine::Machine;
use crate::installed::pods::{CONFIG, HOST};

/// A script that reads, writes, creates and removes files, one of which stays open, until `/tmp/enough` exists. The script ends
/// when a command fails.
const SCRIPT: &str = r#"
exec 3>>"$host/held"
round=0
while [ ! -e /tmp/enough ]; do
    round=$((round + 1))
    read -r value <"$config/a"
    [ "$value" = 1 ]
    echo $round >>"$host/log"
    echo $round >&3
    mkdir "$host/directory"
    rmdir "$host/directory"
    echo $round >/tmp/rounds
done
[ $(wc -l <"$host/log") = $round ]
[ $(wc -l <"$host/held") = $round ]
"#;

/// The process that uses the volumes.
pub struct Load<'a> {
    machine: &'a Machine,
    child: Child,
}

impl<'a> Load<'a> {
    /// Starts the process, and waits until it uses the volumes.
    pub fn start(machine: &'a Machine) -> Self {
        machine.output_of("rm -f /tmp/enough /tmp/rounds /srv/host/log /srv/host/held");
        let mut command = machine.command(&format!("config={CONFIG}\nhost={HOST}\n{SCRIPT}"));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("nsenter starts");
        let mut load = Self { machine, child };
        load.wait_for_rounds();
        load
    }

    fn rounds(&self) -> u64 {
        let text = fs::read_to_string(self.machine.path("/tmp/rounds")).unwrap_or_default();
        text.trim().parse().unwrap_or_default()
    }

    /// Waits for further rounds of the script.
    #[track_caller]
    pub fn wait_for_rounds(&mut self) {
        let before = self.rounds();
        eventually("the volumes are used", || {
            let status = self.child.try_wait().expect("a child");
            assert!(status.is_none(), "a call failed in round {}", self.rounds() + 1);
            self.rounds() > before + 20
        });
    }

    /// Ends the process, and asserts that no call has failed and that each line was written once.
    #[track_caller]
    pub fn end(mut self) {
        self.wait_for_rounds();
        self.machine.write("/tmp/enough", "");
        let rounds = self.rounds();
        let status = self.child.wait().expect("a child");
        assert!(status.success(), "a call failed after round {rounds}, or a line was lost");
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
