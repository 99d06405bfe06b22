//! `podfs node --discover`: entries of directories become PersistentVolumes, are cleaned when they are released, and offered
//! again.

mod kills;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::{Value, json};

use crate::api_server::{Answer, ApiServer, InitialEvents, Style};
use crate::common::loop_device::LoopDevice;
use crate::common::node::Node;
use crate::common::{Running, eventually};
use crate::rig::NODE;
use crate::roles::node::{account, bind_role};
use crate::roles::{Account, create, objects_of, permissions_in};

/// The role for `--discover`, which the account of the node has besides its own.
const ROLE: &str = "podfs-local-volumes";
const ROLE_FILE: &str = "examples/rbac/local-volumes.yaml";

/// A server with a StorageClass `fast`, and a node with a directory for it.
struct Rig {
    server: ApiServer,
    podfs: Account,
    node: Node,
    directory: PathBuf,
    mounted: Vec<PathBuf>,
}

impl Rig {
    fn new(reclaim: &str) -> Rig {
        let server = ApiServer::start();
        create(&server, objects_of(ROLE_FILE));
        bind_role(&server, ROLE);
        let podfs = account(&server, &[]);
        let labels = json!({"kubernetes.io/hostname": "host-1"});
        server.put_value(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": labels}}));
        server.put_value(json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "fast"},
            "provisioner": "kubernetes.io/no-provisioner", "reclaimPolicy": reclaim, "mountOptions": ["noatime"],
        }));
        let node = Node::new();
        let directory = node.fixture.path("fast");
        fs::create_dir(&directory).expect("a directory");
        let directory = directory.canonicalize().expect("its path");
        Rig { server, podfs, node, directory, mounted: Vec::new() }
    }

    /// Mounts a tmpfs as an entry of the directory.
    fn mount(&mut self, name: &str) -> PathBuf {
        let path = self.directory.join(name);
        fs::create_dir_all(&path).expect("a directory");
        mount(Some("tmpfs"), &path, Some("tmpfs"), MsFlags::empty(), Some("size=16m")).expect("mounted");
        self.mounted.push(path.clone());
        path
    }

    fn command(&self) -> Command {
        let mut command = self.node.bare_command();
        command.arg("--kubeconfig").arg(self.server.kubeconfig_of(&self.podfs.user, Style::Token));
        command.arg("--node-name").arg(NODE).arg("--discover").arg(format!("fast={}", self.directory.display()));
        command
    }

    fn start(&self) -> Running {
        self.node.start_command(self.command())
    }

    /// The PersistentVolume at a path, if there is one.
    fn volume(&self, path: &Path) -> Option<Value> {
        let volumes = self.server.objects("PersistentVolume");
        volumes.into_iter().find(|volume| volume["spec"]["local"]["path"] == path.to_str().expect("text"))
    }

    #[track_caller]
    fn wait_offered(&self, path: &Path) -> Value {
        eventually(&format!("{} is offered\n{}", path.display(), self.node.log()), || self.volume(path).is_some());
        self.volume(path).expect("it is offered")
    }

    #[track_caller]
    fn wait_log(&self, sentence: &str) {
        eventually(&format!("the log says {sentence:?}"), || self.node.log().contains(sentence));
    }

    /// Binds the volume to a claim and sets its phase, as Kubernetes' controller does when a claim is bound to the volume, and
    /// when the claim is deleted. Returns the uid of the PersistentVolume.
    fn set_phase(&self, path: &Path, phase: &str) -> String {
        let mut volume = self.volume(path).expect("it is offered");
        let claim =
            json!({"kind": "PersistentVolumeClaim", "namespace": "default", "name": "data", "uid": "uid-claim"});
        volume["spec"]["claimRef"] = claim;
        volume["status"]["phase"] = phase.into();
        let uid = volume["metadata"]["uid"].as_str().expect("a uid").to_owned();
        self.server.put_value(volume);
        uid
    }

    /// Waits until another PersistentVolume than the one with this uid is at the path.
    #[track_caller]
    fn wait_offered_again(&self, path: &Path, uid: &str) {
        let is_new = || self.volume(path).is_some_and(|volume| volume["metadata"]["uid"] != uid);
        eventually(&format!("{} is offered again", path.display()), is_new);
    }

    fn records(&self) -> Vec<PathBuf> {
        let records = fs::read_dir(self.node.fixture.path("root/plugins/podfs/local-volumes"));
        records.into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for path in self.mounted.iter().rev() {
            let _ = umount2(path, MntFlags::MNT_DETACH);
        }
        if !std::thread::panicking() {
            self.server.assert_conventions();
            self.podfs.assert_suffices(&self.server);
        }
    }
}

