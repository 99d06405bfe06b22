//! A process that uses a pod's volumes all the time, and whose calls may not fail.

use std::fs;
use std::process::{Child, Stdio};

use crate::common::eventually;
use crate::installed::machine::Machine;
use crate::installed::pods::{CONFIG, HOST};

/// Reads, writes, makes and removes, with a file that stays open, until `/tmp/enough` is there. Anything that fails ends it.
const USE: &str = r#"
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

/// The user of the volumes.
pub struct Load<'a> {
    machine: &'a Machine,
    child: Child,
}

impl<'a> Load<'a> {
    /// Starts to use the volumes of the pod.
    pub fn start(machine: &'a Machine) -> Self {
        machine.does("rm -f /tmp/enough /tmp/rounds /srv/host/log /srv/host/held");
        let mut command = machine.command(&format!("config={CONFIG}\nhost={HOST}\n{USE}"));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("nsenter starts");
        let mut load = Self { machine, child };
        load.goes_on();
        load
    }

    fn rounds(&self) -> u64 {
        let text = fs::read_to_string(self.machine.path("/tmp/rounds")).unwrap_or_default();
        text.trim().parse().unwrap_or_default()
    }

    /// Waits until the volumes were used some more.
    #[track_caller]
    pub fn goes_on(&mut self) {
        let before = self.rounds();
        eventually("the volumes are used", || {
            let ended = self.child.try_wait().expect("a child");
            assert!(ended.is_none(), "a call failed in round {}", self.rounds() + 1);
            self.rounds() > before + 20
        });
    }

    /// Ends it, and checks that all it has written is there once.
    #[track_caller]
    pub fn ends_well(mut self) {
        self.goes_on();
        self.machine.write("/tmp/enough", "");
        let rounds = self.rounds();
        let status = self.child.wait().expect("a child");
        assert!(status.success(), "a call failed after round {rounds}, or something was lost");
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
