//! The symbols belong to the programs, and neither has paths of the build machine.

use std::fs;
use std::io::{Write, stderr};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::built::unpacked::Unpacked;
use crate::common::packages::{PROGRAMS, packages, stdout_of, top};

/// A part of the name of a function of each program.
const FUNCTIONS: [&str; 3] = [" podfs::supervisor::", " podfs_fuse::server::", " podfs::supervisor::"];

#[test]
fn the_symbols_are_those_of_the_programs_and_are_found_by_their_build_ids() {
    let tree = Unpacked::debian();
    for (program, function) in PROGRAMS.into_iter().zip(FUNCTIONS) {
        // eu-unstrip refuses symbols of another program.
        let whole = TempDir::with_prefix("podfs-test-").expect("a directory");
        let whole = whole.path().join("podfs");
        let mut unstrip = Command::new("eu-unstrip");
        stdout_of(unstrip.arg(tree.path(program)).arg(tree.symbols(program)).arg("--output").arg(&whole));
        let names = stdout_of(Command::new("nm").arg("--demangle").arg(&whole));
        assert!(names.contains(function), "the functions of {program} have no names");
        let sections = stdout_of(Command::new("readelf").args(["--sections", "--wide"]).arg(&whole));
        assert!(sections.contains(".debug_line"), "the functions of {program} have no lines:\n{sections}");
    }
}

#[test]
fn the_programs_are_stripped_and_name_the_files_of_their_symbols() {
    let tree = Unpacked::debian();
    for program in PROGRAMS {
        let sections = stdout_of(Command::new("readelf").args(["--sections", "--wide"]).arg(tree.path(program)));
        for section in [".symtab", ".debug_info", ".debug_line"] {
            assert!(!sections.contains(section), "{section} is in {program}");
        }
        let link = stdout_of(Command::new("readelf").args(["--string-dump=.gnu_debuglink"]).arg(tree.path(program)));
        let symbols = tree.symbols(program);
        assert!(link.contains(symbols.file_name().and_then(|name| name.to_str()).expect("a name")), "{link}");
    }
}

#[test]
fn no_path_of_this_machine_is_in_a_published_program_or_its_symbols() {
    if !packages().published {
        // `writeln!` bypasses the test harness, which captures `eprintln!` and shows it only if the test fails.
        let _ = writeln!(stderr(), "skipped: no_path_of_this_machine_is_in_a_published_program: tests/run builds one");
        return;
    }
    let tree = Unpacked::debian();
    let sysroot = stdout_of(Command::new("rustc").args(["--print", "sysroot"]));
    let home = std::env::var("HOME").expect("a home");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target directory");
    let machine_paths = [top(), target.to_owned(), Path::new(&home).join(".cargo"), sysroot.trim().into()];
    for program in PROGRAMS {
        let plain = TempDir::with_prefix("podfs-test-").expect("a directory");
        let plain = plain.path().join("symbols");
        let mut decompress = Command::new("objcopy");
        stdout_of(decompress.arg("--decompress-debug-sections").arg(tree.symbols(program)).arg(&plain));
        for file in [tree.path(program), plain.clone()] {
            let bytes = fs::read(&file).expect("a file");
            for path in &machine_paths {
                let path = path.to_str().expect("a text");
                assert!(find(&bytes, path).is_none(), "{path} is in {}: {:?}", file.display(), find(&bytes, path));
            }
        }
        // The build replaces the paths by these ones. The search finds them, so it would also have found the original
        // paths.
        let symbols = fs::read(plain).expect("a file");
        for replacement in ["/usr/src/podfs", "/usr/src/crates"] {
            assert!(find(&symbols, replacement).is_some(), "{replacement} is not in the symbols of {program}");
        }
    }
}

/// A text among bytes, with the bytes that follow it, up to 120 in all.
fn find(bytes: &[u8], text: &str) -> Option<String> {
    let position = bytes.windows(text.len()).position(|window| window == text.as_bytes())?;
    Some(String::from_utf8_lossy(&bytes[position..bytes.len().min(position + 120)]).into_owned())
}
