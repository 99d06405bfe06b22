//! The status of pods, as a table.
//!
//! ```text
//! default/web  running
//!   uid         c15b9f1e-…
//!   supervisor  pid 4711, podfs 0.1.0
//!   server      pid 4712, podfs 0.1.0
//!   volumes     /var/lib/podfs/pods/c15b9f1e-…/volumes
//!
//!   VOLUME  KIND       MODE          GENERATION                     AGE  REQUESTS  PATH
//!   config  configMap  zero-message  2026_11_20_19_54_31.221582083  3m         17  kubernetes.io~configmap/config
//!
//!   OBJECT                 VERSION  WATCH     HEARD
//!   ConfigMap default/app     1234  watching    42s
//! ```

use std::fmt::Write;
use std::path::Path;

use podfs_fuse::printable::printable_line;

use crate::host::disk_errors::in_words;
use crate::supervisor::status::{AuditStatus, ObjectStatus, PodStatus, ProcessStatus, VolumeState, VolumeStatus};

const HEADINGS: [&str; 7] = ["VOLUME", "KIND", "MODE", "GENERATION", "AGE", "REQUESTS", "PATH"];
/// The columns of numbers. They are right-aligned.
const NUMERIC: [usize; 2] = [4, 5];
const OBJECT_HEADINGS: [&str; 4] = ["OBJECT", "VERSION", "WATCH", "HEARD"];
const OBJECT_NUMERIC: [usize; 2] = [1, 3];

/// The text for these pods.
pub fn table(pods: &[PodStatus]) -> String {
    pods.iter().map(pod).collect::<Vec<_>>().join("\n")
}

fn pod(pod: &PodStatus) -> String {
    let base = base(&pod.volumes);
    let mut text = format!("{}  {}\n", pod.title(), pod.state.word());
    let mut fact = |name: &str, value: &str| {
        let _ = writeln!(text, "  {name:<10}  {}", printable_line(value));
    };
    if let Some(reason) = &pod.reason {
        fact("reason", &one_line(reason));
    }
    if let Some(since) = &pod.state_since {
        fact("since", since);
    }
    fact("uid", &pod.uid);
    if let Some(supervisor) = &pod.supervisor {
        fact("supervisor", &process(supervisor));
    }
    if let Some(server) = &pod.server {
        let restarts = match server.restarts {
            0 => String::new(),
            1 => ", restarted once".to_owned(),
            times => format!(", restarted {times} times"),
        };
        fact("server", &format!("{}{restarts}", process(&server.process)));
    }
    if let Some(base) = base {
        fact("volumes", &base.display().to_string());
    }
    if !pod.volumes.is_empty() {
        text.push('\n');
        text.push_str(&volumes(&pod.volumes, base));
    }
    if !pod.objects.is_empty() {
        text.push('\n');
        text.push_str(&objects(&pod.objects));
    }
    text
}

fn process(process: &ProcessStatus) -> String {
    match &process.version {
        Some(version) => format!("pid {}, podfs {version}", process.pid),
        None => format!("pid {}", process.pid),
    }
}

/// The directory that all volumes are in, two levels above them in the kubelet's layout.
fn base(volumes: &[VolumeStatus]) -> Option<&Path> {
    let mut paths = volumes.iter().filter_map(|volume| volume.path.as_deref());
    let base = paths.next()?.parent()?.parent()?;
    paths.all(|path| path.starts_with(base)).then_some(base)
}

fn volumes(volumes: &[VolumeStatus], base: Option<&Path>) -> String {
    let rows = volumes.iter().map(|volume| (cells(volume, base), remarks(volume)));
    grid(HEADINGS, &NUMERIC, &rows.collect::<Vec<_>>())
}

fn remarks(volume: &VolumeStatus) -> Vec<String> {
    let mode = volume.mode.iter().zip(&volume.mode_reason).map(|(mode, reason)| format!("{mode}: {reason}"));
    let remarks = mode.chain(volume.audit.as_ref().map(audit)).chain(errors(volume));
    remarks.chain(trouble(volume)).collect()
}

/// The errors of the volume's source.
fn errors(volume: &VolumeStatus) -> Option<String> {
    let counted = [("calls that failed", &volume.source_errors), ("errors of the disk", &volume.disk_errors)];
    let counted = counted.into_iter().filter(|(_, counts)| !counts.is_empty());
    let parts: Vec<_> = counted.map(|(what, counts)| format!("{what}: {}", in_words(counts))).collect();
    (!parts.is_empty()).then(|| format!("its source has errors: {}", parts.join("; ")))
}

