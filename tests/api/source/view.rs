//! `podfs view` and `podfs render` of pods of an API server, with the rights of a user.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::api_server::{InitialEvents, MASTERS, Order, Style, User};
use crate::common::fuse_user::{USER, as_user, is_mounted, read, wait_read, where_users_may_mount};
use crate::common::outcome::{Outcome, finish};
use crate::common::terminal::Terminal;
use crate::common::*;
use crate::rig::Rig;
use crate::source::bundles::{bundle, pem};

const VOLUMES: &str = "[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: tls}}, \
    {name: access, projected: {sources: [{serviceAccountToken: {path: token}}, {configMap: {name: app}}]}}]";

/// A server with the pod, and a user that may only get and watch pods and ConfigMaps.
fn rig_of_user(volumes: &str) -> (Rig, User) {
    let mut rig = Rig::new(volumes);
    let jane = User::new("jane", "developers");
    for resource in ["pods", "configmaps"] {
        rig.server.permit(&jane, &["get", "watch"], resource);
    }
    rig.kubeconfig = rig.server.kubeconfig_of(&jane, Style::Embedded);
    let directory = rig.kubeconfig.parent().expect("a directory");
    fs::set_permissions(directory, Permissions::from_mode(0o755)).expect("the mode is set");
    chown(rig.fixture.path(""), Some(USER.uid), Some(USER.gid)).expect("given away");
    (rig, jane)
}

impl Rig {
    /// podfs as the user, with these arguments.
    fn as_user(&self, program: &Path, arguments: &[&str]) -> Command {
        let prefix = as_user(USER);
        let mut command = Command::new(&prefix[0]);
        command.args(&prefix[1..]).arg(program).args(arguments);
        command.env("PODFS_CONFIG", "/dev/null").env_remove("RUST_LOG").stdin(Stdio::null());
        command
    }

    fn view(&self, directory: &Path) -> Running {
        let mut command = self.as_user(Path::new(PODFS), &["view", "--pod-name", "default/web", "--kubeconfig"]);
        let running = self.fixture.spawn(command.arg(&self.kubeconfig).arg(directory));
        running.wait_log("Ctrl-C ends this");
        running
    }
}

#[test]
fn a_view_needs_get_and_watch_only_and_reports_forbidden_objects() {
    where_users_may_mount(|| {
        let (rig, _) = rig_of_user(VOLUMES);
        rig.put_config("1");
        rig.server.put(&secret("tls", &[("key", "pem")]));
        let directory = rig.fixture.path("view");
        let mut viewing = rig.view(&directory);
        wait_read(&directory.join("config/key"), "1");
        // podfs view does not show tokens, so it requests none.
        wait_read(&directory.join("access/token"), "");
        assert_eq!(rig.server.count("create", "serviceaccounts/token"), 0);
        viewing.wait_log("podfs: MountVolume.SetUp failed for volume \"keys\" : secrets \"tls\" is forbidden");
        assert!(!directory.join("keys").exists());
        rig.put_config("2");
        wait_read(&directory.join("config/key"), "2");
        wait_read(&directory.join("access/key"), "2");
        rig.server.delete("Pod", "default", "web");
        viewing.wait_log("the pod is gone from the API server; its volumes stay as they are");
        assert_eq!(read(&directory.join("config/key")).as_deref(), Some("2"));
        assert!(viewing.stop().success() && !is_mounted(&directory));
    });
}

