//! An API server for tests: it replaces kube-apiserver in everything that podfs requests.
//!
//! The server speaks HTTP/1.1 and HTTP/2 over TLS on a port of 127.0.0.1, identifies users by client certificates and bearer
//! tokens, and permits nodes what the Node authorizer and the NodeRestriction admission permit them. One version counts the
//! changes of all objects. The server answers `get`, `list` (selectors, pages, versions) and `watch` (resuming, `410`,
//! bookmarks, initial events, timeouts), `create` for events, PersistentVolumes, PodCertificateRequests, CSINodes and tokens of
//! service accounts, `patch` for events, CSINodes and the status of nodes and claims, and `delete` for PersistentVolumes.
//! Errors are `Status` objects with the codes, reasons and texts of a real server.
//!
//! A test can make the server refuse, hold, break or freeze connections ([`Order`]); answer with faults ([`Answer`]), late, or
//! with watches that end early or repeat changes ([`Behaviour`]); present another certificate ([`Presents`]); forget its
//! history ([`ApiServer::compact`]); crash, and start as a real server does ([`ApiServer::boot`]); refuse requests because of
//! overload ([`ApiServer::limit`]); or send no initial events ([`InitialEvents`]). The server records every request, and
//! [`ApiServer::assert_conventions`] finds those that break the conventions of the API.
//!
//! The server does not have: validation of objects, defaults beyond those that podfs reads, any other change over HTTP (tests
//! change objects with [`ApiServer::put`] and [`ApiServer::delete`]), the work of controllers, discovery, protobuf, tables,
//! server-side apply, the queues of priority and fairness, and signatures of tokens. `Node` objects, namespaces and service
//! accounts exist only if a test creates them.
//!
//! Each file has one concept: `listener` accepts connections, `request` parses requests, `identity` and `authorizer` decide
//! permissions, `answers` and `watch` answer from the `store`, `faults` has the planned faults of answers, and `conventions`
//! finds requests that a real server might refuse.
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
pub use faults::{Answer, Behaviour, Cut, Disturbance, End};
pub use identity::{MASTERS, NODES, User};
pub use kubeconfig::Style;
pub use listener::Order;
pub use request::ApiRequest;
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

    /// A client certificate of a user, valid until `until`.
    pub fn client_certificate(&self, user: &User, until: SystemTime) -> Pair {
        self.authority.client(&user.name, user.groups.first().map_or("", String::as_str), until)
    }

    /// Permits a user that is no node these verbs on a resource (such as `serviceaccounts/token`).
    pub fn permit(&self, user: &User, verbs: &[&str], resource: &str) {
        self.cluster.state().rules.permit(&user.name, None, verbs, resource);
    }

    /// Permits the same in one namespace.
    pub fn permit_in(&self, user: &User, namespace: &str, verbs: &[&str], resource: &str) {
        self.cluster.state().rules.permit(&user.name, Some(namespace), verbs, resource);
    }

    /// Removes all permissions of a user that is no node.
    pub fn forbid(&self, user: &User) {
        self.cluster.state().rules.forbid(&user.name);
    }

    /// Forgets the tokens of this user.
    pub fn refuse_tokens_of(&self, user: &User) {
        self.cluster.users.refuse_tokens_of(&user.name);
    }

    /// Creates or replaces an object (YAML or JSON). An object that names no namespace is in `default`. Returns its version.
    #[track_caller]
    pub fn put(&self, object: &str) -> u64 {
        self.put_value(serde_saphyr::from_str(object).expect("a manifest"))
    }

    #[track_caller]
    pub fn put_value(&self, object: Value) -> u64 {
        self.cluster.state().store.put(object)
    }

    /// Deletes an object. Returns the version of the deletion.
    #[track_caller]
    pub fn delete(&self, kind: &str, namespace: &str, name: &str) -> u64 {
        self.cluster.state().store.delete(&key(kind, namespace, name))
    }

    /// An object at the present version, if it exists.
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

    /// Sends the present version to all watches, as a bookmark.
    pub fn bookmark(&self) {
        self.cluster.state().store.bookmark();
    }

    /// Forgets the history: a new watch from an earlier version gets 410. Running watches go on.
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

    /// Begins again after a crash, as a real server does: the server has no history, so that it answers a watch from an
    /// earlier version with 410; and until [`Self::become_ready`], the server does not know which objects nodes may read, and
    /// answers nodes with 403.
    #[track_caller]
    pub fn boot(&self) {
        let mut state = self.cluster.state();
        state.store.compact();
        state.rules.graph_is_empty = true;
        state.starting = true;
        drop(state);
        self.connections(Order::Serve);
    }

    /// Makes the authorizer know which objects nodes may read. From then on, `/readyz` answers with 200.
    pub fn become_ready(&self) {
        let mut state = self.cluster.state();
        state.rules.graph_is_empty = false;
        state.starting = false;
    }

    /// Sets the treatment of watches with `sendInitialEvents`.
    pub fn initial_events(&self, initial: InitialEvents) {
        self.cluster.state().initial_events = initial;
    }

    /// Answers with 429 to requests beyond this number within the duration.
    pub fn limit(&self, requests: usize, within: Duration) {
        self.cluster.state().overload.limit = Some((requests, within));
    }

    /// The number of requests that got 429 because of the limit.
    pub fn too_many(&self) -> usize {
        self.cluster.state().overload.refused
    }

    /// Breaks all connections and listens again at once, on the same port, with the same objects and history.
    #[track_caller]
    pub fn restart(&self) {
        self.connections(Order::Refuse);
        self.connections(Order::Serve);
    }

    /// Sets the certificate that the server presents on new connections.
    pub fn present(&self, presents: Presents) {
        *self.tls.lock().expect("no panic") = tls(&certificate(&self.authority, presents));
    }

    /// Presents a self-signed certificate on new connections. Returns it, in PEM.
    pub fn present_self_signed(&self) -> String {
        let pair = Authority::self_signed();
        *self.tls.lock().expect("no panic") = tls(&pair);
        pair.certificate
    }

    /// Plans an answer for the next `times` requests.
    pub fn fail(&self, times: usize, answer: Answer) {
        self.cluster.faults.plan(None, Some(times), answer);
    }

    /// Plans an answer for the next `times` requests with this verb on this resource (such as `serviceaccounts/token`).
    pub fn fail_only(&self, verb: &str, resource: &str, times: usize, answer: Answer) {
        self.cluster.faults.plan(Some((verb, resource)), Some(times), answer);
    }

    /// Plans an answer for all requests with this verb on this resource, until [`Self::heal`].
    pub fn fail_always(&self, verb: &str, resource: &str, answer: Answer) {
        self.cluster.faults.plan(Some((verb, resource)), None, answer);
    }

    /// The number of planned faults that are still to come.
    pub fn pending_failures(&self) -> usize {
        self.cluster.faults.pending()
    }

    /// Changes the behaviour of the server.
    pub fn change_behaviour(&self, change: impl FnOnce(&mut Behaviour)) {
        self.cluster.faults.change_behaviour(change);
    }

    /// Ends watches early.
    pub fn cut(&self, events: Option<usize>, time: Option<Duration>, end: End) {
        self.change_behaviour(|behaviour| behaviour.cut = Some(Cut { events, time, end }));
    }

    /// Forgets all planned answers and changes of the behaviour.
    pub fn heal(&self) {
        self.cluster.faults.heal();
    }

    /// Every request, in the order in which they came.
    pub fn requests(&self) -> Vec<ApiRequest> {
        self.cluster.state().requests.clone()
    }

    /// The number of requests so far.
    pub fn request_count(&self) -> usize {
        self.cluster.state().requests.len()
    }

    /// The number of requests with this verb on this resource so far.
    pub fn count(&self, verb: &str, resource: &str) -> usize {
        self.cluster.state().requests.iter().filter(|request| request.is(verb, resource)).count()
    }

    /// The number of requests for all objects of this resource so far: lists, and watches that begin with the existing objects.
    pub fn lists(&self, resource: &str) -> usize {
        let lists = |request: &&ApiRequest| {
            request.is("list", resource) || request.is("watch", resource) && request.wants_initial_events()
        };
        self.cluster.state().requests.iter().filter(lists).count()
    }

    /// Forgets the requests so far.
    pub fn forget_requests(&self) {
        self.cluster.state().requests.clear();
    }

    /// Panics if any request breaks the conventions of the API.
    #[track_caller]
    pub fn assert_conventions(&self) {
        let problems: Vec<String> = self
            .requests()
            .iter()
            .flat_map(|request| {
                let title = format!("{} {}?{}", request.verb, request.path, request.raw_query);
                conventions::problems(request).into_iter().map(move |problem| format!("{title}: {problem}"))
            })
            .collect();
        assert!(problems.is_empty(), "requests that a real server might refuse:\n{}", problems.join("\n"));
    }
}

fn key(kind: &str, namespace: &str, name: &str) -> Key {
    Key::new(Resource::of_kind(kind).expect("a kind").plural, namespace, name)
}

fn certificate(authority: &Authority, presents: Presents) -> Pair {
    let unknown;
    let signer = match presents {
        Presents::OtherAuthority => {
            unknown = Authority::new("another authority");
            &unknown
        }
        _ => authority,
    };
    signer.server(presents)
}

fn tls(pair: &Pair) -> Arc<ServerConfig> {
    let provider = Arc::new(ring::default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
    let config = config
        .expect("ring has these versions")
        .with_client_cert_verifier(Arc::new(identity::AnyCertificate(provider)));
    let mut config =
        config.with_single_cert(vec![pair.certificate()], pair.key()).expect("the key is the certificate's");
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Arc::new(config)
}
