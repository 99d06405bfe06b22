//! A plain HTTP client of the API server, without any code of podfs.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use reqwest::{Client, ClientBuilder, Response, StatusCode};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};

use crate::api_server::{ApiServer, End, MASTERS, User};

/// The time limit for each wait of a test. On an idle machine, such waits take milliseconds.
const TIMEOUT: Duration = Duration::from_secs(180);

/// A plain client.
pub struct Caller {
    pub client: Client,
    pub server: String,
}

impl Caller {
    pub fn admin(server: &ApiServer) -> Self {
        Self::with_certificate(server, &User::new("admin", MASTERS), tomorrow())
    }

    /// The node `n`.
    pub fn node(server: &ApiServer) -> Self {
        Self::with_certificate(server, &User::node("n"), tomorrow())
    }

    pub fn with_certificate(server: &ApiServer, user: &User, until: SystemTime) -> Self {
        let client = client_builder(server, Some((user, until))).build().expect("a client");
        Self { client, server: server.url() }
    }

    pub async fn send(&self, path: &str) -> Result<Response, reqwest::Error> {
        let request = self.client.get(format!("{}{path}", self.server)).header("accept", "application/json");
        request.send().await
    }

    pub async fn send_accepting(&self, path: &str, accept: &str) -> Response {
        let request = self.client.get(format!("{}{path}", self.server)).header("accept", accept);
        request.send().await.expect("an answer")
    }

    pub async fn bytes(&self, path: &str) -> Result<Vec<u8>, reqwest::Error> {
        Ok(self.send(path).await?.bytes().await?.to_vec())
    }

    pub async fn try_get(&self, path: &str) -> (StatusCode, Value) {
        let answer = self.send(path).await.expect("an answer");
        if answer.status().is_success() && path.contains("watch=") {
            return (answer.status(), Value::Null);
        }
        assert_eq!(answer.headers()["content-type"], "application/json");
        (answer.status(), json_of(answer).await)
    }

    pub async fn get(&self, path: &str) -> Value {
        let (code, body) = self.try_get(path).await;
        assert_eq!(code, StatusCode::OK, "{body}");
        body
    }

    pub async fn post(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        let request = self.client.post(format!("{}{path}", self.server)).header("accept", "application/json");
        let answer = request.header("content-type", "application/json").body(body.to_string()).send().await;
        let answer = answer.expect("an answer");
        (answer.status(), json_of(answer).await)
    }

    pub async fn token(&self, audience: &str, seconds: i64, uid: &str) -> (StatusCode, Value) {
        let reference = json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": uid});
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": seconds, "boundObjectRef": reference},
        });
        self.post("/api/v1/namespaces/default/serviceaccounts/default/token", &request).await
    }

    pub async fn watch(&self, path: &str) -> Watch {
        let answer = self.send(path).await.expect("an answer");
        assert_eq!(answer.status(), StatusCode::OK);
        Watch { answer, buffer: Vec::new() }
    }
}

/// A watch, line by line.
pub struct Watch {
    answer: Response,
    /// The received bytes after the last line.
    buffer: Vec<u8>,
}

impl Watch {
    /// The next line, if there is a whole one.
    async fn next(&mut self) -> Result<Option<Value>, reqwest::Error> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(Some(serde_json::from_slice(&line).expect("JSON")));
            }
            let chunk = tokio::time::timeout(TIMEOUT, self.answer.chunk()).await.expect("something happens");
            match chunk? {
                Some(chunk) => self.buffer.extend_from_slice(&chunk),
                None => return Ok(None),
            }
        }
    }

    pub async fn line(&mut self) -> Value {
        self.next().await.expect("no break").expect("no end")
    }

    /// The type of the next change, and the value of the key `a`.
    pub async fn change(&mut self) -> (String, Value) {
        let line = self.line().await;
        (line["type"].as_str().expect("a text").to_owned(), line["object"]["data"]["a"].clone())
    }

    pub async fn is_over(&mut self) -> bool {
        matches!(self.next().await, Ok(None))
    }

    /// The way in which the stream ends. Fails the test if another line comes.
    pub async fn end(&mut self) -> End {
        match self.next().await {
            Ok(Some(line)) => panic!("the watch continues: {line}"),
            Ok(None) if self.buffer.is_empty() => End::Clean,
            Ok(None) => End::MidLine,
            Err(_) => End::Broken,
        }
    }
}

pub fn client(server: &ApiServer) -> ClientBuilder {
    client_builder(server, None)
}

pub fn client_with_token(server: &ApiServer, token: &str) -> Result<Client, reqwest::Error> {
    let headers = [("authorization".parse().expect("a name"), format!("Bearer {token}").parse().expect("a value"))];
    client(server).default_headers(headers.into_iter().collect()).build()
}

pub fn client_builder(server: &ApiServer, certificate: Option<(&User, SystemTime)>) -> ClientBuilder {
    let mut tls = tls(server, certificate);
    tls.alpn_protocols = vec![b"h2".to_vec()];
    client_with(tls)
}

pub fn client_with(tls: ClientConfig) -> ClientBuilder {
    let client = Client::builder().tls_backend_preconfigured(tls).no_proxy();
    client.redirect(reqwest::redirect::Policy::none()).user_agent("test/1")
}

pub fn tls(server: &ApiServer, certificate: Option<(&User, SystemTime)>) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(server.authority().as_bytes()).expect("a certificate")).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("ring has them").with_root_certificates(roots);
    match certificate {
        Some((user, until)) => {
            let pair = server.client_certificate(user, until);
            let chain = vec![CertificateDer::from_pem_slice(pair.certificate.as_bytes()).expect("a certificate")];
            let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).expect("a key");
            config.with_client_auth_cert(chain, key).expect("they fit")
        }
        None => config.with_no_client_auth(),
    }
}

pub fn tomorrow() -> SystemTime {
    SystemTime::now() + Duration::from_secs(86_400)
}

pub async fn json_of(answer: Response) -> Value {
    serde_json::from_slice(&answer.bytes().await.expect("a body")).expect("JSON")
}
