//! Tokens of service accounts: `create serviceaccounts/token`. They have the form and the claims of real tokens, but no valid
//! signature.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::faults::Behaviour;
use super::identity::User;
use super::request::ApiRequest;
use super::status::Failure;
use super::store::{Key, Store};

/// The audience of a token whose request names none.
const AUDIENCE: &str = "https://kubernetes.default.svc";

/// The answer to a TokenRequest. `behaviour` has the lifetime of tokens, which overrides the requested one, and the offset of
/// the server's clock. `serial` makes each token unique.
pub fn issue(
    store: &Store,
    user: &User,
    request: &ApiRequest,
    behaviour: &Behaviour,
    serial: u64,
) -> Result<Value, Failure> {
    let (namespace, name) =
        (request.namespace.as_deref().unwrap_or_default(), request.name.as_deref().unwrap_or_default());
    let account =
        store.get(&Key::new("serviceaccounts", namespace, name)).ok_or_else(|| Failure::not_found(request))?;
    let spec = &request.body["spec"];
    let reference = &spec["boundObjectRef"];
    let pod = bound_pod(store, namespace, reference, request)?;
    if let Some(node) = user.as_node() {
        admit(store, node, pod, spec, request)?;
    }
    let expiration = spec["expirationSeconds"].as_i64().unwrap_or(3600);
    if expiration < 600 {
        let why = format!(
            "spec.expirationSeconds: Invalid value: {expiration}: may not specify a duration less than 10 minutes"
        );
        return Err(Failure::invalid("TokenRequest.authentication.k8s.io", "", &why));
    }
    let seconds =
        behaviour.token_lifetime.map_or(expiration, |lifetime| i64::try_from(lifetime.as_secs()).expect("seconds"));
    let audiences = match spec["audiences"].as_array() {
        Some(audiences) if !audiences.is_empty() => json!(audiences),
        _ => json!([AUDIENCE]),
    };
    let skew = Duration::from_secs(behaviour.clock_ahead.unsigned_abs());
    let now = if behaviour.clock_ahead < 0 { SystemTime::now() - skew } else { SystemTime::now() + skew };
    let until = now + Duration::from_secs(seconds.unsigned_abs());
    let mut claims = json!({
        "aud": audiences, "iss": AUDIENCE, "iat": seconds_of(now), "nbf": seconds_of(now), "exp": seconds_of(until),
        "jti": format!("{serial}"), "sub": format!("system:serviceaccount:{namespace}:{name}"),
        "kubernetes.io": {
            "namespace": namespace, "serviceaccount": {"name": name, "uid": account["metadata"]["uid"]},
        },
    });
    if let Some(pod) = pod {
        claims["kubernetes.io"]["pod"] = json!({"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]});
    }
    let mut answer = json!({
        "kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1",
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": rfc3339(now)},
        "spec": {"audiences": audiences, "expirationSeconds": seconds},
        "status": {"token": encode(&claims), "expirationTimestamp": rfc3339(until)},
    });
    if !reference.is_null() {
        answer["spec"]["boundObjectRef"] = reference.clone();
    }
    Ok(answer)
}

/// The claims of a token.
pub fn claims(token: &str) -> Value {
    let payload = token.split('.').nth(1).expect("three parts");
    let mut base64 = payload.replace('-', "+").replace('_', "/");
    while !base64.len().is_multiple_of(4) {
        base64.push('=');
    }
    let ByteString(bytes) = serde_json::from_value(base64.into()).expect("base64");
    serde_json::from_slice(&bytes).expect("JSON")
}

/// A time as in `2026-01-02T03:04:05Z`.
pub fn rfc3339(time: SystemTime) -> Value {
    json!(Time(Timestamp::from_second(seconds_of(time)).expect("a time")))
}

fn seconds_of(time: SystemTime) -> i64 {
    Timestamp::try_from(time).expect("a time").as_second()
}

/// The pod to bind the token to.
fn bound_pod<'a>(
    store: &'a Store,
    namespace: &str,
    reference: &Value,
    request: &ApiRequest,
) -> Result<Option<&'a Value>, Failure> {
    let (Some("Pod"), Some(name)) = (reference["kind"].as_str(), reference["name"].as_str()) else { return Ok(None) };
    let pod = store.get(&Key::new("pods", namespace, name)).ok_or_else(|| Failure::missing("pods", name))?;
    match reference["uid"].as_str() {
        Some(uid) if !uid.is_empty() && pod["metadata"]["uid"] != uid => {
            let why = format!(
                "the UID in the bound object reference ({uid}) does not match the UID in record. The object might have been \
                 deleted and then recreated"
            );
            Err(Failure::not_admitted(request, &why))
        }
        _ => Ok(Some(pod)),
    }
}

