//! How long requests wait when a server is killed, alone or with its keeper: from SIGKILL to the first answer of its
//! successor, for a request that the kernel cannot answer from its cache. Needs root.

#[path = "../tests/common/mod.rs"]
mod common;

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use common::passthrough::disk_directory;
use common::*;
use nix::sys::signal::{Signal, kill};

/// The number of kills for each figure.
const KILLS: usize = 200;
/// The number of open files, in the pod with few files.
const FILES: usize = 1000;
/// The processes that are killed.
const VICTIMS: [Victims; 2] = [Victims::Server, Victims::ServerAndKeeper];
/// The number of files that the kernel has looked up, in the pod with many files.
const NODES: usize = 50_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victims {
    Server,
    ServerAndKeeper,
}

fn main() {
    five_volumes();
    many_nodes();
}

fn five_volumes() {
    let source = disk_directory();
    let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
    let fixture = Fixture::new(&pod(&format!(
        "[{{name: config, configMap: {{name: app}}}}, {{name: keys, secret: {{secretName: tls}}}},
          {{name: about, downwardAPI: {{items: [{{path: labels, fieldRef: {{fieldPath: metadata.labels}}}}]}}}},
          {host}, {{name: scratch, emptyDir: {{sizeLimit: 1Gi}}}}]"
    )));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture.write("objects/tls.json", &secret("tls", &[("key", "pem")]));
    let running = fixture.run();
    let config = running.volume("config");
    let host = running.volume("host");
    for victims in VICTIMS {
        report("a pod with 5 volumes, its configMap", victims, measure(&running, victims, |_| status(&config)));
        let times = measure(&running, victims, |kill| look_for_nothing(&host, kill));
        report("a pod with 5 volumes, its hostPath", victims, times);
    }
    let files: Vec<_> = (0..FILES).map(|n| File::create(host.join(format!("open-{n}"))).expect("made")).collect();
    let what = format!("the same with {FILES} open files, first use of one");
    for victims in VICTIMS {
        let times = measure(&running, victims, |kill| look_for_data(&files[kill % FILES]));
        report(&what, victims, times);
    }
}

fn many_nodes() {
    let source = disk_directory();
    let names: Vec<_> = (0..NODES).map(|n| format!("file-{n}")).collect();
    names.iter().for_each(|name| fs::write(source.path().join(name), "").expect("written"));
    let fixture = Fixture::new(&pod(&format!("[{{name: host, hostPath: {{path: {}}}}}]", source.path().display())));
    let running = fixture.run();
    let host = running.volume("host");
    for name in &names {
        fs::metadata(host.join(name)).expect("a file");
    }
    let what = format!("a hostPath with {NODES} files that the kernel knows");
    for victims in VICTIMS {
        report(&what, victims, measure(&running, victims, |kill| look_for_nothing(&host, kill)));
    }
}

/// The status of a file system is not cached.
fn status(volume: &Path) {
    rustix::fs::statvfs(volume).expect("a server answers");
}

/// Looks up a name that no call has looked up before.
fn look_for_nothing(volume: &Path, number: usize) {
    assert!(!fs::exists(volume.join(format!("missing-{number}"))).expect("a server answers"));
}

/// Asks the server where an open file has data. The file is empty.
fn look_for_data(file: &File) {
    let found = rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0));
    assert_eq!(found, Err(rustix::io::Errno::NXIO));
}

/// The times without an answer, shortest first.
fn measure(running: &Running, victims: Victims, call: impl Fn(usize)) -> Vec<Duration> {
    let restart = "another one (pid ";
    let before = running.log().matches(restart).count();
    let measure = |number| {
        let mut processes = vec![running.server()];
        if victims == Victims::ServerAndKeeper {
            processes.extend(running.keepers());
        }
        let killed = Instant::now();
        processes.iter().for_each(|process| kill(*process, Signal::SIGKILL).expect("it is there"));
        call(number);
        let took = killed.elapsed();
        // The supervisor must see that this server has answered a request: after some servers that have not, it pauses.
        running.wait_log_times(restart, before + number + 1);
        call(KILLS + number);
        took
    };
    let mut times: Vec<_> = (0..KILLS).map(measure).collect();
    times.sort_unstable();
    times
}

fn report(what: &str, victims: Victims, times: Vec<Duration>) {
    let milliseconds = |time: Duration| time.as_secs_f64() * 1000.0;
    let (median, longest) = (milliseconds(times[times.len() / 2]), milliseconds(times[times.len() - 1]));
    println!("{what}: median {median:.2} ms, longest {longest:.2} ms, of {} kills of {victims:?}", times.len());
}