#[test]
fn no_byte_of_a_secret_of_a_cluster_or_of_a_credential_is_printed() {
    where_users_may_mount(|| {
        const SECRET: &str = "correct horse battery staple";
        const BASE64: &str = "Y29ycmVjdCBob3JzZSBiYXR0ZXJ5IHN0YXBsZQ";
        let (mut rig, jane) =
            rig_of_user("[{name: keys, secret: {secretName: tls}}, {name: config, configMap: {name: app}}]");
        rig.server.permit(&jane, &["get", "watch"], "secrets");
        rig.kubeconfig = rig.server.kubeconfig_of(&jane, Style::Token);
        let kubeconfig = fs::read_to_string(&rig.kubeconfig).expect("a kubeconfig");
        let kubeconfig: Value = serde_json::from_str(&kubeconfig).expect("JSON");
        let token = kubeconfig["users"][0]["user"]["token"].as_str().expect("a token").to_owned();
        rig.put_config("1");
        rig.server.put(&secret("tls", &[("key", SECRET)]));
        let path = rig.kubeconfig.to_str().expect("text").to_owned();
        let arguments = |command| [command, "--log", "trace", "--pod-name", "default/web", "--kubeconfig", &path];
        let directory = rig.fixture.path("view");
        let mut command = rig.as_user(Path::new(PODFS), &arguments("view"));
        let mut viewing = rig.fixture.spawn(command.arg(&directory));
        wait_read(&directory.join("config/key"), "1");
        wait_read(&directory.join("keys/key"), "");
        let of_process = |name: &str| fs::read_to_string(format!("/proc/{}/{name}", viewing.pid())).expect(name);
        let mut all = of_process("cmdline") + &of_process("environ");
        rig.server.put(&secret("tls", &[("key", SECRET), ("more", SECRET)]));
        wait_read(&directory.join("keys/more"), "");
        assert!(viewing.stop().success(), "{}", viewing.log());
        for name in ["log", "out"] {
            all += &fs::read_to_string(rig.fixture.path(name)).expect(name);
        }
        rig.fixture.write("old.yaml", &secret("tls", &[("key", "another")]));
        let old = rig.fixture.path("old.yaml").display().to_string();
        for more in [&[][..], &["--output", "json"], &["--output", "tar"], &["--diff", &old]] {
            let outcome = finish(&mut rig.as_user(Path::new(PODFS), &[&arguments("render"), more].concat()));
            assert_eq!(outcome.code, Some(0), "{more:?}: {}", outcome.stderr);
            all += &(outcome.stdout + &outcome.stderr);
        }
        assert!(all.contains("TRACE"), "podfs logs every detail");
        for hidden in [SECRET, BASE64, &token] {
            assert!(!all.contains(hidden), "{hidden} is printed");
        }
    });
}

#[test]
fn a_view_asks_for_no_list_of_a_server_that_sends_initial_events() {
    let (rig, _) = rig_of_user("[{name: config, configMap: {name: app}}]");
    rig.put_config("1");
    let mut render = rig.as_user(Path::new(PODFS), &["render", "--pod-name", "default/web", "--kubeconfig"]);
    let outcome = finish(render.arg(&rig.kubeconfig));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(rig.server.count("list", "configmaps"), 0);
}

#[test]
fn a_view_needs_no_right_to_list_of_a_server_that_sends_no_initial_events() {
    where_users_may_mount(|| {
        for initial in [InitialEvents::Refused, InitialEvents::Ignored] {
            let (rig, _) =
                rig_of_user("[{name: config, configMap: {name: app}}, {name: late, configMap: {name: late}}]");
            rig.server.initial_events(initial);
            rig.put_config("1");
            let directory = rig.fixture.path("view");
            let mut viewing = rig.view(&directory);
            wait_read(&directory.join("config/key"), "1");
            rig.server.put(&config_map("late", &[("key", "there")]));
            wait_read(&directory.join("late/key"), "there");
            rig.put_config("2");
            wait_read(&directory.join("config/key"), "2");
            // podfs gets an object again if the server does not know its version any more.
            rig.server.crash();
            rig.put_config("3");
            rig.server.restart();
            wait_read(&directory.join("config/key"), "3");
            rig.server.delete("ConfigMap", "default", "late");
            viewing.wait_log("late");
            rig.server.put(&config_map("late", &[("key", "again")]));
            wait_read(&directory.join("late/key"), "again");
            rig.server.delete("Pod", "default", "web");
            viewing.wait_log("the pod is gone from the API server; its volumes stay as they are");
            // A server that ignores the parameter sends the existing objects all the same, so podfs may need no `get`.
            if initial == InitialEvents::Refused {
                assert!(rig.server.count("get", "configmaps") >= 2, "lists are forbidden");
            }
            assert!(viewing.stop().success() && !is_mounted(&directory));
        }
    });
}

