//! `--diff`: the changes against other files.

use std::fs;

use crate::common::*;

#[test]
fn a_diff_has_contents_modes_and_owners_and_no_secrets() {
    let pod = |mode, group| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: web}}, spec: {{securityContext: {{fsGroup: {group}}}, volumes: [
                {{name: config, configMap: {{name: app}}}}, {{name: keys, secret: {{secretName: keys, defaultMode: {mode}}}}}]}}}}"
        )
    };
    let fixture = Fixture::new(&pod("0400", "2000"));
    let lines = |changed: &str| format!("1\n2\n3\n4\n5\n{changed}\n");
    fixture.write("objects/app.yaml", &config_map("app", &[("conf", &lines("new")), ("added", "a"), ("same", "s")]));
    fixture.write("objects/keys.yaml", &secret("keys", &[("k", "new-secret")]));
    fs::create_dir(fixture.path("old")).expect("a directory");
    fixture.write("old/app.yaml", &config_map("app", &[("conf", &lines("old")), ("removed", "r\n"), ("same", "s")]));
    fixture.write("old/keys.yaml", &secret("keys", &[("k", "old-secret!")]));
    let diff = |old: &str, arguments: &[&str]| {
        fixture.render(&[&["--diff", &fixture.path(old).display().to_string()], arguments].concat())
    };
    let outcome = diff("old", &[]);
    let expected = "\
--- /dev/null
+++ config/added
+[-rw-r--r-- 0:2000]
@@ -0,0 +1,1 @@
+a
\\ No newline at end of file
--- config/conf
+++ config/conf
@@ -3,4 +3,4 @@
 3
 4
 5
-old
+new
--- config/removed
+++ /dev/null
-[-rw-r--r-- 0:2000]
@@ -1,1 +0,0 @@
-r
--- keys/k
+++ keys/k
-<11 bytes>
+<10 bytes>
";
    assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (Some(0), expected, ""));
    let revealed = diff("old", &["--reveal"]).stdout;
    assert!(revealed.contains("-old-secret!\n") && revealed.contains("+new-secret\n"), "{revealed}");
    // Nothing differs from the objects themselves.
    assert_eq!(diff("objects", &[]).stdout, "");
    // A file with a pod in it is the old pod, too.
    let objects =
        ["app", "keys"].map(|name| fs::read_to_string(fixture.path(&format!("objects/{name}.yaml"))).expect("text"));
    fixture.write("old-pod.yaml", &format!("{}\n---\n{}", pod("0444", "3000"), objects.join("\n---\n")));
    let changed = diff("old-pod.yaml", &[]).stdout;
    let expected = "--- keys/k\n+++ keys/k\n-[-r--r--r-- 0:3000]\n+[-r--r----- 0:2000]\n";
    assert!(changed.ends_with(expected), "{changed}");
    diff("none", &[]).says(2, &["/none: there is no such file or directory"]);
    // An object that is gone.
    fixture.remove("objects/app.yaml");
    let outcome = diff("old", &[]);
    outcome.says(1, &["configmap \"app\" not found"]);
    assert!(outcome.stdout.contains("+[waits: configmap \"app\" not found]\n"), "{}", outcome.stdout);
}

#[test]
fn a_key_that_moves_to_a_secret_makes_no_difference() {
    let pod = |source: &str| pod(&format!("[{{name: all, projected: {{sources: [{source}]}}}}]"));
    let fixture = Fixture::new(&pod("{secret: {name: keys}}"));
    fixture.write("objects/keys.yaml", &secret("keys", &[("k", "1")]));
    let old = format!("{}\n---\n{}", pod("{configMap: {name: app}}"), config_map("app", &[("k", "1")]));
    fixture.write("old-pod.yaml", &old);
    let outcome = fixture.render(&["--diff", &fixture.path("old-pod.yaml").display().to_string()]);
    assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (Some(0), "", ""));
}
