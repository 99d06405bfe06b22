//! Kubeconfig files, right and wrong.

use std::fs;

use secrecy::ExposeSecret;
use serde_json::{Value, json};

use super::in_cluster::address;
use super::{Authority, Bearer, ClientSettings, SettingsSource};
use crate::kube::exec;

const GOOD: &str = "
current-context: c
contexts: [{name: c, context: {cluster: k, user: u}}]
clusters: [{name: k, cluster: {server: 'https://10.0.0.1:6443', certificate-authority-data: QUFB}}]
users: [{name: u, user: {token: secret-token}}]
";

/// Reads a kubeconfig with this text, with files `ca`, `cert`, `key` and `token` beside it.
fn read(text: &str) -> Result<ClientSettings, String> {
    let directory = tempfile::tempdir().expect("a directory");
    for (file, content) in [("ca", "CA"), ("cert", "CERT"), ("key", "KEY"), ("token", "of-file\n")] {
        fs::write(directory.path().join(file), content).expect("written");
    }
    let path = directory.path().join("config");
    fs::write(&path, text).expect("written");
    let place = format!("{}/", directory.path().display());
    ClientSettings::read(&SettingsSource::Kubeconfig(path)).map_err(|error| error.to_string().replace(&place, ""))
}

fn error(text: &str) -> String {
    read(text).err().expect("an error")
}

fn token(settings: &ClientSettings) -> &str {
    match &settings.user.bearer {
        Some(Bearer::Token(token)) => token.expose_secret(),
        _ => panic!("no token"),
    }
}

#[test]
fn the_current_context_has_the_server_and_the_user() {
    let settings = read(GOOD).expect("settings");
    assert_eq!(settings.server.as_str(), "https://10.0.0.1:6443/");
    assert!(settings.authority == Authority::Pem(b"AAA".to_vec()));
    assert_eq!(token(&settings), "secret-token");
}

#[test]
fn files_are_beside_the_kubeconfig() {
    let text = GOOD
        .replace("certificate-authority-data: QUFB", "certificate-authority: ca")
        .replace("token: secret-token", "tokenFile: token, client-certificate: cert, client-key: key");
    let settings = read(&text).expect("settings");
    assert!(settings.authority == Authority::Pem(b"CA".to_vec()));
    assert_eq!(token(&settings), "of-file");
    let certificate = settings.user.certificate.expect("a certificate");
    assert_eq!((certificate.chain.as_slice(), certificate.key.expose_secret()), (&b"CERT"[..], "KEY"));
}

#[tokio::test]
async fn a_program_gets_the_cluster_if_the_kubeconfig_says_so() {
    // The program writes what it is given into its token, in hexadecimal.
    let program = "exec: {apiVersion: client.authentication.k8s.io/v1, command: sh, provideClusterInfo: true, args: [-c, \
        'printf ''{\"status\":{\"token\":\"%s\"}}'' $(printf %s \"$KUBERNETES_EXEC_INFO\" | od -An -v -tx1 | tr -d \" \\n\")']}";
    let text = GOOD.replace("token: secret-token", program);
    let whole = text.replace(
        "certificate-authority-data: QUFB",
        "certificate-authority: ca, tls-server-name: n, disable-compression: true, \
         extensions: [{name: other, extension: 1}, {name: client.authentication.k8s.io/exec, extension: {audience: a}}]",
    );
    let open = text.replace(
        "certificate-authority-data: QUFB",
        "insecure-skip-tls-verify: true, proxy-url: 'http://10.0.0.2:3128'",
    );
    let server = "https://10.0.0.1:6443";
    let rows = [
        (text.replace("provideClusterInfo: true, ", ""), Value::Null),
        (text, json!({"server": server, "certificate-authority-data": "QUFB"})),
        (
            whole,
            json!({
                "server": server, "certificate-authority-data": "Q0E=", "tls-server-name": "n",
                "disable-compression": true, "config": {"audience": "a"},
            }),
        ),
        (open, json!({"server": server, "insecure-skip-tls-verify": true, "proxy-url": "http://10.0.0.2:3128"})),
    ];
    for (text, cluster) in rows {
        let settings = read(&text).expect("settings");
        let Some(Bearer::Program(program)) = &settings.user.bearer else { panic!("no program") };
        let token = exec::issue(program).await.unwrap_or_else(|error| panic!("{error}")).token.expect("a token");
        let digits: Vec<char> = token.expose_secret().chars().collect();
        let byte = |pair: &[char]| u8::from_str_radix(&pair.iter().collect::<String>(), 16).expect("hexadecimal");
        let bytes: Vec<u8> = digits.chunks(2).map(byte).collect();
        let given: Value = serde_json::from_slice(&bytes).expect("JSON");
        assert_eq!(given["spec"]["cluster"], cluster, "{given}");
        assert_eq!(given["kind"], "ExecCredential");
    }
}

