//! The progress of `podfs run` on a terminal, and its absence elsewhere.

use std::fs;
use std::process::{Command, Stdio};

use crate::common::terminal::Terminal;
use crate::common::*;

/// A pod whose volume `late` waits for its ConfigMap.
fn fixture() -> Fixture {
    let fixture = Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: late, configMap: {name: late}}]"));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture
}

fn start(fixture: &Fixture, terminal: &Terminal, prepare: impl FnOnce(&mut Command) -> &mut Command) -> Running {
    let mut command = fixture.command();
    command.env("TERM", "xterm").env_remove("NO_COLOR").env_remove("RUST_LOG");
    terminal.controls(&mut command);
    prepare(&mut command);
    fixture.start_command(command)
}

const UP: &str = "podfs: 1 of 2 volumes of pod default/web are up: config";
const WAITS: &str = r#"  late  waits: configmap "late" not found"#;
/// A line of the log. It must be whole, above the lines of the progress.
const WARNING: &str =
    r#" WARN podfs::supervisor::volume: MountVolume.SetUp failed for volume "late" : configmap "late" not found"#;

#[test]
fn a_terminal_shows_mounted_and_waiting_volumes_until_the_pod_is_ready() {
    let (fixture, terminal) = (fixture(), Terminal::new(24, 200));
    let mut running = start(&fixture, &terminal, |command| command);
    let screen = terminal.wait_end(&[UP, WAITS]);
    assert_eq!(screen.iter().filter(|line| line.ends_with(WARNING)).count(), 1, "{screen:#?}");
    assert!(screen[..screen.len() - 2].iter().all(|line| line.starts_with("20")), "only log lines: {screen:#?}");
    fixture.write("objects/late.json", &config_map("late", &[("a", "1")]));
    running.wait_ready();
    let screen =
        terminal.wait_line("ready", |line| line.starts_with("podfs: pod default/web is ready: config, late in"));
    assert!(screen.iter().all(|line| !line.contains("volumes of pod") || line.starts_with("20")), "{screen:#?}");
    assert!(screen.iter().all(|line| !line.contains("waits:")), "{screen:#?}");
    assert!(screen.iter().any(|line| line.ends_with(WARNING)), "the log stays: {screen:#?}");
    assert_eq!(running.stop().code(), Some(0));
}

#[test]
fn ctrl_c_leaves_the_terminal_as_it_was() {
    let (fixture, mut terminal) = (fixture(), Terminal::new(24, 200));
    let mut running = start(&fixture, &terminal, |command| command);
    terminal.wait_line(UP, |line| line == UP);
    terminal.types(b"\x03");
    assert_eq!(running.wait().code(), Some(0));
    let screen =
        terminal.wait_line("the end", |line| line.ends_with("INFO podfs::supervisor::run::shutdown: unmounting"));
    terminal.wait_all("only the log is left", |line| line.trim_start_matches("^C").starts_with("20"));
    assert!(!terminal.hides_cursor(), "{screen:#?}");
    assert!(!terminal.written().contains("\x1b[?"), "no mode of the terminal is changed");
}

