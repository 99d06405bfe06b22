//! Kubeconfig files with each form of credentials, and some with credentials that do not work.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use serde_json::{Value, json};

use super::ApiServer;
use super::authority::Authority;
use super::identity::{NODES, User};

/// The form of the credentials in a kubeconfig.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// The kubeconfig contains the certificates and the key.
    Embedded,
    /// The certificates and the key are files in the kubeconfig's directory, and the kubeconfig has their relative
    /// paths.
    Files,
    /// The kubeconfig contains a bearer token.
    Token,
    /// A bearer token is a file in the kubeconfig's directory.
    TokenFile,
    /// The kubeconfig names a program that prints the token.
    Exec,
    /// As `Embedded`, and the certificate authority is not the server's.
    OtherAuthority,
    /// As `Embedded`, and the client's certificate expired yesterday.
    ExpiredCertificate,
}

impl ApiServer {
    /// A kubeconfig with the identity of a node, as the kubelet has.
    pub fn kubeconfig(&self, node: &str, style: Style) -> PathBuf {
        self.kubeconfig_of(&User::node(node), style)
    }

    /// A kubeconfig of a user.
    pub fn kubeconfig_of(&self, user: &User, style: Style) -> PathBuf {
        let group = user.groups.first().map_or(NODES, String::as_str);
        let hour = Duration::from_secs(3600);
        let until = match style {
            Style::ExpiredCertificate => SystemTime::now() - 24 * hour,
            _ => SystemTime::now() + hour,
        };
        let stem = user.name.replace(':', "-");
        let pair = self.authority.client(&user.name, group, until);
        let identity = match style {
            Style::Embedded | Style::OtherAuthority | Style::ExpiredCertificate => json!({
                "client-certificate-data": base64(&pair.certificate), "client-key-data": base64(&pair.key),
            }),
            Style::Files => {
                self.write(&format!("{stem}.crt"), &pair.certificate);
                self.write(&format!("{stem}.key"), &pair.key);
                json!({"client-certificate": format!("{stem}.crt"), "client-key": format!("{stem}.key")})
            }
            Style::Token => json!({"token": self.new_token(user)}),
            Style::TokenFile => {
                let token = self.new_token(user);
                json!({"tokenFile": self.write(&format!("{stem}.token"), &token)})
            }
            Style::Exec => self.program(user, &stem),
        };
        let authority = match style {
            Style::OtherAuthority => Authority::new("another authority").pem(),
            _ => self.authority.pem(),
        };
        let authority = match style {
            Style::Files => json!({"certificate-authority": self.write("ca.crt", &authority)}),
            _ => json!({"certificate-authority-data": base64(&authority)}),
        };
        self.write_kubeconfig(&format!("{stem}-{style:?}.kubeconfig"), authority, identity)
    }

    /// Replaces all tokens of a user by a new one, and writes it to the file that the user's kubeconfig names.
    pub fn renew_token_file(&self, user: &User) {
        let token = self.new_token(user);
        self.write(&format!("{}.token", user.name.replace(':', "-")), &token);
    }

    /// The number of runs of the program of [`Style::Exec`].
    pub fn program_runs(&self) -> usize {
        fs::read_to_string(self.directory.path().join("runs")).map_or(0, |runs| runs.lines().count())
    }

    /// Replaces a file in the server's directory atomically.
    pub fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.directory.path().join(name);
        let new = path.with_extension("new");
        fs::write(&new, content).expect("written");
        fs::rename(new, &path).expect("renamed");
        path
    }

    /// A new token of the user. The server forgets the user's earlier tokens.
    pub fn new_token(&self, user: &User) -> String {
        self.cluster.users.refuse_tokens_of(&user.name);
        let token = format!("token-{:032x}", fastrand::u128(..));
        self.cluster.users.accept_token(&token, user.clone());
        token
    }

    /// A program that prints the token in a file, and adds a line to the file `runs` with each run.
    fn program(&self, user: &User, stem: &str) -> Value {
        let token = self.write(&format!("{stem}.token"), &self.new_token(user));
        let runs = self.directory.path().join("runs");
        let credential =
            r#"{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"%s"}}"#;
        let (token, runs) = (token.display(), runs.display());
        let script = format!("#!/bin/sh\necho run >> '{runs}'\nprintf '{credential}' \"$(cat '{token}')\"\n");
        let program = self.write(&format!("{stem}.sh"), &script);
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("a program");
        json!({"exec": {
            "apiVersion": "client.authentication.k8s.io/v1", "command": program, "interactiveMode": "Never",
        }})
    }

    fn write_kubeconfig(&self, name: &str, mut cluster: Value, identity: Value) -> PathBuf {
        cluster["server"] = self.url().into();
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": identity}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        });
        self.write(Path::new(name).to_str().expect("text"), &kubeconfig.to_string())
    }
}

fn base64(text: &str) -> Value {
    json!(ByteString(text.as_bytes().to_vec()))
}