fn write(path: &Path) {
    fs::create_dir_all(path.join("a/b")).expect("directories");
    for name in ["a/b/file", "a/file", ".hidden"] {
        fs::write(path.join(name), "secret").expect("a file");
    }
}

fn is_empty(path: &Path) -> bool {
    fs::read_dir(path).expect("a directory").next().is_none()
}

#[test]
fn a_mounted_directory_is_offered_and_the_offer_is_the_same_after_a_restart() {
    let mut rig = Rig::new("Retain");
    let first = rig.mount("first");
    let daemon = rig.start();
    let volume = rig.wait_offered(&first);
    let expected = json!({
        "capacity": {"storage": "16Mi"},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "fast",
        "volumeMode": "Filesystem",
        "mountOptions": ["noatime"],
        "local": {"path": first.to_str().expect("text")},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["host-1"]}]},
        ]}},
    });
    assert_eq!(volume["spec"], expected);
    let provisioner = format!("local.podfs.io/{NODE}");
    assert_eq!(volume["metadata"]["annotations"]["pv.kubernetes.io/provisioned-by"], provisioner);
    // podfs finds later mounts by the mount table, and offers them to the server without a restart.
    let second = rig.mount("second");
    rig.wait_offered(&second);
    drop(daemon);
    let third = rig.mount("third");
    let _daemon = rig.start();
    rig.wait_offered(&third);
    let mut names: Vec<_> = rig.server.objects("PersistentVolume");
    assert_eq!(names.len(), 3, "nothing is offered twice");
    names.retain(|other| other["metadata"]["uid"] == volume["metadata"]["uid"]);
    assert_eq!(names[0]["metadata"]["name"], volume["metadata"]["name"]);
}

#[test]
fn used_unmounted_and_linked_entries_are_never_offered() {
    let mut rig = Rig::new("Delete");
    let other = rig.node.fixture.path("elsewhere");
    fs::create_dir(&other).expect("a directory");
    let bound = rig.mount("bound");
    mount(Some(&bound), &other, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("bound");
    rig.mounted.push(other.clone());
    fs::create_dir(rig.directory.join("plain")).expect("a directory");
    fs::write(rig.directory.join("file"), "").expect("a file");
    let named = rig.mount("named");
    std::os::unix::fs::symlink(&named, rig.directory.join("link")).expect("a link");
    rig.server.put_value(json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "by-hand"},
        "spec": {"local": {"path": named.to_str().expect("text")}, "capacity": {"storage": "1Mi"}},
    }));
    let good = rig.mount("good");
    let _daemon = rig.start();
    rig.wait_offered(&good);
    let at = |name: &str| rig.directory.join(name).display().to_string();
    for sentence in [
        format!("{} is not offered: it is not a mount point", at("plain")),
        format!("{} is not offered: it is neither a mounted directory nor a block device", at("file")),
        format!("{} is not offered: it is a symbolic link", at("link")),
        format!("{} is not offered: it is in use: it is mounted at", at("bound")),
    ] {
        rig.wait_log(&sentence);
    }
    let volumes = rig.server.objects("PersistentVolume");
    assert_eq!(volumes.len(), 2, "the one made by hand, and the good one: {volumes:?}");
    // podfs offers an entry as soon as nothing else uses it.
    umount2(&other, MntFlags::empty()).expect("unmounted");
    rig.wait_offered(&bound);
    rig.server.delete("PersistentVolume", "", "by-hand");
    rig.wait_offered(&named);
}

