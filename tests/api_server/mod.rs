//! An API server for tests: it stands for kube-apiserver in all that podfs asks of one.
//!
//! It speaks HTTP/1.1 and HTTP/2 over TLS on a port of 127.0.0.1, knows users by client certificates and bearer tokens, and
//! lets nodes do what the Node authorizer and the NodeRestriction admission let them do. It keeps objects with one version for
//! all of them, and answers `get`, `list` (selectors, pages, versions) and `watch` (resuming, `410`, bookmarks, initial events,
//! timeouts), `create` for events, PersistentVolumes and tokens of service accounts, `delete` for PersistentVolumes. Errors are
//! `Status` objects with the codes, reasons and texts of a real server.
//!
//! A test can make it fail: refuse connections, hold them, break or freeze them ([`Order`]); answer wrongly ([`Answer`]), late,
//! or with watches that end or repeat themselves ([`Mood`]); to present another certificate ([`Presents`]); to have forgotten
//! its history; to crash and start as a real one does ([`ApiServer::boot`]); to have too much to do ([`ApiServer::limit`]); to
//! be one that sends no initial events ([`InitialEvents`]). It writes down every request, and says which of them are not what
//! the conventions of the API ask for.
//!
//! What it leaves out: validation of objects, defaults beyond those that podfs reads, every other change over HTTP (tests
//! change objects with [`ApiServer::put`] and [`ApiServer::delete`]), finalizers, namespaces as objects, discovery, protobuf,
//! tables, server-side apply, the queues of priority and fairness, and signatures of tokens. `Node` objects and service
//! accounts exist only if a test puts them.
//!
//! Each file has one concept: `listener` takes connections, `request` parses requests, `identity` and `authorizer` decide
//! permissions, `answers` and `watch` answer from the `store`, `faults` has the planned faults of answers, and `conventions`
//! finds requests that a real server would not accept.
#![allow(dead_code, unused_imports, reason = "each test program uses its part")]

mod answers;
mod authority;
mod authorizer;
mod conventions;
mod faults;
mod identity;
mod kubeconfig;
mod listener;
mod request;
mod resources;
mod selector;
mod status;
mod store;
mod tokens;
mod watch;

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use rustls::ServerConfig;
use rustls::crypto::ring;
use serde_json::Value;
use tempfile::TempDir;

use answers::Cluster;
use authority::Authority;
use identity::Users;
use listener::Listener;
use resources::Resource;
use store::Key;

pub use answers::InitialEvents;
pub use authority::{Pair, Presents};
pub use faults::{Answer, Cut, Disturbance, End, Mood};
pub use identity::{MASTERS, NODES, User};
pub use kubeconfig::Style;
pub use listener::Order;
pub use request::Asked;
pub use tokens::claims;

/// A server; it ends when it is dropped.
pub struct ApiServer {
    listener: Listener,
    cluster: Arc<Cluster>,
    authority: Authority,
    tls: Arc<Mutex<Arc<ServerConfig>>>,
    directory: TempDir,
}

impl ApiServer {
    pub fn start() -> Self {
        let authority = Authority::new("kubernetes");
        let users = Users::new(authority.der(), Arc::new(ring::default_provider()));
        let cluster = Arc::new(Cluster::new(users));
        let tls = Arc::new(Mutex::new(tls(&certificate(&authority, Presents::Good))));
        let listener = Listener::start(Arc::clone(&cluster), Arc::clone(&tls));
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        Self { listener, cluster, authority, tls, directory }
    }

    pub fn url(&self) -> String {
        format!("https://{}", self.listener.address)
    }

    /// The URL for connections without TLS, as to `kubectl proxy`. Users authenticate by tokens there.
    pub fn plain_url(&self) -> String {
        format!("http://{}", self.listener.plain)
    }

    /// The certificate of the authority, in PEM.
    pub fn authority(&self) -> String {
        self.authority.pem()
    }

    /// A certificate by which a user is known until then.
    pub fn client_certificate(&self, user: &User, until: SystemTime) -> Pair {
        self.authority.client(&user.name, user.groups.first().map_or("", String::as_str), until)
    }

