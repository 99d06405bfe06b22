//! Objects that the tests create, and requests for them.

use serde_json::{Value, json};

use crate::api_server::ApiServer;

pub const APP: &str = "/api/v1/namespaces/default/configmaps";
pub const OF_APP: &str = "fieldSelector=metadata.name%3Dapp";

pub fn put_app(server: &ApiServer, value: &str) -> u64 {
    put_config_map(server, "app", value)
}

pub fn put_config_map(server: &ApiServer, name: &str, value: &str) -> u64 {
    server.put(&format!("{{apiVersion: v1, kind: ConfigMap, metadata: {{name: {name}}}, data: {{a: \"{value}\"}}}}"))
}

/// Creates the pod `web` on node `n`, which refers to the ConfigMap `app`, the claim `data` and a token. Returns its
/// uid.
pub fn put_pod(server: &ApiServer) -> String {
    server.put("{apiVersion: v1, kind: ServiceAccount, metadata: {name: default}}");
    let token = json!({"serviceAccountToken": {"path": "token", "audience": "vault"}});
    server.put_value(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
        "spec": {"nodeName": "n", "volumes": [
            {"name": "config", "configMap": {"name": "app"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "token", "projected": {"sources": [token]}},
        ]},
    }));
    let pod = server.object("Pod", "default", "web").expect("it was put");
    pod["metadata"]["uid"].as_str().expect("a uid").to_owned()
}

pub fn watch_of_app(version: u64) -> String {
    format!("{APP}?watch=true&{OF_APP}&resourceVersion={version}&timeoutSeconds=600")
}

pub fn names(list: &Value) -> Vec<&str> {
    let items = list["items"].as_array().expect("items");
    items.iter().map(|item| item["metadata"]["name"].as_str().expect("a name")).collect()
}

/// A `continue` token of a list, encoded for a query.
pub fn encode(token: &str) -> String {
    token.replace('=', "%3D").replace('/', "%2F").replace('+', "%2B")
}
