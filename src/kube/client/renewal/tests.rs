//! Connections that are opened while requests go on. A shell script issues the credentials, when the test lets it.

use std::fs;
use std::path::PathBuf;

use serde_json::json;
use tempfile::TempDir;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{sleep, timeout};

use super::*;
use crate::kube::settings::SettingsSource;

/// How long a test waits for a result that should come at once.
const LIMIT: Duration = Duration::from_secs(20);

/// A kubeconfig with a program that waits while there is a file `slow`, and fails while there is a file `fails`.
struct Program(TempDir);

impl Program {
    fn new() -> Program {
        let program = Program(tempfile::tempdir().expect("a directory"));
        let script = "#!/bin/sh\n\
            cd \"$(dirname \"$0\")\"\n\
            echo run >>runs\n\
            number=$(wc -l <runs)\n\
            while [ -e slow ]; do sleep 0.02; done\n\
            [ ! -e fails ] || exit 1\n\
            printf '{\"status\": {\"token\": \"t%s\", \"expirationTimestamp\": \"2100-01-01T00:00:00Z\"}}' \"$number\"\n";
        fs::write(program.path("program"), script).expect("written");
        let kubeconfig = json!({
            "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1"}}],
            "users": [{"name": "u", "user": {"exec": {
                "apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/sh", "args": [program.path("program")],
                "interactiveMode": "Never",
            }}}],
        });
        fs::write(program.path("config"), kubeconfig.to_string()).expect("written");
        program
    }

    async fn client(&self) -> ApiClient {
        ApiClient::open(SettingsSource::Kubeconfig(self.path("config"))).await.expect("a client")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn set(&self, name: &str) {
        fs::write(self.path(name), "").expect("written");
    }

    fn unset(&self, name: &str) {
        fs::remove_file(self.path(name)).expect("removed");
    }

    fn runs(&self) -> usize {
        fs::read_to_string(self.path("runs")).expect("it has run").lines().count()
    }

    async fn wait_runs(&self, runs: usize) {
        within(async {
            while self.runs() < runs {
                sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }
}

async fn within<T>(task: impl Future<Output = T>) -> T {
    timeout(LIMIT, task).await.expect("it does not wait")
}

/// The credentials of the next request.
async fn token(client: &ApiClient) -> String {
    token_of(&*client.connection().await)
}

fn token_of(connection: &ApiConnection) -> String {
    let header = connection.authorization.as_ref().expect("a token").to_str().expect("text");
    header.trim_start_matches("Bearer ").to_owned()
}

fn request(client: &ApiClient) -> JoinHandle<String> {
    let client = client.clone();
    tokio::spawn(async move { token(&client).await })
}

/// The files were read so long ago, and the credentials expire at a time from now on.
fn age(client: &ApiClient, age: Duration, left: Duration) {
    let mut current = client.current();
    current.read = Instant::now().checked_sub(age).expect("the machine has run for some minutes");
    Arc::get_mut(&mut current.connection).expect("no request is under way").expires = Some(SystemTime::now() + left);
}

#[tokio::test]
async fn a_slow_renewal_delays_no_request_whose_credentials_are_good() {
    let program = Program::new();
    let client = program.client().await;
    program.set("slow");
    age(&client, REREAD_INTERVAL, AHEAD / 2);
    assert_eq!(within(token(&client)).await, "t1");
    program.wait_runs(2).await;
    let connection = within(client.connection()).await;
    assert_eq!(token_of(&connection), "t1");
    client.note_broken_connection();
    assert_eq!(within(token(&client)).await, "t1");
    program.unset("slow");
    within(async {
        while token(&client).await != "t2" {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    assert_eq!(program.runs(), 2);
}

#[tokio::test]
async fn requests_whose_credentials_were_rejected_or_have_expired_wait_for_one_renewal() {
    let program = Program::new();
    let client = program.client().await;
    for (runs, is_rejected) in [(2, true), (3, false)] {
        program.set("slow");
        if is_rejected {
            let connection = client.connection().await;
            client.request_reread(&connection, RereadReason::Identity);
        } else {
            age(&client, Duration::ZERO, Duration::ZERO);
        }
        let requests = [request(&client), request(&client), request(&client)];
        program.wait_runs(runs).await;
        assert!(requests.iter().all(|request| !request.is_finished()));
        program.unset("slow");
        for request in requests {
            assert_eq!(within(request).await.expect("a token"), format!("t{runs}"));
        }
        assert_eq!(program.runs(), runs);
    }
}

#[tokio::test]
async fn a_rejection_during_a_renewal_waits_for_it_and_is_over_with_other_credentials() {
    let program = Program::new();
    let client = program.client().await;
    program.set("slow");
    age(&client, REREAD_INTERVAL, AHEAD / 2);
    let connection = within(client.connection()).await;
    program.wait_runs(2).await;
    client.request_reread(&connection, RereadReason::Identity);
    let requests = [request(&client), request(&client)];
    yield_now().await;
    program.unset("slow");
    for request in requests {
        assert_eq!(within(request).await.expect("a token"), "t2");
    }
    assert_eq!((program.runs(), client.current().reread_reason), (2, RereadReason::No));
}

#[tokio::test]
async fn a_rejection_that_an_opening_did_not_consider_stays_with_the_same_credentials() {
    let program = Program::new();
    let client = program.client().await;
    let before = client.connection().await;
    let access = SettingsSource::Kubeconfig(program.path("config"));
    let opened = ApiConnection::open(&access, Some((&before, true))).await;
    client.request_reread(&before, RereadReason::Identity);
    client.current().replace(opened, RereadReason::No);
    assert_eq!(within(token(&client)).await, "t2");
}

#[tokio::test]
async fn a_renewal_that_fails_runs_once_for_all_that_wait_and_spoils_nothing() {
    let program = Program::new();
    let client = program.client().await;
    program.set("slow");
    program.set("fails");
    let connection = client.connection().await;
    client.request_reread(&connection, RereadReason::Identity);
    let requests = [request(&client), request(&client)];
    program.wait_runs(2).await;
    program.unset("slow");
    for request in requests {
        assert_eq!(within(request).await.expect("a token"), "t1");
    }
    assert_eq!(program.runs(), 2);
    program.unset("fails");
    client.request_reread(&client.connection_now(), RereadReason::Identity);
    assert_eq!(within(token(&client)).await, "t3");
}

#[tokio::test]
async fn a_request_that_is_dropped_while_it_waits_leaves_no_other_waiting() {
    let program = Program::new();
    let client = program.client().await;
    program.set("slow");
    let connection = client.connection().await;
    client.request_reread(&connection, RereadReason::Identity);
    let dropped = request(&client);
    program.wait_runs(2).await;
    let other = request(&client);
    dropped.abort();
    assert!(within(dropped).await.is_err());
    program.unset("slow");
    assert_eq!(within(other).await.expect("a token"), "t2");
}

#[test]
fn a_runtime_that_ends_during_a_renewal_leaves_no_request_of_another_waiting() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let program = Program::new();
    let (first, second) = (runtime(), runtime());
    let client = first.block_on(async {
        let client = program.client().await;
        program.set("slow");
        let connection = client.connection().await;
        client.request_reread(&connection, RereadReason::Identity);
        drop(request(&client));
        program.wait_runs(2).await;
        client
    });
    drop(first);
    program.unset("slow");
    assert_eq!(second.block_on(within(token(&client))), "t3");
}
