//! Storms: workers change a volume without pause, while servers are killed.

use std::fs;

use podfs_fuse::nfs::options::ExportOptions;

use crate::mounted::options;
use crate::nfs_rig::proxy::End;
use crate::nfs_rig::{Ganesha, Proxy, eventually};
use crate::takeover::pod::Pod;
use crate::takeover::worker::{COUNT, Work, Workers, check, directory_of};

/// Lets workers change a volume while `disturb` runs, and checks the outcome.
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
        // Each worker has checked its own data.
        workers.end();
        return;
    }
    for (worker, rounds) in workers.end().into_iter().enumerate() {
        check(&directory_of(&server.exported(), worker), rounds);
    }
    let removed_files = || {
        let entries =
            (0..COUNT).flat_map(|worker| fs::read_dir(directory_of(&server.exported(), worker)).expect("listed"));
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        names.filter(|name| name.to_string_lossy().starts_with(".nfs")).count()
    };
    eventually("files that were removed while they were open are gone", || removed_files() == 0);
}

#[test]
fn nothing_fails_and_nothing_is_done_twice_when_the_server_process_is_killed() {
    storm(Work::Names, |pod, _, workers| {
        for _ in 0..15 {
            workers.wait_for(3);
            pod.replace_server();
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
            pod.replace_server();
            server.restart();
            workers.wait_for(1);
            pod.replace_server();
        }
        workers.wait_for(3);
    });
}

#[test]
fn no_data_is_lost_when_the_server_process_is_killed() {
    storm(Work::Data, |pod, _, workers| {
        for _ in 0..10 {
            workers.wait_for(1);
            pod.replace_server();
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
            pod.replace_server();
            server.restart();
            pod.replace_server();
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
    let mut ports = proxy.traffic().ports;
    assert!(ports.len() > 5, "{ports:?}");
    ports.dedup();
    assert_eq!(ports.len(), 1, "all connections come from one port: {ports:?}");
}