/// The cost of the access log.
fn audit(audit: &AuditStatus) -> String {
    let AuditStatus { messages_per_open, messages_per_close, opens, lost } = audit;
    let lost = if *lost == 0 { String::new() } else { format!(", lines lost: {lost}") };
    format!(
        "audited: each open waits for {messages_per_open} message, each close sends {messages_per_close}; \
         opens so far: {opens}{lost}"
    )
}

/// The volume's present or last error.
fn trouble(volume: &VolumeStatus) -> Option<String> {
    let label = match volume.state {
        VolumeState::Waiting => "waiting",
        VolumeState::Behind => "not refreshed",
        VolumeState::Hidden => "not at its path",
        VolumeState::Live | VolumeState::Silent => "trouble",
    };
    match (&volume.reason, &volume.last_error) {
        (Some(reason), _) => Some(format!("{label}: {}", one_line(reason))),
        (None, Some(error)) => Some(format!("last error: {}", one_line(error))),
        (None, None) => None,
    }
}

fn objects(objects: &[ObjectStatus]) -> String {
    let rows = objects.iter().map(|object| {
        let cells = [
            object.object.clone(),
            or_none(object.resource_version.clone()),
            object.watch.clone(),
            or_none(object.contact_age_seconds.map(age)),
        ];
        (cells, object.trouble.as_deref().map(one_line).into_iter().collect())
    });
    grid(OBJECT_HEADINGS, &OBJECT_NUMERIC, &rows.collect::<Vec<_>>())
}

/// A table with headings, each row followed by its remarks. A column is as wide as its widest cell; the columns in `numeric` are
/// right-aligned.
pub fn grid<const N: usize>(headings: [&str; N], numeric: &[usize], rows: &[([String; N], Vec<String>)]) -> String {
    let headings = headings.map(str::to_owned);
    // A manifest or a driver may have given a cell.
    let escape = |cell: &String| printable_line(cell).into_owned();
    let rows: Vec<_> = rows.iter().map(|(cells, remarks)| (cells.each_ref().map(escape), remarks)).collect();
    let cells = || rows.iter().map(|(cells, _)| cells).chain([&headings]);
    let width = |column: usize| cells().map(|row| row[column].chars().count()).max();
    let widths: Vec<_> = (0..N).map(|column| width(column).unwrap_or_default()).collect();
    let mut text = line(&headings, &widths, numeric);
    for (row, remarks) in &rows {
        text.push_str(&line(row, &widths, numeric));
        for remark in remarks.iter() {
            let _ = writeln!(text, "    {}", printable_line(remark));
        }
    }
    text
}

fn line(row: &[String], widths: &[usize], numeric: &[usize]) -> String {
    let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| {
        if numeric.contains(&column) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
    });
    format!("  {}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
}

fn cells(volume: &VolumeStatus, base: Option<&Path>) -> [String; 7] {
    let path = volume.path.as_deref();
    let below = path.map(|path| base.and_then(|base| path.strip_prefix(base).ok()).unwrap_or(path));
    [
        volume.name.clone(),
        volume.kind.clone(),
        mode(volume),
        or_none(volume.generation.as_deref().map(|name| name.trim_start_matches('.').to_owned())),
        or_none(volume.generation_age_seconds.map(age)),
        or_none(volume.requests.map(|requests| requests.to_string())),
        or_none(below.map(|path| path.display().to_string())),
    ]
}

/// The mode of the volume, with its transport if that is io_uring.
fn mode(volume: &VolumeStatus) -> String {
    match (&volume.mode, volume.transport.as_deref()) {
        (Some(mode), Some("io_uring")) => format!("{mode}/io_uring"),
        (Some(mode), _) => mode.clone(),
        (None, _) => "waiting".to_owned(),
    }
}

fn or_none(cell: Option<String>) -> String {
    cell.unwrap_or_else(|| "-".to_owned())
}

/// An age in the unit that gives few digits: `42s`, `17m`, `5h`, `12d`.
fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86400),
    }
}