    /// Lets a user that is no node do this to a resource (`serviceaccounts/token`).
    pub fn permit(&self, user: &User, verbs: &[&str], resource: &str) {
        self.cluster.state().rules.permit(&user.name, verbs, resource);
    }

    /// Takes all that it may from a user that is no node.
    pub fn forbid(&self, user: &User) {
        self.cluster.state().rules.forbid(&user.name);
    }

    /// Forgets the tokens of this user.
    pub fn refuse_tokens_of(&self, user: &User) {
        self.cluster.users.refuse_tokens_of(&user.name);
    }

    /// Creates or replaces an object (YAML or JSON, `default` being its namespace if it names none). Gives its version.
    #[track_caller]
    pub fn put(&self, object: &str) -> u64 {
        self.put_value(serde_saphyr::from_str(object).expect("a manifest"))
    }

    #[track_caller]
    pub fn put_value(&self, object: Value) -> u64 {
        self.cluster.state().store.put(object)
    }

    /// Takes an object away. Gives the version since which it is gone.
    #[track_caller]
    pub fn delete(&self, kind: &str, namespace: &str, name: &str) -> u64 {
        self.cluster.state().store.delete(&key(kind, namespace, name))
    }

    /// An object as it is.
    pub fn object(&self, kind: &str, namespace: &str, name: &str) -> Option<Value> {
        self.cluster.state().store.get(&key(kind, namespace, name)).map(|object| Value::clone(object))
    }

    /// All objects of a kind.
    pub fn objects(&self, kind: &str) -> Vec<Value> {
        let plural = Resource::of_kind(kind).expect("a kind").plural;
        self.cluster.state().store.of(plural).map(|(_, object)| Value::clone(object)).collect()
    }

    /// The version of the last change.
    pub fn version(&self) -> u64 {
        self.cluster.state().store.version()
    }

    /// The number of watches that cover an object.
    pub fn watches(&self, kind: &str, name: &str) -> usize {
        let plural = Resource::of_kind(kind).expect("a kind").plural;
        self.cluster.state().store.watches(plural, name)
    }

    /// Tells all watches how far the server is.
    pub fn bookmark(&self) {
        self.cluster.state().store.bookmark();
    }

    /// Forgets the history: a watch that is not there can only begin at what follows.
    pub fn compact(&self) {
        self.cluster.state().store.compact();
    }

    /// Sets the treatment of connections.
    #[track_caller]
    pub fn connections(&self, order: Order) {
        self.listener.order(order);
    }

    /// The number of connections so far.
    pub fn connection_count(&self) -> u64 {
        self.listener.count()
    }

    /// Breaks all connections and refuses new ones, until [`Self::boot`].
    #[track_caller]
    pub fn crash(&self) {
        self.connections(Order::Refuse);
    }

    /// Begins again after a crash, as a real server does: it knows no version from before, so watches are answered with
    /// 410; and until [`Self::become_ready`], it does not know what nodes may read, and answers them with 403.
    #[track_caller]
    pub fn boot(&self) {
        let mut state = self.cluster.state();
        state.store.compact();
        state.rules.graph_is_empty = true;
        state.starting = true;
        drop(state);
        self.connections(Order::Serve);
    }

    /// Makes the authorizer know which objects nodes may read; `/readyz` reports that.
    pub fn become_ready(&self) {
        let mut state = self.cluster.state();
        state.rules.graph_is_empty = false;
        state.starting = false;
    }

    /// Sets the treatment of watches with `sendInitialEvents`.
    pub fn initial_events(&self, initial: InitialEvents) {
        self.cluster.state().initial_events = initial;
    }

    /// Answers with 429 when there are more requests than this within the time.
    pub fn limit(&self, requests: usize, within: Duration) {
        self.cluster.state().overload.limit = Some((requests, within));
    }

    /// The number of requests that got 429 because of the limit.
    pub fn too_many(&self) -> usize {
        self.cluster.state().overload.refused
    }

    /// Ends and begins again on the same port, with the same objects and their history, within a moment.
    #[track_caller]
    pub fn restart(&self) {
        self.connections(Order::Refuse);
        self.connections(Order::Serve);
    }

