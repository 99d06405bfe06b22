//! Archives: every entry that `podfs run` mounts, byte by byte.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use fastrand::Rng;

use super::generator::Generator;
use super::render;
use crate::common::outcome::finish;
use crate::common::packages::top;
use crate::common::terminal::{Terminal, with_standard_output};
use crate::common::*;

/// An entry: type and permissions, owner, group, and size and bytes. The bytes of a link are its target.
pub type Entry = (u32, u32, u32, u64, Vec<u8>);

/// Everything at and below a directory. The name of a generation is without its time.
pub fn entries(root: &Path) -> BTreeMap<String, Entry> {
    let mut entries = BTreeMap::new();
    collect(root, ".", &mut entries);
    entries
}

fn collect(path: &Path, name: &str, entries: &mut BTreeMap<String, Entry>) {
    let metadata = fs::symlink_metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (size, content) = match metadata.file_type() {
        kind if kind.is_dir() => (0, Vec::new()),
        kind if kind.is_symlink() => {
            (0, plain(fs::read_link(path).expect("a link").to_str().expect("text")).into_bytes())
        }
        _ => (metadata.size(), fs::read(path).expect("a file")),
    };
    entries.insert(name.to_owned(), (metadata.mode(), metadata.uid(), metadata.gid(), size, content));
    if metadata.is_dir() {
        for entry in fs::read_dir(path).expect("a listing") {
            let entry = entry.expect("an entry").file_name().into_string().expect("text");
            collect(&path.join(&entry), &format!("{name}/{}", plain(&entry)), entries);
        }
    }
}

/// The name of a generation as a rendering has it; any other name unchanged.
fn plain(name: &str) -> String {
    let is_generation = name.strip_prefix("..").is_some_and(|time| time.starts_with(|c: char| c.is_ascii_digit()));
    if is_generation { "..generation".to_owned() } else { name.to_owned() }
}

/// Renders the fixture as an archive, extracts it as root, and compares each volume with what `podfs run` mounts.
#[track_caller]
fn assert_archive_is_what_is_mounted(fixture: &Fixture, volumes: &[String], about: &str) {
    let archive = format!("tar:{}", fixture.path("volumes.tar").display());
    let outcome = fixture.render(&["--reveal", "--output", &archive]);
    assert_eq!(outcome.code, Some(0), "{about}: {}", outcome.stderr);
    fs::create_dir(fixture.path("extracted")).expect("a directory");
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--preserve-permissions", "--same-owner", "--numeric-owner"]);
    tar.arg("--directory").arg(fixture.path("extracted")).arg("--file").arg(fixture.path("volumes.tar"));
    let extracted = finish(&mut tar);
    assert_eq!((extracted.code, extracted.stderr.as_str()), (Some(0), ""), "{about}");
    let mut running = fixture.run();
    for volume in volumes {
        let rendered = entries(&fixture.path("extracted").join(volume));
        assert_eq!(rendered, entries(&running.volume(volume)), "volume {volume} of {about}");
    }
    assert!(running.stop().success());
}

#[test]
fn archives_of_all_examples_have_every_entry_that_is_mounted() {
    let single = "single/pods/6f1c0a54-2f0e-4c6e-9d4e-1b7a5f3c9e01";
    let pushed = "single/pods/b2a7d1c8-83f5-4f0b-8a36-7c2e94d0f502";
    for (pod, objects, volumes) in [
        (
            "pod.yaml",
            &["objects/web-config.yaml", "objects/web-secret.yaml"][..],
            &["config", "credentials", "about", "everything"][..],
        ),
        ("pods/web.yaml", &["pods/web-config.yaml"], &["config", "about"]),
        ("pods/worker.yaml", &["pods/database.yaml"], &["credentials"]),
        (&format!("{single}/pod.yaml"), &[&format!("{single}/objects/web.yaml")], &["config", "about"]),
        (&format!("{pushed}/pod.yaml"), &["pods/database.yaml"], &["credentials"]),
    ] {
        let read = |name: &str| fs::read_to_string(top().join("packaging/examples").join(name)).expect(name);
        // Without the uid of the example: cgroups are named by the uid, and other tests use the same examples.
        let manifest: String = read(pod)
            .lines()
            .filter(|line| !line.starts_with("  uid: "))
            .fold(String::new(), |text, line| text + line + "\n");
        let fixture = Fixture::new(&manifest);
        for (number, object) in objects.iter().enumerate() {
            fixture.write(&format!("objects/{number}.yaml"), &read(object));
        }
        let volumes: Vec<String> = volumes.iter().map(|volume| (*volume).to_owned()).collect();
        assert_archive_is_what_is_mounted(&fixture, &volumes, pod);
    }
}

#[test]
fn archives_of_generated_pods_have_every_entry_that_is_mounted() {
    const PODS: u64 = 200;
    const AT_ONCE: u64 = 4;
    thread::scope(|scope| {
        for first in 0..AT_ONCE {
            scope.spawn(move || (first..PODS).step_by(AT_ONCE as usize).for_each(compare_generated_pod));
        }
    });
}

fn compare_generated_pod(seed: u64) {
    let mut generator = Generator(Rng::with_seed(seed));
    let (pod, volumes) = generator.pod();
    let fixture = Fixture::new(&pod.to_string());
    fixture.write("objects/all.json", &generator.objects().to_string());
    assert_archive_is_what_is_mounted(&fixture, &volumes, &format!("seed {seed}: {pod}"));
}

#[test]
fn equal_manifests_give_equal_archives() {
    let archive = || {
        let examples = top().join("packaging/examples");
        let mut command = render(&examples.join("pod.yaml"), &examples.join("objects"));
        command.args(["--reveal", "--output", "tar"]).output().expect("podfs").stdout
    };
    let first = archive();
    assert!(first.len() > 10_000 && first == archive());
}

#[test]
fn an_archive_is_not_written_to_a_terminal() {
    let fixture = Fixture::new(&config_pod());
    let terminal = Terminal::new(24, 80);
    let mut command = render(&fixture.pod(), &fixture.objects());
    with_standard_output(command.args(["--output", "tar"]), &terminal);
    let status = command.stderr(Stdio::null()).status().expect("podfs");
    assert_eq!((status.code(), terminal.written().as_str()), (Some(2), ""));
}
