//! An NFS server that moves to another address: podfs finds it by its name, and no call fails.

use std::fmt::Display;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use nix::sys::signal::{Signal, kill};

use crate::common::namespace::{Container, Propagation, bind};
use crate::common::network::in_own_network;
use crate::common::*;
use crate::nfs_rig::{Ganesha, Portmapper, Proxy};
use crate::pod_volumes::pods::write_claims;

/// The name of the server. Only the hosts file of a [`Machine`] has it.
const SERVER: &str = "nfs.example";
const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;
const THERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const THERE_BY_IPV6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2);
/// The client caches no attributes, so that each access needs the server.
const UNCACHED: &str = "actimeo=0";

/// A pod in a container with its own `/etc/hosts`, which has the server's address.
struct Machine {
    container: Container,
    fixture: Arc<Fixture>,
    hosts: PathBuf,
}

impl Machine {
    /// A machine with a pod that has one volume `a`, or two volumes `a` and `b`, of one server.
    fn new(uid: &str, ganesha: &Ganesha, volumes: usize) -> Self {
        Self::with(uid, &format!("{},{UNCACHED}", ports(ganesha)), volumes)
    }

    /// As [`Self::new`], with these mount options.
    fn with(uid: &str, options: &str, volumes: usize) -> Self {
        let fixture = Arc::new(Fixture::new(""));
        write_claims(&fixture, uid, &[("a", options), ("b", options)][..volumes], SERVER);
        let hosts = fixture.path("hosts");
        fs::write(&hosts, "").expect("written");
        let container = Container::new(Propagation::Private);
        let file = hosts.clone();
        container.run(move || bind(&file, Path::new("/etc/hosts")));
        let machine = Self { container, fixture, hosts };
        machine.set_address(HERE.into());
        machine
    }

    /// Gives the server's name this address. This writes into the existing file, because the file is mounted.
    fn set_address(&self, address: IpAddr) {
        fs::write(&self.hosts, format!("127.0.0.1 localhost\n{address} {SERVER}\n")).expect("written");
    }

    fn run(&self) -> Running {
        let fixture = Arc::clone(&self.fixture);
        self.container.run(move || fixture.run())
    }

    /// Starts a shell with this script. `$0` in the script is the path of a file in a volume.
    fn start(&self, running: &Running, volume: &str, file: &str, script: &str) -> Child {
        let path = running.volume(volume).join(file);
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(path).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        self.container.run(move || command.spawn().expect("a shell"))
    }

    /// Runs a script as [`Self::start`] does. Returns its output.
    #[track_caller]
    fn output_of(&self, running: &Running, volume: &str, file: &str, script: &str) -> String {
        wait_for(running, self.start(running, volume, file, script))
    }
}

/// The mount options for the ports of `ganesha`.
fn ports(ganesha: &Ganesha) -> String {
    format!("port={},mountport={}", ganesha.address().port(), ganesha.mount_address().port())
}

/// A portmapper for the services of `ganesha` at this address.
fn mapper(address: Ipv4Addr, ganesha: &Ganesha) -> Portmapper {
    Portmapper::start(address.into(), ganesha.address().port(), ganesha.mount_address().port())
}

/// Waits until a shell has ended with success. Returns its output.
#[track_caller]
fn wait_for(running: &Running, mut shell: Child) -> String {
    let mut status = None;
    eventually("a shell ends", || {
        status = shell.try_wait().expect("our child");
        status.is_some()
    });
    assert!(status.expect("the loop has set it").success(), "{}", running.log());
    std::io::read_to_string(shell.stdout.take().expect("a pipe")).expect("text")
}

#[track_caller]
fn wait_moved(running: &Running, from: impl Display, to: impl Display) {
    running.wait_log(&format!("NFS server {SERVER} has moved from {from} to {to}"));
}