#[test]
fn a_released_volume_is_cleaned_and_offered_again_and_one_to_retain_is_not() {
    for (reclaim, is_cleaned) in [("Delete", true), ("Retain", false)] {
        let mut rig = Rig::new(reclaim);
        let (path, other) = (rig.mount("one"), rig.mount("two"));
        // podfs also has to send list requests.
        rig.server.initial_events(InitialEvents::Refused);
        let _daemon = rig.start();
        rig.wait_offered(&path);
        rig.set_phase(&path, "Bound");
        write(&path);
        let uid = rig.set_phase(&path, "Released");
        rig.wait_offered(&other);
        if is_cleaned {
            rig.wait_offered_again(&path, &uid);
            assert!(is_empty(&path));
            assert!(rig.records().is_empty(), "{:?}", rig.records());
            let unused = permissions_in(ROLE_FILE, ROLE).difference(&rig.podfs.used(&rig.server)).count();
            assert_eq!(unused, 0, "rules that podfs does not need");
        } else {
            let third = rig.mount("three");
            rig.wait_offered(&third);
            assert_eq!(rig.volume(&path).expect("it stays")["metadata"]["uid"], uid.as_str());
            assert!(path.join("a/b/file").exists());
        }
    }
}

#[test]
fn nothing_is_erased_that_is_in_use_or_another_file_system_by_now() {
    let mut rig = Rig::new("Delete");
    let (used, replaced, inside) = (rig.mount("used"), rig.mount("replaced"), rig.mount("inside"));
    let daemon = rig.start();
    for path in [&used, &replaced, &inside] {
        rig.wait_offered(path);
        rig.set_phase(path, "Bound");
        write(path);
    }
    let place = rig.node.fixture.path("kubelet/pods/uid/volumes/kubernetes.io~local-volume");
    let place = place.join(rig.volume(&used).expect("offered")["metadata"]["name"].as_str().expect("a name"));
    fs::create_dir_all(&place).expect("directories");
    mount(Some(&used), &place, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("bound");
    rig.mounted.push(place.clone());
    umount2(&replaced, MntFlags::empty()).expect("unmounted");
    rig.mount("replaced");
    write(&replaced);
    let inner = rig.mount("inside/inner");
    write(&inner);
    let uid = rig.set_phase(&used, "Released");
    rig.set_phase(&replaced, "Released");
    let uid_inside = rig.set_phase(&inside, "Released");
    rig.wait_log("is in use: a pod has it at");
    rig.wait_log("may be another disk or file system than PersistentVolume");
    rig.wait_log("is not clean: podfs cannot delete 1 entry: inner is a mount point");
    for path in [&used, &replaced, &inner] {
        assert!(path.join("a/b/file").exists(), "{}", path.display());
    }
    // A restart of the daemon does not make it erase them.
    drop(daemon);
    let _daemon = rig.start();
    umount2(&place, MntFlags::empty()).expect("unmounted");
    umount2(&inner, MntFlags::empty()).expect("unmounted");
    rig.wait_offered_again(&used, &uid);
    rig.wait_offered_again(&inside, &uid_inside);
    assert!(is_empty(&used) && is_empty(&inside) && replaced.join("a/b/file").exists());
}

#[test]
fn an_offer_is_withdrawn_when_nothing_is_mounted_there_any_more() {
    let mut rig = Rig::new("Delete");
    let (path, bound) = (rig.mount("one"), rig.mount("two"));
    let _daemon = rig.start();
    rig.wait_offered(&path);
    rig.wait_offered(&bound);
    rig.set_phase(&bound, "Bound");
    for path in [&path, &bound] {
        umount2(path, MntFlags::empty()).expect("unmounted");
    }
    eventually("the offer is withdrawn", || rig.volume(&path).is_none());
    assert!(rig.volume(&bound).is_some(), "a claim has it");
}

#[test]
fn a_hundred_directories_are_offered_once_each_while_the_daemon_is_killed_at_each_offer() {
    const VOLUMES: &str = "persistentvolumes";
    let mut rig = Rig::new("Delete");
    let paths: Vec<_> = (0..100).map(|number| rig.mount(&format!("disk-{number:03}"))).collect();
    let offered = || rig.server.objects("PersistentVolume").len();
    for number in 0..paths.len() {
        // The server answers one more offer, and never answers the next one.
        rig.server.fail_only("create", VOLUMES, 1, Answer::Right);
        rig.server.fail_always("create", VOLUMES, Answer::Never);
        let requests = rig.server.count("create", VOLUMES);
        let mut daemon = rig.start();
        eventually("one more is offered", || offered() > number);
        // In every second round, the kill comes when podfs has begun the next offer; otherwise while podfs gets the answer to
        // the last one.
        if number % 2 == 0 && number + 1 < paths.len() {
            eventually("the next offer has begun", || rig.server.count("create", VOLUMES) > requests + 1);
        }
        daemon.signal(nix::sys::signal::Signal::SIGKILL);
        daemon.wait();
        rig.server.heal();
        assert_eq!(offered(), number + 1, "nothing is offered twice");
    }
    let _daemon = rig.start();
    let late = rig.mount("late");
    rig.wait_offered(&late);
    assert!(paths.iter().all(|path| rig.volume(path).is_some()));
    assert_eq!(rig.server.objects("PersistentVolume").len(), paths.len() + 1);
}

#[test]
fn a_daemon_that_is_killed_between_two_requests_continues_where_it_was() {
    let mut rig = Rig::new("Delete");
    let path = rig.mount("one");
    let hangs = |verb: &str| rig.server.fail_always(verb, "persistentvolumes", Answer::Never);
    // The first kill comes before podfs has offered the entry.
    hangs("create");
    let daemon = rig.start();
    eventually("it is being offered", || rig.server.count("create", "persistentvolumes") > 0);
    drop(daemon);
    rig.server.heal();
    let daemon = rig.start();
    rig.wait_offered(&path);
    rig.set_phase(&path, "Bound");
    write(&path);
    // The second kill comes before podfs has read the PersistentVolume again, to check that it may clean the entry.
    hangs("get");
    let uid = rig.set_phase(&path, "Released");
    eventually("podfs reads it again", || rig.server.count("get", "persistentvolumes") > 0);
    assert!(path.join("a/b/file").exists() && rig.records().is_empty());
    drop(daemon);
    rig.server.heal();
    // The third kill comes after podfs has cleaned the entry, and before the PersistentVolume is deleted.
    hangs("delete");
    let daemon = rig.start();
    eventually("it is being deleted", || rig.server.count("delete", "persistentvolumes") > 0);
    assert!(is_empty(&path) && rig.records().len() == 1);
    drop(daemon);
    // An operator deletes the PersistentVolume meanwhile.
    rig.server.heal();
    let name = rig.volume(&path).expect("it is there")["metadata"]["name"].as_str().expect("a name").to_owned();
    rig.server.delete("PersistentVolume", "", &name);
    let _daemon = rig.start();
    rig.wait_offered_again(&path, &uid);
    assert!(rig.records().is_empty());
}

#[test]
fn a_volume_that_was_deleted_half_clean_is_cleaned_before_it_is_offered() {
    let mut rig = Rig::new("Delete");
    let path = rig.mount("one");
    let daemon = rig.start();
    rig.wait_offered(&path);
    rig.set_phase(&path, "Bound");
    write(&path);
    let inner = rig.mount("one/a/inner");
    let uid = rig.set_phase(&path, "Released");
    rig.wait_log("is not clean: podfs cannot delete");
    assert!(!path.join(".hidden").exists(), "the other files are deleted");
    drop(daemon);
    let name = rig.volume(&path).expect("it is there")["metadata"]["name"].as_str().expect("a name").to_owned();
    rig.server.delete("PersistentVolume", "", &name);
    let before = rig.server.count("create", "persistentvolumes");
    let _daemon = rig.start();
    let other = rig.mount("other");
    rig.wait_offered(&other);
    assert_eq!(rig.server.count("create", "persistentvolumes"), before + 1, "half clean, it is not offered");
    umount2(&inner, MntFlags::empty()).expect("unmounted");
    rig.wait_offered_again(&path, &uid);
    assert!(is_empty(&path));
}

#[test]
fn a_block_device_is_offered_and_erased_to_its_last_byte() {
    let mut rig = Rig::new("Delete");
    let (disk, table, used) = (LoopDevice::new(128), LoopDevice::new(16), LoopDevice::new(16));
    table.run("mkswap", &[]);
    used.run("mkfs.ext4", &["-q"]);
    let at = rig.node.fixture.path("at");
    fs::create_dir(&at).expect("a directory");
    mount(Some(used.path()), &at, Some("ext4"), MsFlags::empty(), None::<&str>).expect("mounted");
    rig.mounted.push(at.clone());
    let mut entry = |name: &str, device: &LoopDevice| {
        let path = rig.directory.join(name);
        fs::write(&path, "").expect("a file");
        mount(Some(device.path()), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("bound");
        rig.mounted.push(path.clone());
        path
    };
    let (path, _, used_path) = (entry("disk", &disk), entry("swap", &table), entry("used", &used));
    let _daemon = rig.start();
    let volume = rig.wait_offered(&path);
    assert_eq!(
        (volume["spec"]["volumeMode"].as_str(), volume["spec"]["capacity"]["storage"].as_str()),
        (Some("Block"), Some("128Mi"))
    );
    rig.wait_log("swap is not offered: it may belong to something else: it holds swap");
    rig.wait_log("used is not offered: it is in use by the node");
    umount2(&at, MntFlags::empty()).expect("unmounted");
    rig.wait_offered(&used_path);

    rig.set_phase(&path, "Bound");
    for offset in [0, 64 << 20, (128 << 20) - 4096] {
        disk.write(b"secret", offset);
    }
    // podfs does not erase a device that is open exclusively, as a device that the kernel uses.
    let holder = std::os::unix::fs::OpenOptionsExt::custom_flags(fs::OpenOptions::new().read(true), libc::O_EXCL)
        .open(disk.path())
        .expect("open for this process alone");
    let uid = rig.set_phase(&path, "Released");
    rig.wait_log("is in use by the node");
    assert!(disk.head().starts_with(b"secret"));
    drop(holder);
    rig.wait_offered_again(&path, &uid);
    let bytes = fs::read(disk.path()).expect("it can be read");
    assert!(bytes.len() == 128 << 20 && bytes.iter().all(|byte| *byte == 0));
    assert!(rig.records().is_empty());
}

#[test]
fn metrics_count_the_entries_by_state() {
    let mut rig = Rig::new("Delete");
    let (path, inside) = (rig.mount("one"), rig.mount("two"));
    fs::create_dir(rig.directory.join("plain")).expect("a directory");
    let mut command = rig.command();
    command.args(["--metrics-addr", "127.0.0.1:0"]);
    let _daemon = rig.node.start_command(command);
    rig.wait_offered(&path);
    rig.wait_offered(&inside);
    rig.mount("two/inner");
    rig.set_phase(&inside, "Bound");
    rig.set_phase(&inside, "Released");
    rig.wait_log("is not clean: podfs cannot delete 1 entry");
    let log = rig.node.log();
    let address = log.split("http://").nth(1).and_then(|url| url.split('/').next()).expect("an address").to_owned();
    for (state, count) in [("free", 1), ("released", 1), ("bound", 0), ("unfit", 1), ("failing", 1)] {
        let line = format!("podfs_local_volumes{{state=\"{state}\"}} {count}");
        eventually(&line, || scrape(&address).lines().any(|metric| metric == line));
    }
}

fn scrape(address: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the daemon listens");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("asked");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    text
}
