//! downwardAPI volumes.

use super::*;
use crate::types::{PodField, Quantity};

#[test]
fn da_08_da_12_items_become_typed_facts() {
    let yaml = "
        name: v
        downwardAPI:
          items:
          - {path: labels, fieldRef: {apiVersion: v1, fieldPath: metadata.labels}}
          - {path: this//one, mode: 0400, fieldRef: {fieldPath: \"metadata.labels['one']\"}}
          - {path: cpu, resourceFieldRef: {containerName: app, resource: limits.cpu, divisor: 1m}}
          - {path: memory, resourceFieldRef: {containerName: app, resource: requests.memory, divisor: 1Mi}}
          - {path: storage, resourceFieldRef: {containerName: app, resource: limits.ephemeral-storage}}
          - {path: pages, resourceFieldRef: {containerName: app, resource: limits.hugepages-2Mi, divisor: \"0\"}}
    ";
    let volume = projection(yaml);
    let ProjectionSource::DownwardApi(files) = &volume.sources[0] else { panic!("a downwardAPI source") };
    let resource = |bound, resource: &str, divisor| {
        DownwardValue::Resource(ContainerResource {
            container: "app".into(),
            bound,
            resource: resource.into(),
            divisor: Quantity::parse(divisor).expect(divisor),
        })
    };
    let expected = [
        ("labels", None, DownwardValue::Field(PodField::Labels)),
        ("this/one", Some(0o400), DownwardValue::Field(PodField::Label("one".into()))),
        ("cpu", None, resource(ResourceBound::Limit, "cpu", "1m")),
        ("memory", None, resource(ResourceBound::Request, "memory", "1Mi")),
        ("storage", None, resource(ResourceBound::Limit, "ephemeral-storage", "1")),
        ("pages", None, resource(ResourceBound::Limit, "hugepages-2Mi", "1")),
    ];
    assert_eq!(files.len(), expected.len());
    for (file, (at, mode, value)) in files.iter().zip(expected) {
        assert_eq!((&file.path, file.mode, &file.value), (&path(at), mode, &value));
    }
}

#[test]
fn da_13_items_the_api_refuses() {
    let rows = [
        ("{path: p}", "", "one of fieldRef and resourceFieldRef is required"),
        (
            "{path: p, fieldRef: {fieldPath: metadata.name}, resourceFieldRef: {containerName: c, resource: limits.cpu}}",
            "",
            "fieldRef and resourceFieldRef can not be specified simultaneously",
        ),
        (
            "{path: p, fieldRef: {apiVersion: v2, fieldPath: metadata.name}}",
            ".fieldRef.apiVersion",
            "unsupported pod version: v2",
        ),
        ("{path: p, fieldRef: {}}", ".fieldRef.fieldPath", "is required"),
        (
            "{path: p, fieldRef: {fieldPath: status.podIP}}",
            ".fieldRef.fieldPath",
            "unsupported fieldPath: status.podIP;",
        ),
        ("{path: p, resourceFieldRef: {resource: limits.cpu}}", ".resourceFieldRef.containerName", "is required"),
        (
            "{path: p, resourceFieldRef: {containerName: c, resource: limits.pods}}",
            ".resourceFieldRef.resource",
            "unsupported container resource : limits.pods;",
        ),
    ];
    for (item, field, sentence) in rows {
        let error = error(&format!("{{name: v, downwardAPI: {{items: [{item}]}}}}"));
        assert!(error.starts_with(&format!("downwardAPI.items[0]{field}: volume \"v\": {sentence}")), "{error}");
    }
}

#[test]
fn da_10_divisors_are_those_of_the_api() {
    let volume = |resource: &str, divisor: &str| {
        let field = format!("{{containerName: c, resource: limits.{resource}, divisor: {divisor}}}");
        parse(&format!("{{name: v, downwardAPI: {{items: [{{path: p, resourceFieldRef: {field}}}]}}}}"))
    };
    let bytes = ["1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei", "0", "\"\""];
    for divisor in bytes {
        for resource in ["memory", "ephemeral-storage", "hugepages-2Mi"] {
            assert!(volume(resource, divisor).is_ok(), "{resource} {divisor}");
        }
    }
    for divisor in ["1", "1m", "0"] {
        assert!(volume("cpu", divisor).is_ok(), "{divisor}");
    }
    for (resource, divisor) in [("cpu", "100m"), ("cpu", "1k"), ("memory", "1m"), ("memory", "2Mi"), ("memory", "x")] {
        let error = volume(resource, divisor).expect_err(divisor);
        assert_eq!(error.field, "downwardAPI.items[0].resourceFieldRef.divisor");
    }
}
