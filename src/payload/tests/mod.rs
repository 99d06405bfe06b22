//! Payloads of volumes in a pod's manifest: from YAML to files.

mod absence;
mod credential;
mod pod;
mod projected;

use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::manifest::Tokens;
use crate::manifest::objects::{Objects, Values, parse_object};
use crate::manifest::pod::Pod;
use crate::manifest::{Document, KnownObjects, parse_documents};
use crate::types::Allocatable;
use crate::volume::VolumeSource;

const MACHINE: Allocatable = Allocatable { cpu_milli: 2_000, memory_bytes: 4 << 30, ephemeral_storage_bytes: 10 << 30 };

fn documents(yaml: &str) -> Vec<Document> {
    parse_documents(Path::new("test.yaml"), yaml.as_bytes()).expect(yaml)
}

fn objects(yaml: &str) -> Objects {
    let parsed = documents(yaml).into_iter().map(|document| parse_object(document).expect(yaml));
    Objects::collect(parsed.flatten().map(Arc::new)).expect(yaml)
}

/// A pod with the given volume source and the other fields of its spec, both as YAML.
fn pod(source: &str, spec: &str) -> Pod {
    let yaml = format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: web, namespace: shop, labels: {{a: '1'}}}}, \
         spec: {{volumes: [{{name: v, {source}}}], {spec}}}}}"
    );
    Pod::parse(documents(&yaml).remove(0)).expect(&yaml)
}

/// The pod, the objects and the tokens of a test.
fn view(pod: &Pod, objects: &Objects, tokens: &Tokens) -> PodView {
    PodView {
        identity: pod.identity.clone(),
        facts: pod.facts.clone(),
        known: KnownObjects { objects: objects.clone(), tokens: tokens.clone(), is_settling: false },
        machine: MACHINE,
    }
}

/// Assembles the pod's one volume.
fn payload<'a>(pod: &'a Pod, view: &'a PodView) -> Result<AssembledPayload<'a>, PayloadError> {
    let VolumeSource::Projection(projection) = &pod.volumes[0].source else { panic!("a projection") };
    Payload::assemble(projection, view)
}

/// Each file as `path=content@mode` or `path=content@mode:uid`.
fn shown(payload: &Payload<'_>) -> Vec<String> {
    let shown = |(path, file): (&PayloadPath, &PayloadFile<'_>)| {
        let owner = if file.uid == 0 { String::new() } else { format!(":{}", file.uid) };
        format!("{path}={}@{:04o}{owner}", String::from_utf8_lossy(&file.content), file.mode)
    };
    payload.files.iter().map(shown).collect()
}

/// Files and warnings as text, or all problems.
fn assembled(pod: &Pod, objects: &Objects) -> Result<(Vec<String>, Vec<String>), String> {
    let tokens = Tokens::default();
    let view = view(pod, objects, &tokens);
    let assembled = payload(pod, &view).map_err(|error| error.to_string())?;
    Ok((shown(&assembled.payload), assembled.warnings.iter().map(ToString::to_string).collect()))
}

fn files(source: &str, objects: &Objects) -> Result<Vec<String>, String> {
    assembled(&pod(source, "containers: []"), objects).map(|(files, _)| files)
}

fn lines(lines: &[&str]) -> Result<Vec<String>, String> {
    Ok(lines.iter().map(ToString::to_string).collect())
}

/// The object of the kubelet's table, as each kind that can hold it.
fn foo_bar() -> Objects {
    objects(
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: o, namespace: shop}, data: {foo: foo, bar: bar}}\n---\n\
         {apiVersion: v1, kind: Secret, metadata: {name: o, namespace: shop}, stringData: {foo: foo, bar: bar}}",
    )
}

/// The volume sources that show the object `o` with the given further fields.
fn each_kind(fields: &str) -> [String; 4] {
    [
        format!("configMap: {{name: o{fields}}}"),
        format!("secret: {{secretName: o{fields}}}"),
        format!("projected: {{sources: [{{configMap: {{name: o{fields}}}}}]}}"),
        format!("projected: {{sources: [{{secret: {{name: o{fields}}}}}]}}"),
    ]
}