#[test]
fn a_server_that_has_moved_is_found_by_its_name_and_waiting_calls_continue() {
    let mut ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("there"), "content").expect("written");
    let machine = Machine::new("nfs-moved", &ganesha, 2);
    let mut running = machine.run();
    assert_eq!(machine.output_of(&running, "b", "there", "cat $0"), "content");
    let mut writer = machine.start(&running, "a", "written", "exec 3>$0; echo 1 >&3; sleep 2; echo 2 >&3; sync $0");
    eventually("the writer has begun", || ganesha.exported().join("written").exists());
    // At the old address, the kernel still accepts connections, but the stopped process does not answer.
    ganesha.move_to(THERE);
    let reader = machine.start(&running, "a", "there", "cat $0");
    let other = machine.start(&running, "b", "there", "cat $0; mkdir $0-directory");
    assert!(writer.try_wait().expect("our child").is_none());
    machine.set_address(THERE.into());
    assert_eq!(wait_for(&running, reader), "content");
    assert_eq!(wait_for(&running, other), "content");
    wait_for(&running, writer);
    wait_moved(&running, HERE, THERE);
    assert_eq!(fs::read_to_string(ganesha.exported().join("written")).expect("on the server"), "1\n2\n");
    assert!(ganesha.exported().join("there-directory").is_dir());
    assert_eq!(running.log().matches("has moved").count(), 1, "the volumes share the server: {}", running.log());
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    machine.fixture.assert_nothing_left();
}

#[test]
fn successors_and_supervisors_that_follow_know_where_a_server_is_now() {
    let mut ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("there"), "content").expect("written");
    let machine = Machine::new("nfs-moved-killed", &ganesha, 2);
    let mut running = machine.run();
    assert_eq!(machine.output_of(&running, "a", "there", "cat $0"), "content");
    // Here, no process listens at the old address.
    ganesha.kill();
    ganesha.move_to(THERE);
    machine.set_address(THERE.into());
    assert_eq!(machine.output_of(&running, "a", "there", "cat $0"), "content");
    wait_moved(&running, HERE, THERE);
    // The name has no address now, so the next supervisor must know the server's address from its predecessor.
    fs::write(&machine.hosts, "").expect("written");
    running.signal(Signal::SIGKILL);
    running.wait();
    let mut running = machine.run();
    running.wait_log("podfs takes them over");
    kill(running.server(), Signal::SIGKILL).expect("killed");
    assert_eq!(machine.output_of(&running, "b", "new", "echo 1 >$0; cat $0"), "1\n");
    // The server moves back, and the next supervisor follows it.
    ganesha.move_to(HERE);
    machine.set_address(HERE.into());
    assert_eq!(machine.output_of(&running, "a", "new", "echo 2 >>$0; cat $0"), "1\n2\n");
    wait_moved(&running, THERE, HERE);
    fs::write(&machine.hosts, "").expect("written");
    kill(running.server(), Signal::SIGKILL).expect("killed");
    assert_eq!(machine.output_of(&running, "a", "new", "echo 3 >>$0; cat $0"), "1\n2\n3\n");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    machine.fixture.assert_nothing_left();
    assert_eq!(fs::read_to_string(ganesha.exported().join("new")).expect("on the server"), "1\n2\n3\n");
}

#[test]
fn a_machine_without_the_export_is_not_taken_for_a_server_that_has_moved() {
    let ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("there"), "content").expect("written");
    let machine = Machine::new("nfs-not-moved", &ganesha, 1);
    let mut running = machine.run();
    ganesha.stop();
    let reader = machine.start(&running, "a", "there", "cat $0");
    let without_export = TcpListener::bind((THERE, ganesha.mount_address().port())).expect("a free port");
    machine.set_address(THERE.into());
    without_export.set_nonblocking(true).expect("set");
    eventually("podfs connects to the MOUNT port", || without_export.accept().is_ok());
    // The connection ends without an answer.
    drop(without_export);
    ganesha.cont();
    assert_eq!(wait_for(&running, reader), "content");
    assert!(!running.log().contains("has moved"), "{}", running.log());
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    machine.fixture.assert_nothing_left();
}