#[test]
fn a_view_gets_the_bundles_of_a_signer_without_the_right_to_list() {
    where_users_may_mount(|| {
        let source = "{clusterTrustBundle: {path: ca, signerName: x.io/y, labelSelector: {}}}";
        let (rig, jane) = rig_of_user(&format!("[{{name: trust, projected: {{sources: [{source}]}}}}]"));
        rig.server.permit(&jane, &["get", "watch"], "clustertrustbundles");
        rig.server.initial_events(InitialEvents::Refused);
        rig.server.put(&bundle("x.io:y:one", Some("x.io/y"), "a", &["AAAA"]));
        rig.server.put(&bundle("x.io:y:two", Some("x.io/y"), "a", &["BBBB"]));
        let file = rig.fixture.path("view/trust/ca");
        let mut viewing = rig.view(&rig.fixture.path("view"));
        wait_read(&file, &pem(&["AAAA", "BBBB"]));
        rig.server.put(&bundle("x.io:y:two", Some("x.io/y"), "a", &["CCCC"]));
        wait_read(&file, &pem(&["AAAA", "CCCC"]));
        rig.server.delete("ClusterTrustBundle", "", "x.io:y:one");
        wait_read(&file, &pem(&["CCCC"]));
        assert!(viewing.stop().success());
    });
}

#[test]
fn podfs_is_a_plugin_of_kubectl_by_the_names_of_its_links() {
    where_users_may_mount(|| {
        let (rig, jane) = rig_of_user("[{name: config, configMap: {name: app}}]");
        rig.put_config("1");
        let link = |name: &str| -> PathBuf {
            let link = rig.fixture.path(name);
            symlink(PODFS, &link).expect("a link");
            link
        };
        for name in ["kubectl-podfs-render", "kubectl-podfs_render"] {
            let mut command = rig.as_user(&link(name), &["pod/web", "-n", "default"]);
            let outcome = finish(command.env("KUBECONFIG", &rig.kubeconfig));
            assert!(outcome.stdout.starts_with("pod default/web\n"), "{}", outcome.stderr);
        }
        for name in ["kubectl-podfs-view", "kubectl-podfs_view"] {
            let directory = rig.fixture.path("view");
            let mut command = rig.as_user(&link(name), &["pod/web"]);
            let mut viewing = rig.fixture.spawn(command.arg(&directory).env("KUBECONFIG", &rig.kubeconfig));
            wait_read(&directory.join("config/key"), "1");
            assert!(viewing.stop().success(), "{}", viewing.log());
        }
        // The namespace is that of the current context.
        let kubeconfig = fs::read_to_string(&rig.kubeconfig).expect("a kubeconfig");
        let mut kubeconfig: Value = serde_json::from_str(&kubeconfig).expect("JSON");
        kubeconfig["contexts"][0]["context"]["namespace"] = "shop".into();
        let in_shop = rig.server.write("shop.kubeconfig", &kubeconfig.to_string());
        let render = |arguments: &[&str]| finish(rig.as_user(Path::new(PODFS), arguments).env("KUBECONFIG", &in_shop));
        render(&["render", "pod/web"]).says(2, &["pods \"web\" not found in namespace \"shop\" of the API server"]);
        assert_eq!(render(&["render", "pod/web", "--namespace", "default"]).code, Some(0));
        let several = format!("{}:{}", in_shop.display(), rig.kubeconfig.display());
        let mut command = rig.as_user(Path::new(PODFS), &["render", "pod/web"]);
        finish(command.env("KUBECONFIG", several)).says(2, &["KUBECONFIG names several files", "--kubeconfig"]);
        let outcome = render(&["render", "deployment/web"]);
        assert!(outcome.code == Some(2) && outcome.stderr.contains("give pod/NAME"), "{}", outcome.stderr);
        let mut command = rig.as_user(Path::new(PODFS), &["render", "pod/web"]);
        let home = command.env_remove("KUBECONFIG").env("HOME", rig.fixture.path("home"));
        finish(home).says(2, &["/home/.kube/config: the kubeconfig cannot be read"]);
        drop(jane);
    });
}

