//! Real containers of runc and crun, with the mounts that `podfs mounts prepare` has prepared.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use nix::sys::signal::{Signal, kill};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde_json::Value;

use crate::common::namespace::{enter, mount_tmpfs};
use crate::common::outcome::finish;
use crate::common::passthrough::disk_directory;
use crate::common::runtime::{Runtime, RuntimeContainer, SharedDirectory};
use crate::common::*;
use podfs::mounts::{AgentFacts, ContainerMount, MountSource};
use podfs::supervisor::control::{ContainerRequest, ControlAnswer, ControlQuestion, ask};
use tempfile::TempDir;

const UID: &str = "7c1e6a52-9a51-4d0b-8d5e-3f2a6c9e1b44";

/// A pod whose containers share its volumes. Fields are dropped in this order.
struct Pod {
    running: Running,
    fixture: Fixture,
    _shared: SharedDirectory,
    host: TempDir,
    claimed: TempDir,
}

const CLAIM: &str = "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data, uid: c-1}, spec: {volumeName: pv-1}, \
                     status: {phase: Bound}}";
const VOLUME: &str = "{apiVersion: v1, kind: PersistentVolume, metadata: {name: pv-1}, spec: {claimRef: {namespace: default, \
                      name: data, uid: c-1}, local: {path: PATH}}}";

impl Pod {
    fn new(mounts: &str) -> Pod {
        Self::with_spec(mounts, "")
    }

    /// The same with additional fields in the pod's spec.
    fn with_spec(mounts: &str, spec: &str) -> Pod {
        let (shared, host, claimed) = (SharedDirectory::new(), disk_directory(), disk_directory());
        let manifest = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}}}\nspec:\n  containers:\n  - name: web\n    \
             volumeMounts:{mounts}\n  volumes:\n  - {{name: config, configMap: {{name: app}}}}\n  \
             - {{name: keys, secret: {{secretName: keys}}}}\n  - {{name: scratch, emptyDir: {{}}}}\n  \
             - {{name: host, hostPath: {{path: {}}}}}\n  - {{name: data, persistentVolumeClaim: {{claimName: data}}}}\n{spec}",
            host.path().display()
        );
        let fixture = Fixture::new_in(&shared.path(), &manifest);
        write(&fixture, "1");
        fixture.write("objects/claim.yaml", CLAIM);
        fixture.write("objects/volume.yaml", &VOLUME.replace("PATH", claimed.path().to_str().expect("text")));
        fixture.write("objects/keys.json", &secret("keys", &[("password", "opensesame")]));
        let running = fixture.run();
        Pod { running, fixture, _shared: shared, host, claimed }
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

    /// Requests the mounts of a container that is about to start, as an agent does.
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
        let write_to_all = "for f in /etc/app/setting /etc/app.conf /etc/app/new /keys/password /look/new /look-part/new; do \
                      echo x >$f; done";
        let refused = container.says(write_to_all);
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

        // A later mount of the host appears only in the container mount with `HostToContainer`.
        let later = pod.running.volume("host").join("some");
        mount_tmpfs(&later);
        fs::write(later.join("later"), "seen").expect("written");
        assert_eq!(container.says("cat /data/some/later"), "seen", "{runtime:?}");
        assert!(container.says("cat /alone/some/later").contains("No such file"), "{runtime:?}");
    }
}

