//! SE-02: the value of a Secret is in the volume and in its manifest, and nowhere else. When the value is replaced,
//! podfs erases the old one from its memory.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::common::outcome::finish;
use crate::common::*;
use nix::unistd::Pid;

/// A value that nothing else on this machine contains. Two values with different words have no part in common.
fn value(word: &str) -> String {
    let part = |number: u64| {
        let mut hasher = DefaultHasher::new();
        (word, std::process::id(), number).hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    };
    (0..3).map(part).collect()
}

/// `value` in base64, as `data` of a Secret has it.
fn base64(value: &str) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |bytes: &[u8]| {
        let number = (0..3).fold(0, |number, place| number << 8 | u32::from(bytes.get(place).copied().unwrap_or(0)));
        let letter = move |place: usize| match place <= bytes.len() {
            true => char::from(ALPHABET[(number >> (18 - 6 * place) & 0x3f) as usize]),
            false => '=',
        };
        (0..4).map(letter).collect::<String>()
    };
    value.as_bytes().chunks(3).map(group).collect()
}

/// A Secret `tls` with the keys `text` (as `stringData`) and `encoded` (as `data`).
fn manifest(text: &str, encoded: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: tls}}\nstringData: {{text: {text}}}\ndata: {{encoded: {}}}\n",
        base64(encoded)
    )
}

const VOLUMES: &str =
    "[{name: keys, secret: {secretName: tls}}, {name: all, projected: {sources: [{secret: {name: tls}}]}}]";

/// The parts of a value. To find one of them is to find a leak.
fn parts(value: &str) -> Vec<Vec<u8>> {
    const PART: usize = 12;
    value.as_bytes().chunks_exact(PART).map(<[u8]>::to_vec).collect()
}

fn contains(haystack: &[u8], parts: &[Vec<u8>]) -> bool {
    parts.iter().any(|part| find(haystack, part).is_some())
}

/// The offset of `part`. `memmem` searches megabytes quickly, also in a debug build.
fn find(haystack: &[u8], part: &[u8]) -> Option<usize> {
    // SAFETY: both ranges are valid for the length given, and only read.
    let address = unsafe { libc::memmem(haystack.as_ptr().cast(), haystack.len(), part.as_ptr().cast(), part.len()) };
    (!address.is_null()).then(|| address as usize - haystack.as_ptr() as usize)
}

#[test]
fn the_tests_base64_is_right() {
    assert_eq!(["", "f", "fo", "foo", "foob"].map(base64), ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]);
}

#[test]
fn no_log_line_and_no_trace_line_shows_a_value() {
    let [text, encoded] = ["text", "encoded"].map(value);
    let secret = [&text, &encoded, &base64(&encoded)].map(|value| parts(value)).concat();
    let assert_silent = |fixture: &Fixture| {
        for name in ["log", "out"] {
            assert!(!contains(&fs::read(fixture.path(name)).expect("a file"), &secret), "{name} shows the secret");
        }
    };

    let fixture = Fixture::new(&pod(VOLUMES));
    fixture.write("objects/tls.yaml", &manifest(&text, &encoded));
    let mut command = fixture.command();
    command.env("RUST_LOG", "trace");
    let mut running = fixture.start_command(command);
    running.wait_ready();
    wait_content(&running.volume("keys").join("encoded"), &encoded);
    // The log line about a manifest that is not valid does not show the values of the manifest.
    fixture.write("objects/tls.yaml", &format!("{}  - {text}: [", manifest(&text, &encoded)));
    running.wait_log("podfs uses the earlier content");
    fixture.write("objects/tls.yaml", &manifest(&text, "other"));
    wait_content(&running.volume("keys").join("encoded"), "other");
    running.stop();
    assert!(running.log().contains("DEBUG"), "the log has the lines of level DEBUG: {}", running.log());
    assert_silent(&fixture);

    let fixture = Fixture::new("");
    fixture.write("volume.yaml", "name: keys\nsecret: {secretName: tls}\n");
    fixture.write("objects/tls.yaml", &manifest(&text, &encoded));
    let mut command = Command::new(PODFS);
    command.args(["mount", "--trace", "--volume"]).arg(fixture.path("volume.yaml")).arg("--objects");
    command.arg(fixture.objects()).arg(fixture.path("at")).env("RUST_LOG", "trace").stdin(Stdio::null());
    let mut running = fixture.spawn(&mut command);
    running.wait_log("is ready");
    wait_content(&fixture.path("at/text"), &text);
    running.stop();
    let trace = fs::read_to_string(fixture.path("out")).expect("the trace");
    assert!(trace.contains("READ "), "{trace}");
    assert_silent(&fixture);
}

