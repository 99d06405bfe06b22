//! Prints a program as a script.

use std::fs;

use super::actors::peer;
use super::program::{Program, View};

/// The line of the peer that a script replaces by its program.
const EMPTY: &str = "PROGRAM = []\n";

/// A Python script that makes the calls in a native directory and in a volume, and prints the differences.
pub fn script(program: &Program) -> String {
    let frame = fs::read_to_string(peer()).expect("the peer");
    assert!(frame.contains(EMPTY), "the peer has a place for the program");
    let steps: String = program.0.iter().map(|step| format!("    {step},\n")).collect();
    frame.replace(EMPTY, &format!("PROGRAM = [\n{steps}]\n"))
}

/// How to run the script.
pub fn usage(program: &Program) -> String {
    let source = if program.uses(View::Host) || program.uses(View::SecondVolume) { " SOURCE" } else { "" };
    let second = if program.uses(View::SecondVolume) { " SECOND_VOLUME" } else { "" };
    format!("python3 SCRIPT NATIVE_DIRECTORY VOLUME{source}{second}")
}