#[test]
fn many_volumes_do_not_fill_the_screen() {
    const VOLUMES: usize = 60;
    let volumes: Vec<_> = (0..VOLUMES).map(|n| format!("{{name: v{n}, configMap: {{name: late}}}}")).collect();
    let fixture = Fixture::new(&pod(&format!("[{}]", volumes.join(", "))));
    let terminal = Terminal::new(24, 60);
    let mut running = start(&fixture, &terminal, |command| command.env("RUST_LOG", "error"));
    let screen = terminal.wait_line("all wait", |line| line == "  … and 52 more wait");
    assert_eq!(screen.len(), 10, "{screen:#?}");
    assert_eq!(screen[0], format!("podfs: 0 of {VOLUMES} volumes of pod default/web are up"));
    assert_eq!(screen[1], r#"  v0  waits: configmap "late" not found"#);
    fixture.write("objects/late.json", &config_map("late", &[("a", "1")]));
    running.wait_ready();
    terminal.wait_line("ready", |line| line.starts_with("podfs: pod default/web is ready"));
    terminal.wait_all("nothing else", |line| !line.contains("wait"));
}

#[test]
fn a_narrow_terminal_gets_the_beginnings_of_lines() {
    let (fixture, terminal) = (fixture(), Terminal::new(6, 20));
    let mut running = start(&fixture, &terminal, |command| command.env("RUST_LOG", "error"));
    let screen = terminal.wait_end(&["podfs: 1 of 2 volu…", "  late  waits: con…"]);
    assert_eq!(screen.len(), 2, "{screen:#?}");
    assert_eq!(running.stop().code(), Some(0));
    terminal.wait_all("nothing is left", |_| false);
}

#[test]
fn no_color_turns_colours_off() {
    let (fixture, terminal) = (fixture(), Terminal::new(24, 200));
    let _running = start(&fixture, &terminal, |command| command.env("NO_COLOR", "1"));
    terminal.wait_line(UP, |line| line == UP);
    assert!(!terminal.written().contains("\x1b[3"), "{:?}", terminal.written());
}

#[test]
fn a_terminal_that_cannot_move_its_cursor_gets_plain_lines() {
    let (fixture, terminal) = (fixture(), Terminal::new(24, 200));
    let mut running = start(&fixture, &terminal, |command| command.env("TERM", "dumb"));
    terminal.wait_line(WARNING, |line| line.ends_with(WARNING));
    fixture.write("objects/late.json", &config_map("late", &[("a", "1")]));
    running.wait_ready();
    terminal.wait_line("ready", |line| line.starts_with("podfs: pod default/web is ready"));
    let written = terminal.written();
    assert!(!written.contains('\x1b') && !written.contains("volumes of pod default/web are up"), "{written}");
}

#[test]
fn logs_for_programs_are_nothing_but_json_at_a_terminal_too() {
    let (fixture, terminal) = (fixture(), Terminal::new(24, 500));
    let mut running = start(&fixture, &terminal, |command| command.args(["--log-format", "json"]));
    terminal.wait_line("it waits", |line| line.contains("not found"));
    assert_eq!(running.stop().code(), Some(0));
    for line in terminal.written().lines() {
        serde_json::from_str::<serde_json::Value>(line).expect(line);
    }
}

#[test]
fn lines_of_the_access_log_are_not_written_over() {
    let (fixture, terminal) = (fixture(), Terminal::new(24, 400));
    let manifest = fs::read_to_string(fixture.pod()).expect("a manifest");
    let audited =
        manifest.replace("{name: web, labels", "{name: web, annotations: {podfs.io/audit.config: open}, labels");
    fixture.write("pod.yaml", &audited);
    let mut running = start(&fixture, &terminal, |command| command);
    terminal.wait_line("the volume is up", |line| line.contains("mode=\"audited\""));
    let pods = fixture.pods();
    let volume = pods[0]["volumes"][0]["path"].as_str().expect("a path");
    assert_eq!(fs::read_to_string(format!("{volume}/a")).expect("a key"), "1");
    fixture.write("objects/late.json", &config_map("late", &[("a", "1")]));
    running.wait_ready();
    let screen = terminal.wait_line("ready", |line| line.starts_with("podfs: pod default/web is ready"));
    let is_whole = |line: &&String| line.starts_with("{\"audit\":\"open\"") && line.ends_with('}');
    assert_eq!(screen.iter().filter(is_whole).count(), 1, "{screen:#?}");
}

#[test]
fn a_pipe_gets_plain_lines() {
    let fixture = fixture();
    let mut running = fixture.start();
    running.wait_log(WARNING);
    fixture.write("objects/late.json", &config_map("late", &[("a", "1")]));
    running.wait_ready();
    running.wait_log("podfs: pod default/web is ready");
    let log = running.log();
    assert!(!log.contains('\x1b') && !log.contains("volumes of pod default/web are up"), "{log}");
}

#[test]
fn podfs_mount_shows_why_its_volume_waits() {
    let (fixture, terminal) = (fixture(), Terminal::new(24, 200));
    fixture.write("volume.yaml", "name: late\nconfigMap: {name: late}\n");
    let mut command = Command::new(PODFS);
    command.arg("mount").arg("--volume").arg(fixture.path("volume.yaml")).arg("--objects").arg(fixture.objects());
    command.arg(fixture.path("at")).env("TERM", "xterm").stdin(Stdio::null());
    terminal.controls(&mut command);
    let _running = fixture.spawn(&mut command);
    terminal.wait_end(&["podfs: 0 of 1 volumes are up", WAITS]);
    fixture.write("objects/late.json", &config_map("late", &[("a", "1")]));
    wait_content(&fixture.path("at/a"), "1");
    let screen = terminal.wait_line("ready", |line| line.starts_with("podfs: volume \"late\" is ready at"));
    assert!(!screen.iter().any(|line| line.contains("waits:")), "{screen:#?}");
    assert!(fs::exists(fixture.path("at")).expect("looked at"));
}