/// A kubeconfig with a program that asks for the password `sesame`, and then prints a new token of the user.
fn asking(rig: &Rig, user: &User) -> PathBuf {
    write_token(rig, user);
    let program = "#!/bin/sh
printf 'Password: ' >&2
read -r password || exit 1
[ \"$password\" = sesame ] || exit 1
printf '{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"kind\":\"ExecCredential\",\"status\":{\"token\":\"%s\"}}' \
    \"$(cat \"${0%.sh}.token\")\"
";
    let program = rig.server.write("asking.sh", program);
    fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("a program");
    let kubeconfig = fs::read_to_string(&rig.kubeconfig).expect("a kubeconfig");
    let mut kubeconfig: Value = serde_json::from_str(&kubeconfig).expect("JSON");
    kubeconfig["users"][0]["user"] = json!({"exec": {
        "apiVersion": "client.authentication.k8s.io/v1", "command": program, "interactiveMode": "Always"}});
    rig.server.write("asking.kubeconfig", &kubeconfig.to_string())
}

/// Writes a new token, which the program prints from now on. The server does not accept the earlier token any more.
fn write_token(rig: &Rig, user: &User) {
    let token = rig.server.write("asking.token", &rig.server.new_token(user));
    fs::set_permissions(token, Permissions::from_mode(0o644)).expect("the mode is set");
}

#[test]
fn a_view_asks_for_credentials_that_have_expired_and_its_volumes_stay_meanwhile() {
    where_users_may_mount(|| {
        let (rig, jane) = rig_of_user("[{name: config, configMap: {name: app}}]");
        rig.put_config("1");
        let (kubeconfig, directory) = (asking(&rig, &jane), rig.fixture.path("view"));
        let mut terminal = Terminal::new(40, 160);
        let mut command = rig.as_user(Path::new(PODFS), &["view", "--pod-name", "default/web", "--kubeconfig"]);
        terminal.is_read_by(rig.fixture.mark(command.arg(&kubeconfig).arg(&directory)));
        let mut viewing = command.stdout(Stdio::null()).spawn().expect("podfs starts");
        let wait_question = |terminal: &Terminal, times: usize| {
            let has_asked = || terminal.written().matches("Password: ").count() >= times;
            eventually(&format!("the program asks {times} times"), has_asked);
        };
        wait_question(&terminal, 1);
        terminal.types(b"sesame\n");
        wait_read(&directory.join("config/key"), "1");
        write_token(&rig, &jane);
        rig.server.connections(Order::Break);
        rig.put_config("2");
        wait_question(&terminal, 2);
        terminal.types(b"wrong\n");
        eventually("podfs reports the failure", || terminal.written().contains("asking.sh failed (exit status: 1)"));
        assert_eq!(read(&directory.join("config/key")).as_deref(), Some("1"), "the last content stays");
        wait_question(&terminal, 3);
        terminal.types(b"sesame\n");
        wait_read(&directory.join("config/key"), "2");
        terminal.types(b"\x03");
        let status = viewing.wait().expect("it ends");
        assert!(status.success() && !is_mounted(&directory), "{}", terminal.written());
    });
}

#[test]
fn a_program_for_credentials_may_ask_the_person_at_the_terminal() {
    let (rig, jane) = rig_of_user("[{name: config, configMap: {name: app}}]");
    rig.put_config("1");
    let kubeconfig = asking(&rig, &jane);
    let render = || {
        let mut command = Command::new(PODFS);
        command.args(["render", "--pod-name", "default/web", "--kubeconfig"]).arg(&kubeconfig);
        command.env("PODFS_CONFIG", "/dev/null").stdin(Stdio::null());
        command
    };
    finish(&mut render()).says(2, &["asks for input, and podfs has no terminal"]);
    let mut terminal = Terminal::new(24, 80);
    let mut command = render();
    terminal.is_read_by(&mut command);
    let child = command.stdout(Stdio::piped()).spawn().expect("podfs starts");
    terminal.wait_line("the question", |line| line.contains("Password:"));
    terminal.types(b"sesame\n");
    let output = child.wait_with_output().expect("podfs ends");
    assert!(output.status.success(), "{}", terminal.written());
    assert!(String::from_utf8_lossy(&output.stdout).contains("| 1\n"), "{}", terminal.written());
}

/// `podfs render --diff cluster` of the fixture's files.
fn diff(rig: &Rig, arguments: &[&str]) -> Outcome {
    let mut command = Command::new(PODFS);
    command.arg("render").arg("--pod").arg(rig.fixture.pod()).arg("--objects").arg(rig.fixture.objects());
    command.args(["--diff", "cluster"]).args(arguments).env("PODFS_CONFIG", "/dev/null").stdin(Stdio::null());
    finish(&mut command)
}

#[test]
fn a_diff_with_the_cluster_shows_what_changes_in_the_containers() {
    let volumes = "[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: tls}}]";
    let rig = Rig::new(volumes);
    let kubeconfig = rig.server.kubeconfig_of(&User::new("admin", MASTERS), Style::Embedded);
    let kubeconfig = ["--kubeconfig", kubeconfig.to_str().expect("text")];
    rig.put_config("1\n");
    rig.server.put(&secret("tls", &[("key", "pem")]));
    assert_eq!(diff(&rig, &kubeconfig).stdout, "", "nothing is to be applied");
    rig.fixture.write("objects/app.yaml", &config_map("app", &[("key", "2\n")]));
    rig.fixture.write("objects/tls.yaml", &secret("tls", &[("key", "other")]));
    let outcome = diff(&rig, &kubeconfig);
    let expected = "\
--- config/key
+++ config/key
@@ -1,1 +1,1 @@
-1
+2
--- keys/key
+++ keys/key
-<3 bytes>
+<5 bytes>
";
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(0), expected), "{}", outcome.stderr);
    // The volumes of a workload are those of its template in the cluster.
    let deployment = |mode: &str, name: &str| {
        format!(
            "{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: {name}, namespace: default}}, spec: {{template: {{\
             metadata: {{labels: {{app: web}}}}, spec: {{containers: [{{name: web}}], volumes: [\
             {{name: config, configMap: {{name: app, defaultMode: {mode}}}}}]}}}}}}}}"
        )
    };
    rig.server.put(&deployment("420", "web"));
    rig.fixture.write("pod.yaml", &deployment("256", "web"));
    rig.fixture.remove("objects/app.yaml");
    let outcome = diff(&rig, &kubeconfig);
    let expected = "--- config/key\n+++ config/key\n-[-rw-r--r-- 0:0]\n+[-r-------- 0:0]\n";
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(0), expected), "{}", outcome.stderr);
    rig.fixture.write("pod.yaml", &deployment("256", "new"));
    let outcome = diff(&rig, &kubeconfig);
    assert!(outcome.stderr.contains("the API server has no Deployment default/new; everything is new"));
    assert!(outcome.stdout.starts_with("--- /dev/null\n+++ config\n"), "{}", outcome.stdout);
    diff(&rig, &[]).says(2, &["--diff cluster compares with an API server; give --kubeconfig or --in-cluster"]);
}