#[test]
fn memory_is_locked_and_neither_dumped_nor_traced() {
    let fixture = Fixture::new(&pod(VOLUMES));
    fixture.write("objects/tls.yaml", &manifest("text", "encoded"));
    // A process may read the memory of another process with the same user and the same capabilities, unless the other
    // process forbids it. So podfs runs without CAP_SYS_PTRACE here, as the process that tries to read its memory.
    let mut command = without_ptrace(PODFS);
    command.args(fixture.command().get_args());
    let mut running = fixture.start_command(command);
    running.wait_ready();
    for pid in [running.pid(), running.server()] {
        let locked: u64 = status(pid, "VmLck:").trim_end_matches("kB").trim().parse().expect("a number");
        assert!(locked > 0, "{pid} has no locked memory");
        let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("limits");
        let core = limits.lines().find(|line| line.starts_with("Max core file size")).expect("a line");
        assert_eq!(core.split_whitespace().skip(4).take(2).collect::<Vec<_>>(), ["0", "0"], "{pid}: {core}");
        assert!(!can_open_memory(pid), "{pid} lets another process of its user open its memory");
    }
    // The check above can fail: it opens the memory of a process that does not forbid this.
    let mut unprotected = without_ptrace("cat").stdin(Stdio::piped()).spawn().expect("cat starts");
    let pid = Pid::from_raw(i32::try_from(unprotected.id()).expect("a pid"));
    // At first the process is `setpriv`, which still has CAP_SYS_PTRACE.
    let opened = std::panic::catch_unwind(|| eventually("the memory can be opened", || can_open_memory(pid)));
    let _ = (unprotected.kill(), unprotected.wait());
    opened.expect("the memory of an unprotected process can be opened");
}

#[test]
fn a_process_unmaps_the_code_of_its_start_and_continues() {
    let fixture = Fixture::new(&pod(VOLUMES));
    fixture.write("objects/tls.yaml", &manifest("text", "encoded"));
    let mut running = fixture.run();
    for pid in [running.server(), running.pid()] {
        // A process of a debug build touches more than three quarters of its code when it starts.
        eventually("most of the code is unmapped", || {
            let (in_memory, all) = code(pid);
            in_memory < all * 3 / 8
        });
    }
    fixture.write("objects/tls.yaml", &manifest("changed", "encoded"));
    wait_content(&running.volume("keys").join("text"), "changed");
    running.stop();
}

/// The code of its program that a process has in memory, and all of it, in KiB.
fn code(pid: Pid) -> (u64, u64) {
    let program = fs::read_link(format!("/proc/{pid}/exe")).expect("a program");
    let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("the maps");
    let mapping = maps.split_once(" r-xp ").expect("code").1;
    assert!(mapping.lines().next().is_some_and(|line| line.ends_with(&program.display().to_string())), "{mapping}");
    let size = |name: &str| {
        let size = mapping.lines().find_map(|line| line.strip_prefix(name)).expect("a size");
        size.trim().trim_end_matches(" kB").parse().expect("a number")
    };
    (size("Rss:"), size("Size:"))
}

/// A program with root's capabilities except CAP_SYS_PTRACE.
fn without_ptrace(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", program]);
    command
}

/// Whether another process of the same user may open the memory of the process `pid`. No memory is mapped at address 0,
/// so `head` always fails: with EIO if it could open the file.
fn can_open_memory(pid: Pid) -> bool {
    let outcome = finish(without_ptrace("head").args(["-c1", &format!("/proc/{pid}/mem")]));
    match outcome.stderr {
        refused if refused.contains("Permission denied") => false,
        opened if opened.contains("Input/output error") => true,
        unexpected => panic!("unexpected error: {unexpected}"),
    }
}

fn status(pid: Pid, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a status");
    let line = status.lines().find(|line| line.starts_with(field)).expect("the field");
    line[field.len()..].trim().to_owned()
}

#[test]
fn no_file_but_the_manifest_holds_a_value() {
    let [text, encoded] = ["text", "encoded"].map(value);
    let secret = [&text, &encoded, &base64(&encoded)].map(|value| parts(value)).concat();
    let fixture = Fixture::new(&pod(VOLUMES));
    fixture.write("objects/tls.yaml", &manifest(&text, &encoded));
    fs::create_dir(fixture.path("tmp")).expect("a directory");
    let mut command = fixture.command();
    command.env("TMPDIR", fixture.path("tmp"));
    let mut running = fixture.start_command(command);
    running.wait_ready();
    for volume in ["keys", "all"] {
        wait_content(&running.volume(volume).join("text"), &text);
    }
    for directory in ["root", "run", "tmp"] {
        assert_not_below(&fixture.path(directory), &fixture.mounts(), &secret);
    }
    for pid in [running.pid(), running.server()] {
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors") {
            let path = entry.expect("an entry").path();
            // The process may have closed the descriptor meanwhile. Pipes, sockets and devices have no bytes that the
            // test could read.
            let Ok(target) = fs::read_link(&path) else { continue };
            if target.is_absolute() && target.is_file() {
                let contains_secret = contains(&fs::read(&path).expect("a file"), &secret);
                assert!(!contains_secret, "{} contains the secret", target.display());
            }
        }
    }
}