/// Admits the requests that nodes may make: tokens bound to their pods, for audiences that those pods name.
fn admit(store: &Store, node: &str, pod: Option<&Value>, spec: &Value, request: &ApiRequest) -> Result<(), Failure> {
    let refuse = |why: &str| Err(Failure::not_admitted(request, why));
    let reference = &spec["boundObjectRef"];
    let Some(pod) = pod.filter(|_| reference["apiVersion"] == "v1") else {
        return refuse("node requested token not bound to a pod");
    };
    if reference["uid"].as_str().unwrap_or_default().is_empty() {
        return refuse("node requested token with a pod binding without a uid");
    }
    if pod["spec"]["nodeName"] != node {
        return refuse("node requested token bound to a pod scheduled on a different node");
    }
    let audiences = spec["audiences"].as_array().map(Vec::as_slice).unwrap_or_default();
    match audiences {
        [] => Ok(()),
        [audience] if audiences_of(store, pod).contains(audience.as_str().unwrap_or_default()) => Ok(()),
        [audience] => refuse(&format!("audience {audience} not found in pod spec volume")),
        _ => refuse("node may only request 0 or 1 audiences"),
    }
}

/// The audiences that the volumes of a pod name: those of `serviceAccountToken` sources, and those of the `tokenRequests` of
/// the volumes' CSI drivers.
fn audiences_of(store: &Store, pod: &Value) -> BTreeSet<String> {
    let volumes = || pod["spec"]["volumes"].as_array().into_iter().flatten();
    let sources = volumes().flat_map(|volume| volume["projected"]["sources"].as_array().into_iter().flatten());
    let tokens = sources.map(|source| &source["serviceAccountToken"]).filter(|token| token.is_object());
    let of_sources = tokens.map(|token| token["audience"].as_str().unwrap_or_default().to_owned());
    let of_drivers = volumes().filter_map(|volume| driver_of(store, pod, volume)).flat_map(|name| {
        let driver = store.get(&Key::new("csidrivers", "", &name));
        let requests = driver.and_then(|driver| driver["spec"]["tokenRequests"].as_array().cloned());
        let audience = |request: Value| request["audience"].as_str().unwrap_or_default().to_owned();
        requests.into_iter().flatten().map(audience).collect::<Vec<_>>()
    });
    of_sources.chain(of_drivers).collect()
}

/// The CSI driver of a volume of a pod.
fn driver_of(store: &Store, pod: &Value, volume: &Value) -> Option<String> {
    if let Some(driver) = volume["csi"]["driver"].as_str() {
        return Some(driver.to_owned());
    }
    let namespace = pod["metadata"]["namespace"].as_str()?;
    let claim = store.get(&Key::new(
        "persistentvolumeclaims",
        namespace,
        volume["persistentVolumeClaim"]["claimName"].as_str()?,
    ))?;
    let persistent = store.get(&Key::new("persistentvolumes", "", claim["spec"]["volumeName"].as_str()?))?;
    persistent["spec"]["csi"]["driver"].as_str().map(str::to_owned)
}

fn encode(claims: &Value) -> String {
    let part = |value: &Value| {
        let bytes = json!(ByteString(value.to_string().into_bytes()));
        let base64 = bytes.as_str().expect("base64").trim_end_matches('=');
        base64.replace('+', "-").replace('/', "_")
    };
    let header = json!({"alg": "RS256", "kid": "test"});
    let signature = json!({"not": "a signature"});
    [&header, claims, &signature].map(part).join(".")
}