    /// Sets the certificate that the server presents on new connections.
    pub fn present(&self, presents: Presents) {
        *self.tls.lock().expect("no panic") = tls(&certificate(&self.authority, presents));
    }

    /// New connections see a certificate that is its own authority. Gives it, in PEM.
    pub fn present_its_own(&self) -> String {
        let pair = Authority::itself();
        *self.tls.lock().expect("no panic") = tls(&pair);
        pair.certificate
    }

    /// Answers the next requests wrongly, so many.
    pub fn fail(&self, times: usize, answer: Answer) {
        self.cluster.faults.plan(None, Some(times), answer);
    }

    /// Answers the next requests of this verb on this resource (`serviceaccounts/token`) wrongly, so many.
    pub fn fail_only(&self, verb: &str, resource: &str, times: usize, answer: Answer) {
        self.cluster.faults.plan(Some((verb, resource)), Some(times), answer);
    }

    /// Answers all requests of this verb on this resource wrongly, until [`Self::heal`].
    pub fn fail_always(&self, verb: &str, resource: &str, answer: Answer) {
        self.cluster.faults.plan(Some((verb, resource)), None, answer);
    }

    /// The number of planned faults that are still to come.
    pub fn pending_failures(&self) -> usize {
        self.cluster.faults.pending()
    }

    /// Changes how answers are given.
    pub fn mood(&self, change: impl FnOnce(&mut Mood)) {
        self.cluster.faults.change(change);
    }

    /// Ends watches early.
    pub fn cut(&self, events: Option<usize>, time: Option<Duration>, end: End) {
        self.mood(|mood| mood.cut = Some(Cut { events, time, end }));
    }

    /// Answers rightly from now on.
    pub fn heal(&self) {
        self.cluster.faults.heal();
    }

    /// Every request, in the order in which they came.
    pub fn requests(&self) -> Vec<Asked> {
        self.cluster.state().seen.clone()
    }

    /// The number of requests so far.
    pub fn request_count(&self) -> usize {
        self.cluster.state().seen.len()
    }

    /// The number of requests with this verb on this resource so far.
    pub fn count(&self, verb: &str, resource: &str) -> usize {
        self.cluster.state().seen.iter().filter(|asked| asked.is(verb, resource)).count()
    }

    /// The number of requests for all objects of this resource so far: lists, and watches that begin with the existing objects.
    pub fn lists(&self, resource: &str) -> usize {
        let lists =
            |asked: &&Asked| asked.is("list", resource) || asked.is("watch", resource) && asked.wants_initial_events();
        self.cluster.state().seen.iter().filter(lists).count()
    }

    /// Forgets the requests so far.
    pub fn forget_requests(&self) {
        self.cluster.state().seen.clear();
    }

    /// Panics if any request is not what the conventions of the API ask for.
    #[track_caller]
    pub fn assert_conventions(&self) {
        let complaints: Vec<String> = self
            .requests()
            .iter()
            .flat_map(|asked| {
                let request = format!("{} {}?{}", asked.verb, asked.path, asked.raw_query);
                conventions::problems(asked).into_iter().map(move |problem| format!("{request}: {problem}"))
            })
            .collect();
        assert!(complaints.is_empty(), "requests that a server might not take:\n{}", complaints.join("\n"));
    }
}

fn key(kind: &str, namespace: &str, name: &str) -> Key {
    Key::new(Resource::of_kind(kind).expect("a kind").plural, namespace, name)
}

fn certificate(authority: &Authority, presents: Presents) -> Pair {
    let other;
    let signer = match presents {
        Presents::OtherAuthority => {
            other = Authority::new("another authority");
            &other
        }
        _ => authority,
    };
    signer.server(presents)
}

fn tls(pair: &Pair) -> Arc<ServerConfig> {
    let provider = Arc::new(ring::default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
    let config = config.expect("ring has them").with_client_cert_verifier(Arc::new(identity::AnyCertificate(provider)));
    let mut config = config.with_single_cert(vec![pair.certificate()], pair.key()).expect("they fit");
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Arc::new(config)
}
