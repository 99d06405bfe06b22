//! Real containers, of runc and crun, on what `podfs mounts prepare` has made ready.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use crate::common::namespace::mount_tmpfs;
use crate::common::outcome::finish;
use crate::common::passthrough::disk_directory;
use crate::common::runtime::{Runtime, RuntimeContainer, SharedDirectory};
use crate::common::*;
use podfs::mounts::{ContainerMount, Environment, MountSource};
use podfs::supervisor::control::{Answer, ContainerRequest, Question, ask};
use tempfile::TempDir;

const UID: &str = "7c1e6a52-9a51-4d0b-8d5e-3f2a6c9e1b44";

/// A pod whose containers share its volumes. Fields are dropped in this order.
struct Pod {
    running: Running,
    fixture: Fixture,
    _shared: SharedDirectory,
    host: TempDir,
}

impl Pod {
    fn new(mounts: &str) -> Pod {
        let (shared, host) = (SharedDirectory::new(), disk_directory());
        let manifest = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}}}\nspec:\n  containers:\n  - name: web\n    \
             volumeMounts:{mounts}\n  volumes:\n  - {{name: config, configMap: {{name: app}}}}\n  \
             - {{name: keys, secret: {{secretName: keys}}}}\n  - {{name: scratch, emptyDir: {{}}}}\n  \
             - {{name: host, hostPath: {{path: {}}}}}\n",
            host.path().display()
        );
        let fixture = Fixture::new_in(&shared.path(), &manifest);
        write(&fixture, "1");
        fixture.write("objects/keys.json", &secret("keys", &[("password", "opensesame")]));
        let running = fixture.run();
        Pod { running, fixture, _shared: shared, host }
    }

    fn with_all() -> Pod {
        Self::new(
            "
    - {name: config, mountPath: /etc/app}
    - {name: scratch, mountPath: /etc/app/inner}
    - {name: config, mountPath: /etc/app.conf, subPath: setting}
    - {name: keys, mountPath: /keys}
    - {name: host, mountPath: /data, mountPropagation: HostToContainer}
    - {name: host, mountPath: /alone}
    - {name: host, mountPath: /part, subPath: some/part}
    - {name: host, mountPath: /look, readOnly: true}
    - {name: host, mountPath: /look-part, subPath: some, readOnly: true}",
        )
    }

    /// The mounts of a container that is about to start, as an agent asks for them.
    #[track_caller]
    fn mounts(&self) -> Vec<Value> {
        let mut prepare = self.fixture.operator("mounts");
        let outcome = finish(prepare.args(["prepare", "--pod", UID, "--container", "web", "--pod-ip", "198.51.100.7"]));
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        serde_json::from_str(&outcome.stdout).expect("JSON")
    }

    #[track_caller]
    fn start(&self, runtime: Runtime) -> RuntimeContainer {
        RuntimeContainer::start(runtime, &self.mounts())
    }

    fn write(&self, content: &str) {
        write(&self.fixture, content);
        wait_content(&self.running.volume("config").join("setting"), content);
    }
}

fn write(fixture: &Fixture, content: &str) {
    fixture.write("objects/app.json", &config_map("app", &[("setting", content)]));
}

#[test]
fn containers_of_runc_and_crun_see_what_podfs_prepares() {
    // MT-02, MT-03, MT-04, MT-07, MT-08, NM-02
    for runtime in Runtime::ALL {
        let pod = Pod::with_all();
        let mut container = pod.start(runtime);
        assert_eq!(container.says("cat /etc/app/setting /etc/app.conf /keys/password"), "11opensesame", "{runtime:?}");
        let writes = "for f in /etc/app/setting /etc/app.conf /etc/app/new /keys/password /look/new /look-part/new; do \
                      echo x >$f; done";
        let refused = container.says(writes);
        assert_eq!(refused.matches("Read-only file system").count(), 6, "{runtime:?}: {refused}");
        assert_eq!(container.says("echo in >/etc/app/inner/f; echo in >/data/f; echo in >/part/f; cat /look/f"), "in");
        assert_eq!(fs::read(pod.host.path().join("some/part/f")).expect("the part"), b"in\n");
        assert_eq!(fs::read(pod.running.volume("scratch").join("f")).expect("the emptyDir"), b"in\n");
        let hosts = container.says("cat /etc/hosts");
        assert!(
            hosts.starts_with("# Kubernetes-managed hosts file.\n") && hosts.ends_with("\n198.51.100.7\tweb"),
            "{hosts}"
        );
        container.says("echo why >/dev/termination-log");
        let logs = pod.fixture.path(&format!("root/pods/{UID}/containers/web"));
        let log = fs::read_dir(logs).expect("a listing").next().expect("a log").expect("an entry").path();
        assert_eq!(fs::read(log).expect("the log"), b"why\n");

        // What is mounted on the host later comes to the mount that asks for it alone.
        let later = pod.running.volume("host").join("some");
        mount_tmpfs(&later);
        fs::write(later.join("later"), "seen").expect("written");
        assert_eq!(container.says("cat /data/some/later"), "seen", "{runtime:?}");
        assert!(container.says("cat /alone/some/later").contains("No such file"), "{runtime:?}");
    }
}