#[test]
fn a_moved_server_is_found_also_while_no_call_waits() {
    let mut ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("there"), "content").expect("written");
    let options = format!("{},{UNCACHED},soft,timeo=5,retrans=1", ports(&ganesha));
    let machine = Machine::with("nfs-moved-soft", &options, 1);
    let mut running = machine.run();
    assert_eq!(machine.output_of(&running, "a", "there", "until cat $0; do :; done"), "content");
    ganesha.move_to(THERE);
    // From now on no process uses the volume.
    machine.output_of(&running, "a", "there", "! cat $0");
    machine.set_address(THERE.into());
    wait_moved(&running, HERE, THERE);
    eventually("status says that the volume is live", || {
        machine.fixture.pods().swap_remove(0)["volumes"][0]["state"] == "live"
    });
    assert_eq!(machine.output_of(&running, "a", "there", "until cat $0; do :; done"), "content");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    machine.fixture.assert_nothing_left();
}

#[test]
fn a_server_without_port_options_is_found_on_other_ports() {
    in_own_network(&[], || {
        let mut ganesha = Ganesha::start();
        fs::write(ganesha.exported().join("there"), "content").expect("written");
        let mapper = mapper(HERE, &ganesha);
        let machine = Machine::with("nfs-moved-mapped", UNCACHED, 2);
        let mut running = machine.run();
        assert_eq!(machine.output_of(&running, "a", "there", "cat $0"), "content");
        drop(mapper);
        ganesha.change_ports();
        ganesha.move_to(THERE);
        let _mapper = self::mapper(THERE, &ganesha);
        let reader = machine.start(&running, "a", "there", "cat $0");
        let other = machine.start(&running, "b", "there", "cat $0");
        machine.set_address(THERE.into());
        assert_eq!(wait_for(&running, reader), "content");
        assert_eq!(wait_for(&running, other), "content");
        wait_moved(&running, HERE, THERE);
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        machine.fixture.assert_nothing_left();
    });
}

#[test]
fn a_server_is_followed_from_one_address_of_ipv6_to_another() {
    in_own_network(&[THERE_BY_IPV6], || {
        let here = Ipv6Addr::LOCALHOST;
        let ganesha = Ganesha::start();
        fs::write(ganesha.exported().join("there"), "content").expect("written");
        // ganesha listens on IPv4 addresses only, so proxies give it an IPv6 address.
        let proxies_at = |address: Ipv6Addr| {
            let proxies = [ganesha.address(), ganesha.mount_address()].map(|to| Proxy::start_at(address.into(), to));
            let [nfs, mountd] = proxies.each_ref().map(|proxy| proxy.address().port());
            (proxies, Portmapper::start(address.into(), nfs, mountd))
        };
        let (proxies, _mapper) = proxies_at(here);
        let machine = Machine::with("nfs-moved-ipv6", UNCACHED, 2);
        machine.set_address(here.into());
        let mut running = machine.run();
        assert_eq!(machine.output_of(&running, "a", "there", "cat $0"), "content");
        proxies.iter().for_each(Proxy::freeze);
        let reader = machine.start(&running, "a", "there", "cat $0");
        let writer = machine.start(&running, "b", "written", "echo 1 >$0");
        let (there, _other_mapper) = proxies_at(THERE_BY_IPV6);
        machine.set_address(THERE_BY_IPV6.into());
        assert_eq!(wait_for(&running, reader), "content");
        wait_for(&running, writer);
        wait_moved(&running, here, THERE_BY_IPV6);
        assert_eq!(fs::read_to_string(ganesha.exported().join("written")).expect("on the server"), "1\n");
        assert_eq!(there[0].connections(), 1, "the volumes share the connection");
        // The successor knows the new address.
        kill(running.server(), Signal::SIGKILL).expect("killed");
        assert_eq!(machine.output_of(&running, "b", "there", "cat $0"), "content");
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        machine.fixture.assert_nothing_left();
    });
}
