//! podfs in a DaemonSet: the image, and its container on a machine with and without systemd. The tests kill, replace and
//! upgrade the container while a process reads a volume: no call fails, and nothing is left in the end.

mod container;
#[path = "../../../cli/node/nri/cri.rs"]
mod cri;
mod image;
mod imported;
mod storm;

use std::fs;
use std::io::{Write, stderr};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use self::container::{DaemonContainer, prepare};
use self::image::{Image, images};
use crate::common::kubelet::{KubeletCalls, Volume};
use crate::common::packages::{packages, stdout_of};
use crate::common::{config_map, eventually, wait_content};
use crate::installed::machine::{Init, Machine};

const KUBELET: &str = "/var/lib/kubelet";

/// A machine with runc, the CSI calls of a kubelet, and two images. If they cannot be made, prints that the test is skipped.
fn node(test: &str, init: Init) -> Option<(Machine, KubeletCalls, &'static [Image; 2])> {
    let skip = |missing: &str| {
        // `writeln!` bypasses the test harness, which captures `eprintln!` and shows it only if the test fails.
        let _ = writeln!(stderr(), "skipped: {test}: {missing}; tests/run makes a Debian tree");
        None
    };
    let Some(images) = images() else { return skip("Debian's packages for the image cannot be fetched") };
    let machine = match Machine::start(init) {
        Ok(machine) => machine,
        Err(missing) => return skip(&missing),
    };
    if init == Init::Nothing {
        machine.output_of("mount -t cgroup2 cgroup2 /sys/fs/cgroup");
    }
    prepare(&machine);
    let kubelet = KubeletCalls::new(Path::new(KUBELET), &machine.path(KUBELET));
    Some((machine, kubelet, images))
}

/// Writes the ConfigMap with this value.
fn write_config(machine: &Machine, value: &str) {
    machine.write("/etc/podfs/new", config_map("app", &[("key", value)]));
    machine.output_of("mv /etc/podfs/new /etc/podfs/manifests/app.yaml");
}

/// Publishes a volume of the ConfigMap for a pod.
#[track_caller]
fn publish(kubelet: &KubeletCalls, container: &DaemonContainer<'_>, pod: &str) -> Volume {
    let volume = kubelet.volume(pod, "config", &[("kind", "configMap"), ("name", "app")]);
    if let Err(status) = kubelet.publish(&volume) {
        panic!("{status:?}\n{}", container.log());
    }
    volume
}

/// The directory in `/proc` of a pod's supervisor, with the pid in the machine.
fn supervisor(machine: &Machine, pod: &str) -> String {
    machine.output_of(&format!("grep -lz -x -e 'uid-{pod}' /proc/[0-9]*/cmdline | while read f; do tr '\\0' ' ' <$f | grep -q '^[^ ]*podfs-supervisor ' && echo ${{f%/cmdline}}; done | head -n 1"))
}