#[test]
fn a_container_keeps_its_generation_and_the_next_one_has_the_newest() {
    // SP-05, SP-06
    for runtime in Runtime::ALL {
        let pod = Pod::with_all();
        let mut container = pod.start(runtime);
        pod.write("2");
        assert_eq!(container.says("cat /etc/app/setting; echo; cat /etc/app.conf"), "2\n1", "{runtime:?}");
        drop(container);
        let mut next = pod.start(runtime);
        assert_eq!(next.says("cat /etc/app/setting; echo; cat /etc/app.conf"), "2\n2", "{runtime:?}");
    }
}

#[test]
fn no_call_of_a_container_fails_when_the_server_and_the_supervisor_are_killed() {
    for runtime in Runtime::ALL {
        let pod = Pod::with_all();
        let mut container = pod.start(runtime);
        container.begin(
            "while [ ! -e /part/stop ]; do cat /etc/app/setting /etc/app.conf /keys/password >/part/read && \
             [ \"$(cat /part/read)\" = 11opensesame ] && echo x >>/part/rounds || echo x >>/part/failures; done; \
             echo x >/part/stopped",
        );
        let part = pod.host.path().join("some/part");
        let rounds = || fs::metadata(part.join("rounds")).map_or(0, |rounds| rounds.len());
        let go_on = |what: &str| {
            let before = rounds();
            eventually(what, || rounds() > before + 10);
        };
        go_on("the container reads");
        let Pod { mut running, fixture, _shared, host: _host } = pod;
        for _ in 0..3 {
            kill(running.server(), Signal::SIGKILL).expect("there is a server");
            go_on("it reads with another server");
        }
        fixture.kill_supervisor(&mut running);
        go_on("it reads without a supervisor");
        let running = fixture.run();
        go_on("it reads with another supervisor");
        kill(running.server(), Signal::SIGKILL).expect("there is a server");
        go_on("it reads with the next server");
        fs::write(part.join("stop"), "").expect("written");
        eventually("the loop ends", || part.join("stopped").exists());
        assert!(!part.join("failures").exists(), "{runtime:?}: a call failed\n{}", running.log());
        assert_eq!(container.says("cat /etc/app.conf"), "1");
    }
}

/// How often a part is asked for while the container swaps it. The unit tests of `host::sub_path` look 100 000 times.
const LOOKS: usize = 400;

#[test]
fn sp_04_a_container_that_swaps_its_part_with_a_link_gets_nothing_of_the_node() {
    let pod = Pod::new(
        "
    - {name: host, mountPath: /host}
    - {name: scratch, mountPath: /scratch}
    - {name: host, mountPath: /a, subPath: swapped}
    - {name: host, mountPath: /b, subPath: swapped/made}
    - {name: scratch, mountPath: /c, subPath: swapped/deep/er}",
    );
    let outside = TempDir::new().expect("a directory");
    fs::create_dir(outside.path().join("made")).expect("a directory");
    let mut container = pod.start(Runtime::Runc);
    for volume in ["/host", "/scratch"] {
        let link = outside.path().display();
        container.begin(&format!(
            "cd {volume}; while :; do rm -rf swapped; ln -s {link} swapped; rm -f swapped; mkdir -p swapped/made; done"
        ));
    }
    let forbidden: Vec<(u64, u64)> =
        [outside.path(), &outside.path().join("made"), Path::new("/")].iter().map(|path| file(path)).collect();
    let directory = pod.fixture.path("run").join(UID);
    let (mut prepared, mut refused) = (0, 0);
    for _ in 0..LOOKS {
        let request = ContainerRequest {
            container: "web".to_owned(),
            environment: Environment::default(),
            recursive_read_only: false,
        };
        match ask(&directory, &Question::PrepareContainer(request), None).expect("an answer") {
            Answer::Prepared(mounts) => {
                prepared += 1;
                for path in mounts.iter().map(host_path) {
                    // A part that the container has removed meanwhile is still a mount of it.
                    assert!(!forbidden.contains(&file(&path)), "{} shows the node", path.display());
                }
            }
            Answer::Refused(reason) => {
                refused += 1;
                assert!(reason.contains("subPath"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
    println!("{prepared} times prepared, {refused} times refused");
    let left: Vec<_> =
        fs::read_dir(outside.path()).expect("a listing").map(|entry| entry.expect("one").file_name()).collect();
    assert_eq!(left, ["made"], "nothing was made outside");
    assert_eq!(fs::read_dir(outside.path().join("made")).expect("a listing").count(), 0);
    assert!(prepared > 0 && refused > 0, "{prepared} prepared, {refused} refused: there was no race");
}

fn file(path: &Path) -> (u64, u64) {
    let found = fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    (found.dev(), found.ino())
}

fn host_path(mount: &ContainerMount) -> PathBuf {
    match &mount.source {
        MountSource::HostPath(path) => path.clone(),
        MountSource::Image { .. } | MountSource::Device(_) => panic!("only volumes are mounted"),
    }
}