/// The text without line breaks.
pub fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::supervisor::status::{PodState, ServerStatus};

    #[test]
    fn a_pod_is_shown_with_its_processes_and_volumes() {
        let volume = |name: &str, path: &str, state| VolumeStatus {
            name: name.to_owned(),
            kind: "configMap".to_owned(),
            path: Some(path.into()),
            state,
            reason: None,
            mode: Some("zero-message".to_owned()),
            mode_reason: None,
            backend: None,
            transport: Some("/dev/fuse".to_owned()),
            generation: Some("..2026_11_20_19_54_31.7".to_owned()),
            generation_age_seconds: Some(180),
            old_generations: Some(1),
            old_generation_bytes: Some(8192),
            requests: Some(17),
            audit: None,
            read_only: true,
            supplemental_group: None,
            expansion: None,
            ownership: None,
            source_errors: BTreeMap::new(),
            disk_errors: BTreeMap::new(),
            restarts: 2,
            last_error: None,
        };
        let waiting = VolumeStatus {
            reason: Some("configmap \"late\"\nnot found".to_owned()),
            mode: None,
            generation: None,
            generation_age_seconds: None,
            old_generations: None,
            old_generation_bytes: None,
            requests: None,
            ..volume("late", "/r/volumes/kubernetes.io~configmap/late", VolumeState::Waiting)
        };
        let audited = VolumeStatus {
            mode: Some("audited".to_owned()),
            audit: Some(AuditStatus { messages_per_open: 1, messages_per_close: 1, opens: 12, lost: 2 }),
            ..volume("db", "/r/volumes/kubernetes.io~secret/db", VolumeState::Live)
        };
        let ringed = VolumeStatus {
            mode: Some("passthrough".to_owned()),
            transport: Some("io_uring".to_owned()),
            generation: None,
            generation_age_seconds: None,
            ..volume("data", "/r/volumes/kubernetes.io~host-path/data", VolumeState::Live)
        };
        assert_eq!(cells(&ringed, None)[2], "passthrough/io_uring");
        let failing = VolumeStatus {
            source_errors: BTreeMap::from([("EIO".to_owned(), 3), ("EROFS".to_owned(), 1)]),
            disk_errors: BTreeMap::from([("ext4".to_owned(), 2)]),
            ..volume("data", "/r/volumes/kubernetes.io~host-path/data", VolumeState::Live)
        };
        assert_eq!(
            remarks(&failing),
            ["its source has errors: calls that failed: EIO 3, EROFS 1; errors of the disk: ext4 2"]
        );
        let process = |pid| ProcessStatus { pid, version: Some("0.1.0".to_owned()) };
        let status = PodStatus {
            namespace: Some("default".to_owned()),
            name: Some("web".to_owned()),
            supervisor: Some(process(4711)),
            server: Some(ServerStatus { process: process(4712), restarts: 2 }),
            volumes: vec![
                volume("config", "/r/volumes/kubernetes.io~configmap/config", VolumeState::Live),
                audited,
                waiting,
            ],
            objects: vec![ObjectStatus {
                object: "ConfigMap default/late".to_owned(),
                resource_version: Some("1234".to_owned()),
                watch: "waiting".to_owned(),
                contact_age_seconds: Some(42),
                trouble: Some("the server is away".to_owned()),
            }],
            ..PodStatus::without_answer("c15b", PodState::Degraded, "volume \"late\" waits")
        };
        let expected = r#"default/web  degraded
  reason      volume "late" waits
  uid         c15b
  supervisor  pid 4711, podfs 0.1.0
  server      pid 4712, podfs 0.1.0, restarted 2 times
  volumes     /r/volumes

  VOLUME  KIND       MODE          GENERATION             AGE  REQUESTS  PATH
  config  configMap  zero-message  2026_11_20_19_54_31.7   3m        17  kubernetes.io~configmap/config
  db      configMap  audited       2026_11_20_19_54_31.7   3m        17  kubernetes.io~secret/db
    audited: each open waits for 1 message, each close sends 1; opens so far: 12, lines lost: 2
  late    configMap  waiting       -                        -         -  kubernetes.io~configmap/late
    waiting: configmap "late" not found

  OBJECT                  VERSION  WATCH    HEARD
  ConfigMap default/late     1234  waiting    42s
    the server is away
"#;
        assert_eq!(table(&[status]), expected);
    }

    #[test]
    fn no_cell_and_no_remark_begins_a_row() {
        let rows = [(["a\nforged".to_owned()], vec!["b\nforged".to_owned()])];
        assert_eq!(grid(["NAME"], &[], &rows), "  NAME\n  a\\u000aforged\n    b\\u000aforged\n");
    }

    #[test]
    fn an_age_has_few_digits() {
        assert_eq!(
            [0, 119, 120, 7199, 7200, 172_799, 172_800].map(age),
            ["0s", "119s", "2m", "119m", "2h", "47h", "2d"]
        );
    }
}