fn volumes_survive_the_container(test: &str, init: Init) {
    let Some((machine, kubelet, [first, second])) = node(test, init) else { return };
    write_config(&machine, "one");
    let container = DaemonContainer::start(&machine, "first", first);
    kubelet.register("podfs.io@reg.sock").expect("the driver registers");
    let volume = publish(&kubelet, &container, "web");
    let file = volume.target.join("key");
    assert_eq!(fs::read_to_string(&file).expect("the mount has arrived on the node"), "one");
    let web_supervisor = supervisor(&machine, "web");
    for namespace in ["mnt", "net", "ipc", "uts", "cgroup"] {
        let namespace_of = |process: &str| machine.output_of(&format!("readlink {process}/ns/{namespace}"));
        assert_eq!(namespace_of(&web_supervisor), namespace_of("/proc/1"), "the supervisor has the node's {namespace}");
    }
    let cgroup = machine.output_of(&format!("cat {web_supervisor}/cgroup"));
    assert!(cgroup.contains("podfs-pod-uid-web") && !cgroup.contains("kubepods"), "{cgroup}");

    let (stop, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                match fs::read_to_string(&file) {
                    Ok(text) if !text.is_empty() => calls.fetch_add(1, Ordering::Relaxed),
                    outcome => return Err(format!("{outcome:?}")),
                };
            }
            Ok(())
        });
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            container.kill();
            let container = DaemonContainer::start(&machine, "again", first);
            write_config(&machine, "two");
            wait_content(&file, "two");
            container.delete();
            let container = DaemonContainer::start(&machine, "newer", second);
            write_config(&machine, "three");
            wait_content(&file, "three");
            assert_eq!(kubelet.publish(&volume).map_err(|status| status.to_string()), Ok(()));
            assert_eq!(supervisor(&machine, "web"), web_supervisor, "the same process serves the pod");
            let copies = machine.output_of("ls /var/lib/podfs/programs");
            assert_eq!(copies.lines().count(), 3, "two copies and a link: {copies}");
            let other = publish(&kubelet, &container, "other");
            assert_ne!(
                machine.output_of(&format!("readlink {}/exe", supervisor(&machine, "other"))),
                machine.output_of(&format!("readlink {web_supervisor}/exe")),
                "a new pod has the new program"
            );
            kubelet.end_pod("other", &[other]);
            // The pod's supervisor executes the program that the last container has installed.
            let upgraded = container.exec("podfs upgrade --all --run-dir /run/podfs");
            assert_eq!(upgraded.code, Some(0), "{upgraded:?}");
            container.delete();
        }));
        stop.store(true, Ordering::Relaxed);
        assert_eq!(reader.join().expect("the reader ends"), Ok(()));
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
    assert!(calls.load(Ordering::Relaxed) > 10, "the volume was in use");

    let container = DaemonContainer::start(&machine, "last", second);
    let copies = machine.output_of("ls /var/lib/podfs/programs");
    assert_eq!(copies.lines().count(), 2, "no process runs the first copy: {copies}");
    kubelet.end_pod("web", &[volume]);
    eventually("nothing of the pod is left", || {
        machine.run("! grep -q -e fuse.podfs /proc/self/mountinfo && [ ! -e /run/podfs/uid-web ] && [ ! -e /var/lib/podfs/pods/uid-web ]").code == Some(0)
    });
    container.delete();
    machine.eventually("! grep -l '^podfs' /proc/[0-9]*/comm");
    machine.eventually("[ -z \"$(find /sys/fs/cgroup -path '*podfs-pod-uid-*' 2>/dev/null)\" ]");
}

#[test]
fn volumes_survive_the_container_of_the_daemon_set_where_systemd_runs() {
    volumes_survive_the_container("volumes_survive_the_container_of_the_daemon_set_where_systemd_runs", Init::Systemd);
}

#[test]
fn volumes_survive_the_container_of_the_daemon_set_without_systemd() {
    volumes_survive_the_container("volumes_survive_the_container_of_the_daemon_set_without_systemd", Init::Nothing);
}

#[test]
fn an_image_is_built_equal_twice_and_says_of_its_parts_what_they_are() {
    let Some([first, second]) = images() else { return };
    let again = Image::build("again", &packages().deb);
    assert_eq!(again.digest, first.digest);
    assert_ne!(second.digest, first.digest, "another package is another image");
    assert_eq!(first.index()["manifests"][0]["digest"], first.digest.as_str());
    for (descriptor, blob) in first.blobs() {
        let sum = stdout_of(Command::new("sha256sum").arg(&blob));
        assert_eq!(descriptor["digest"], format!("sha256:{}", sum.split(' ').next().expect("a sum")));
        assert_eq!(descriptor["size"], fs::metadata(&blob).expect("a blob").len());
    }
    let config = first.config();
    assert_eq!((&config["os"], &config["config"]["User"]), (&"linux".into(), &"0:0".into()));
    assert!(
        config["config"]["Labels"]["io.podfs.debian"].as_str().is_some_and(|packages| packages.starts_with("libc6="))
    );
    let [layer] = &first.layers()[..] else { panic!("one layer") };
    let listed = stdout_of(Command::new("tar").args(["--list", "--gzip", "--file"]).arg(layer));
    let programs = ["./usr/bin/podfs", "./usr/libexec/podfs/podfs-fuse", "./usr/libexec/podfs/podfs-supervisor"];
    for file in programs.into_iter().chain(["./usr/share/doc/libc6/copyright", "./lib64"]) {
        assert!(listed.lines().any(|line| line == file), "{file} is in the image:\n{listed}");
    }
    assert!(!listed.contains("/man/") && !listed.contains("/gconv"), "{listed}");
}
