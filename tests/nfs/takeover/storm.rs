//! Storms: changes without pause, while servers die.

use std::fs;

use podfs_fuse::nfs::options::ExportOptions;

use crate::mounted::options;
use crate::nfs_rig::proxy::End;
use crate::nfs_rig::{Ganesha, Proxy, eventually};
use crate::takeover::pod::Pod;
use crate::takeover::worker::{COUNT, Work, Workers, check, place};

/// Lets workers work in a volume while `disturb` runs.
fn storm(work: Work, disturb: impl FnOnce(&Pod, &mut Ganesha, &mut Workers)) {
    let server = Ganesha::start();
    let options = options(&server);
    storm_with(work, server, &options, disturb);
}

fn storm_with(
    work: Work,
    mut server: Ganesha,
    options: &ExportOptions,
    disturb: impl FnOnce(&Pod, &mut Ganesha, &mut Workers),
) {
    let pod = Pod::new(options);
    let mut workers = Workers::start(pod.path(), work);
    disturb(&pod, &mut server, &mut workers);
    if work == Work::Data {
        // Each has looked at all that it wrote.
        workers.end();
        return;
    }
    for (worker, rounds) in workers.end().into_iter().enumerate() {
        check(&place(&server.exported(), worker), rounds);
    }
    let silly = || {
        let all = (0..COUNT).flat_map(|worker| fs::read_dir(place(&server.exported(), worker)).expect("listed"));
        all.filter(|one| one.as_ref().expect("an entry").file_name().to_string_lossy().starts_with(".nfs")).count()
    };
    eventually("files that were removed while they were open are gone", || silly() == 0);
}

#[test]
fn nothing_fails_and_nothing_is_done_twice_when_the_server_process_is_killed() {
    storm(Work::Names, |pod, _, workers| {
        for _ in 0..15 {
            workers.wait_for(3);
            pod.kill_and_succeed();
        }
        workers.wait_for(3);
    });
}

#[test]
fn nothing_fails_and_nothing_is_done_twice_when_the_nfs_server_is_killed() {
    storm(Work::Names, |_, server, workers| {
        for _ in 0..8 {
            workers.wait_for(3);
            server.kill();
            server.restart();
        }
        workers.wait_for(3);
    });
}

#[test]
fn nothing_fails_and_nothing_is_done_twice_when_both_are_killed() {
    storm(Work::Names, |pod, server, workers| {
        for _ in 0..8 {
            workers.wait_for(3);
            server.kill();
            pod.kill_and_succeed();
            server.restart();
            workers.wait_for(1);
            pod.kill_and_succeed();
        }
        workers.wait_for(3);
    });
}

#[test]
fn no_data_is_lost_when_the_server_process_is_killed() {
    storm(Work::Data, |pod, _, workers| {
        for _ in 0..10 {
            workers.wait_for(1);
            pod.kill_and_succeed();
        }
        workers.wait_for(COUNT);
    });
}

#[test]
fn no_data_is_lost_when_the_nfs_server_is_killed() {
    storm(Work::Data, |_, server, workers| {
        for _ in 0..6 {
            workers.wait_for(1);
            server.kill();
            server.restart();
        }
        workers.wait_for(COUNT);
    });
}

#[test]
fn no_data_is_lost_when_both_are_killed() {
    storm(Work::Data, |pod, server, workers| {
        for _ in 0..6 {
            workers.wait_for(1);
            server.kill();
            pod.kill_and_succeed();
            server.restart();
            pod.kill_and_succeed();
        }
        workers.wait_for(COUNT);
    });
}

#[test]
fn nothing_fails_and_nothing_is_done_twice_when_connections_are_cut() {
    let server = Ganesha::start();
    let proxy = Proxy::start(server.address());
    let options = options(&(proxy.address(), server.mount_address()));
    proxy.forget();
    storm_with(Work::Names, server, &options, |_, _, workers| {
        for number in 0..20 {
            workers.wait_for(2);
            proxy.cut(if number % 2 == 0 { End::Rst } else { End::Fin });
        }
        workers.wait_for(3);
    });
    let mut ports = proxy.seen().ports;
    assert!(ports.len() > 5, "{ports:?}");
    ports.dedup();
    assert_eq!(ports.len(), 1, "all connections come from one port: {ports:?}");
}