/// Checks that no file below `directory` contains the secret. Skips the mounted volumes.
fn assert_not_below(directory: &Path, mounts: &[std::path::PathBuf], secret: &[Vec<u8>]) {
    for entry in fs::read_dir(directory).expect("a listing") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !mounts.contains(&path) {
            assert_not_below(&path, mounts, secret);
        } else if path.is_file() {
            assert!(!contains(&fs::read(&path).expect("a file"), secret), "{} contains the secret", path.display());
        }
    }
}

#[test]
fn nothing_of_a_value_stays_in_memory_once_it_is_replaced_or_refused() {
    let pair = |word: &str| [value(word), value(&format!("{word}, encoded"))];
    let [old, refused, new] = ["old", "refused", "new"].map(pair);
    // podfs and its libraries handle buffers of this size differently from those of a short value.
    let long = |value: &str| value.to_owned() + &"x".repeat(300_000);
    let manifest_of = |[text, encoded]: &[String; 2]| manifest(text, &long(encoded));
    let fixture = Fixture::new(&pod(VOLUMES));
    fixture.write("objects/tls.yaml", &manifest_of(&old));
    let running = fixture.run();
    let wait_shown = |[text, encoded]: &[String; 2]| {
        for volume in ["keys", "all"] {
            wait_content(&running.volume(volume).join("text"), text);
            wait_content(&running.volume(volume).join("encoded"), &long(encoded));
        }
    };
    let assert_in_memory = |values: &[String; 2]| {
        for pid in [running.pid(), running.server()] {
            let finds_all = values.iter().all(|value| !remnants(pid, value).is_empty());
            assert!(finds_all, "the scan of the memory of {pid} does not find the current values");
        }
    };
    wait_shown(&old);
    assert_in_memory(&old);
    fixture.write("objects/tls.yaml", &format!("{}not: [valid", manifest_of(&refused)));
    running.wait_log("podfs uses the earlier content");
    fixture.write("objects/tls.yaml", &manifest_of(&new));
    wait_shown(&new);
    assert_in_memory(&new);
    for [text, encoded] in [&old, &refused] {
        for value in [text, encoded, &base64(encoded)] {
            assert_gone("supervisor", running.pid(), value);
            assert_gone("server", running.server(), value);
        }
    }
}

/// Waits until the memory of the process contains no part of the value. The server keeps the bytes of an old generation
/// until the kernel has forgotten its inodes, which takes a moment.
#[track_caller]
fn assert_gone(process: &str, pid: Pid, value: &str) {
    let deadline = Instant::now() + TIMEOUT;
    let mut regions_with_value = remnants(pid, value);
    while !regions_with_value.is_empty() && Instant::now() < deadline {
        regions_with_value = remnants(pid, value);
    }
    assert!(
        regions_with_value.is_empty(),
        "the memory of the {process} still contains {value}: {regions_with_value:#?}"
    );
}

/// The writable memory regions of a process that contain a part of the value: lines of `/proc/PID/maps`, with the
/// offset.
fn remnants(pid: Pid, value: &str) -> Vec<String> {
    let parts = parts(value);
    let memory = File::open(format!("/proc/{pid}/mem")).expect("memory");
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("regions");
    let mut regions_with_value = Vec::new();
    for region in maps.lines().filter(|region| region.split(' ').nth(1).is_some_and(|mode| mode.starts_with("rw"))) {
        let (start, end) = region.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
        let address = |text| u64::from_str_radix(text, 16).expect("an address");
        let mut bytes = vec![0; (address(end) - address(start)) as usize];
        // The read fails if the process has unmapped the region meanwhile.
        let read = memory.read_at(&mut bytes, address(start)).unwrap_or(0);
        bytes.truncate(read);
        for part in &parts {
            if let Some(at) = find(&bytes, part) {
                regions_with_value.push(format!("{region} at offset {at:#x}: {:?}", String::from_utf8_lossy(part)));
            }
        }
    }
    regions_with_value
}
