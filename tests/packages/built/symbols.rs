//! The symbols fit the program, and neither tells where it was built.

use std::fs;
use std::io::{Write, stderr};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::built::unpacked::Unpacked;
use crate::common::packages::{packages, told_by, top};

#[test]
fn the_symbols_are_those_of_the_program_and_are_found_by_its_build_id() {
    let tree = Unpacked::debian();
    let notes = told_by(Command::new("readelf").arg("--notes").arg(tree.program()));
    let id = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: ")).expect("a build id");
    let expected = tree.path(&format!("usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]));
    assert_eq!(tree.symbols(), expected);

    // eu-unstrip refuses symbols of another program.
    let whole = TempDir::with_prefix("podfs-test-").expect("a directory");
    let whole = whole.path().join("podfs");
    told_by(Command::new("eu-unstrip").arg(tree.program()).arg(tree.symbols()).arg("--output").arg(&whole));
    let names = told_by(Command::new("nm").arg("--demangle").arg(&whole));
    assert!(names.contains(" podfs::supervisor::"), "its functions have no names");
    let sections = told_by(Command::new("readelf").args(["--sections", "--wide"]).arg(&whole));
    assert!(sections.contains(".debug_line"), "its functions have no lines:\n{sections}");
}

#[test]
fn the_program_is_stripped_and_names_the_file_of_its_symbols() {
    let tree = Unpacked::debian();
    let sections = told_by(Command::new("readelf").args(["--sections", "--wide"]).arg(tree.program()));
    for kept in [".symtab", ".debug_info", ".debug_line"] {
        assert!(!sections.contains(kept), "{kept} is in the program");
    }
    let link = told_by(Command::new("readelf").args(["--string-dump=.gnu_debuglink"]).arg(tree.program()));
    assert!(link.contains(tree.symbols().file_name().and_then(|name| name.to_str()).expect("a name")), "{link}");
}

#[test]
fn no_path_of_this_machine_is_in_a_published_program_or_its_symbols() {
    if !packages().published {
        // Past the test harness, which shows what a test prints only if it fails.
        let _ = writeln!(stderr(), "skipped: no_path_of_this_machine_is_in_a_published_program: tests/run builds one");
        return;
    }
    let tree = Unpacked::debian();
    let plain = TempDir::with_prefix("podfs-test-").expect("a directory");
    let plain = plain.path().join("symbols");
    told_by(Command::new("objcopy").arg("--decompress-debug-sections").arg(tree.symbols()).arg(&plain));
    let sysroot = told_by(Command::new("rustc").args(["--print", "sysroot"]));
    let home = std::env::var("HOME").expect("a home");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is in the target directory");
    let of_machine = [top(), target.to_owned(), Path::new(&home).join(".cargo"), sysroot.trim().into()];
    for file in [tree.program(), plain.clone()] {
        let bytes = fs::read(&file).expect("a file");
        for path in &of_machine {
            let path = path.to_str().expect("a text");
            assert!(find(&bytes, path).is_none(), "{path} is in {}: {:?}", file.display(), find(&bytes, path));
        }
    }
    // What was looked for is what would have been there.
    let symbols = fs::read(plain).expect("a file");
    for replaced in ["/usr/src/podfs", "/usr/src/crates"] {
        assert!(find(&symbols, replaced).is_some(), "{replaced} is not in the symbols");
    }
}

/// A text among bytes, with what follows it.
fn find(bytes: &[u8], text: &str) -> Option<String> {
    let place = bytes.windows(text.len()).position(|window| window == text.as_bytes())?;
    Some(String::from_utf8_lossy(&bytes[place..bytes.len().min(place + 120)]).into_owned())
}