#[test]
fn mt_04_a_mount_of_a_container_in_its_part_reaches_the_volume_and_stays_when_the_part_goes() {
    let mut pod = Pod::new(
        "
    - {name: host, mountPath: /part, subPath: some/part, mountPropagation: Bidirectional}
    - {name: host, mountPath: /late, subPath: some/part, mountPropagation: HostToContainer}
    - {name: host, mountPath: /all, mountPropagation: HostToContainer}
    - {name: host, mountPath: /alone, subPath: some/part}
    securityContext: {privileged: true}",
    );
    // The test cannot use crun: here crun runs only in a mount namespace whose mounts do not propagate to the host.
    let mut container = RuntimeContainer::start_sharing(Runtime::Runc, &pod.mounts());
    container.says("mkdir /part/inner");
    let process = container.pid();
    thread::spawn(move || {
        enter(process);
        mount_tmpfs(Path::new("/part/inner"));
        fs::write("/part/inner/f", "mounted").expect("written");
    })
    .join()
    .expect("the mount is made");
    let inner = pod.running.volume("host").join("some/part/inner");
    assert_eq!(fs::read_to_string(inner.join("f")).expect("the mount is in the volume"), "mounted");
    assert_eq!(container.says("cat /late/inner/f /all/some/part/inner/f"), "mountedmounted");
    assert!(container.says("cat /alone/inner/f").contains("No such file"));
    let released = finish(pod.fixture.operator("mounts").args(["release", "--pod", UID]));
    assert_eq!((released.code, released.stderr.as_str()), (Some(0), ""));
    assert_eq!(container.says("cat /part/inner/f /all/some/part/inner/f"), "mountedmounted");
    assert_eq!(fs::read_to_string(inner.join("f")).expect("the mount stays in the volume"), "mounted");
    drop(container);
    nix::mount::umount(&inner).expect("unmounted");
    assert!(pod.running.stop().success(), "{}", pod.running.log());
    pod.fixture.assert_nothing_left();
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
        let wait_for_rounds = |condition: &str| {
            let before = rounds();
            eventually(condition, || rounds() > before + 10);
        };
        wait_for_rounds("the container reads");
        let Pod { mut running, fixture, _shared, host: _host, claimed: _claimed } = pod;
        for _ in 0..3 {
            kill(running.server(), Signal::SIGKILL).expect("the server exists");
            wait_for_rounds("the container reads with another server");
        }
        fixture.kill_supervisor(&mut running);
        wait_for_rounds("the container reads without a supervisor");
        let running = fixture.run();
        wait_for_rounds("the container reads with another supervisor");
        kill(running.server(), Signal::SIGKILL).expect("the server exists");
        wait_for_rounds("the container reads with the next server");
        fs::write(part.join("stop"), "").expect("written");
        eventually("the loop ends", || part.join("stopped").exists());
        assert!(!part.join("failures").exists(), "{runtime:?}: a call failed\n{}", running.log());
        assert_eq!(container.says("cat /etc/app.conf"), "1");
    }
}

#[test]
fn a_container_with_a_user_namespace_has_the_ids_of_the_volumes() {
    // FU-04. The test uses crun: runc maps ids of mounts only from 1.2 on, and Debian 12 has an older version.
    let pod = Pod::with_spec(
        "
    - {name: config, mountPath: /etc/app}
    - {name: keys, mountPath: /key, subPath: password}
    - {name: scratch, mountPath: /scratch}",
        "  hostUsers: false\n",
    );
    let mounts = pod.mounts();
    let is_mapped =
        |mount: &&Value| mount["options"].as_array().is_some_and(|options| options.contains(&"idmap".into()));
    assert_eq!(mounts.iter().filter(is_mapped).count(), mounts.len(), "{mounts:?}");
    let mut container = RuntimeContainer::start_in_user_namespace(Runtime::Crun, &mounts);
    assert_eq!(container.says("cat /etc/app/setting /key; cat /proc/self/uid_map"), {
        let map = fs::read_to_string(format!("/proc/{}/uid_map", container.pid())).expect("a map");
        format!("1opensesame{}", map.trim_end_matches('\n'))
    });
    assert_eq!(container.says("ls -ln /etc/app/..data/setting /key").matches(" 0        0 ").count(), 2);
    container.says("echo x >/scratch/f");
    let file = fs::metadata(pod.running.volume("scratch").join("f")).expect("the file");
    assert_eq!((file.uid(), file.gid()), (0, 0), "the volume has the ids of the container");
    assert!(container.says("echo x >/etc/app/setting").contains("Read-only file system"));
}

