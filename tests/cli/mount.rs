//! `podfs mount`: one volume in the foreground, for debugging.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::*;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use tempfile::TempDir;

/// A volume in `volume.yaml` and a ConfigMap `app` with the file `a` of content 1.
fn fixture(volume: &str) -> Fixture {
    let fixture = Fixture::new("");
    fixture.write("volume.yaml", volume);
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture
}

const CONFIG: &str = "name: config\nconfigMap: {name: app}\n";

/// `podfs mount` of the fixture's volume at `at`, without objects.
fn bare_command(fixture: &Fixture) -> Command {
    let mut command = Command::new(PODFS);
    command.arg("mount").arg("--volume").arg(fixture.path("volume.yaml")).arg(at(fixture)).stdin(Stdio::null());
    command
}

fn command(fixture: &Fixture) -> Command {
    let mut command = bare_command(fixture);
    command.arg("--objects").arg(fixture.objects());
    command
}

fn at(fixture: &Fixture) -> PathBuf {
    fixture.path("at")
}

/// Starts podfs and waits until the volume is there.
fn start(fixture: &Fixture, command: &mut Command) -> Running {
    let running = fixture.spawn(command);
    running.wait_log("is ready");
    running
}

#[track_caller]
fn interrupt(mut running: Running, fixture: &Fixture) {
    running.signal(Signal::SIGINT);
    assert_eq!(running.wait().code(), Some(0), "{}", running.log());
    assert_eq!((fixture.mounts(), fixture.processes()), (vec![], vec![]));
}

#[test]
fn a_volume_is_shown_and_followed_until_ctrl_c() {
    let fixture = fixture(CONFIG);
    let running = start(&fixture, &mut command(&fixture));
    wait_content(&at(&fixture).join("a"), "1");
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&at(&fixture).join("a"), "2");
    interrupt(running, &fixture);
    assert!(!at(&fixture).exists(), "podfs removes the directory that it made");
}

#[test]
fn a_volume_that_another_process_unmounts_ends_podfs() {
    let source = TempDir::with_prefix("podfs-test-").expect("a directory");
    let host = format!("name: host\nhostPath: {{path: {}, type: Directory}}\n", source.path().display());
    for volume in [CONFIG, &host] {
        let fixture = fixture(volume);
        let mut running = start(&fixture, &mut command(&fixture));
        umount2(&at(&fixture), MntFlags::empty()).expect("unmounted");
        assert_eq!(running.wait().code(), Some(0), "{}", running.log());
        let line = format!("another process unmounted {}; podfs ends", at(&fixture).display());
        assert_eq!(running.log().matches(&line).count(), 1, "{}", running.log());
        assert_eq!(fixture.processes(), []);
        assert!(!at(&fixture).exists(), "podfs removes the directory that it made");
    }
}

#[test]
fn a_volume_below_a_symbolic_link_and_at_a_relative_path_is_not_taken_for_unmounted() {
    let volume = fixture("");
    fs::create_dir(volume.path("real")).expect("a directory");
    fs::create_dir(volume.path("source")).expect("a directory");
    std::os::unix::fs::symlink("real", volume.path("link")).expect("a link");
    let host = format!("name: host\nhostPath: {{path: {}}}\n", volume.path("source").display());
    volume.write("volume.yaml", &host);
    let mut podfs = Command::new(PODFS);
    podfs.args(["mount", "--volume", "volume.yaml", "link/at"]).current_dir(volume.path("")).stdin(Stdio::null());
    let mut running = start(&volume, &mut podfs);
    mount_tmpfs(&volume.path("other"));
    umount2(&volume.path("other"), MntFlags::empty()).expect("unmounted");
    fs::write(volume.path("real/at/file"), "1").expect("podfs serves on");
    umount2(&volume.path("real/at"), MntFlags::empty()).expect("unmounted");
    assert_eq!(running.wait().code(), Some(0), "{}", running.log());
    assert!(running.log().contains("real/at; podfs ends"), "{}", running.log());
}

#[test]
fn a_volume_stays_when_other_mounts_come_and_go() {
    let fixture = fixture(CONFIG);
    let running = start(&fixture, &mut command(&fixture));
    let other = fixture.path("other");
    mount_tmpfs(&other);
    umount2(&other, MntFlags::empty()).expect("unmounted");
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&at(&fixture).join("a"), "2");
    interrupt(running, &fixture);
}

