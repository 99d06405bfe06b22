//! The states of objects, by their serial numbers: the content of a state follows from its number, and identifies it.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;
use serde_json::{Value, json};

use crate::api_server::ApiServer;

/// The node of the pod.
pub const NODE: &str = "n";

/// The objects of the pod's volumes. The keys of each object begin with its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Object {
    /// A ConfigMap with a volume of its own.
    Config,
    /// A ConfigMap that the projected volume shows.
    Part,
    /// A Secret with a volume of its own, which the projected volume shows, too.
    Secret,
    /// A ConfigMap that may be missing.
    Optional,
    /// The pod, whose label the projected volume shows.
    Pod,
}

/// The volumes, and the objects that each shows.
pub const VOLUMES: [(&str, &[Object]); 4] = [
    ("config", &[Object::Config]),
    ("secret", &[Object::Secret]),
    ("optional", &[Object::Optional]),
    ("all", &[Object::Part, Object::Secret, Object::Pod]),
];

impl Object {
    pub const ALL: [Object; 5] = [Object::Config, Object::Part, Object::Secret, Object::Optional, Object::Pod];

    pub fn name(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Part => "part",
            Self::Secret => "secret",
            Self::Optional => "optional",
            Self::Pod => "web",
        }
    }

    /// The name of the file that has the serial number.
    pub fn serial_key(self) -> String {
        format!("{}.serial", self.name())
    }

    /// The files of a state.
    pub fn files(self, serial: u64) -> BTreeMap<String, Vec<u8>> {
        let mut rng = Rng::with_seed(serial * 8 + self as u64);
        let mut files = BTreeMap::from([(self.serial_key(), serial.to_string().into_bytes())]);
        let keys = if self == Self::Pod { 0 } else { rng.usize(0..6) };
        for _ in 0..keys {
            // A few files need several READ requests.
            let length = if rng.u8(..) < 16 { rng.usize(0..150_000) } else { rng.usize(0..3000) };
            let text = (0..length).map(|_| rng.alphanumeric()).collect::<String>();
            files.insert(format!("{}.{}", self.name(), rng.u8(0..8)), text.into_bytes());
        }
        files
    }

    fn kind(self) -> &'static str {
        match self {
            Self::Secret => "Secret",
            Self::Pod => "Pod",
            _ => "ConfigMap",
        }
    }

    fn manifest(self, serial: u64) -> Value {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it was made of letters");
        let data: BTreeMap<_, _> = self.files(serial).into_iter().map(|(key, bytes)| (key, text(bytes))).collect();
        let metadata = json!({"name": self.name(), "namespace": "default"});
        match self {
            Self::Pod => pod(serial),
            Self::Secret => json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}),
            _ => json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}),
        }
    }
}

/// The states of all objects.
#[derive(Default)]
pub struct Model([State; Object::ALL.len()]);

#[derive(Default)]
struct State {
    serial: AtomicU64,
    /// The states after which the object was deleted.
    gone_after: Mutex<Vec<u64>>,
}

impl Model {
    /// A model with every object in its first state.
    pub fn new(server: &ApiServer) -> Self {
        let model = Self::default();
        Object::ALL.into_iter().for_each(|object| model.put(server, object));
        model
    }

    /// The last state that an object has, or is about to have.
    pub fn last(&self, object: Object) -> u64 {
        self.state(object).serial.load(Ordering::SeqCst)
    }

    pub fn is_gone(&self, object: Object) -> bool {
        self.gone_after(object, self.last(object)).is_some()
    }

    /// The first state, from `serial` on, after which the object was deleted.
    pub fn gone_after(&self, object: Object, serial: u64) -> Option<u64> {
        let gone_after = self.state(object).gone_after.lock().expect("no panic");
        gone_after.iter().copied().find(|after| *after >= serial)
    }

    /// Gives an object its next state.
    pub fn put(&self, server: &ApiServer, object: Object) {
        // Counts the state first: a reader may see it before `put_value` returns.
        let serial = self.state(object).serial.fetch_add(1, Ordering::SeqCst) + 1;
        server.put_value(object.manifest(serial));
    }

    pub fn delete(&self, server: &ApiServer, object: Object) {
        let serial = self.last(object);
        self.state(object).gone_after.lock().expect("no panic").push(serial);
        server.delete(object.kind(), "default", object.name());
    }

    fn state(&self, object: Object) -> &State {
        &self.0[object as usize]
    }
}

fn pod(serial: u64) -> Value {
    let label = json!({"path": Object::Pod.serial_key(), "fieldRef": {"fieldPath": "metadata.labels['serial']"}});
    let sources =
        json!([{"configMap": {"name": "part"}}, {"secret": {"name": "secret"}}, {"downwardAPI": {"items": [label]}}]);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": Object::Pod.name(), "namespace": "default", "labels": {"serial": serial.to_string()}},
        "spec": {
            "nodeName": NODE, "containers": [{"name": "web", "image": "web"}],
            "volumes": [
                {"name": "config", "configMap": {"name": "config"}},
                {"name": "secret", "secret": {"secretName": "secret"}},
                {"name": "optional", "configMap": {"name": "optional", "optional": true}},
                {"name": "all", "projected": {"sources": sources}},
            ],
        },
    })
}
