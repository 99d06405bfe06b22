//! The symbols fit the programs, and neither has paths of the build machine.

use std::fs;
use std::io::{Write, stderr};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::built::unpacked::Unpacked;
use crate::common::packages::{PROGRAMS, packages, told_by, top};

/// A function of each program.
const FUNCTIONS: [&str; 3] = [" podfs::supervisor::", " podfs_fuse::server::", " podfs::supervisor::"];

#[test]
fn the_symbols_are_those_of_the_programs_and_are_found_by_their_build_ids() {
    let tree = Unpacked::debian();
    for (program, function) in PROGRAMS.into_iter().zip(FUNCTIONS) {
        // eu-unstrip refuses symbols of another program.
        let whole = TempDir::with_prefix("podfs-test-").expect("a directory");
        let whole = whole.path().join("podfs");
        let mut unstrip = Command::new("eu-unstrip");
        told_by(unstrip.arg(tree.path(program)).arg(tree.symbols(program)).arg("--output").arg(&whole));
        let names = told_by(Command::new("nm").arg("--demangle").arg(&whole));
        assert!(names.contains(function), "the functions of {program} have no names");
        let sections = told_by(Command::new("readelf").args(["--sections", "--wide"]).arg(&whole));
        assert!(sections.contains(".debug_line"), "the functions of {program} have no lines:\n{sections}");
    }
}

#[test]
fn the_programs_are_stripped_and_name_the_files_of_their_symbols() {
    let tree = Unpacked::debian();
    for program in PROGRAMS {
        let sections = told_by(Command::new("readelf").args(["--sections", "--wide"]).arg(tree.path(program)));
        for kept in [".symtab", ".debug_info", ".debug_line"] {
            assert!(!sections.contains(kept), "{kept} is in {program}");
        }
        let link = told_by(Command::new("readelf").args(["--string-dump=.gnu_debuglink"]).arg(tree.path(program)));
        let symbols = tree.symbols(program);
        assert!(link.contains(symbols.file_name().and_then(|name| name.to_str()).expect("a name")), "{link}");
    }
}

#[test]
fn no_path_of_this_machine_is_in_a_published_program_or_its_symbols() {
    if !packages().published {
        // Past the test harness, which shows what a test prints only if it fails.
        let _ = writeln!(stderr(), "skipped: no_path_of_this_machine_is_in_a_published_program: tests/run builds one");
        return;
    }
    let tree = Unpacked::debian();
    let sysroot = told_by(Command::new("rustc").args(["--print", "sysroot"]));
    let home = std::env::var("HOME").expect("a home");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is in the target directory");
    let of_machine = [top(), target.to_owned(), Path::new(&home).join(".cargo"), sysroot.trim().into()];
    for program in PROGRAMS {
        let plain = TempDir::with_prefix("podfs-test-").expect("a directory");
        let plain = plain.path().join("symbols");
        let mut decompress = Command::new("objcopy");
        told_by(decompress.arg("--decompress-debug-sections").arg(tree.symbols(program)).arg(&plain));
        for file in [tree.path(program), plain.clone()] {
            let bytes = fs::read(&file).expect("a file");
            for path in &of_machine {
                let path = path.to_str().expect("a text");
                assert!(find(&bytes, path).is_none(), "{path} is in {}: {:?}", file.display(), find(&bytes, path));
            }
        }
        // The symbols do have replaced paths, so the search above would have found the original ones.
        let symbols = fs::read(plain).expect("a file");
        for replaced in ["/usr/src/podfs", "/usr/src/crates"] {
            assert!(find(&symbols, replaced).is_some(), "{replaced} is not in the symbols of {program}");
        }
    }
}

/// A text among bytes, with what follows it.
fn find(bytes: &[u8], text: &str) -> Option<String> {
    let place = bytes.windows(text.len()).position(|window| window == text.as_bytes())?;
    Some(String::from_utf8_lossy(&bytes[place..bytes.len().min(place + 120)]).into_owned())
}