#[test]
fn a_directory_that_was_there_stays() {
    let fixture = fixture(CONFIG);
    fs::create_dir(at(&fixture)).expect("a directory");
    let running = start(&fixture, &mut command(&fixture));
    wait_content(&at(&fixture).join("a"), "1");
    interrupt(running, &fixture);
    assert_eq!(fs::read_dir(at(&fixture)).expect("it stays").count(), 0);
}

#[test]
fn the_volume_may_come_from_standard_input_and_be_of_any_kind() {
    for (volume, file, content) in [
        (CONFIG.to_owned(), "a", "1"),
        (r#"{"name": "keys", "secret": {"secretName": "tls"}}"#.to_owned(), "key", "pem"),
        (
            "{name: all, projected: {sources: [{configMap: {name: app}}, {secret: {name: tls}}]}}".to_owned(),
            "key",
            "pem",
        ),
    ] {
        let fixture = fixture(&volume);
        fixture.write("objects/tls.json", &secret("tls", &[("key", "pem")]));
        let mut command = Command::new(PODFS);
        command.args(["mount", "--volume", "-", "--objects"]).arg(fixture.objects()).arg(at(&fixture));
        command.stdin(File::open(fixture.path("volume.yaml")).expect("a volume"));
        let running = start(&fixture, &mut command);
        wait_content(&at(&fixture).join(file), content);
        interrupt(running, &fixture);
    }
}

#[test]
fn without_objects_podfs_says_which_ones_the_volume_needs() {
    let sources = "[{configMap: {name: app}}, {secret: {name: tls}}, {configMap: {name: more, optional: true}}]";
    let fixture = fixture(&format!("name: all\nprojected: {{sources: {sources}}}\n"));
    let outcome = fixture.refused(&mut bare_command(&fixture));
    let needed = "the volume needs ConfigMap app, Secret tls, ConfigMap more (optional) of namespace default";
    outcome.says(2, &[needed, "--objects"]);
    assert!(!at(&fixture).exists());
}

#[test]
fn without_objects_a_volume_whose_sources_are_all_optional_is_empty() {
    // CM-06
    let fixture = fixture("name: config\nconfigMap: {name: app, optional: true}\n");
    let running = start(&fixture, &mut bare_command(&fixture));
    let needed = "the volume needs ConfigMap app (optional) of namespace default; without --objects it stays empty";
    assert!(running.log().contains(needed), "{}", running.log());
    assert_eq!(tree::files(&at(&fixture)), tree::Files::new());
    assert!(at(&fixture).join("..data").is_dir());
    interrupt(running, &fixture);
}

#[test]
fn fields_of_the_pod_need_a_pod() {
    // DA-01
    let fixture = fixture("name: about\ndownwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}\n");
    let outcome = fixture.refused(&mut command(&fixture));
    outcome.says(2, &["the volume shows fields of its pod", "--pod"]);
    fixture.write("pod.yaml", &config_pod());
    let running = start(&fixture, bare_command(&fixture).arg("--pod").arg(fixture.pod()));
    wait_content(&at(&fixture).join("name"), "web");
    interrupt(running, &fixture);
}

#[test]
fn a_bad_volume_is_refused_with_its_place() {
    for (volume, parts) in [
        ("", ["volume.yaml: ", "the file is empty"]),
        ("name: [", ["volume.yaml:1:7: ", "unclosed bracket"]),
        ("name: v\n---\nname: w\n", ["volume.yaml: ", "expected one document, found 2"]),
        (
            "name: v\niscsi: {targetPortal: a, iqn: i, lun: 0}\n",
            ["volume.yaml: ", "volume \"v\": iscsi volumes are not supported"],
        ),
        ("name: v\nofALaterApi: {}\n", ["volume.yaml: ", "volume \"v\": ofALaterApi volumes are not supported"]),
        ("name: v\nsecrets: {}\n", ["volume.yaml: ", "did you mean \"secret\"?"]),
        ("name: v\nconfigMap: {nam: app}\n", ["volume.yaml: configMap.nam: volume \"v\"", "did you mean \"name\"?"]),
        ("name: v\nconfigMap: {items: 7}\n", ["volume.yaml: ", "configMap.items"]),
        ("configMap: {name: app}\n", ["volume.yaml: ", "name"]),
    ] {
        let fixture = fixture(volume);
        fixture.refused(&mut command(&fixture)).says(2, &parts);
        assert!(!at(&fixture).exists(), "{volume}");
    }
}

#[test]
fn a_directory_that_a_living_podfs_serves_is_refused_and_one_of_a_dead_podfs_is_taken_over() {
    let fixture = fixture(CONFIG);
    let mut first = start(&fixture, &mut command(&fixture));
    let outcome = crate::common::outcome::finish(&mut command(&fixture));
    outcome.says(1, &["volume \"config\": ", "/at is already a mount point", "unmount it or choose another directory"]);
    wait_content(&at(&fixture).join("a"), "1");

    first.signal(Signal::SIGKILL);
    first.wait();
    eventually("the server ends by itself", || fixture.processes().is_empty());
    assert_eq!(fixture.mounts(), [at(&fixture)], "the dead mount is still there");
    fs::write(fixture.path("log"), "").expect("the log of the first");
    let second = start(&fixture, &mut command(&fixture));
    wait_content(&at(&fixture).join("a"), "1");
    assert_eq!(fixture.mounts(), [at(&fixture)], "the dead mount is gone");
    interrupt(second, &fixture);
}

#[test]
fn an_empty_dir_in_memory_goes_with_a_podfs_that_is_killed() {
    let fixture = fixture("name: scratch\nemptyDir: {medium: Memory, sizeLimit: 1Mi}\n");
    let temporary = fixture.path("tmp");
    fs::create_dir(&temporary).expect("a directory");
    let left = || (fs::read_dir(&temporary).expect("a listing").count(), fixture.mounts());
    let mut running = start(&fixture, bare_command(&fixture).env("TMPDIR", &temporary));
    assert_eq!(fs::metadata(at(&fixture)).expect("attributes").mode() & 0o7777, 0o1777);
    fs::write(at(&fixture).join("secret"), "1").expect("written");
    let error = fs::write(at(&fixture).join("large"), vec![0; 2 << 20]).expect_err("it does not fit");
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    running.kill_server_and_keeper(|| wait_content(&at(&fixture).join("secret"), "1"));
    assert_eq!(left(), (0, vec![at(&fixture)]), "no path of the node leads to the content");
    assert!(!running.log().contains("does not cut its server off"), "{}", running.log());
    running.signal(Signal::SIGKILL);
    running.wait();
    eventually("the server ends by itself", || fixture.processes().is_empty());
    assert_eq!(left(), (0, vec![at(&fixture)]));
    fs::write(fixture.path("log"), "").expect("the log of the first");
    let again = start(&fixture, bare_command(&fixture).env("TMPDIR", &temporary));
    assert!(!at(&fixture).join("secret").exists());
    interrupt(again, &fixture);
    assert_eq!(left(), (0, vec![]));
}

#[test]
fn places_that_are_taken_are_refused() {
    for (make, parts) in [
        (&(|at: &Path| fs::write(at, "mine").expect("written")) as &dyn Fn(&Path), "/at is not a directory"),
        (&|at: &Path| fs::create_dir_all(at.join("inner")).expect("directories"), "/at is not empty"),
        (&mount_tmpfs, "/at is already a mount point"),
    ] {
        let fixture = fixture(CONFIG);
        make(&at(&fixture));
        fixture.refused(&mut command(&fixture)).says(1, &["volume \"config\": ", parts]);
        assert!(at(&fixture).exists());
    }
}

fn mount_tmpfs(at: &Path) {
    fs::create_dir(at).expect("a directory");
    mount(Some("none"), at, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a tmpfs");
}

/// A line of the trace: time, operation, path, caller's pid and uid, result, microseconds. The kernel itself has no pid
/// and no uid, which is shown as `-`.
#[derive(Debug)]
struct Traced {
    operation: String,
    path: String,
    pid: i32,
    uid: u32,
    result: String,
}

impl Traced {
    fn parse(line: &str) -> Self {
        let fields: Vec<_> = line.split(' ').collect();
        let [time, operation, path, pid, uid, result, microseconds] = fields.as_slice() else {
            panic!("not seven fields: {line}");
        };
        let shape: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert_eq!(shape, "00:00:00.000000", "no time: {line}");
        let number = |field: &str, prefix: &str, suffix: &str| -> u32 {
            let digits = field.strip_prefix(prefix).and_then(|field| field.strip_suffix(suffix)).expect(line);
            if digits == "-" { u32::MAX } else { digits.parse().expect(line) }
        };
        number(microseconds, "", "us");
        let (operation, path, result) = ((*operation).to_owned(), (*path).to_owned(), (*result).to_owned());
        Self { operation, path, pid: number(pid, "pid=", "") as i32, uid: number(uid, "uid=", ""), result }
    }
}

#[test]
fn trace_prints_a_line_for_every_request() {
    let fixture = fixture(CONFIG);
    let running = start(&fixture, command(&fixture).arg("--trace"));
    let mut reader = Command::new("setpriv");
    reader.args(["--reuid=65534", "--regid=65534", "--clear-groups", "cat", "a", "absent"]);
    reader.current_dir(at(&fixture)).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut reader = reader.spawn().expect("setpriv starts");
    let pid = i32::try_from(reader.id()).expect("a pid");
    reader.wait().expect("it ends");
    let generation = generation(&at(&fixture));
    interrupt(running, &fixture);

    let trace = fs::read_to_string(fixture.path("out")).expect("the trace");
    let lines: Vec<_> = trace.lines().map(Traced::parse).collect();
    let of_reader: Vec<_> = lines.iter().filter(|line| line.pid == pid && line.uid == 65534).collect();
    let content = format!("/{generation}/a");
    for (operation, path, result) in
        [("LOOKUP", &*content, "ok"), ("READ", &content, "ok"), ("LOOKUP", "/absent", "ENOENT")]
    {
        let same = |line: &&&Traced| {
            (line.operation.as_str(), line.path.as_str(), line.result.as_str()) == (operation, path, result)
        };
        assert!(of_reader.iter().any(|line| same(&line)), "no {operation} {path} {result} in {of_reader:#?}");
    }
    // The requests of the commit come from the supervisor.
    assert!(lines.iter().any(|line| line.operation == "RENAME" && line.uid == 0 && line.pid != pid), "{trace}");
}

#[test]
fn without_trace_nothing_is_printed() {
    let fixture = fixture(CONFIG);
    let running = start(&fixture, &mut command(&fixture));
    wait_content(&at(&fixture).join("a"), "1");
    interrupt(running, &fixture);
    assert_eq!(fs::read_to_string(fixture.path("out")).expect("standard output"), "");
}

#[test]
fn a_server_and_its_keeper_that_are_killed_at_once_are_replaced() {
    let fixture = fixture("");
    let source = fixture.path("source");
    fs::create_dir(&source).expect("a directory");
    fixture.write("volume.yaml", &format!("name: host\nhostPath: {{path: {}}}\n", source.display()));
    let running = start(&fixture, &mut command(&fixture));
    for round in 0..3 {
        running.kill_server_and_keeper(|| {
            fs::write(at(&fixture).join("f"), format!("{round}")).expect("a server answers");
        });
        assert_eq!(fs::read_to_string(source.join("f")).expect("read"), format!("{round}"));
        eventually("podfs waits for its children", || running.zombies().is_empty());
    }
    interrupt(running, &fixture);
}

#[test]
fn a_file_that_is_no_volume_is_refused_with_the_cause() {
    let fixture = fixture(CONFIG);
    let refused = |file: &str| {
        let mut command = Command::new(PODFS);
        fixture.refused(command.arg("mount").arg("--volume").arg(fixture.path(file)).arg(at(&fixture)))
    };
    refused("missing.yaml").says(2, &["/missing.yaml: cannot be read: No such file or directory"]);
    refused("objects").says(2, &["/objects: cannot be read: Is a directory"]);
    let mut command = Command::new(PODFS);
    command.args(["mount", "--volume", "-"]).arg(at(&fixture)).stdin(Stdio::null());
    fixture.refused(&mut command).says(2, &["standard input: the file is empty"]);
    fixture.write("whole.yaml", &config_pod());
    refused("whole.yaml")
        .says(2, &["/whole.yaml: is an object of kind \"Pod\"; give one entry of a pod's spec.volumes"]);
    fixture.assert_nothing_left();
}