#[test]
fn an_error_is_one_sentence() {
    let cluster = |field: &str| GOOD.replace("certificate-authority-data: QUFB", field);
    let user = |field: &str| GOOD.replace("token: secret-token", field);
    let rows = [
        ("a: [".to_owned(), "config: is no kubeconfig: it is not YAML of that form (line 1)"),
        (String::new(), "config: has no current-context; set one with `kubectl config use-context`"),
        (GOOD.replace("name: c,", "name: d,"), "config: the current-context \"c\" is not among its contexts"),
        (
            GOOD.replace("cluster: k,", "cluster: z,"),
            "config: context \"c\" is of cluster \"z\", which is not among its clusters",
        ),
        (GOOD.replace("user: u}", "user: z}"), "config: context \"c\" is of user \"z\", which is not among its users"),
        (
            GOOD.replace("https://", "http://"),
            "config: cluster \"k\": its server is reached by http, and podfs sends no credentials in the clear, unless it is \
             at a loopback address; use https",
        ),
        (
            GOOD.replace("https://10.0.0.1", "http://127.0.0.1")
                .replace("certificate-authority-data: QUFB", "proxy-url: 'http://h'"),
            "config: cluster \"k\": has a proxy-url and a server that is reached by http; use https",
        ),
        (
            GOOD.replace("https://", "ftp://"),
            "config: cluster \"k\": its server begins with ftp; podfs knows https and http",
        ),
        (
            cluster("certificate-authority: ca, certificate-authority-data: QUFB"),
            "config: cluster \"k\": has certificate-authority and certificate-authority-data; remove one of them",
        ),
        (
            cluster("certificate-authority-data: '%%'"),
            "config: cluster \"k\": its certificate-authority-data is not base64",
        ),
        (
            cluster("certificate-authority: none"),
            "none: certificate-authority cannot be read: No such file or directory (os error 2)",
        ),
        (
            cluster("proxy-url: 'socks5://h'"),
            "config: cluster \"k\": its proxy-url begins with socks5; podfs knows http and https",
        ),
        (user("client-certificate: cert"), "config: user \"u\": has a client-certificate and no client-key"),
        (
            user("token: a, username: b, password: c"),
            "config: user \"u\": has more than one of token, username and exec; keep one",
        ),
        (user("as: another"), "config: user \"u\": impersonates another user (`as`), which podfs does not"),
    ];
    for (text, expected) in rows {
        assert_eq!(error(&text), expected);
    }
}

#[test]
fn a_server_at_a_loopback_address_may_be_reached_by_http() {
    for host in ["127.0.0.1:8001", "127.8.0.1", "[::1]:8001", "localhost:8001"] {
        let text = GOOD.replace("https://10.0.0.1:6443", &format!("http://{host}"));
        assert_eq!(read(&text).expect("settings").server.as_str(), format!("http://{host}/"));
    }
    for host in ["localhost.example", "[::2]", "127.0.0.1.example", "0.0.0.0"] {
        let text = GOOD.replace("https://10.0.0.1:6443", &format!("http://{host}"));
        assert!(error(&text).contains("in the clear"), "{host}");
    }
}

#[test]
fn a_missing_kubeconfig_is_named() {
    let error = ClientSettings::read(&SettingsSource::Kubeconfig("/nowhere/config".into()))
        .err()
        .expect("an error")
        .to_string();
    assert_eq!(error, "/nowhere/config: the kubeconfig cannot be read: No such file or directory (os error 2)");
}

#[test]
fn addresses_inside_of_a_cluster_may_be_of_either_kind() {
    assert_eq!(address("10.0.0.1", "443").expect("an address").as_str(), "https://10.0.0.1/");
    assert_eq!(address("fd00::1", "6443").expect("an address").as_str(), "https://[fd00::1]:6443/");
    assert!(address("10.0.0.1", "tcp://x").is_err());
}
