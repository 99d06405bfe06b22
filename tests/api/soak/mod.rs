//! Thousands of random changes with an API server that has random faults. A reader reads the volumes all the time. It checks
//! that a volume always shows a whole state that its object had, and never one older than an earlier read has shown. When the
//! server has recovered, the volume must show the last state.
//!
//! `cargo test --test api soak::` makes 1500 changes; `PODFS_API_SOAK` sets another number. `PODFS_API_SOAK_SEED` repeats the
//! choices of a run, which prints its seed at the beginning; the timing always differs. Only longer runs have the faults that
//! podfs detects by a timeout.

mod fault;
mod model;
mod reader;

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api_server::{ApiServer, Style, User};
use crate::common::turn::Turn;
use crate::common::{Fixture, PODFS, Running};
use fastrand::Rng;
use fault::Fault;
use model::{Model, NODE, Object, VOLUMES};
use reader::{Look, Reader};

/// The number of changes, unless the environment sets it.
pub const CHANGES: usize = 1500;
/// The time in which a pod must show the last state after the server has recovered. Pings detect a frozen connection in 25 s.
const TIMEOUT: Duration = Duration::from_secs(90);

#[test]
fn volumes_show_whole_states_never_go_back_and_end_with_the_last() {
    let (changes, seed) = (environment("PODFS_API_SOAK"), environment("PODFS_API_SOAK_SEED"));
    let changes = changes.map_or(CHANGES, |changes| usize::try_from(changes).expect("a number of changes"));
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    println!("{changes} changes; PODFS_API_SOAK_SEED={seed}");
    let mut rng = Rng::with_seed(seed);

    let (_turn, server) = (Turn::of_soak(), ApiServer::start());
    let user = User::node(NODE);
    let kubeconfig = server.kubeconfig_of(&user, Style::TokenFile);
    let model = Arc::new(Model::new(&server));
    let fixture = Fixture::new("");
    let mut command = Command::new(PODFS);
    command.args(["run", "--pod-name", "default/web", "--kubeconfig"]).arg(&kubeconfig);
    command.arg("--root-dir").arg(fixture.path("root")).arg("--run-dir").arg(fixture.path("run"));
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let mut reader = Reader::start(Arc::clone(&model), |volume| running.volume(volume));
    converge(&model, &mut reader, "at the beginning", &running);

    let mut made = 0;
    while made < changes {
        let fault = Fault::choose(&mut rng, made);
        fault.begin(&server, &user);
        for number in 1..=rng.usize(5..40) {
            change(&mut rng, &server, &model);
            made += 1;
            fault.go_on(&server, number);
            reader.look();
        }
        fault.end(&server, &user);
        // A volume does not show the last state of a deleted object, so each deleted object gets a new state.
        Object::ALL.into_iter().filter(|object| model.is_gone(*object)).for_each(|object| model.put(&server, object));
        converge(&model, &mut reader, &format!("after {made} changes and {fault:?}"), &running);
    }
    drop(reader);
    server.assert_conventions();
    let requests = server.requests();
    let connections = requests.last().map_or(0, |request| request.connection + 1);
    println!("{made} changes, {} requests on {connections} connections", requests.len());
}

/// Makes one change: a new state of a random object, or its deletion.
fn change(rng: &mut Rng, server: &ApiServer, model: &Model) {
    let object = Object::ALL[rng.usize(0..Object::ALL.len())];
    if object != Object::Pod && !model.is_gone(object) && rng.u8(..) < 20 {
        model.delete(server, object);
    } else {
        model.put(server, object);
    }
}

/// Waits until every volume shows the last state of its objects.
#[track_caller]
fn converge(model: &Model, reader: &mut Reader, when: &str, running: &Running) {
    let deadline = Instant::now() + TIMEOUT;
    let last: Look = VOLUMES
        .iter()
        .flat_map(|(volume, objects)| {
            objects.iter().map(|object| ((*volume, object.name()), Some(model.last(*object))))
        })
        .collect();
    loop {
        let look = reader.look();
        if look == last {
            return;
        }
        assert!(Instant::now() < deadline, "{when}: volumes show {look:?}, not {last:?}\n{}", running.log());
    }
}

fn environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}