/// How often the container exchanges the directory of a `subPath` with a symbolic link, in each volume, while podfs prepares
/// the mount of this directory.
const SWAPS: usize = 34_000;

#[test]
fn sp_04_a_container_that_swaps_its_part_with_a_link_gets_nothing_of_the_node() {
    let pod = Pod::new(
        "
    - {name: host, mountPath: /host}
    - {name: scratch, mountPath: /scratch}
    - {name: data, mountPath: /claim}
    - {name: host, mountPath: /a, subPath: swapped}
    - {name: host, mountPath: /b, subPath: swapped/made}
    - {name: scratch, mountPath: /c, subPath: swapped/deep/er}
    - {name: data, mountPath: /d, subPath: swapped/made}",
    );
    let outside = TempDir::new().expect("a directory");
    fs::create_dir(outside.path().join("made")).expect("a directory");
    let container = pod.start(Runtime::Runc);
    let swappers = ["/host", "/scratch", "/claim"].map(|volume| swap(&container, volume, outside.path()));
    let forbidden: Vec<(u64, u64)> =
        [outside.path(), &outside.path().join("made"), Path::new("/")].iter().map(|path| file_id(path)).collect();
    let directory = pod.fixture.path("run").join(UID);
    let (mut prepared, mut refused) = (0, 0);
    while !swappers.iter().all(JoinHandle::is_finished) {
        let request = ContainerRequest {
            container: "web".to_owned(),
            environment: AgentFacts::default(),
            recursive_read_only: false,
            only_volumes: false,
        };
        match ask(&directory, &ControlQuestion::PrepareContainer(request), None).expect("an answer") {
            ControlAnswer::Prepared(mounts) => {
                prepared += 1;
                for path in mounts.iter().map(host_path) {
                    // Each mount still shows the directory that podfs mounted, also after the container has exchanged it.
                    assert!(!forbidden.contains(&file_id(&path)), "{} shows a directory of the node", path.display());
                }
            }
            ControlAnswer::Refused(reason) => {
                refused += 1;
                assert!(reason.contains("subPath"), "{reason}");
            }
            unexpected => panic!("{unexpected:?}"),
        }
    }
    swappers.into_iter().for_each(|swapper| swapper.join().expect("each exchange succeeds"));
    println!("{prepared} times prepared, {refused} times refused");
    let outside_names: Vec<_> =
        fs::read_dir(outside.path()).expect("a listing").map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(outside_names, ["made"], "podfs made nothing outside of the volume");
    assert_eq!(fs::read_dir(outside.path().join("made")).expect("a listing").count(), 0);
    assert!(
        prepared > 0 && refused > 0,
        "{prepared} prepared, {refused} refused: the exchanges never hit the preparation"
    );
    assert!(pod.claimed.path().join("swapped").symlink_metadata().is_ok());
}

/// Exchanges a directory with a symbolic link to `outside` again and again, in the mount namespace of a container.
fn swap(container: &RuntimeContainer, volume: &str, outside: &Path) -> JoinHandle<()> {
    let (process, volume, outside) = (container.pid(), volume.to_owned(), outside.to_owned());
    thread::spawn(move || {
        enter(process);
        std::env::set_current_dir(volume).expect("the volume");
        fs::create_dir_all("swapped/made").expect("a directory");
        symlink(&outside, "link").expect("a link");
        for _ in 0..SWAPS {
            renameat_with(CWD, "swapped", CWD, "link", RenameFlags::EXCHANGE).expect("swapped");
        }
    })
}

fn file_id(path: &Path) -> (u64, u64) {
    let metadata = fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    (metadata.dev(), metadata.ino())
}

fn host_path(mount: &ContainerMount) -> PathBuf {
    match &mount.source {
        MountSource::HostPath(path) => path.clone(),
        MountSource::Image { .. } | MountSource::Device(_) => {
            panic!("this pod has no image volume and no block volume")
        }
    }
}
