//! The scripts that run tests. `tests/retry`: a flaky test does not fail the run, a broken one does. `tests/quick` leaves out
//! tests that exist.

use std::fs;
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::common::packages::top;

const RETRY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/retry");
const QUICK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/quick");

/// Runs `tests/retry` in a project with tests that fail in this many runs, and pass then. Each test counts its runs in a file.
/// A test whose name ends with `in_guest` or `in_cli` is in that program; the others are unit tests.
fn retry(failures: &[(&str, u32)]) -> (Output, String) {
    retry_within(600, failures)
}

/// As [`retry`]; the repetitions may take this many seconds together.
fn retry_within(seconds: u32, failures: &[(&str, u32)]) -> (Output, String) {
    let project = TempDir::with_prefix("podfs-test-").expect("a directory");
    let manifest = "[package]\nname = \"sample\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace]\n";
    fs::write(project.path().join("Cargo.toml"), manifest).expect("Cargo.toml");
    fs::create_dir(project.path().join("src")).expect("src");
    let passes = "#[test]\nfn passes() {}\n";
    let (mut tests, mut guest, mut cli) = (passes.to_owned(), passes.to_owned(), passes.to_owned());
    for (name, runs) in failures {
        let file = project.path().join(name);
        let program = match name.split_once("in_") {
            Some((_, "guest")) => &mut guest,
            Some((_, "cli")) => &mut cli,
            _ => &mut tests,
        };
        *program += &format!(
            "#[test]\nfn {name}() {{\n    let earlier = std::fs::read({file:?}).unwrap_or_default();\n    \
             std::fs::write({file:?}, [&earlier[..], b\"x\"].concat()).unwrap();\n    assert!(earlier.len() >= {runs});\n}}\n"
        );
    }
    fs::write(project.path().join("src/lib.rs"), tests).expect("src/lib.rs");
    for (program, tests) in [("guest", guest), ("cli", cli)] {
        fs::create_dir_all(project.path().join("tests").join(program)).expect("tests");
        fs::write(project.path().join("tests").join(program).join("main.rs"), tests).expect("main.rs");
    }
    let mut retry = Command::new(RETRY);
    let steps = project.path().join("steps");
    fs::write(&steps, "1234\ttests/run: compile the tests\n").expect("steps");
    retry.arg("--offline").current_dir(&project).env("PODFS_TEST_STEPS", steps);
    retry.env("PODFS_TEST_RETRY_SECONDS", seconds.to_string());
    retry.env("CARGO_TARGET_DIR", project.path().join("target"));
    let output = retry.output().expect("tests/retry");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, text)
}

#[test]
fn a_test_that_passes_alone_is_flaky_and_the_last_line_names_it() {
    let (output, text) = retry(&[("unlucky_once", 1), ("unlucky_twice_in_cli", 2), ("unlucky_in_guest", 1)]);
    assert!(output.status.success(), "{text}");
    let flaky =
        "flaky:\n    --lib unlucky_once\n    --test cli unlucky_twice_in_cli\n    --test guest unlucky_in_guest\n";
    assert!(text.ends_with(flaky), "{text}");
}

#[test]
fn a_test_that_fails_three_times_fails_the_run() {
    let (output, text) = retry(&[("broken", 3), ("unlucky", 1)]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.ends_with("failed:\n    --lib broken\nflaky:\n    --lib unlucky\n"), "{text}");
}

#[test]
fn many_failed_tests_run_again_and_none_does_once_the_time_is_over() {
    let failures = [("a", 1), ("b", 1), ("c", 1), ("d", 1)];
    let (output, text) = retry(&failures);
    assert!(output.status.success(), "{text}");
    assert!(text.ends_with("flaky:\n    --lib a\n    --lib b\n    --lib c\n    --lib d\n"), "{text}");
    let (output, text) = retry_within(0, &failures);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        !text.contains("runs again") && text.contains("d does not run again: the repetitions have taken 0 s"),
        "{text}"
    );
}

#[test]
fn a_run_names_its_slowest_steps_also_those_before_the_tests() {
    let (output, text) = retry(&[]);
    assert!(output.status.success(), "{text}");
    let (_, steps) = text.split_once("the slowest steps").expect("a list");
    let first = steps.lines().nth(1).unwrap_or_default();
    assert_eq!(first, "  1234.0 s  tests/run: compile the tests", "{text}");
    for step in ["Running unittests src/lib.rs", "tests/retry: the guests' programs", "tests/retry: the examples"] {
        assert!(steps.contains(&format!(" s  {step}")), "{step}: {text}");
    }
}

#[test]
fn the_scripts_are_clean() {
    let scripts = [
        "tests/retry",
        "tests/quick",
        "tests/run",
        "tests/skew/build",
        ".ci/run",
        "packaging/build",
        "packaging/hidden-paths",
    ];
    let mut command = Command::new("shellcheck");
    let checked = command.arg("--external-sources").args(scripts).current_dir(top()).output().expect("shellcheck");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

#[test]
fn the_quick_script_leaves_out_existing_tests() {
    let script = fs::read_to_string(QUICK).expect("a script");
    let list = script.split("need_root=(").nth(1).and_then(|text| text.split(')').next()).expect("a list");
    let modules = list.split_whitespace().map(|tests| tests.split("tests::").next().unwrap_or_default());
    let modules: Vec<_> = modules.map(|module| module.trim_end_matches("::").replace("::", "/")).collect();
    assert!(modules.len() > 5, "{modules:?}");
    for module in modules {
        let is_there = |sources: &str| {
            let place = top().join(sources).join(&module);
            place.is_dir() || place.with_extension("rs").is_file()
        };
        assert!(is_there("src") || is_there("fuse/src"), "tests/quick names {module}, which does not exist");
    }
}
