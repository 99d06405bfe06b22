//! Pods of `podfs run` under load, while processes of both versions are killed, adopt each other, and are upgraded.

use crate::common::io_uring;
use crate::common::load::{self, Pod, faults};
use crate::previous::First;

/// A pod that callers use through projections and all kinds of passthrough to the disk and the memory of the node.
fn pod(first: First) -> Pod {
    let volume = |name, fields| (name, format!("{{name: {name}, emptyDir: {fields}}}"));
    Pod::with(|fixture| first.builds(fixture), &[volume("scratch", "{}"), volume("memory", "{medium: Memory}")])
}

#[test]
fn an_upgraded_pod_and_one_that_goes_back_lose_nothing_under_load() {
    load::rounds::upgrade(pod(First::Previous), load::rounds_or(4));
}

#[test]
fn each_version_adopts_the_servers_of_the_other_under_load() {
    load::rounds::adopt(pod(First::Previous), load::rounds_or(4), |pod| pod.builds.put_other());
}

#[test]
fn no_call_fails_when_processes_of_two_versions_are_killed_at_random() {
    faults::inject_at_random(pod(First::Previous), load::number("PODFS_SOAK_KILLS").unwrap_or(30));
}

#[test]
fn the_same_holds_over_io_uring() {
    if io_uring::is_chosen() || !io_uring::is_offered() {
        return;
    }
    io_uring::repeat(&["pods::"]);
}
