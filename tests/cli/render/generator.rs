//! Random pods, and objects for them.

use fastrand::Rng;
use serde_json::{Value, json};

/// Random pods, and objects for them.
pub struct Generator(pub Rng);

impl Generator {
    pub fn objects(&mut self) -> Value {
        let bytes: Vec<u8> = (0..self.0.usize(1..3000)).map(|_| self.0.u8(..)).collect();
        let binary = k8s_openapi::ByteString(bytes);
        let long = "x".repeat(self.0.usize(0..9000));
        json!({"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "o"},
             "data": {"a": "text\n", "b": "", "c.conf": long}, "binaryData": {"d": binary}},
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "o"},
             "data": {"a": binary}, "stringData": {"b": "secret", "c.conf": "more", "d": ""}},
        ]})
    }

    pub fn pod(&mut self) -> (Value, Vec<String>) {
        let names: Vec<String> = (0..self.0.usize(1..5)).map(|number| format!("v{number}")).collect();
        let volumes: Vec<Value> = names.iter().map(|name| self.volume(name)).collect();
        let mut context = json!({});
        if self.0.bool() {
            // The last one needs more than the seven octal digits of a tar header.
            context["fsGroup"] = [0, 1001, 2_097_152].map(Value::from)[self.0.usize(..3)].clone();
        }
        if self.0.bool() {
            context["runAsUser"] = [0, 1000, 3_000_000].map(Value::from)[self.0.usize(..3)].clone();
        }
        let mut mounts: Vec<Value> =
            names.iter().map(|name| json!({"name": name, "mountPath": format!("/mnt/{name}")})).collect();
        if names.len() > 1 && self.0.bool() {
            let below = ["a", "other/deep", "c.conf"][self.0.usize(..3)];
            mounts.push(json!({"name": "v1", "mountPath": format!("/mnt/v0/{below}")}));
        }
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "web", "labels": {"app": "web", "n": self.0.u8(..).to_string()}},
            "spec": {
                "securityContext": context,
                "containers": [{"name": "c", "volumeMounts": mounts, "resources": {"limits": {"memory": "64Mi"}}}],
                "volumes": volumes,
            },
        });
        (pod, names)
    }

    fn volume(&mut self, name: &str) -> Value {
        let mut volume = json!({"name": name});
        let (field, mut source) = match self.0.u8(..4) {
            0 => ("configMap", self.object("name")),
            1 => ("secret", self.object("secretName")),
            2 => ("downwardAPI", self.downward()),
            _ => {
                let count = self.0.usize(1..4);
                let sources: Vec<Value> = (0..count).map(|number| self.source(number)).collect();
                ("projected", json!({"sources": sources}))
            }
        };
        if self.0.bool() {
            source["defaultMode"] = self.mode();
        }
        volume[field] = source;
        volume
    }

    /// A source of a projected volume. Each source has its own directory, so that no path is both a file and a
    /// directory.
    fn source(&mut self, number: usize) -> Value {
        let prefix = format!("s{number}/");
        match self.0.u8(..3) {
            0 => json!({"configMap": {"name": "o", "items": self.items(&prefix)}}),
            1 => json!({"secret": {"name": "o", "items": self.items(&prefix)}}),
            _ => json!({"downwardAPI": {"items": [
                {"path": format!("{prefix}labels"), "fieldRef": {"fieldPath": "metadata.labels"}}]}}),
        }
    }

    fn object(&mut self, name_field: &str) -> Value {
        let mut source = json!({name_field: "o"});
        if self.0.bool() {
            source["items"] = self.items("");
        } else if self.0.u8(..4) == 0 {
            source[name_field] = "absent".into();
            source["optional"] = true.into();
        }
        source
    }

    fn items(&mut self, prefix: &str) -> Value {
        let paths = ["a", "dir/b", "dir/deep/er/b", "dir-2/x", ".hidden", "z"];
        let long = format!("{}/{}", "long".repeat(30), "name".repeat(30));
        let count = self.0.usize(1..5);
        let items = (0..count).map(|number| {
            let path = if self.0.u8(..8) == 0 { format!("l{number}/{long}") } else { paths[number].to_owned() };
            let key = ["a", "b", "c.conf", "d"][self.0.usize(..4)];
            let mut item = json!({"key": key, "path": prefix.to_owned() + &path});
            if self.0.bool() {
                item["mode"] = self.mode();
            }
            item
        });
        items.collect::<Vec<_>>().into()
    }

    fn downward(&mut self) -> Value {
        json!({"items": [
            {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}, "mode": self.mode()},
            {"path": "sub/labels", "fieldRef": {"fieldPath": "metadata.labels"}},
            {"path": "memory", "resourceFieldRef": {"containerName": "c", "resource": "limits.memory"}},
        ]})
    }

    fn mode(&mut self) -> Value {
        [0o644, 0o400, 0o777, 0o440, 0o000, 0o555][self.0.usize(..6)].into()
    }
}
