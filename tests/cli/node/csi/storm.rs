//! Kills of the daemon, of supervisors and of servers while a kubelet publishes and unpublishes: no call in a published volume
//! fails.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use nix::sys::signal::{Signal, kill};

use super::kubelet::Kubelet;
use crate::common::turn::Turn;
use crate::common::{config_map, eventually, wait_content};
use crate::node::storm::processes;

/// The number of pods that stay while others are added and deleted.
const STAYING: usize = 3;
/// The number of kills.
const STRIKES: usize = 18;

#[test]
fn kills_of_daemon_supervisors_and_servers_fail_no_call_in_a_published_volume() {
    let (_turn, kubelet) = (Turn::of_soak(), Kubelet::new());
    kubelet.node.put("app.yaml", &config_map("app", &[("key", "v0")]));
    let mut daemon = kubelet.start();
    let volume = |pod: &str| kubelet.volume(pod, "config", &[("kind", "configMap"), ("name", "app")]);
    let name = |number: usize| format!("stays{number}");
    let staying: Vec<_> = (0..STAYING).map(|number| volume(&name(number))).collect();
    staying.iter().for_each(|volume| kubelet.published(volume));
    let (stop, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    let files: Vec<PathBuf> = staying.iter().map(|volume| volume.target.join("key")).collect();
    thread::scope(|scope| {
        let read = |file: &PathBuf| {
            while !stop.load(Ordering::Relaxed) {
                match fs::read_to_string(file) {
                    Ok(text) if text.starts_with('v') => calls.fetch_add(1, Ordering::Relaxed),
                    other => return Err(format!("{}: {other:?}", file.display())),
                };
            }
            Ok(())
        };
        let readers: Vec<_> = files.iter().map(|file| scope.spawn(move || read(file))).collect();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for strike in 0..STRIKES {
                let target = format!("uid-{}", name(fastrand::usize(..STAYING)));
                match strike % 3 {
                    0 => {
                        daemon.signal(Signal::SIGKILL);
                        daemon.wait();
                        daemon = kubelet.start();
                    }
                    kind => {
                        let mut before = None;
                        eventually("the pod is served", || {
                            before = processes(&kubelet.node, &target);
                            before.is_some()
                        });
                        let (supervisor, server) = before.expect("the closure has set it");
                        kill(if kind == 1 { supervisor } else { server }, Signal::SIGKILL).expect("killed");
                        eventually("another process serves the pod", || {
                            processes(&kubelet.node, &target)
                                .is_some_and(|(now, then)| if kind == 1 { now != supervisor } else { then != server })
                        });
                    }
                }
                let comes = format!("comes{strike}");
                let short = volume(&comes);
                kubelet.published(&short);
                let value = format!("v{strike}");
                kubelet.node.put("app.yaml", &config_map("app", &[("key", &value)]));
                files.iter().chain([&short.target.join("key")]).for_each(|file| wait_content(file, &value));
                staying.iter().for_each(|volume| kubelet.published(volume));
                kubelet.end_pod(&comes, &[short]);
            }
        }));
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            assert_eq!(reader.join().expect("a reader ends"), Ok(()), "{}", kubelet.node.log());
        }
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
    assert!(calls.load(Ordering::Relaxed) > STRIKES as u64, "the volumes were in use");
    staying
        .iter()
        .enumerate()
        .for_each(|(number, volume)| kubelet.end_pod(&name(number), std::slice::from_ref(volume)));
}