#[test]
fn cm_01_cm_02_cm_03_se_01_rows_of_the_payload_builders() {
    let rows: &[(&str, &str, &[&str])] = &[
        ("no overrides", "", &["bar=bar@0644", "foo=foo@0644"]),
        ("basic 1", ", items: [{key: foo, path: path/to/foo.txt}]", &["path/to/foo.txt=foo@0644"]),
        ("subdirs", ", items: [{key: foo, path: path/to/1/2/3/foo.txt}]", &["path/to/1/2/3/foo.txt=foo@0644"]),
        (
            "subdirs 3",
            ", items: [{key: foo, path: path/to/1/2/3/foo.txt}, {key: bar, path: another/path/to/the/esteemed/bar.bin}]",
            &["another/path/to/the/esteemed/bar.bin=bar@0644", "path/to/1/2/3/foo.txt=foo@0644"],
        ),
        (
            "mapping with Mode",
            ", items: [{key: foo, path: foo.txt, mode: 0400}, {key: bar, path: bar.bin, mode: 0400}]",
            &["bar.bin=bar@0400", "foo.txt=foo@0400"],
        ),
        (
            "mapping with defaultMode",
            ", items: [{key: foo, path: foo.txt}, {key: bar, path: bar.bin}]",
            &["bar.bin=bar@0644", "foo.txt=foo@0644"],
        ),
        ("optional non existent key", ", items: [{key: zab, path: path/to/foo.txt}], optional: true", &[]),
    ];
    for (name, fields, expected) in rows {
        for source in each_kind(fields) {
            assert_eq!(files(&source, &foo_bar()), lines(expected), "{name}: {source}");
        }
    }
}

#[test]
fn cm_05_se_01_a_missing_key_is_reported_in_the_kubelets_words() {
    let texts = ["configmap references non-existent config key: zab", "references non-existent secret key: zab"];
    for (index, source) in each_kind(", items: [{key: zab, path: path/to/foo.txt}]").iter().enumerate() {
        assert_eq!(files(source, &foo_bar()), Err(texts[index % 2].to_owned()), "{source}");
    }
}

#[test]
fn cm_04_se_01_a_missing_object_is_reported_in_the_kubelets_words() {
    let texts = [r#"configmap "o" not found"#, r#"secret "o" not found"#];
    for (index, source) in each_kind("").iter().enumerate() {
        assert_eq!(files(source, &Objects::default()), Err(texts[index % 2].to_owned()), "{source}");
    }
}

#[test]
fn cm_06_optional_objects_and_keys_may_be_missing() {
    for source in each_kind(", optional: true") {
        assert_eq!(files(&source, &Objects::default()), lines(&[]), "{source}");
    }
    for source in each_kind(", optional: true, items: [{key: foo, path: f}, {key: zab, path: z}]") {
        assert_eq!(files(&source, &foo_bar()), lines(&["f=foo@0644"]), "{source}");
    }
}

#[test]
fn cm_01_aw_23_text_and_bytes_are_shown_alike_and_exact() {
    let only_binary =
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: o, namespace: shop}, binaryData: {foo: Zm9v, bar: YmFy}}";
    let mixed = "{apiVersion: v1, kind: ConfigMap, metadata: {name: o, namespace: shop}, binaryData: {foo: Zm9v}, data: {bar: bar}}";
    for yaml in [only_binary, mixed] {
        assert_eq!(files("configMap: {name: o}", &objects(yaml)), lines(&["bar=bar@0644", "foo=foo@0644"]));
    }
    let elf = "{apiVersion: v1, kind: ConfigMap, metadata: {name: o, namespace: shop}, binaryData: {elf: f0VMRgD/, none: ''}}";
    let objects = objects(elf);
    let elf = objects.config_map("shop", "o").expect("parsed");
    assert_eq!(elf.value("elf"), Some(b"\x7fELF\0\xff".as_slice()));
    assert_eq!(elf.value("none"), Some(b"".as_slice()));
}

#[test]
fn se_03_objects_of_other_namespaces_are_not_used() {
    let elsewhere = objects("{apiVersion: v1, kind: Secret, metadata: {name: o}, stringData: {foo: foo}}");
    assert_eq!(files("secret: {secretName: o}", &elsewhere), Err(r#"secret "o" not found"#.into()));
}

#[test]
fn aw_06_keys_and_paths_are_normalised() {
    assert_eq!(
        files("configMap: {name: o, items: [{key: foo, path: ./foo////bar}]}", &foo_bar()),
        lines(&["foo/bar=foo@0644"])
    );
}

#[test]
fn debug_output_shows_no_bytes() {
    let objects =
        objects("{apiVersion: v1, kind: Secret, metadata: {name: o, namespace: shop}, stringData: {k: hunter2}}");
    let pod = pod("secret: {secretName: o}", "containers: []");
    let tokens = Tokens::default();
    let view = view(&pod, &objects, &tokens);
    let assembled = payload(&pod, &view).expect("assembled");
    let shown = format!("{assembled:?} {objects:?}");
    assert!(shown.contains("7 bytes, mode 0644, uid 0") && !shown.contains("hunter2"), "{shown}");
}
